"""Log-probs and entropies: golden values, chunks, banned ids, temperature, support."""

import numpy as np
import pytest
import torch
from pytest import approx

from saccade.forest import logprobs
from saccade.forest.logprobs import read_logprobs, sampling_logits

# logits[a, b, c] = 2 sin(0.7 (15a + 5b + c)), targets [[0, 1, 2], [3, 4, 0]]
LOGITS = 2 * torch.sin(0.7 * torch.arange(30, dtype=torch.float64)).view(6, 5)
TARGETS = torch.tensor([0, 1, 2, 3, 4, 0])
LOGPROBS = [-2.964186, -2.498372, -1.226533, -1.635504, -4.492992, -4.496073]
ENTROPIES = [1.424818, 1.342931, 1.372204, 0.929665, 1.133313, 1.032456]


def read(hidden=LOGITS, targets=TARGETS, head=None, *, temperature=1.0, **options):
    if head is None:
        head = torch.nn.Linear(5, 5, bias=False, dtype=hidden.dtype)
        torch.nn.init.eye_(head.weight)
    return read_logprobs(hidden, head, targets, temperature=temperature, **options)


def test_golden_values():
    new, entropy = read()
    assert new.tolist() == approx(LOGPROBS, abs=1e-6)
    assert entropy.tolist() == approx(ENTROPIES, abs=1e-6)
    single, _ = read(LOGITS.float())
    assert single.dtype == torch.float32 and single.tolist() == approx(LOGPROBS, abs=2e-6)
    hot, _ = read(temperature=2.0)
    assert hot.tolist() == approx((LOGITS / 2).log_softmax(-1)[range(6), TARGETS].tolist())
    assert sampling_logits(LOGITS.bfloat16(), 0.5, None).dtype == torch.float32  # half precision is widened
    new, entropy = read(LOGITS[:0], TARGETS[:0])
    assert new.shape == entropy.shape == (0,)


@pytest.mark.parametrize("elements", [1, 11, 10**9])
def test_chunks_change_neither_values_nor_gradients(monkeypatch, elements):
    head = torch.nn.Linear(7, 5, dtype=torch.float64)
    hidden = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    banned = torch.tensor([False, False, False, False, True])
    support = [np.array([0, 1]), np.array([1]), np.array([]), *[np.arange(5)] * 3]
    targets = torch.tensor([0, 1, 2, 3, 1, 0])
    inputs = [hidden, head.weight, head.bias]

    def run():
        options = {"temperature": 0.7, "banned": banned, "support": support}
        new, entropy = read(hidden, targets, head, entropy_gradient=True, **options)
        loss = (new * torch.arange(1.0, 7)).sum() + (entropy * torch.arange(6.0, 0, -1)).sum()
        return new, entropy, torch.autograd.grad(loss, inputs)

    whole = run()
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    chunked = run()
    assert torch.equal(whole[0], chunked[0]) or (whole[0] - chunked[0]).abs().max() < 1e-14
    assert (whole[1] - chunked[1]).abs().max() < 1e-14
    for a, b in zip(whole[2], chunked[2], strict=True):
        assert a.isfinite().all() and (a - b).abs().max() < 1e-13


def test_the_logits_of_a_chunk_are_not_kept_for_backward(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20)
    shapes = []
    hidden = torch.randn(6, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        new, _ = read(hidden, TARGETS, torch.nn.Linear(4, 10))
    assert all(shape[-1] != 10 for shape in shapes if len(shape) == 2)
    new.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("elements", [10, 10**9])
def test_the_entropy_has_a_graph_only_when_asked(monkeypatch, elements):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    results = []
    for asked in (False, True):
        logits = LOGITS.clone().requires_grad_()
        new, entropy = read(logits, entropy_gradient=asked)
        assert new.requires_grad and entropy.requires_grad is asked
        (gradient,) = torch.autograd.grad(new.square().sum(), logits)
        results.append((new.detach(), entropy.detach(), gradient))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_banned_ids_have_no_mass_and_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    banned = torch.tensor([False, True, False, False, False])
    targets = torch.tensor([0, 2, 3, 4, 0, 2])
    new, entropy = read(logits, targets, banned=banned, entropy_gradient=True)
    rest = logits.detach()[:, [0, 2, 3, 4]].log_softmax(-1)
    column = torch.tensor([0, 1, 2, 3, 0, 1])
    assert new.tolist() == approx(rest[range(6), column].tolist())
    assert entropy.tolist() == approx((-(rest.exp() * rest).sum(-1)).tolist())
    (new.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all() and (logits.grad[:, 1] == 0).all()


def test_support_is_the_distribution_that_was_sampled_from():
    support = [np.array([0, 3]), np.array([1]), np.array([1, 2, 4]), *[np.array([])] * 3]
    new, entropy = read(support=support)
    for row, ids in enumerate(support[:3]):
        rest = LOGITS[row, ids].log_softmax(-1)
        place = ids.tolist().index(int(TARGETS[row]))
        assert new[row].item() == approx(rest[place].item())
        assert entropy[row].item() == approx(-(rest.exp() * rest).sum().item())
    assert new[1].item() == 0.0 and entropy[1].item() == approx(0.0, abs=1e-12)
    assert new[3:].tolist() == approx(LOGPROBS[3:], abs=1e-6)  # empty: nothing was cut away


def test_nothing_is_nan_where_a_target_itself_is_banned():
    logits = LOGITS.clone().requires_grad_()
    banned = torch.tensor([True, True, False, True, True])
    new, entropy = read(logits, banned=banned, entropy_gradient=True)
    assert new[2].item() == 0.0 and (new[[0, 1, 3, 4, 5]] == -torch.inf).all()
    assert entropy.abs().max() < 1e-12
    (new.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_logit_that_is_not_finite_is_seen_in_its_log_prob(value):
    new, _ = read(LOGITS.index_put((torch.arange(6), TARGETS), torch.tensor(value, dtype=torch.float64)))
    assert not new.isfinite().any()
