"""What layers keep for their backward: the formula against the tensors that autograd saves."""

import sys
import types

import numpy as np
import pytest
import torch

from saccade.forest.packing import pack
from saccade.models.families import load_family
from saccade.models.load import hidden_states, load_model
from saccade.plugins.estimate import flops, memory_items, shapes
from saccade.plugins.families import tiny
from saccade.plugins.gpu import fused
from saccade.types import MediaSpan, Message
from tests.models.against import noise

TOKENS, KEYS = 64, 100


class Kernel(torch.autograd.Function):
    """Keeps what the flash kernel keeps, and computes nothing of use."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.clone()
        ctx.save_for_backward(q, k, v, out)
        return out


class Norm(torch.autograd.Function):
    """Keeps what the fused norm of a GPU keeps."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The fused modules in bf16 on the CPU, over stand-ins for what only a GPU has."""
    gate = types.ModuleType("saccade.plugins.gpu.gate")
    gate.multiply = lambda gate, up, gelu: gate * up
    monkeypatch.setitem(sys.modules, "saccade.plugins.gpu.gate", gate)
    rotary = types.ModuleType("saccade.plugins.gpu.rotary")
    rotary.rotate = lambda q, k, cos, sin, pairs: (q.clone(), k.clone())
    monkeypatch.setitem(sys.modules, "saccade.plugins.gpu.rotary", rotary)
    monkeypatch.setattr(fused, "_applies", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(fused, "_near", lambda *_: True)
    monkeypatch.setattr(fused, "rms_norm", lambda x, shape, weight, eps: Norm.apply(x, weight))
    monkeypatch.setattr(
        "saccade.forest.interface.segment_attention",
        lambda q, k, v, *_: Kernel.apply(q.contiguous(), k.contiguous(), v.contiguous()),
    )


def over_gathered_keys(layer, q, k, v, scale, window):
    index = torch.arange(KEYS) % len(q)
    return Kernel.apply(q.contiguous(), k[index], v[index])


def kept_by(layer, run):
    """Bytes of the tensors that autograd saves while `layer` runs, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved, inside = {}, [False]

    def save(tensor):
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    layer.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    layer.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def model_of(name, folder):
    text = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    family = load_family(tiny.build(name, folder, text=text))
    return family, load_model(family, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "qwen3", "mixtral", "qwen2_moe"])
def test_a_layer_of_a_decoder(name, tmp_path, as_on_a_gpu):
    family, model = model_of(name, tmp_path)
    ids = torch.randint(0, 200, (TOKENS,))
    positions = torch.arange(TOKENS).repeat(family.axes, 1)
    layers = [m for m in model.modules() if hasattr(getattr(m, "self_attn", None), "layer_idx")]
    saved = kept_by(layers[1], lambda: hidden_states(model, family, ids, positions, (), over_gathered_keys))
    stack = shapes.shape_of(model, family.tower_of).text
    shared = 2 * TOKENS * 32 * 2 + KEYS * 8  # rotations and index, by all layers
    wanted = memory_items.layer_bytes(stack, TOKENS, KEYS, element=2) + shared
    # About 100 bytes of a token that a router keeps are not counted.
    assert saved == (pytest.approx(wanted, rel=0.03) if stack.experts else wanted)


def test_a_block_of_a_vision_tower(tmp_path, as_on_a_gpu, image):
    family, model = model_of("qwen2_5_vl", tmp_path)
    picture = image(224, 168)
    grid, tokens = family.measure(picture)
    span = MediaSpan(media=picture, start=0, length=tokens, grid=grid)
    ids = torch.full((tokens,), family.chat.placeholder)
    positions = torch.from_numpy(family.positions(ids.numpy(), (span,)))
    saved = kept_by(
        model.model.visual.blocks[1], lambda: hidden_states(model, family, ids, positions, (span,), over_gathered_keys)
    )
    shape = shapes.shape_of(model, family.tower_of)
    count, stack = flops.sensed(shape, [span])["vision"], shape.senses["vision"]
    assert count == 16 * 12
    shared = 2 * count * 32 * 4  # rotations
    assert saved == memory_items.layer_bytes(stack, count, count, element=2) + shared


def test_a_block_of_a_tower_of_squares(tmp_path, as_on_a_gpu, monkeypatch, image):
    """Its results are scaled by vectors that learn, so they are kept."""
    family, model = model_of("internvl", tmp_path)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", lambda q, k, v, **_: Kernel.apply(q, k, v))
    (span,) = family.render([Message(role="user", parts=(image(448, 336),))]).media
    media = family.media([span])
    saved = kept_by(model.model.vision_tower.encoder.layer[1], lambda: family.features(model, media))
    shape = shapes.shape_of(model, family.tower_of)
    vision, count = shape.senses["vision"], flops.sensed(shape, [span])["vision"]
    assert vision.extra == 1 and count == span.grid[0] * 17
    wanted = memory_items.layer_bytes(vision, count, count, element=2)
    assert saved == pytest.approx(wanted, rel=0.03)  # means and spreads of norms are not counted


@pytest.mark.parametrize(("name", "heard"), [("qwen2_audio", 1500), ("qwen2_5_omni", 100)])
def test_a_layer_of_a_tower_that_hears(name, heard, tmp_path, as_on_a_gpu, monkeypatch):
    """Two seconds: Qwen2-Audio fills them up to half a minute."""
    family, model = model_of(name, tmp_path)

    def attend(q, k, v, **_):
        return Kernel.apply(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))  # as kernels lay it

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    (span,) = family.render([Message(role="user", parts=(noise(2.0),))]).media
    media, shape = family.media([span]), shapes.shape_of(model, family.tower_of)
    tower = next(module for n, module in model.named_modules() if n.endswith("audio_tower"))
    saved = kept_by(tower.layers[1], lambda: family.features(model, media))
    assert flops.sensed(shape, [span]) == {"audio": heard}
    wanted = memory_items.layer_bytes(shape.senses["audio"], heard, heard, element=2)
    assert saved == pytest.approx(wanted, rel=0.05)  # means and spreads of norms are not counted


def test_keys_are_gathered_once_per_path(family_of, grow):
    family = family_of("qwen3")
    rng = np.random.default_rng(0)
    (batch,) = pack([grow(rng, family, images=0)], micro_tokens=10_000)
    sizes, lengths = np.diff(batch.node_starts), []
    for node, parent in enumerate(batch.parents):
        lengths.append(sizes[node] + (lengths[parent] if parent >= 0 else 0))
    assert memory_items.gathered_keys(batch) == sum(lengths)
