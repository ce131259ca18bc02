"""Memory of a plan by item, at the peaks of the rollout, of scoring and of the update; also the main
memory of a machine with GPUs.

Activations are the tensors that are alive when memory peaks. They are counted for a GPU in half
precision (fused norms, rotations and gated layers, one attention call over gathered keys); elsewhere
the count is too low by what these save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from saccade.config import ADAPTED, RewardConfig
from saccade.engines.embedded.kv_cache import CPU_CACHE_BYTES, GPU_CACHE_SHARE
from saccade.engines.embedded.pages import POOL_SHARE
from saccade.engines.embedded.scheduler import PREFILL_TOKENS
from saccade.forest.batch import Batch
from saccade.forest.logprobs import CHUNK_ELEMENTS, KERNEL_CHUNK
from saccade.media.pixel_cache import DECODED
from saccade.models.families.qwen_vl import CACHE_BYTES
from saccade.plugins.estimate.batch_plan import ModelSize, Plan
from saccade.plugins.estimate.flops import sensed, towers_frozen
from saccade.plugins.estimate.shapes import Stack
from saccade.plugins.offload.host_state import CHUNK, SLOTS
from saccade.plugins.ranks.layouts import NODE, key_repeats
from saccade.plugins.reward_models.reward_model_term import model_terms
from saccade.trainer.checkpointing import MARGIN
from saccade.trainer.forward_inputs import FEATURE_BYTES
from saccade.types import MediaSpan

GIB = 2**30
POOL = "keys and values"
PROCESS_GIB = 2.0  # main memory of libraries and the CUDA context, measured on a machine with an H200
STATE: Mapping[str, Mapping[str, float]] = {  # bytes per trained weight
    "adamw": {"fp32 masters": 4, "moments": 8},
    "adamw_bf16": {"moments and compensation": 6},
    "adamw_8bit": {"moments and compensation": 4.125},
}
# Temporary fp32 numbers per weight of the optimizers with Kahan summation, for one tensor or chunk at a time.
WORKING = {"adamw": 0, "adamw_bf16": 7, "adamw_8bit": 12}
OFFLOADED = "state of the optimizer"
COPY = "copy for generation"
SMALLEST_PREFILL = 1024  # tokens: the engine could halve further, but would be slow


# Numbers per token that one layer saves for backward, including its input: two inputs of norms and
# two of matrices (hidden size), queries and attention output (all heads), gate and up (MLP width).
# With adapters, the input of the last matrix, too.
KEPT_HIDDEN, KEPT_HEADS, KEPT_WIDE, KEPT_WIDE_ADAPTED = 4, 2, 2, 3
# Numbers that an expert, which is not fused, saves: its token and its output (hidden size); gate, up,
# the activated gate and their product (expert width). Frozen experts save no inputs of matrices.
KEPT_EXPERT_HIDDEN, KEPT_EXPERT_WIDE = 2, 4
# In addition during backward: gradients of gate and up, their product and its gradient; of hidden states.
BACKWARD_WIDE, BACKWARD_HIDDEN = 4, 4
# Without backward: gate, up and their product; hidden states and their norms.
FORWARD_WIDE, FORWARD_HIDDEN = 3, 3


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    gib: float
    phase: str  # always, rollout, scoring or update
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Memory:
    items: tuple[Item, ...]
    limit: float  # GiB that can be planned with
    engine_limit: float = 0.0  # the same on a GPU of a replica, if rollouts are there

    @property
    def peaks(self) -> dict[str, float]:
        return {phase: total(self.during(phase)) for phase in ("rollout", "scoring", "update")}

    @property
    def fits(self) -> bool:
        return all(peak <= self.room(phase) for phase, peak in self.peaks.items())

    def room(self, phase: str) -> float:
        return self.engine_limit if self.engine_limit and phase == "rollout" else self.limit

    def during(self, phase: str) -> list[Item]:
        phases = {phase} if self.engine_limit and phase == "rollout" else {"always", phase}
        return [item for item in self.items if item.phase in phases]

    @property
    def free(self) -> float:
        """GiB that are left beside the items of phase `always`."""
        return self.limit - total(self.items, "always")

    @property
    def pool(self) -> float:
        return next(item.gib for item in self.items if item.name == POOL)


def total(items: Sequence[Item], *phases: str) -> float:
    """GiB of the items of these phases, or of all if none is given."""
    return sum(item.gib for item in items if not phases or item.phase in phases)


def memory_of(plan: Plan) -> Memory:
    always = _always(plan)
    free = plan.limit - total(always, "always")
    update = max((_update(plan, learner, free) for learner in plan.learners), key=total)
    chosen, engine_limit = plan.config.rollout, 0.0
    if plan.generates and plan.device.is_gpu and chosen.replicas:
        share = 1 if chosen.engine == "embedded" else chosen.memory_share
        engine_limit = free = min(plan.limit, share * plan.device.memory)
        held, note = (
            plan.policy.weights / GIB / chosen.tensor_parallel,
            f"rollout.replicas={chosen.replicas}, on GPUs with {engine_limit:.1f}",
        )
        always.append(Item(name="weights of an engine", gib=held, phase="rollout", note=note))
    rollout = _rollout(plan, free - total(always, "rollout")) if plan.generates else []
    return Memory(items=(*always, *rollout, *update), limit=plan.limit, engine_limit=engine_limit)


# -- items in all phases ---------------------------------------------------------------------------


def _always(plan: Plan) -> list[Item]:
    """Weights and optimizer state, other copies of the model, features of images, and reward models, which
    may be loaded only while they score, when the engine's memory has been freed.
    """
    half, sizes = plan.element < 4, dict[str, float]()
    special = {"features of images": {"note": "at most"}}
    state = {} if plan.config.train.offload else state_sizes(plan)
    for whose, model in zip(("", " of the critic"), plan.learners, strict=False):
        sizes[f"weights{whose}"] = model.weights * (plan.share("weights") if plan.divides(model) else 1.0)
        sizes |= {f"{name}{whose}": size * model.trained * plan.share("state") for name, size in state.items()}
    # A moving average has an fp32 copy beside its weights, as its changes are small.
    averaged = plan.whole.weights * (3 if half else 1) * plan.share("weights")
    sizes["average"] = averaged if plan.config.train.ema else 0.0
    if plan.algorithm.needs_reference:
        update = plan.algorithm.kl.update
        if plan.config.model.train in ADAPTED:  # the reference is the policy with adapters disabled
            sizes["reference"] = plan.element * plan.policy.trained if update == "copy" else 0.0
        else:
            sizes["reference"] = averaged if update == "ema" else plan.whole.weights * plan.share("weights")
            alone = plan.layout == "whole" and plan.config.train.sequence_parallel == 1
            if plan.config.train.offload and alone and update != "ema":
                special["reference"] = {"phase": "scoring", "note": "while it scores"}
    sizes["teacher"] = plan.element * plan.teacher * plan.share("weights")
    if plan.step.pictures and towers_frozen(plan.policy.training):
        sizes["features of images"] = FEATURE_BYTES
    usual = {"phase": "always", "note": ""}
    items = [Item(name=name, gib=size / GIB, **usual | special.get(name, {})) for name, size in sizes.items()]
    rewards = sum(f.stat().st_size for d in reward_folders(plan.config.reward) for f in weights_in(d)) / GIB
    scoring = "scoring" if rewards and plan.config.reward.offload and plan.layout == "whole" else "always"
    rewards *= plan.share("weights")
    note = "while they score" * (scoring != "always")
    items.append(Item(name="reward models", gib=rewards, phase=scoring, note=note))
    # Replicas have their own weights to generate with.
    if plan.divides(plan.policy) and plan.generates and not plan.config.rollout.replicas:
        phases = ("rollout", *["scoring"] * (scoring != "always")) if plan.config.train.offload else ("always",)
        note = "given back in the update" * (phases[0] != "always")
        items += [Item(name=COPY, gib=plan.policy.weights / GIB, phase=phase, note=note) for phase in phases]
    return [item for item in items if item.gib]


def state_sizes(plan: Plan) -> dict[str, float]:
    """Optimizer state in bytes per weight, by item; fp32 weights need no master copy."""
    kept = STATE[plan.config.train.optimizer]
    return {name: size for name, size in kept.items() if plan.element < 4 or name != "fp32 masters"}


def reward_folders(reward: RewardConfig) -> list[str]:
    """Folders of reward models, each once; without tiny models, whose size is negligible."""
    paths = dict.fromkeys(args["path"] for args in model_terms(reward))
    return [path for path in paths if not path.startswith("tiny:")]


def weights_in(folder: str) -> list[Path]:
    return list(Path(folder).glob("*.safetensors"))


# -- rollout ---------------------------------------------------------------------------------------


def _rollout(plan: Plan, free: float) -> list[Item]:
    """The pool of keys and values is allocated first and takes a share of the free memory; prompts that
    do not fit into the rest are computed in smaller pieces.
    """
    shape, element, step = plan.policy.shape, plan.element, plan.step
    gpus = plan.config.rollout.tensor_parallel if plan.config.rollout.replicas else 1
    per_token = shape.kv_bytes(element) / GIB / gpus
    longest = max(len(member.ids) for member in step.members)
    state = shape.state_bytes / GIB / gpus
    wanted = plan.sequences * ((step.mean_length if plan.paged else longest) * per_token + state)
    drawn = float(plan.sequences * shape.vocabulary * element)
    whole, least = ((size + drawn) / GIB for size in _prefill(plan))
    margin = MARGIN * plan.device.memory  # the engine does not subtract it, so it takes a share of it, too
    if plan.device.is_gpu:
        share = POOL_SHARE if plan.paged else GPU_CACHE_SHARE
        room = share * free
        if least <= (1 - share) * (free + margin):
            room = min(room, (free - least) * (1 - 1e-9))  # rounding must not exceed the limit
    else:  # a CPU has a cache of fixed size
        room, least = CPU_CACHE_BYTES / GIB, whole
    # The pool takes what there is, but at least room for one sequence.
    pool = max(min(wanted, room), longest * per_token + state)
    left = (free - pool) * (1 - 1e-9)
    beside = max(least, min(whole, left))
    fitting = min(plan.sequences, int(pool / wanted * plan.sequences))
    held = f"{fitting} of {plan.sequences} sequences at a time, {step.mean_length:.0f} tokens each"
    cut = f"prompts in pieces, all at once {whole:.2f}" if whole > left + margin > least else ""
    rows = ((POOL, pool, held), ("prompts and logits", beside, cut))
    return [Item(name=name, gib=gib, phase="rollout", note=note) for name, gib, note in rows]


def _prefill(plan: Plan) -> tuple[float, float]:
    """Bytes of one forward over prompts, and of the smallest one that the engine splits it into when
    memory is short: it splits no image or sound, and without pages no prompt.
    """
    members, shape = plan.step.members, plan.policy.shape

    def passing(media: Sequence[MediaSpan]) -> float:
        """Numbers alive in the largest tower; towers run before the prompts are prefilled."""
        return max((_forward(shape.senses[n], count) for n, count in sensed(shape, media).items()), default=0.0)

    units = [(one.prompt_length, passing(one.media)) for one in members]
    mean, mean_passing = (fmean(numbers) for numbers in zip(*units, strict=True))
    if plan.paged:
        units = [(span.length, passing([span])) for one in members for span in one.media]
    tokens, largest = max(units, default=(0, 0.0))
    most = max(PREFILL_TOKENS, tokens) if plan.paged else PREFILL_TOKENS + tokens
    together = min(plan.config.train.prompts_per_step * mean, most)
    least = min(together, max(tokens, SMALLEST_PREFILL))
    whole = max(_forward(shape.text, together), largest, together / mean * mean_passing)
    return plan.element * whole, plan.element * max(_forward(shape.text, least), largest)


def _forward(stack: Stack, tokens: float) -> float:
    """Numbers alive in a layer's forward without backward."""
    return int(tokens) * (FORWARD_WIDE * _wide(stack) + FORWARD_HIDDEN * stack.hidden)


