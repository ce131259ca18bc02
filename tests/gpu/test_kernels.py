"""Triton kernels against the plain formulas in float64, over random shapes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda")


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
    from saccade import logprobs
    from saccade.kernels import logits as kernel

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
            exact = logprobs._gradient(
                z.double(), targets, 0.7, banned, kept, *wanted[1:], to_new, asked
            )
            got = kernel.write_gradient(
                *(z.clone(), targets, 0.7, banned, kept, *found[1:], to_new.float()),
                None if asked is None else asked.float(),
            )
            limit = max(4 * torch.finfo(dtype).eps, 5e-6)
            assert (got - exact).norm() / exact.norm() < limit


def test_reading_through_a_head_in_chunks(monkeypatch):
    from saccade import logprobs

    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000, bias=False, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(300, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 900, (300,), device=DEVICE)
    banned = torch.arange(1000, device=DEVICE) >= 950
    support = [np.array([], np.int64) if i % 3 else np.arange(920) for i in range(300)]

    def run(hidden, head):
        new, entropy = logprobs.read_logprobs(
            hidden,
            head,
            targets,
            temperature=0.8,
            banned=banned,
            support=support,
            vocabulary=1000,
            entropy_gradient=True,
        )
        loss = (new * torch.linspace(0, 1, 300, device=DEVICE)).sum() + entropy.sum() / 7
        return new, entropy, *torch.autograd.grad(loss, (hidden, head.weight))

    exact_head = torch.nn.Linear(64, 1000, bias=False, device=DEVICE, dtype=torch.float64)
    exact_head.weight.data.copy_(head.weight)
    exact = run(hidden.detach().double().requires_grad_(), exact_head)
    for elements in (10**9, 20_000):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        for got, wanted in zip(run(hidden, head), exact, strict=True):
            assert (got.double() - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_products(dtype):
    from saccade.kernels.gate import gradients, multiply

    rng = np.random.default_rng(0)
    for shape in ((1, 1), (3, 7, 5), (2, 33, 3420), (1, 300, 11008)):
        gate, up, to_product = (
            torch.from_numpy(rng.normal(0, 2, shape)).to(DEVICE, dtype) for _ in range(3)
        )
        exact = [x.double().requires_grad_() for x in (gate, up)]
        product = torch.nn.functional.silu(exact[0]) * exact[1]
        wanted = (product, *torch.autograd.grad(product, exact, to_product.double()))
        limit = 2 * torch.finfo(dtype).eps
        assert (multiply(gate, up) - product).norm() <= limit * product.norm()
        for got, right in zip(gradients(gate, up, to_product), wanted, strict=True):
            assert (got - right).norm() <= limit * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_embeddings(dtype):
    from saccade.kernels.rotary import rotate

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
            x * narrow[0][:, None]
            + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * (narrow[1][:, None])
        )
        assert torch.equal(rotate(x, *narrow), plain)  # rounded where separate kernels round
        got = rotate(x, cos.float(), sin.float())
        assert got.is_contiguous() and (got - turned).norm() <= limit * turned.norm()
        got = rotate(gradient.to(dtype), cos.float(), sin.float(), back=True)
        assert (got - wanted).norm() <= 2 * limit * wanted.norm()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl", "qwen3"])
def test_fused_modules_are_the_modules(name, family_of):
    from saccade.models.fused import fuse
    from saccade.models.load import load_model

    fused = load_model(family_of(name), dtype=torch.bfloat16, device=DEVICE)
    exact = load_model(family_of(name), dtype=torch.float32, device=DEVICE)
    exchanged = [m for m in fused.modules() if type(m).__name__.startswith("Fused")]
    assert len(exchanged) > 5 and fuse(exact) == []
    for path, module in fused.named_modules():
        if module not in exchanged:
            continue
        width = getattr(module, "gate_proj", module)
        width = width.in_features if hasattr(width, "in_features") else width.weight.shape[0]
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
    from saccade.models import fused

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
