"""Triton kernels against the plain formulas in float64, over random shapes."""

import sys
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda")
GATES = {False: torch.nn.functional.silu, True: partial(torch.nn.functional.gelu, approximate="tanh")}


def masks(rng, rows, vocabulary, targets, ban, cut):
    banned = kept = None
    if ban:
        banned = torch.from_numpy(rng.random(vocabulary) < 0.3).to(DEVICE)
        banned[targets] = False
    if cut:
        kept = torch.from_numpy(rng.random((rows, vocabulary)) < 0.2).to(DEVICE)
        kept[torch.arange(rows), targets] = True
    return banned, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ban", "cut"), [(False, False), (True, False), (True, True)])
def test_log_probs_entropies_and_their_gradient(dtype, ban, cut):
    from saccade.forest import logprobs
    from saccade.plugins.gpu import logits as kernel

    rng = np.random.default_rng(0)
    for rows, vocabulary in ((1, 5), (7, 257), (33, 8192), (64, 50_257), (17, 151_936)):
        z = torch.from_numpy(rng.normal(0, 4, (rows, vocabulary))).to(DEVICE, dtype)
        targets = torch.from_numpy(rng.integers(0, vocabulary, rows)).to(DEVICE)
        banned, kept = masks(rng, rows, vocabulary, targets, ban, cut)
        found = kernel.read(z, targets, 0.7, banned, kept)
        wanted = logprobs._read(z.double(), targets, 0.7, banned, kept)
        for got, exact in zip(found, wanted, strict=True):
            assert (got - exact).abs().max() < 5e-5
        to_new, to_entropy = (torch.from_numpy(rng.normal(size=rows)).to(DEVICE) for _ in "ab")
        for asked in (None, to_entropy):
            how = (targets, 0.7, banned, kept)
            exact = logprobs._gradient(z.double(), how, wanted[1:], to_new, asked)
            narrow = None if asked is None else asked.float()
            got = kernel.write_gradient(z.clone(), how, found[1:], to_new.float(), narrow)
            limit = max(4 * torch.finfo(dtype).eps, 5e-6)
            assert (got - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("gelu", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_products(dtype, gelu):
    from saccade.plugins.gpu.gate import gradients, multiply

    rng = np.random.default_rng(0)
    for shape in ((1, 1), (3, 7, 5), (2, 33, 3420), (1, 300, 11008)):
        gate, up, to_product = (torch.from_numpy(rng.normal(0, 2, shape)).to(DEVICE, dtype) for _ in range(3))
        exact = [x.double().requires_grad_() for x in (gate, up)]
        product = GATES[gelu](exact[0]) * exact[1]
        wanted = (product, *torch.autograd.grad(product, exact, to_product.double()))
        limit = 2 * torch.finfo(dtype).eps
        assert (multiply(gate, up, gelu=gelu) - product).norm() <= limit * product.norm()
        for got, right in zip(gradients(gate, up, to_product, gelu=gelu), wanted, strict=True):
            assert (got - right).norm() <= limit * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_embeddings(dtype):
    from saccade.plugins.gpu.rotary import rotate

    rng = np.random.default_rng(0)
    for tokens, heads, size in ((1, 1, 2), (5, 3, 80), (300, 16, 128), (77, 28, 64)):
        wide = torch.from_numpy(rng.normal(size=(3, heads, tokens, size))).to(DEVICE, dtype)
        x = wide[1].transpose(0, 1)  # as it lies behind a projection
        cos, sin = (torch.from_numpy(rng.normal(size=(tokens, size))).to(DEVICE) for _ in "ab")
        exact = x.double().requires_grad_()
        left, right = exact.chunk(2, -1)
        turned = exact * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
        gradient = torch.randn_like(turned)
        (wanted,) = torch.autograd.grad(turned, exact, gradient)
        limit = torch.finfo(dtype).eps
        narrow = [a.to(dtype) for a in (cos, sin)]
        plain = (
            x * narrow[0][:, None] + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * (narrow[1][:, None])
        )
        few = slice(0, (heads + 1) // 2)  # keys have fewer heads
        both = rotate(x, x[:, few], *narrow)
        assert torch.equal(both[0], plain) and torch.equal(both[1], plain[:, few])
        for got, right in zip(rotate(x, x[:, few], cos.float(), sin.float()), (turned, turned[:, few]), strict=True):
            assert got.is_contiguous() and (got - right).norm() <= limit * right.norm()
        narrow_gradient = gradient.to(dtype)
        for got, right in zip(
            rotate(narrow_gradient, narrow_gradient[:, few], cos.float(), sin.float(), back=True),
            (wanted, wanted[:, few]),
            strict=True,
        ):
            assert (got - right).norm() <= 2 * limit * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_embeddings_of_neighbours(dtype):
    """One tensor without another, from neighbours 2i and 2i + 1, rounded once."""
    from saccade.plugins.gpu.rotary import rotate

    torch.manual_seed(0)
    for tokens, heads, size in ((1, 1, 2), (5, 3, 80), (300, 32, 128)):
        x, gradient = (torch.randn(tokens, heads, size, device=DEVICE).to(dtype) for _ in "ab")
        cos, sin = (torch.randn(tokens, size, device=DEVICE).to(dtype) for _ in "ab")
        exact = x.double().requires_grad_()
        crossed = torch.stack((-exact[..., 1::2], exact[..., ::2]), -1).flatten(-2)
        turned = exact * cos[:, None] + crossed * sin[:, None]
        (wanted,) = torch.autograd.grad(turned, exact, gradient.double())
        for given, right, back in ((x, turned, False), (gradient, wanted, True)):
            got, fewer = rotate(given, given[:, : heads // 2], cos, sin, back=back, pairs=True)
            assert (got - right).norm() <= torch.finfo(dtype).eps * right.norm()
            assert torch.equal(fewer, got[:, : heads // 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_embeddings_of_a_part_and_of_woven_heads(dtype):
    from saccade.plugins.gpu.rotary import rotate

    torch.manual_seed(0)
    for tokens, heads, size, turned in ((1, 1, 4, 2), (5, 3, 80, 24), (300, 16, 256, 64), (77, 32, 64, 64)):
        x, gradient = (torch.randn(tokens, heads, size, device=DEVICE).to(dtype) for _ in "ab")
        cos, sin = (torch.randn(tokens, turned, device=DEVICE).to(dtype) for _ in "ab")
        for how in ({}, {"pairs": True}, {"woven": True}):
            exact = x.double().requires_grad_()
            at = torch.arange(turned).view(2, -1) if not how else torch.arange(turned).view(-1, 2).T
            near, far = at if "woven" not in how else torch.arange(turned // 2).expand(2, -1)
            left, right = (exact[..., each] for each in at)
            both = [left * cos[:, None, near] - right * sin[:, None, near]]
            both.append(right * cos[:, None, far] + left * sin[:, None, far])
            made = torch.stack(both, -1) if "pairs" in how else torch.cat(both, -1)
            wanted = torch.cat([made.flatten(2) if "pairs" in how else made, exact[..., turned:]], -1)
            (back,) = torch.autograd.grad(wanted, exact, gradient.double())
            for given, right, turns in ((x, wanted, False), (gradient, back, True)):
                got, fewer = rotate(given, given[:, : heads // 2], cos, sin, back=turns, **how)
                assert (got - right).norm() <= 4 * torch.finfo(dtype).eps * right.norm()
                assert torch.equal(fewer, got[:, : heads // 2]) and torch.equal(got[..., turned:], given[..., turned:])


def test_rotary_functions_that_are_exchanged(tmp_path):
    """Of a part of a head (Qwen3.5), of woven heads (DeepSeek, without experts: rounding may choose others)."""
    from saccade.models.families import load_family
    from saccade.models.load import load_model
    from saccade.plugins.families.tiny_kinds import build

    for name, kind, function, changes in (
        ("qwen3_5", "qwen3_5", "apply_rotary_pos_emb", {}),
        ("kimi_k25", "deepseek_v3", "apply_rotary_pos_emb_interleave", {"first_k_dense_replace": 99}),
    ):
        family = load_family(build(name, tmp_path / name, **changes))
        load_model(family, dtype=torch.bfloat16, device=DEVICE)
        found = getattr(sys.modules[f"transformers.models.{kind}.modeling_{kind}"], function)
        assert hasattr(found, "plain") and found.keywords["how"].part == (kind == "qwen3_5")


FUSED = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "internvl", "llava", "qwen3", "gemma3", "gemma4", "cohere2_vision"]


@pytest.mark.parametrize("name", FUSED)
def test_fused_modules_are_the_modules(name, family_of):
    from saccade.models.load import load_model
    from saccade.plugins.gpu.fused import fuse

    fused = load_model(family_of(name), dtype=torch.bfloat16, device=DEVICE)
    exact = load_model(family_of(name), dtype=torch.float32, device=DEVICE)
    exchanged = [m for m in fused.modules() if type(m).__name__.startswith("Fused")]
    assert len(exchanged) > 5 and fuse(exact) == []
    for path, module in fused.named_modules():
        if module not in exchanged:
            continue
        width = next((p.shape[-1] for p in getattr(module, "gate_proj", module).parameters()), 32)
        x = torch.randn(3, 50, width, device=DEVICE, dtype=torch.bfloat16)
        inputs = [x.clone().requires_grad_(), x.float().requires_grad_()]
        pair = (module, exact.get_submodule(path))
        outs = [m(i) for m, i in zip(pair, inputs, strict=True)]
        weight = torch.randn_like(outs[1])
        for out in outs:
            out.backward(weight.to(out.dtype))
        assert (outs[0] - outs[1]).norm() <= 0.01 * outs[1].norm()
        assert (inputs[0].grad - inputs[1].grad).norm() <= 0.01 * inputs[1].grad.norm()
        for a, b in zip(*(m.parameters() for m in pair), strict=True):
            assert (a.grad - b.grad).norm() <= 0.01 * b.grad.norm()


def test_a_gated_layer_of_odd_width_is_padded():
    from saccade.plugins.gpu import fused

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (torch.nn.Linear(32, 36) for _ in "ab")
            self.down_proj, self.act_fn = torch.nn.Linear(36, 32), torch.nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    torch.manual_seed(0)
    layer = Gated().to(DEVICE, torch.bfloat16)
    exact = Gated().to(DEVICE)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 32, device=DEVICE, dtype=torch.bfloat16)
    fused._gated(layer, x).square().sum().backward()
    exact(x.float()).square().sum().backward()
    for a, b in zip(layer.parameters(), exact.parameters(), strict=True):
        assert a.grad.shape == a.shape and (a.grad - b.grad).norm() <= 0.02 * b.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_sum_their_gradients(dtype):
    from saccade.plugins.gpu.row_sums import sum_rows

    for seed, (tokens, keys, width) in enumerate(((1, 1, 1), (40, 200, 48), (5_000, 40_000, 256))):
        torch.manual_seed(seed)
        index = torch.randint(0, tokens, (keys,), device=DEVICE)
        ordered, places = torch.sort(index, stable=True)
        offsets = torch.searchsorted(ordered, torch.arange(tokens + 1, device=DEVICE))
        grad = torch.randn(keys, width, device=DEVICE).to(dtype)
        exact = torch.zeros(tokens, width, device=DEVICE, dtype=torch.float64)
        exact.index_add_(0, index, grad.double())
        got = sum_rows(grad, places, offsets)
        assert (got - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
        assert torch.equal(got, sum_rows(grad, places, offsets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_a_sum_and_its_norm(dtype, center, shift):
    from torch.nn.functional import layer_norm, rms_norm

    from saccade.plugins.gpu.norm import add_norm

    def normed(x, weight):
        return (layer_norm if center else rms_norm)(x.double(), weight.shape, weight.double() + shift, eps=1e-6)

    torch.manual_seed(0)
    limit = torch.finfo(dtype).eps
    for shape in ((1, 2), (3, 5), (2, 7, 896), (1, 130, 2048), (4, 8192)):
        x, y, also = (1 + torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(3))
        weight, before = (torch.randn(shape[-1], device=DEVICE, dtype=dtype) for _ in range(2))
        factor = torch.full((1,), 0.7, device=DEVICE, dtype=dtype)
        how = {"shift": shift, "center": center}
        total, made = add_norm(x, y, weight, 1e-6, **how)
        assert torch.equal(total, x + y)
        assert (made - normed(total, weight)).norm() <= limit * normed(total, weight).norm()
        total, made = add_norm(x, y, weight, 1e-6, also=also, **how)
        assert torch.equal(total, x + y + also)
        total, made = add_norm(x, y, weight, 1e-6, before=(before, 1e-6), factor=factor, **how)
        wanted = (x + normed(y, before)) * factor
        assert (total - wanted).norm() <= 3 * limit * wanted.norm()
        assert (made - normed(total, weight)).norm() <= limit * normed(total, weight).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_rows(dtype):
    from torch.nn.functional import rms_norm

    from saccade.plugins.gpu.norm import norm_gradients, norm_rows

    torch.manual_seed(0)
    limit = torch.finfo(dtype).eps
    for shape in ((1, 1), (3, 5), (2, 3, 4, 48), (1, 700, 8, 256), (2, 300, 2560)):
        x, given = (torch.randn(shape, device=DEVICE).to(dtype) for _ in "ab")
        if len(shape) == 4:
            x, given = x.transpose(1, 2), given.transpose(1, 2)  # heads first, as attention has them
        weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
        exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
        wanted = rms_norm(exact[0], weight.shape, 1 + exact[1], 1e-6)
        made = norm_rows(x, weight, 1e-6, shift=True)
        assert (made - wanted).norm() <= limit * wanted.norm()
        assert made.stride() == x.stride() or shape[0] > 1
        for scale in (weight, None):
            plain = rms_norm(x.double(), weight.shape, None if scale is None else scale.double(), 1e-6)
            assert (norm_rows(x, scale, 1e-6) - plain).norm() <= limit * plain.norm()
        to_x, to_weight = torch.autograd.grad(wanted, exact, given.double())
        for got, right in zip(norm_gradients(x, weight, 1e-6, given), (to_x, to_weight), strict=True):
            assert (got - right).norm() <= max(limit * right.norm(), 1e-4)


@pytest.mark.parametrize("gelu", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_halves_of_a_gated_layer_in_one_product(dtype, gelu):
    from saccade.plugins.gpu.gate import project

    rng = np.random.default_rng(0)
    for _ in range(12):
        rows, width, columns = int(rng.integers(1, 65)), *(64 * rng.integers(1, 40, 2)).tolist()
        x = torch.from_numpy(rng.normal(size=(rows, width))).to(DEVICE, dtype)
        gate, up = (
            torch.from_numpy(rng.normal(size=(columns, width)) / width**0.5).to(DEVICE, dtype) for _ in range(2)
        )
        exact = GATES[gelu](x.double() @ gate.double().T) * (x.double() @ up.double().T)
        assert (project(x, gate, up, gelu=gelu) - exact).norm() <= 3 * torch.finfo(dtype).eps * exact.norm()
