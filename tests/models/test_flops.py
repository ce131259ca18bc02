"""Counted FLOPs against torch's own counter, which watches real forwards and backwards."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, LoraConfig, TrainConfig
from saccade.engines.embedded.kv_cache import cache_shape
from saccade.forest.attention import first_seen, paths
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.load import freeze
from saccade.plugins.estimate import flops, shapes
from saccade.plugins.estimate.batch_plan import empty_model
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Group, Message, Sample, Source, Trajectory
from tests.models.against import ask, forest_of, noise, pair

FAMILIES = ("qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "smolvlm", "glm4v")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "aria")
# Latents; recurrent layers; no tower, layers of two sizes; experts for text and for pictures; a projector that looks.
KINDS = ("kimi_k25", "qwen3_5", "minicpmv4_6", "gemma4_unified", "ernie4_5_vl_moe", "granite4_vision")
HEARING = {"qwen2_audio": 30.0, "qwen2_5_omni": 2.0}  # seconds that need no padding
ALGORITHM = resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0.0}), max_tokens=64)
SCORING = Scoring()


@dataclass
class TokenByToken:
    """Attention of each token to exactly the keys it sees, so that a counter of real products counts what is needed."""

    starts: np.ndarray
    parents: np.ndarray

    def __call__(self, layer, q, k, v, scale, window):
        groups, rows = q.shape[1] // k.shape[1], []
        q, k, v = (x.transpose(0, 1) for x in (q * scale, *(x.repeat_interleave(groups, 1) for x in (k, v))))
        spans = [range(*self.starts[i : i + 2]) for i in range(len(self.parents))]
        for path in paths(self.parents):
            tokens = [token for node in path for token in spans[node]]
            keys, values = k[:, tokens].transpose(1, 2), v[:, tokens]
            for place in range(len(tokens) - len(spans[path[-1]]), len(tokens)):
                seen = slice(0 if window is None else max(0, first_seen(place, window)), place + 1)
                scores = torch.bmm(q[:, tokens[place], None], keys[:, :, seen])
                rows.append(torch.bmm(scores.softmax(-1), values[:, seen])[:, 0])
        return torch.stack(rows)


@pytest.fixture(scope="module")
def whole(load):
    """Models whose weights stay as they are, for all tests."""
    return cache(load)


@pytest.fixture
def shape_for(family_of, whole):
    return lambda name: shapes.shape_of(whole(name), family_of(name).tower_of)


@pytest.fixture
def forest(family_of, grow, image):
    """Rows of a family in one forest, with what it sees and hears."""

    def packed(name, *, groups=1, seed=1):
        family = family_of(name)
        if name in HEARING:
            media = noise(HEARING[name]), *([image(84, 56)] if "omni" in name else [])
            batch = forest_of(pair(*media, "what?"), family)
            ones = np.ones(batch.target_count, np.float32)
            return replace(batch, scales=0.01 * ones, advantages=ones)
        rng, images = np.random.default_rng(seed), int(family.spec.image_token is not None)
        grown = [grow(rng, family, uid=f"g{i}", images=images * groups) for i in range(groups)]
        (batch,) = pack(grown, micro_tokens=100_000)
        return replace(batch, scales=np.full(batch.target_count, 0.01, np.float32))

    return packed


@pytest.fixture
def counted(family_of, monkeypatch):
    """FLOPs of a training step, or of scoring, by torch's counter."""

    def run(model, name, batch, *, train=True, checkpointing=False):
        model.set_experts_implementation("eager")  # the counter does not know grouped products
        backend = LocalTrainer(model, family_of(name), TrainConfig(), checkpointing=checkpointing)
        loss = PolicyLoss(ALGORITHM, SCORING)
        # The fused kernel of the CPU is not seen by the counter; plain products are.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, monkeypatch.context() as patched:
            patched.setattr("saccade.forest.attention._dense_plan", lambda *given: TokenByToken(*given[:2]))
            backend.train_step([batch], loss, lr=0.0) if train else backend.logprobs([batch], SCORING)
        return counter.get_total_flops()

    return run


def training_of(model, family):
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    return flops.training_of(model, trained, family.tower_of)


@pytest.mark.parametrize("name", [*FAMILIES, *HEARING])
def test_every_matrix_is_counted_in_its_tower(name, shape_for, whole):
    model, shape = whole(name), shape_for(name)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    unread = [m for m in model.modules() if hasattr(m, "unread")]
    assert len(unread) == (name == "llava")  # the last layer of its tower
    linear -= sum(p.numel() for m in unread for p in m.parameters() if p.ndim > 1)
    counted = shape.text.weights + shape.head_weights
    counted += sum(tower.weights + tower.projector for tower in shape.senses.values())
    assert counted == linear
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    convolved = sum(m.weight.numel() for m in model.modules() if isinstance(m, kinds))
    if name == "glm4v":  # one makes a patch of four
        convolved -= model.model.visual.downsample.weight.numel() * 3 // 4
    assert sum(tower.inputs + tower.stem for tower in shape.senses.values()) == convolved


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_is_stored_and_the_chosen_ones_are_counted(name, shape_for, whole):
    text, layers = shape_for(name).text, whole(name).get_decoder().layers
    own, others = (sum(p.numel() for p in layers.parameters() if p.ndim == n) for n in (3, 2))
    assert text.layers * text.expert_weights == own and (text.experts, text.chosen) == (4, 2)
    assert text.weights == others + own // 2 == text.read_by(1)
    assert text.read_by(2) == others + own * 3 / 4 and text.read_by(99) > others + 0.999 * own


