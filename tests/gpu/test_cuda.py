"""What only a GPU can show; skipped without one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda")


def random_tree(rng, nodes=7):
    sizes = rng.integers(1, 40, nodes)
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])
    return np.concatenate([[0], sizes.cumsum()]), parents


def test_the_variable_length_plan_agrees_with_the_dense_plan_and_its_gradient():
    from saccade.forest.attention import _dense_plan, _varlen_plan

    rng = np.random.default_rng(0)
    for _ in range(5):
        starts, parents = random_tree(rng)
        tokens = int(starts[-1])
        q = torch.randn(tokens, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(tokens, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        v = torch.randn(tokens, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        fast = _varlen_plan(starts, parents, DEVICE, None)(0, q, k, v, 0.125, None)
        exact_inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
        exact = _dense_plan(starts, parents, DEVICE, None)(0, *exact_inputs, 0.125, None)
        assert (fast.float() - exact).norm() / exact.norm() < 0.01
        weight = torch.randn_like(exact)
        fast.backward(weight.to(fast.dtype))
        exact.backward(weight)
        for got, wanted in zip((q, k, v), exact_inputs, strict=True):
            assert (got.grad.float() - wanted.grad).norm() / wanted.grad.norm() < 0.02


def test_vision_segments_agree_with_a_loop():
    from saccade.forest.interface import segment_attention

    boundaries = torch.tensor([0, 5, 21, 22, 64], device=DEVICE)
    q, k, v = (torch.randn(64, 2, 80, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    fast = segment_attention(q, k, v, boundaries, 80**-0.5)
    exact = segment_attention(q.float(), k.float(), v.float(), boundaries, 80**-0.5)
    assert (fast.float() - exact).norm() / exact.norm() < 0.01