# -- update ----------------------------------------------------------------------------------------


def _update(plan: Plan, learner: ModelSize, free: float) -> list[Item]:
    """Items at the peak: in the most expensive micro-batch, or in the optimizer step."""
    standing = beside_activations(plan, learner)
    found: list[list[Item]] = []
    for batch in plan.step.batches:
        kept = layers_that_keep(plan, learner, batch, free - total(standing))
        layers = learner.shape.text.layers
        note = f"{batch.tokens} tokens; {layers - kept.layers[0]} of {layers} layers recompute"
        for moment in _moments(plan, learner, batch, kept):
            first, *others = (Item(name=name, gib=size / GIB, phase="update") for name, size in moment.items() if size)
            found.append([replace(first, note=note), *others])
    state, train = learner.trained * plan.share("state"), plan.config.train
    chunked = train.offload or train.optimizer == "adamw_8bit"
    working = 4 * WORKING[train.optimizer] * min(learner.largest, state, CHUNK if chunked else state)
    passing = min(SLOTS * CHUNK, state) * sum(state_sizes(plan).values()) * train.offload
    work = {"sums over all GPUs": 4 * state * (state < learner.trained), "the optimizer at work": working + passing}
    found += [[Item(name=name, gib=size / GIB, phase="update")] for name, size in work.items() if size]
    return [*standing, *max(found, key=total)]