def test_what_stands_before_the_layers_of_a_tower_and_beside_those_of_a_decoder(family_of, image):
    """Read from modules without weights."""
    of = {}
    for name in ("llama4", "got_ocr2", "perception_lm", "gemma4"):
        family = family_of(name)
        of[name] = shapes.shape_of(empty_model(family), family.tower_of)
    assert of["llama4"].senses["vision"].inputs == 3 * 14 * 14 * 64  # a linear layer over patches that are cut before
    sam = of["got_ocr2"].senses["vision"]
    assert (sam.layers, sam.full_layers, sam.window) == (2, 1, 8)
    grid, _ = family_of("perception_lm").measure(image(56, 56))
    assert grid[1:] == (4, 4)  # patches of 14 pixels, of which its config tells nothing
    model = empty_model(family_of("gemma4"))
    decoder = model.get_decoder()
    inside = sum(p.numel() for p in decoder.layers.parameters() if p.ndim > 1)
    given = decoder.per_layer_model_projection.weight.numel()  # to each layer, beside what it computes
    assert of["gemma4"].text.weights == inside + given


def test_any_decoder_that_transformers_builds_has_a_shape():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    half = experts | {"moe_intermediate_size": 32, "mlp_only_layers": [0, 1]}  # layers that differ are averaged
    others = {"olmoe": experts, "gemma3_text": {}, "phi3": {}, "granite": {}, "glm4": {}, "qwen3_moe": half}
    for kind, more in others.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
        text = shapes.shape_of(model, lambda name: "llm").text
        own, every = (sum(p.numel() for p in model.get_decoder().layers.parameters() if p.ndim == n) for n in (3, 2))
        assert text.weights == every + own / 2 and (text.queries, text.keys) == (64, 32), kind
        assert text.layers * text.expert_weights == own, kind
        widths = {"olmoe": (128, 0, 2), "qwen3_moe": (32, 64, 1)}.get(kind, (0, 128, 0))
        assert (text.expert_wide, text.wide, text.chosen if own else 0) == widths, kind


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl_moe", "internvl", "qwen2_audio"])
def test_the_forward_of_a_forest(name, shape_for, whole, forest, counted):
    batch = forest(name, groups=2 if name == "qwen2_vl" else 1)
    (work,) = flops.Meter(shape=shape_for(name)).forward([batch])
    assert work.total() == pytest.approx(counted(whole(name), name, batch, train=False), rel=0.01)
    assert {s.media.kind for s in batch.media} == {
        {"vision": "image"}.get(k, k) for k in shapes.SENSES if work[f"{k}/layers"]
    }


@pytest.mark.parametrize("name", KINDS)
def test_the_forward_of_a_row_of_any_kind(name, family_of, whole, image, counted, shape_for):
    family, rng = family_of(name), np.random.default_rng(0)
    prompt = family.render(ask(image(140, 70), "what?"))
    new = -len(prompt) % 64 or 64  # recurrent layers fill up chunks of 64
    row = rollout(0, prompt=len(prompt), new=new)
    ids = np.concatenate([prompt.ids, rng.choice(np.flatnonzero(~family.banned), new)])
    (batch,) = pack([group(replace(row, ids=ids, media=prompt.media))], micro_tokens=10_000)
    model, shape = whole(name), shape_for(name)
    (work,) = flops.Meter(shape=shape).forward([batch])
    assert work.total() == pytest.approx(counted(model, name, batch, train=False), rel=0.05)
    assert shape.kv_bytes(4) == pytest.approx(cache_shape(model, family).bytes_per_token)


@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("mixtral", "full"), ("qwen2_5_vl", "full"), ("qwen2_5_vl", "freeze:vision,projector"),
        ("qwen2_5_vl", "freeze:llm"), ("llava", "full"), ("glm4v", "freeze:vision"),
        ("qwen3", r"freeze:re:embed_tokens|layers\.0\."), ("qwen2_5_omni", "freeze:audio,llm"),
    ],
)  # fmt: skip
def test_a_training_step(name, train, family_of, load, forest, counted):
    family, model, batch = family_of(name), load(name), forest(name)
    freeze(model, family, train)
    meter = flops.Meter(shape=shapes.shape_of(model, family.tower_of), training=training_of(model, family))
    assert meter.train_step([batch])[0] == pytest.approx(counted(model, name, batch), rel=0.01)


