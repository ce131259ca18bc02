"""Forest attention in all its forms against a loop over queries."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from saccade.errors import EnvironmentProblem
from saccade.forest import attention, interface
from saccade.forest.attention import forest_plan
from saccade.forest.interface import segment_attention

CPU = torch.device("cpu")


def random_forest(rng: np.random.Generator, trees: int = 3) -> tuple[np.ndarray, np.ndarray]:
    parents: list[int] = []
    for _ in range(trees):
        root = len(parents)
        parents.append(-1)
        for node in range(int(rng.integers(0, 5))):
            parents.append(root + int(rng.integers(0, node + 1)))
    sizes = rng.integers(1, 7, len(parents))
    return np.concatenate([[0], sizes.cumsum()]), np.array(parents)


def qkv(tokens: int, heads: int = 4, key_heads: int = 2, size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, size), (tokens, key_heads, size), (tokens, key_heads, size)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def naive(starts, parents, q, k, v, scale: float, window: int | None, numbers=None) -> torch.Tensor:
    """One query at a time: keys are the path above it and its own node up to itself, or to the end of its block."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    rows = []
    for node in range(len(parents)):
        chain = [node]
        while parents[chain[0]] >= 0:
            chain.insert(0, int(parents[chain[0]]))
        whole = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in chain])
        for token in range(starts[node], starts[node + 1]):
            place = int(np.flatnonzero(whole == token)[0])
            first, last = 0, place
            if window is not None:
                first = max(0, place - window + 1) if window > 0 else place // -window * -window
            while numbers is not None and numbers[token] >= 0 and last + 1 < len(whole):
                if numbers[whole[last + 1]] != numbers[token]:
                    break
                last += 1
            seen = whole[first : last + 1]
            weights = (torch.einsum("hd,khd->hk", q[token], k[seen]) * scale).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v[seen]))
    return torch.stack(rows)


def assert_same(got: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor], gradient: float = 1e-12) -> None:
    """Values and gradients."""
    assert (got - wanted).abs().max() < 1e-13
    weight = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (got, wanted))
    assert max((a - b).abs().max() for a, b in zip(ours, theirs, strict=True)) < gradient


@pytest.mark.parametrize("largest", [4096, 8, 0])
@pytest.mark.parametrize("window", [None, 1, 4, -3])
def test_every_plan_agrees_with_a_loop_over_queries(monkeypatch, largest, window):
    monkeypatch.setattr(attention, "LARGEST_DENSE_TREE", largest)
    for seed in range(4):
        starts, parents = random_forest(np.random.default_rng(seed))
        inputs = qkv(int(starts[-1]))
        plan = forest_plan(starts, parents, CPU, torch.float64)
        got = plan(0, *inputs, 0.3, window)
        wanted = naive(starts, parents, *inputs, 0.3, window)
        assert_same(got, wanted, inputs)


def flash(q, k, v, bounds, longest, scale, window, causal=True):
    """What the variable-length call computes, in float64."""
    rows = []
    for (a, b), (c, d) in zip(pairwise(bounds[0].tolist()), pairwise(bounds[1].tolist()), strict=True):
        assert b - a <= longest[0] and d - c <= longest[1]
        places, keys = torch.arange(d - c - (b - a), d - c)[:, None], torch.arange(d - c)
        hidden = (keys > places) & causal | (keys <= places - (window or d))
        repeats = q.shape[1] // k.shape[1]
        part_k, part_v = (x[c:d].repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], part_k) * scale
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), part_v))
    return torch.cat(rows)


@pytest.mark.parametrize("plans", ["dense", "by node", "flash"])
@pytest.mark.parametrize("window", [None, 2, 5, -4])
@pytest.mark.parametrize("kind", ["all", "windows", ""])
def test_pictures_see_themselves_both_ways(monkeypatch, plans, window, kind):
    monkeypatch.setattr(attention, "LARGEST_DENSE_TREE", 0 if plans == "by node" else 4096)
    monkeypatch.setattr(attention, "varlen", flash)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        starts, parents = random_forest(rng)
        inputs = qkv(int(starts[-1]))
        runs = [np.arange(*sorted(rng.integers(a, b + 1, 2))) for a, b in pairwise(starts)]  # inside of each node
        shown = np.isin(np.arange(starts[-1]), np.concatenate(runs)).astype(int)
        blocks = attention.blocks_at(kind, shown, {"image": 1})
        make = attention._varlen_plan if plans == "flash" else attention._dense_plan
        got = make(starts, parents, CPU, blocks)(0, *inputs, 0.3, window)
        both = kind == "all" or (kind == "windows" and window is not None)
        wanted = naive(starts, parents, *inputs, 0.3, window, blocks.numbers if both else None)
        # Keys that several nodes read sum their gradients in float32.
        assert_same(got, wanted, inputs, gradient=1e-5 if plans == "flash" else 1e-12)


def tiny_model(name: str, **changes) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = AutoConfig.for_model(name, **sizes, **heads, pad_token_id=0, **changes)
    return AutoModelForCausalLM.from_config(config)


def forward(model: torch.nn.Module) -> torch.Tensor:
    plan = forest_plan(np.array([0, 2, 5]), np.array([-1, -1]), CPU, torch.float32)
    ids = torch.tensor([[1, 2, 1, 2, 3]])
    places = torch.tensor([[0, 1, 0, 1, 2]])
    output = model.base_model(input_ids=ids, position_ids=places, use_cache=False, attention_plan=plan)
    return output.last_hidden_state[0]


def test_an_argument_that_would_be_dropped_is_refused():
    model = tiny_model("gemma2")
    interface.use_in(model)
    with pytest.raises(EnvironmentProblem, match=r"Gemma2Attention passes softcap="):
        forward(model)
    model = tiny_model("llama", attention_dropout=0.5)
    interface.use_in(model)
    assert (forward(model.eval())[:2] - forward(model)[2:4]).abs().max() < 1e-6
    with pytest.raises(EnvironmentProblem, match=r"LlamaAttention passes dropout="):
        forward(model.train())


@pytest.mark.parametrize("name", ["mamba", "bloom"])
def test_a_model_that_never_asks_for_a_plan_is_refused(name):
    with pytest.raises(EnvironmentProblem, match="leak into"):
        interface.use_in(tiny_model(name))


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 1, 5, 3, 2], [7]])
def test_segments_attend_inside_themselves_only(lengths):
    boundaries = torch.tensor([0, *np.cumsum(lengths)])
    inputs = qkv(sum(lengths), key_heads=4)
    got = segment_attention(*inputs, boundaries, 0.2)
    q, k, v = inputs
    rows = []
    for start, end in pairwise(boundaries.tolist()):
        weights = (torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * 0.2).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, v[start:end]))
    assert_same(got, torch.cat(rows), inputs)


def test_gathered_rows_sum_their_gradients_in_fp32():
    rows = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index, offsets = torch.zeros(257, dtype=torch.long), torch.tensor([0, 257])
    gathered = attention._GatherRows.apply(rows, index, torch.arange(257), offsets)
    gradient = torch.full_like(gathered, 2.0**-9)
    gradient[0] = 1.0
    gathered.backward(gradient)
    assert rows.grad.item() == 1.5  # in bf16 1 + 2^-9 is 1 again, 256 times over
