"""FLOPs and bytes that a phase needs, counted from shapes alone.

What is counted is what the work needs, not what a kernel happens to do: a trunk once however many
leaves it has, a key only for the queries that see it (its ancestors, half of a causal square), a
picture or a sound once per node that holds it, no padding. Recomputed activations are counted apart
and are no useful work. Reads the shape of a model and the records of a step; knows nothing of
weights or clocks.

    shape = shape_of(model.config)
    work = forward(shape, batch)
    training = work.total + backward(work, Training())

Legend: a product of [m, k] and [k, n] is 2·m·k·n FLOPs. P pairs of a query and a key it sees.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import numpy as np

from saccade.shapes import Audio, Shape, Stack, Vision
from saccade.types import Batch, Group, MediaSpan, Trajectory

Mode = Literal["full", "adapter", "frozen"]
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of a 4-bit weight with its doubly quantised scales
SENSES = ("vision", "audio")
TOWERS = (*SENSES, "projector", "llm")
HEAD = "head"
NUMBERED = re.compile(r"\.(?:layers?|blocks)\.(\d+)\.")


# -- one forward -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sensed:
    """FLOPs of a tower over pictures or sounds, and of the projector behind it."""

    inputs: float = 0.0  # first product with pixels or mel frames, which want no gradient
    stem: float = 0.0  # what follows before the blocks
    blocks: float = 0.0  # their matrices
    attention: float = 0.0
    projector: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Sensed) -> Sensed:
        return _sum(self, other)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """FLOPs of one forward by where they happen, because backward treats each differently."""

    text: float = 0.0  # matrices of the decoder's layers
    text_attention: float = 0.0
    head: float = 0.0  # logits that are read
    adapters: float = 0.0
    vision: Sensed = field(default_factory=Sensed)
    audio: Sensed = field(default_factory=Sensed)

    @property
    def total(self) -> float:
        decoder = self.text + self.text_attention + self.head
        return decoder + self.adapters + self.vision.total + self.audio.total

    def __add__(self, other: Forward) -> Forward:
        return _sum(self, other)


Parts = TypeVar("Parts", Sensed, Forward)


def _sum(one: Parts, other: Parts) -> Parts:
    names = [part.name for part in fields(one)]
    return type(one)(**{name: getattr(one, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Training:
    """How each tower learns (one that is not named: fully), which share of its matrices does, how
    many weights its adapters have, and which share of its layers a gradient passes. The head counts
    apart from the decoder.
    """

    modes: Mapping[str, Mode] = field(default_factory=dict)
    adapters: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    reach: Mapping[str, float] = field(default_factory=dict)

    def mode(self, tower: str) -> Mode:
        return self.modes.get(tower, "full")

    def learns(self, tower: str) -> float:
        """Share of the products whose matrix wants a gradient."""
        full = self.mode("llm" if tower == HEAD else tower) == "full"
        return self.shares.get(tower, 1.0) if full else 0.0

    def passed(self, tower: str) -> float:
        """Share of the layers of a tower that learns which lie above what learns first."""
        return self.reach.get(tower, 1.0)

    @property
    def towers_stand(self) -> bool:
        """Then a picture is looked at once, however often it is shown."""
        return all(self.mode(tower) == "frozen" for tower in (*SENSES, "projector"))


FULL = Training()


def training_of(
    trained: Mapping[str, int], matrices: Mapping[str, int], tower_of: Callable[[str], str]
) -> Training:
    """From the parameters that learn and from all that are matrices: name → how many numbers."""
    modes: dict[str, Mode] = dict.fromkeys(TOWERS, "frozen")
    adapters: dict[str, int] = {}
    for name, numbers in trained.items():
        tower = tower_of(name)
        if ".lora_" in name:
            adapters[tower] = adapters.get(tower, 0) + numbers
        modes[tower] = "adapter" if ".lora_" in name else "full"
    tied = not any(name.startswith("lm_head.") for name in matrices)
    whole, learning = Counter[str](), Counter[str]()
    for name, numbers in matrices.items():
        part = tower_of(name)
        if name.startswith("lm_head.") or "embed_tokens" in name:
            if tied != ("embed_tokens" in name):
                continue  # rows of it are read, nothing is multiplied with it
            part = HEAD
        whole[part] += numbers
        learning[part] += numbers * (name in trained)
    shares = {part: learning[part] / whole[part] for part in whole}
    reach = {tower: _reach(tower, trained, matrices, tower_of) for tower in (*SENSES, "llm")}
    return Training(modes=modes, adapters=adapters, shares=shares, reach=reach)


def _reach(
    tower: str, trained: Iterable[str], matrices: Iterable[str], tower_of: Callable[[str], str]
) -> float:
    """Share of the layers of a tower that a gradient passes: from the lowest that learns on, or all
    where something before them does.
    """
    inside, learning = (
        [name for name in names if tower_of(name) == tower] for names in (matrices, trained)
    )
    count = max((int(n[1]) for n in map(NUMBERED.search, inside) if n), default=-1) + 1
    lowest = min((int(n[1]) for n in map(NUMBERED.search, learning) if n), default=count)
    before = [name for name in learning if not NUMBERED.search(name)]  # a stem
    if tower == "llm":  # its last norm and the head come behind its layers, other towers do not
        before = [n for n in trained if "embed_tokens" in n or tower_of(n) != tower]
    return 1.0 if before or not count else (count - lowest) / count


def matrices_of(model: Any) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}


def forward(
    shape: Shape,
    batch: Batch,
    *,
    head: bool = True,
    media: bool = True,
    training: Training = FULL,
) -> Forward:
    """A forest, its media and the logits at its reads."""
    return count(
        shape,
        depths=token_depths(batch.node_starts, batch.parents),
        reads=len(batch.reads) if head else 0,
        media=batch.media if media else (),
        training=training,
    )


def count(
    shape: Shape,
    *,
    depths: np.ndarray,
    reads: int,
    media: Sequence[MediaSpan] = (),
    training: Training = FULL,
) -> Forward:
    """`depths`: how many tokens each token sees before itself."""
    text, tokens, seen = shape.text, len(depths), depths + 1
    pairs = {
        window: float((seen if window is None else np.minimum(seen, window)).sum())
        for window in set(shape.windows)
    }
    work = Forward(
        text=2.0 * tokens * text.weights,
        text_attention=text.pair_flops * sum(pairs[window] for window in shape.windows),
        head=2.0 * reads * shape.head_weights,
        adapters=2.0 * tokens * training.adapters.get("llm", 0),
    )
    return work + sensed(shape, media, training)


def sensed(shape: Shape, media: Iterable[MediaSpan], training: Training = FULL) -> Forward:
    """Towers and projectors alone. Time series have a small encoder, which is not counted."""
    work = Forward()
    for span in media:
        if shape.audio is not None and span.media.kind == "audio":
            work += _sound(shape.audio, span, training)
        if shape.vision is not None and span.media.kind in ("image", "video"):
            work += _picture(shape.vision, span, training)
    return work


def _picture(vision: Vision, span: MediaSpan, training: Training) -> Forward:
    frames, rows, columns = span.grid
    patches, blocks = frames * rows * columns, vision.blocks
    tokens = patches + frames * vision.extra
    whole = frames * float(tokens / frames) ** 2  # a frame is a sequence of its own
    windowed = (
        frames * float(vision.merge) ** 4 * _squares(rows, vision) * _squares(columns, vision)
    )
    merged = patches / vision.merge**2
    return Forward(
        vision=Sensed(
            inputs=2.0 * patches * vision.patch_inputs * blocks.hidden,
            blocks=2.0 * tokens * blocks.weights,
            attention=blocks.pair_flops
            * (vision.full_layers * whole + (blocks.layers - vision.full_layers) * windowed),
            projector=2.0 * merged * sum(m * n for m, n in vision.projector),
        ),
        adapters=2.0 * tokens * training.adapters.get("vision", 0)
        + 2.0 * merged * training.adapters.get("projector", 0),
    )


def _sound(audio: Audio, span: MediaSpan, training: Training) -> Forward:
    """Of the frames that are heard: silence that fills up half a minute is padding."""
    frames, blocks = span.grid[2], audio.blocks
    window = audio.window or frames
    windows = np.diff([*range(0, frames, window), frames])
    halves = (windows + 1) // 2
    heard = float(halves.sum())
    return Forward(
        audio=Sensed(
            inputs=2.0 * frames * audio.kernel * audio.mels * blocks.hidden,
            stem=2.0 * heard * audio.kernel * blocks.hidden**2,
            blocks=2.0 * heard * blocks.weights,
            attention=blocks.pair_flops * blocks.layers * float((halves**2).sum()),
            projector=2.0 * span.length * sum(m * n for m, n in audio.projector),
        ),
        adapters=2.0 * heard * training.adapters.get("audio", 0)
        + 2.0 * span.length * training.adapters.get("projector", 0),
    )


def _squares(patches: int, vision: Vision) -> float:
    """Σ of the squared sides, in merged patches, of the windows that tile one direction."""
    side, window = patches // vision.merge, vision.window
    if window is None:
        return float(side**2)
    return float(side // window * window**2 + (side % window) ** 2)


def token_depths(starts: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """How many tokens stand before each token on its path from the root."""
    sizes = np.diff(starts)
    above = np.zeros(len(parents), dtype=np.int64)  # tokens of all ancestors
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            above[node] = above[parent] + sizes[parent]
    return np.arange(int(starts[-1])) - np.repeat(starts[:-1] - above, sizes)


# -- training --------------------------------------------------------------------------------------


def backward(work: Forward, training: Training) -> float:
    """Twice the forward, less what nobody asks for: gradients of frozen matrices, of pixels and mel
    frames, and everything below the first tower that learns.
    """
    projector = training.mode("projector")
    total = 2.0 * work.adapters
    for sense, own in (("vision", work.vision), ("audio", work.audio)):
        tower = training.mode(sense)
        if tower != "frozen":
            total += training.learns(sense) * (own.inputs + 2 * own.stem + own.blocks)
            total += training.passed(sense) * (own.blocks + 2 * own.attention)
        if (tower, projector) != ("frozen", "frozen"):
            total += (1 + training.learns("projector")) * own.projector
    if any(training.mode(tower) != "frozen" for tower in TOWERS):
        total += (training.passed("llm") + training.learns("llm")) * work.text
        total += 2 * training.passed("llm") * work.text_attention
        total += (1 + training.learns(HEAD)) * work.head
    return total


def recomputed(shape: Shape, work: Forward, training: Training) -> float:
    """What activation checkpointing computes a second time, and no useful work: the layers that a
    gradient passes.
    """
    decoder = work.text * _until_last(shape.text) + work.text_attention
    total = training.passed("llm") * decoder + work.adapters
    towers = {"vision": (shape.vision, work.vision), "audio": (shape.audio, work.audio)}
    for sense, (tower, own) in towers.items():
        if tower is not None and training.mode(sense) != "frozen":
            blocks = own.blocks * _until_last(tower.blocks) + own.attention
            total += training.passed(sense) * blocks
    return total


def _until_last(stack: Stack) -> float:
    """Share of a layer's products that torch repeats: it stops once backward has what it needs, and
    the result of the last matrix is not among that. Results of experts are: they are weighed.
    """
    if stack.experts:
        return 1.0
    sizes = [m * n for m, n in stack.linears]
    return 1 - sizes[-1] / sum(sizes)


# -- generation ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What sampling some groups needs at least, however it is scheduled."""

    prefill: Forward  # prompts once per group, what environments said, and all media
    decode: Forward  # sampled tokens
    sampled: int
    longest: int  # most tokens that one member sampled
    shape: Shape
    element: int  # bytes of a weight
    matrix: float  # of a weight in the decoder's matrices, which may be packed
    adapters: int  # weights
    cache_bytes: float  # read in all

    def weight_bytes(self, rows: float) -> float:
        """Read by every step of decoding so many sequences."""
        layers = self.shape.text.read_by(rows, matrix=self.matrix, expert=self.element)
        return layers + self.element * (self.shape.head_weights + self.adapters)

    def read_bytes(self, max_sequences: int) -> float:
        """In as few steps as `max_sequences` at a time allow."""
        steps = max(self.longest, -(-self.sampled // max_sequences))
        return steps * self.weight_bytes(self.sampled / max(1, steps)) + self.cache_bytes


def generation(
    shape: Shape,
    groups: Iterable[Group],
    *,
    element: int,
    together: int,
    four_bit: bool = False,
    training: Training = FULL,
) -> Generation:
    """`element`: bytes of a weight, and of a number in the cache. `together`: members for which a
    step of decoding reads the prompt that they share once.
    """
    # Work adds up over tokens and media, so all of a kind is counted at once.
    given, drawn, media, sampled = [], [], list[MediaSpan](), [0]
    prompts, contexts = 0, 0
    for prompt, members in _shared_prompts(groups):
        start, steps = prompt.prompt_length, []
        prompts += 1
        given.append(np.arange(start))
        media += [span for span in prompt.media if span.start < start]
        for member in members:
            policy = np.flatnonzero(member.policy_mask)
            if not len(policy):
                continue
            sampled.append(len(policy))
            rest = np.arange(start, policy[-1])  # the last sampled token is never an input
            own = member.policy_mask[rest]
            given.append(rest[~own])
            drawn.append(rest[own])
            media += [span for span in member.media if span.start >= start]
            contexts += int((drawn[-1] + 1 - start).sum())
            steps.append(len(drawn[-1]))
        # Those that go on are the neighbours that read together.
        contexts += start * sum(sorted(steps, reverse=True)[::together])
    none = np.zeros(0, np.int64)
    prefill = count(
        shape,
        depths=np.concatenate([none, *given]),
        reads=prompts,
        media=media,
        training=training,
    )
    # The first logits of a member came with the prompt, and were shared.
    later = sum(sampled) - len(drawn)
    decode = count(shape, depths=np.concatenate([none, *drawn]), reads=later, training=training)
    return Generation(
        prefill=prefill,
        decode=decode,
        sampled=sum(sampled),
        longest=max(sampled),
        shape=shape,
        element=element,
        matrix=NF4 if four_bit else element,
        adapters=training.adapters.get("llm", 0),
        cache_bytes=float(contexts * shape.kv_bytes(element)),
    )


def _shared_prompts(groups: Iterable[Group]) -> Iterable[tuple[Trajectory, list[Trajectory]]]:
    """Trajectories by what their prompt is."""
    shared: dict[Any, list[Trajectory]] = {}
    for group in groups:
        for member in (*group.trajectories, *([group.greedy] if group.greedy else [])):
            start = member.prompt_length
            media = tuple(span.media.key for span in member.media if span.start < start)
            shared.setdefault((member.ids[:start].tobytes(), media), []).append(member)
    return ((members[0], members) for members in shared.values())
