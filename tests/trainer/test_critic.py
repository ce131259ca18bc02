"""A critic is a backend like any other: values and their gradient; and a reference that follows the policy."""

import numpy as np
import pytest
import torch
from pytest import approx

from saccade.config import TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.forest.packing import pack
from saccade.models.heads import attach_score
from saccade.system.contents import write_files
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import ValueLoss
from saccade.types import Group, Trajectory
from tests.trainer.test_forest_gradient import with_columns

NAMES = ["qwen2_5_vl", "qwen3_vl", "internvl", "qwen3"]
NAME = "qwen2_5_vl"


@pytest.fixture
def critic(family_of, load):
    """Without a config it only scores. Its head is larger than at a start, so values differ."""

    def made(name: str, config: TrainConfig | None = None, dtype="float32", **options):
        model = load(name, dtype)
        attach_score(model, seed=0)
        with torch.no_grad():
            model.score.weight.mul_(10)
        return LocalTrainer(model, family_of(name), config, **options)

    return made


def random_groups(grow, family, seed: int) -> list[Group]:
    """One of text, one with pictures where the family reads them."""
    rng = np.random.default_rng(seed)
    pictures = 1 if family.axes > 1 else 0
    return [grow(rng, family, uid=f"g{i}", images=i * pictures) for i in range(2)]


@pytest.fixture
def alone(padded):
    def values(stock, score: torch.Tensor, family, t: Trajectory) -> torch.Tensor:
        """Values [tokens] of one member from transformers' own forward."""
        return stock.base_model(**padded(family, [t], stock.dtype)).last_hidden_state[0] @ score[0]

    return values


def members(groups: list[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "qwen3"])
def test_values_of_a_forest_are_those_of_each_member_alone(critic, family_of, stock, grow, alone, name):
    family, backend = family_of(name), critic(name)
    groups = random_groups(grow, family, 0)
    wanted, wanted_after = [], []
    with torch.no_grad():
        for t in members(groups):
            values = alone(stock(name), backend.model.score.weight, family, t)
            policy = np.flatnonzero(t.policy_mask)
            wanted.append(values[policy - 1].numpy())
            wanted_after.append(values[policy[-1]].item())
    assert np.concatenate(wanted).std() > 0.1
    for budget in (10_000, 60, 1):
        scored = backend.values(pack(groups, micro_tokens=budget, ends=True))
        got, after = (np.concatenate(part) for part in zip(*scored, strict=True))
        assert got.dtype == after.dtype == np.float32
        assert got == approx(np.concatenate(wanted), abs=1e-5)
        assert after == approx(np.array(wanted_after), abs=1e-5)
    ((without, over),) = backend.values(pack(groups, micro_tokens=10_000))  # an episode that ended
    assert without == approx(np.concatenate(wanted), abs=1e-5) and over.tolist() == [0.0] * 8


def columns_of(groups: list[Group]) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Per member old values, returns and scales over the step; the last member is not live."""
    rng, (*live, last) = np.random.default_rng(1), members(groups)
    tokens = sum(t.response_length for t in live)
    columns = {}
    for t in members(groups):
        values, returns = rng.standard_normal((2, t.response_length)).astype(np.float32) * (np.nan if t is last else 1)
        scales = np.full(t.response_length, 0 if t is last else 1 / tokens, np.float32)
        columns[t.key] = {"values": values, "returns": returns, "scales": scales}
    return columns


def one_by_one(alone, model, score: torch.nn.Parameter, family, groups: list[Group], columns, clip):
    """Loss and gradients from transformers' own forward of each live member, written out again."""
    model.zero_grad()
    score.grad = None
    total = 0.0
    for t in members(groups)[:-1]:
        policy = np.flatnonzero(t.policy_mask)
        new = alone(model, score, family, t)[policy - 1]
        old, returns, scales = (torch.from_numpy(columns[t.key][n]).double() for n in columns[t.key])
        losses = (new - returns) ** 2
        if clip:
            held = old + (new - old).clamp(-clip, clip)
            losses = torch.maximum(losses, (held - returns) ** 2)
        loss = 0.5 * (losses * scales).sum()
        loss.backward()
        total += loss.item()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return total, grads | {"score.weight": score.grad.clone()}


