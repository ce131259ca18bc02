"""Forest = padded = one by one: loss and every gradient, against transformers' own forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.algorithms.build import resolve
from saccade.algorithms.objective import objective
from saccade.algorithms.policy_losses import LossInputs
from saccade.config import AlgorithmConfig, TrainConfig
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Group, Trajectory

# Two updates of a step: the ratio is not 1, so values and gradients depend on the log-probs.
ALGORITHM = resolve(
    AlgorithmConfig(preset="grpo", entropy_coef=0.05, kl={"coef": 0.1}), max_tokens=64, updates_per_step=2
)
SCORING = Scoring(temperature=0.8)
Result = tuple[float, dict[str, torch.Tensor]]


def columns_of(groups: list[Group]) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Per member: scales over the whole step, old and reference log-probs near the tiny model's."""
    tokens = sum(t.response_length for g in groups for t in g.trajectories)
    rng = np.random.default_rng(1)
    return {
        t.key: {
            "scales": np.full(t.response_length, 1 / tokens, np.float32),
            "old_logprobs": -5.6 + 0.2 * rng.standard_normal(t.response_length).astype(np.float32),
            "ref_logprobs": -5.6 + 0.2 * rng.standard_normal(t.response_length).astype(np.float32),
        }
        for g in groups
        for t in g.trajectories
    }


def with_columns(batch: Batch, columns: dict) -> Batch:
    names = columns[batch.keys[0]]
    return replace(batch, **{n: np.concatenate([columns[key][n] for key in batch.keys]) for n in names})


def stock_loss(inputs, stock, members: list[Trajectory], family, columns: dict) -> Result:
    """transformers' own attention, positions and image features on padded rows."""
    logits = stock(**inputs).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / SCORING.temperature
    scores = logits.masked_fill(torch.from_numpy(family.banned), -1e30).log_softmax(-1)
    policy = [np.flatnonzero(t.policy_mask) for t in members]
    here = torch.cat([scores[row, places - 1] for row, places in enumerate(policy)])
    targets = torch.from_numpy(np.concatenate([t.ids[places] for t, places in zip(members, policy, strict=True)]))

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([columns[t.key][name] for t in members])).to(logits.dtype)

    known = LossInputs(
        advantages=torch.from_numpy(np.concatenate([t.advantages for t in members])).to(logits.dtype),
        scales=column("scales"),
        sequence=torch.arange(len(members)).repeat_interleave(torch.tensor([len(places) for places in policy])),
        sequences=len(members), old=column("old_logprobs"), ref=column("ref_logprobs"),
    )  # fmt: skip
    loss, _ = objective(ALGORITHM, here[range(len(targets)), targets], -(here.exp() * here).sum(-1), known)
    stock.zero_grad()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in stock.named_parameters() if p.grad is not None}


@pytest.fixture
def wanted(stock, padded, family_of):
    """The loss and gradients of transformers, and the float64 ones."""

    def results(name: str, dtype: str, groups: list[Group], columns: dict) -> tuple[Result, Result]:
        members, found = [t for g in groups for t in g.trajectories], {}
        for kind in {"float64", dtype}:
            model = stock(name, kind)
            inputs = padded(family_of(name), members, model.dtype)
            found[kind] = stock_loss(inputs, model, members, family_of(name), columns)
        return found[dtype], found["float64"]

    return results


def distance(got: Result, wanted: Result) -> float:
    """Of all gradients together, as a share of their norm."""
    gaps = [(got[1][name] - gradient).norm() for name, gradient in wanted[1].items()]
    whole = torch.stack([gradient.norm() for gradient in wanted[1].values()]).norm()
    return (torch.stack(gaps).norm() / whole).item()


def limit_of(wanted: Result, exact: Result) -> float:
    """In float64 1e-10; in float32 twice the rounding of transformers' own gradients on this machine."""
    return 1e-10 if wanted is exact else 2 * distance(wanted, exact)