def beside_activations(plan: Plan, learner: ModelSize) -> list[Item]:
    """Gradient sums; with sharded weights, gathered embedding, head, current and next layer, and a layer's gradient."""
    sizes, text = {"gradient sums": 4 * learner.trained * plan.share("sums")}, learner.shape.text
    if plan.divides(learner):
        ends = learner.shape.head_weights * (2 - learner.head_tied)
        sizes["gathered weights"] = plan.element * (ends + 3 * (text.matrices + text.expert_weights))
    return [Item(name=name, gib=size / GIB, phase="update") for name, size in sizes.items()]


class Tower(NamedTuple):
    """A tower that a gradient passes, with bytes of one layer in a micro-batch."""

    name: str
    layers: int
    least: float  # saved in any case: the layer's input
    kept: float  # saved if the layer recomputes nothing
    backward: float  # needed during its backward in addition


def passed_towers(plan: Plan, learner: ModelSize, batch: Batch) -> list[Tower]:
    """The decoder, and towers that are not frozen and have media in the batch."""
    shape, element = learner.shape, plan.element
    keys = gathered_keys(batch) * key_repeats(shape.key_heads, plan.together) / plan.together
    passed = [("llm", shape.text, tokens_of_a_rank(plan, batch), keys, learner.training["llm"])]
    seen = ((sense, count, learner.training[sense]) for sense, count in sensed(shape, batch.media).items())
    passed += [(sense, shape.senses[sense], count, count, trained) for sense, count, trained in seen if trained.passed]
    found = []
    for name, stack, tokens, keys, trained in passed:
        kept = layer_bytes(stack, tokens, keys, element=element, adapted=trained.adapters > 0)
        backward = tokens * (BACKWARD_WIDE * _wide(stack) + BACKWARD_HIDDEN * stack.hidden)
        if trained.learns:  # gradients of stacked experts, which are larger than a layer's activations
            backward += stack.expert_weights
        found.append(Tower(name, stack.layers, float(element * tokens * stack.hidden), kept, element * backward))
    return found