@pytest.mark.parametrize(("name", "clip"), [*((name, 0.5) for name in NAMES), (NAME, 0.0)])
def test_gradients_of_a_forest_are_those_of_each_member_alone(
    critic, family_of, stock, grow, alone, measured, keep_float64, name, clip
):
    family, backend = family_of(name), critic(name, TrainConfig(), "float64")
    model = stock(name, "float64")
    keep_float64()
    groups = random_groups(grow, family, 5)
    columns = columns_of(groups)
    score = torch.nn.Parameter(backend.model.score.weight.detach().clone())
    loss, wanted = one_by_one(alone, model, score, family, groups, columns, clip)
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    for budget in (10_000, 60):
        batches = [with_columns(b, columns) for b in pack(groups, micro_tokens=budget)]
        means, got = measured(backend, batches, ValueLoss(clip))
        assert means["critic/loss"] == approx(loss, rel=1e-10)
        assert (means["critic/clip_frac"] > 0.1) == (clip > 0)
        assert means["critic/grad_norm"] > 0 and means["critic/lr"] == means["critic/update_skipped"] == 0
        assert set(got) == set(wanted) and len(got) > 10
        for n, gradient in wanted.items():
            assert (got[n] - gradient).norm() <= 1e-10 * whole, n


def test_weights_of_another_model_are_refused(critic, family_of, load, tmp_path):
    write_files(tmp_path, [critic("qwen3").weight_file()])
    plain = LocalTrainer(load("qwen3"), family_of("qwen3"))
    with pytest.raises(EnvironmentProblem, match=r"unexpected: score\.weight"):
        plain.load_weights(tmp_path)
    write_files(tmp_path, [plain.weight_file()])
    with pytest.raises(EnvironmentProblem, match=r"missing: score\.weight"):
        critic("qwen3").load_weights(tmp_path)
    narrow = {n: p[:1] if n == "model.norm.weight" else p for n, p in plain.weights()}
    with pytest.raises(EnvironmentProblem, match=r"of another shape: model\.norm\.weight"):
        plain.blend(narrow.items(), 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_average_arrives_however_small_its_steps(family_of, load, tmp_path, dtype):
    """Steps of 1 % of a gap of 2 % are far below the spacing of bf16 numbers (0.4 %)."""
    family = family_of("qwen3")
    policy = LocalTrainer(load("qwen3", dtype), family)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.02)
    start = {n: p.double() for n, p in LocalTrainer(load("qwen3", dtype), family).weights()}
    reference = LocalTrainer(load("qwen3", dtype), family)
    for step in range(60):
        reference.blend(policy.weights(), 0.01)
        if step == 30:  # stored and restored half-way, in bf16 with the fp32 averages
            before, reference = reference, LocalTrainer(load("qwen3", dtype), family)
            write_files(tmp_path, [before.weight_file()])
            reference.load_weights(tmp_path)
            assert all(torch.equal(a, reference.averages[n]) for n, a in before.averages.items())
            restored = dict(reference.weights())
            assert all(torch.equal(p, restored[n]) for n, p in before.weights())
    aims = dict(policy.weights())
    for name, weight in reference.weights():
        wanted = start[name] + (1 - 0.99**60) * (aims[name].double() - start[name])
        spacing = 1e-5 if dtype == "float32" else 2**-8
        assert (weight.double() - wanted).abs().max() <= spacing * wanted.abs().max(), name
    if dtype == "bfloat16":
        name = "model.embed_tokens.weight"
        wanted = start[name] + (1 - 0.99**60) * (aims[name].double() - start[name])
        assert (reference.averages[name].double() - wanted).abs().max() < 1e-6