def assert_same(got: Result, wanted: Result, limit: float) -> None:
    """Within `limit` of the whole norm, and a few of their own; one near zero has 1e-3 of the whole as its scale."""
    assert limit < 1e-5
    assert abs(got[0] - wanted[0]) <= limit * max(abs(wanted[0]), 0.1)
    assert set(got[1]) == set(wanted[1]) and len(got[1]) > 10
    assert distance(got, wanted) <= limit
    whole = torch.stack([g.norm() for g in wanted[1].values()]).norm()
    for name, gradient in wanted[1].items():
        error = (got[1][name] - gradient).norm()
        assert error <= 3 * limit * max(gradient.norm(), 1e-3 * whole), name


@pytest.mark.parametrize(("name", "images", "dtype"), [
    *[(name, 3, "float64") for name in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "internvl", "llava")],
    *[("qwen2_5_vl", 3, "float32"), ("llava", 0, "float32"), ("qwen3", 0, "float64"), ("mixtral", 0, "float64")],
    *[("qwen3_vl_moe", 1, "float32"), ("qwen2_moe", 0, "float32")],  # their routers round to float32
])  # fmt: skip
def test_random_trees(family_of, load, stock, grow, measured, wanted, keep_float64, name, images, dtype):
    family = family_of(name)
    backend = LocalTrainer(load(name, dtype), family, TrainConfig())
    stock(name, dtype)
    for model in [stock(name, "float64"), *([backend.model] if dtype == "float64" else [])]:
        model.set_experts_implementation("eager")  # their grouped product knows no such type
    keep_float64()
    rng = np.random.default_rng([0, images])
    groups = [grow(rng, family, uid=f"g{i}", images=images) for i in range(2)]
    columns = columns_of(groups)
    theirs, exact = wanted(name, dtype, groups, columns)
    for budget in (10_000, 1):  # one forest, every sequence by itself
        batches = pack(groups, micro_tokens=budget)
        means, got = measured(backend, [with_columns(b, columns) for b in batches], PolicyLoss(ALGORITHM, SCORING))
        assert_same((means["policy/loss"], got), theirs, limit_of(theirs, exact))


@pytest.mark.parametrize(("checkpointing", "dtype"), [(False, "float32"), (True, "float64")])
def test_twelve_samples_in_any_partition_and_order(
    family_of, load, stock, grow, measured, wanted, keep_float64, checkpointing, dtype
):
    """0, 1 and 3 images mixed: one batch, 3 x 4, 12 x 1, shuffled, forest or padded."""
    family = family_of("qwen2_5_vl")
    rng = np.random.default_rng(3)
    groups = [grow(rng, family, uid=f"g{i}", size=4, images=count) for i, count in enumerate((0, 1, 3))]
    columns = columns_of(groups)
    model = load("qwen2_5_vl", dtype)
    stock("qwen2_5_vl"), stock("qwen2_5_vl", "float64")
    keep_float64()
    theirs, exact = wanted("qwen2_5_vl", dtype, groups, columns)
    backend = LocalTrainer(model, family, TrainConfig(), checkpointing=checkpointing)
    single = [replace(g, trajectories=(t,)) for g in groups for t in g.trajectories]
    shuffled = [single[i] for i in rng.permutation(12)]
    partitions = {
        "one batch": [groups],
        "3 x 4": [[group] for group in groups],
        "12 x 1": [[group] for group in single],
        "shuffled 3 x 4": [shuffled[0:4], shuffled[4:8], shuffled[8:12]],
    }
    sizes = {}
    for name, parts in partitions.items():
        packed = [pack(p, micro_tokens=10_000) for p in parts]
        batches = [with_columns(batch, columns) for batches in packed for batch in batches]
        sizes[name] = (len(batches), sum(batch.tokens for batch in batches))
        means, got = measured(backend, batches, PolicyLoss(ALGORITHM, SCORING))
        assert_same((means["policy/loss"], got), theirs, limit_of(theirs, exact))
    assert [count for count, _ in sizes.values()] == [1, 3, 12, 3]
    assert sizes["one batch"][1] < sizes["12 x 1"][1]