class Retained(NamedTuple):
    """Number of layers, of decoder and towers, that keep their activations, and bytes that are then left."""

    layers: Sequence[int] = (0, 0, 0)
    spare: float = 0.0


def layers_that_keep(plan: Plan, learner: ModelSize, batch: Batch, free: float) -> Retained:
    """Number of layers that keep activations: with checkpointing=auto as many as fit beside the peak of the
    run's first micro-batch with recomputation in every layer, which trainer/checkpointing.py measures.
    """
    wanted, towers = plan.config.model.checkpointing, passed_towers(plan, learner, batch)
    if wanted == "on":
        return Retained()
    if wanted == "off" or not plan.device.is_gpu:
        return Retained([tower.layers for tower in towers])
    first = plan.step.batches[0]
    bare = max(sum(m.values()) for m in _moments(plan, learner, first, Retained()))
    seen, seen_first = (sensed(learner.shape, each.media).total() for each in (batch, first))
    room = free * GIB - bare * max(1.0, batch.tokens / first.tokens, seen / (seen_first or seen or 1))
    keeping = []
    for tower in towers:
        cost = tower.kept - tower.least
        keeping.append(min(tower.layers, max(0, int(room // cost))))
        room -= keeping[-1] * cost
    return Retained(keeping, max(0.0, room))


def _moments(plan: Plan, learner: ModelSize, batch: Batch, retained: Retained) -> list[dict[str, float]]:
    """Memory beside weights and gradient sums when backward enters each tower, the decoder, and the
    head: one mapping item → bytes for each of these moments.
    """
    shape, element, kernel = learner.shape, plan.element, plan.device.is_gpu
    logits = min(batch.target_count, tokens_of_a_rank(plan, batch)) * shape.vocabulary
    if element * logits > retained.spare:  # then they are computed in chunks
        logits = min(logits, CHUNK_ELEMENTS * (KERNEL_CHUNK if kernel else 1))
    # The kernel writes the gradient over the logits; torch has three more copies in fp32.
    logits *= element if kernel else element + 12
    gradient = float(element * shape.head_weights) if learner.head_trained and learner.head else 0.0
    # The gradient of a head that is tied to the embedding stays until the end of backward.
    activations, waiting = dict[str, float](), {"gradient of the head": gradient * learner.head_tied}
    moments = []
    towers = list(zip(passed_towers(plan, learner, batch), retained.layers, strict=False))
    for tower, keeping in reversed(towers):  # backward has freed the activations that come after a tower
        name = "decoder" if tower.name == "llm" else tower.name
        own = {f"{name} activations": keeping * tower.kept + (tower.layers - keeping) * tower.least}
        activations = own | activations
        layer = {"a layer in backward": tower.backward + (0.0 if keeping else tower.kept)}
        moments.append(activations | layer | waiting)
    return [*moments, activations | {"logits": float(logits) * learner.head, "gradient of the head": 2 * gradient}]


# -- activations -----------------------------------------------------------------------------------


def tokens_of_a_rank(plan: Plan, batch: Batch) -> int:
    """Tokens of a forest on one rank; all of its media may be on the same rank."""
    return -(-batch.tokens // plan.together)


def layer_bytes(stack: Stack, tokens: int, keys: float, *, element: int, adapted: bool = False) -> float:
    """Bytes that one layer saves for backward, including `keys` gathered keys and their values."""
    wide = KEPT_WIDE_ADAPTED if adapted else KEPT_WIDE
    per_token = KEPT_HIDDEN * stack.hidden + KEPT_HEADS * stack.queries + wide * stack.wide
    per_token += (KEPT_EXPERT_HIDDEN - adapted) * stack.chosen * stack.hidden
    per_token += (KEPT_EXPERT_WIDE - adapted) * stack.chosen * stack.expert_wide
    if stack.experts and stack.wide:
        per_token += stack.hidden  # the output of the shared expert, which is weighted, too
    per_token += stack.head_norms * (stack.queries + stack.keys)
    per_token += stack.scales * stack.hidden  # the inputs of layer scales
    return float(element * (tokens * per_token + 2 * keys * stack.keys))


def gathered_keys(batch: Batch) -> int:
    """Number of gathered keys: for each node, its own and those of its ancestors."""
    return int((batch.forest.above + batch.forest.sizes).sum())


def _wide(stack: Stack) -> float:
    """Intermediate numbers of the MLP for one token."""
    return stack.wide + stack.chosen * (stack.expert_wide + stack.hidden)


# -- main memory -----------------------------------------------------------------------------------


def host_items(plan: Plan, memory: Memory, *, background: bool) -> tuple[Item, ...]:
    """Main memory of the first machine with GPUs; `phase` is always, start or save. Weights are loaded through it; a
    checkpoint is copied there, if it fits, and written in the background during training.
    """
    if not plan.device.is_gpu:
        return ()
    whole, gpus = plan.whole.weights / GIB, plan.config.run.gpus
    processes = min(gpus, NODE)
    # A checkpoint holds merged weights of adapters, and the average in a separate model folder.
    saved = whole * (len(plan.learners) + bool(plan.config.train.ema))
    kept = ("average", "reference") if plan.algorithm.reference_moves else ("average",)
    saved += total([item for item in memory.items if item.name.startswith(kept)])
    numbers = sum(learner.trained for learner in plan.learners) * plan.share("state")
    state = processes * numbers * sum(state_sizes(plan).values()) / GIB
    saved += state
    waiting = total([item for item in memory.items if (item.name, item.phase) == ("reference", "scoring")])
    waits = "kept for the next one; without room for twice that training waits"
    images = (CACHE_BYTES + DECODED.max_bytes) / GIB if plan.step.pictures else 0.0
    rows = (
        ("processes" if gpus > 1 else "the process", PROCESS_GIB * (processes + (gpus > 1)), "always", ""),
        ("weights while they load", whole, "start", "of their files, which all processes read" * (gpus > 1)),
        (OFFLOADED, state * plan.config.train.offload, "always", "pinned"),
        ("reference", processes * waiting, "always", "pinned"),
        ("images", images * processes, "always", "at most"),
        ("copy of a checkpoint", saved if background else 0.0, "save", waits),
    )
    return tuple(Item(name=name, gib=gib, phase=phase, note=note) for name, gib, phase, note in rows if gib)


def host_peak(items: Sequence[Item]) -> float:
    return total(items, "always") + max((item.gib for item in items if item.phase != "always"), default=0.0)