def test_adapters_are_counted_and_frozen_matrices_want_no_gradient(family_of, load, forest, counted):
    pytest.importorskip("peft")
    name = "qwen2_5_vl"
    family, model, batch = family_of(name), load(name), forest(name, seed=0)
    shape = shapes.shape_of(model, family.tower_of)
    lora.add(model, family, LoraConfig(rank=8), seed=0)
    training = training_of(model, family)
    assert {n: t for n, t in training.items() if t != flops.FROZEN[n]}.keys() == {"llm"} and training["llm"].adapters
    useful, _ = flops.Meter(shape=shape, training=training).train_step([batch])
    # The first of its two layers wants no gradient of its input, which is not subtracted.
    assert useful == pytest.approx(counted(model, name, batch), rel=0.025)


def test_recomputation_is_counted_apart(shape_for, load, forest, counted):
    name = "qwen2_5_vl"
    batch, shape = forest(name), shape_for(name)
    once, twice = (counted(load(name), name, batch, checkpointing=again) for again in (False, True))
    _, again = flops.Meter(shape=shape, repeats=lambda batch: 1.0).train_step([batch])
    assert again == pytest.approx(twice - once, rel=0.01)


def test_a_trunk_is_counted_once_and_pairs_by_ancestors():
    # A trunk of 3 tokens, two leaves of 2: 3 + 2·2 tokens; 1+2+3 and twice 4+5 pairs.
    shape = tiny_shape()
    work = metered().count(np.array([0, 3, 3]), np.array([3, 2, 2]), 4)
    assert work["llm/layers"] == 2 * 7 * shape.text.weights
    # Layers, products, heads, size, pairs.
    assert work["llm/attention"] == 2 * 4 * 4 * 8 * (6 + 2 * 9)
    assert work["head"] == 2 * 4 * 32 * 100
    meter = flops.Meter(shape=replace(shape, pair_flops={None: 128, 4: 128}))
    work = meter.count(np.array([0, 3]), np.array([3, 7]), 0)
    assert work["llm/attention"] == 4 * 4 * 8 * (55 + 1 + 2 + 3 + 7 * 4)  # a sliding window limits the keys


def tiny_shape():
    stack = shapes.Stack(layers=2, hidden=32, queries=32, keys=16, matrices=32 * 32 + 32 * 64)
    return shapes.Shape(text=stack, vocabulary=100, pair_flops={None: 2 * 4 * 32})


def metered():
    return flops.Meter(shape=tiny_shape())


def rollout(repeat, prompt, new):
    sources = np.array([Source.PROMPT] * prompt + [Source.POLICY] * new, np.int8)
    ids = np.arange(prompt + new)
    ids[prompt:] += 100 * (repeat + 1)
    return Trajectory(
        sample_id="g", repeat=repeat, ids=ids, sources=sources, logprobs=np.zeros(prompt + new, np.float32),
        versions=np.zeros(prompt + new, np.int32),
    )  # fmt: skip


def group(*members):
    sample = Sample(id="g", messages=(Message(role="user", parts=("x",)),))
    return Group(sample=sample, uid="g", trajectories=members)


def test_generating_needs_what_the_forest_of_its_rollouts_needs():
    members = group(*(rollout(r, prompt=10, new=n) for r, n in enumerate((5, 8, 3))))
    work = flops.generation(metered(), [members], element=2, together=8)
    (batch,) = pack([members], micro_tokens=1000)
    (trained,) = metered().forward([batch])
    both = work.prefill + work.decode
    for part in ("llm/layers", "llm/attention"):
        assert both[part] == trained[part]
    # The first token of all three comes from one row of logits.
    assert both["head"] == trained["head"] * (16 - 2) / 16
    said = rollout(0, prompt=4, new=8)
    said.sources[6:9] = Source.OBSERVATION  # what an environment says is read, not sampled
    work = flops.generation(metered(), [group(said)], element=2, together=8)
    assert work.prefill["llm/layers"] == 2 * (4 + 3) * tiny_shape().text.weights
    assert work.decode["llm/layers"] == 2 * (2 + 2) * tiny_shape().text.weights


def test_bytes_of_decoding():
    members = group(*(rollout(r, prompt=10, new=n) for r, n in enumerate((5, 8))))
    shape = tiny_shape()
    weights, token = 2 * (shape.text.weights + shape.head_weights), shape.kv_bytes(2)
    assert token == 2 * 2 * 2 * 8 * 2  # keys and values, layers, heads, size, bytes
    # Tokens 11 to 14 of one and 11 to 17 of the other read all keys behind the prompt and their
    # own; the prompt is read once for both as long as both go on.
    contexts = sum(range(1, 5)) + sum(range(1, 8)) + 7 * 10
    work = flops.generation(metered(), [members], element=2, together=8)
    assert work.read_bytes(8) == 8 * weights + contexts * token
    assert work.read_bytes(1) == 13 * weights + contexts * token
    alone = flops.generation(metered(), [members], element=2, together=1)
    assert alone.cache_bytes - work.cache_bytes == 4 * 10 * token
