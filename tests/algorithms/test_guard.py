"""Log-probs that are far apart, or not finite: every loss, every KL, in either place.

A gap of 80 between any two of the policies gives a finite loss and a finite gradient. A log-prob
that is not finite never does, so that no update is made of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.algorithms import corrections
from saccade.algorithms.advantages import ADVANTAGES, compute
from saccade.algorithms.build import resolve
from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.objective import objective, to_metrics
from saccade.algorithms.policy_losses import KINDS, LOSSES, LossInputs
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import AlgorithmConfig, TrainConfig
from saccade.errors import ConfigError
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.trainer import Scoring
from saccade.trainer.local import LocalBackend
from saccade.trainer.losses import PolicyLoss

SEQUENCE = torch.tensor([0] * 6 + [1] + [2] * 4 + [3] * 5)
TOKENS, ADVANTAGE = len(SEQUENCE), torch.tensor([1.0, -1.0, -0.75, 0.0])[SEQUENCE]
NEW = -torch.linspace(0.01, 3.0, TOKENS)  # fp32, as in training
SIGN = torch.tensor([1.0, -1.0]).repeat(TOKENS // 2)
GAPS = {  # of another policy, at each token
    "above": torch.full((TOKENS,), 80.0),
    "below": torch.full((TOKENS,), -80.0),
    "both": 80 * SIGN,
}
OF_A_MODEL = ("clip", "pg", "vespo", "kl_cov")  # that differ in what they do with corrections and a model
IN_LOSS = [name for name, entry in KINDS.items() if entry.in_loss]


@cache
def algorithm_of(loss: str, **kl: Any) -> Algorithm:
    args = {"kl_clamp": kl.pop("clamp")} if "clamp" in kl else {}
    config = {"policy_loss": loss, "old": "recompute", "kl": {"coef": 0.1, **kl}, "args": args}
    return resolve(AlgorithmConfig.model_validate(config), max_tokens=8)


def columns(**changes: Any) -> LossInputs:
    fields: dict[str, Any] = {
        "advantages": ADVANTAGE,
        "scales": torch.full((TOKENS,), 1 / TOKENS),
        "sequence": SEQUENCE,
        "sequences": 4,
        "old": NEW + 0.1 * SIGN,
        "rollout": NEW,
        "ref": NEW,
        "rewards": ADVANTAGE,
        "selected": SEQUENCE == 2,
    }
    return LossInputs(**(fields | changes))


def loss_of(algorithm: Algorithm, new: Tensor, flat: LossInputs) -> tuple[Tensor, Tensor, list[float]]:
    """Value, gradient and metrics."""
    new = new.clone().requires_grad_()
    loss, stats = objective(algorithm, new, torch.ones(TOKENS), flat)
    metrics = to_metrics([stats]).means()
    return loss.detach(), torch.autograd.grad(loss, new)[0], list(metrics.values())


def assert_finite(algorithm: Algorithm, flat: LossInputs) -> None:
    loss, gradient, metrics = loss_of(algorithm, NEW, flat)
    assert loss.isfinite() and gradient.isfinite().all() and np.isfinite(metrics).all()


@pytest.mark.parametrize(
    ("loss", "kl"),
    [
        *((loss, {"kind": "k3", "ratio_correct": True}) for loss in LOSSES),
        *(("clip", {"kind": kind, "ratio_correct": r}) for kind in IN_LOSS for r in (False, True)),
        ("clip", {"kind": "k3", "clamp": "zero"}),
    ],
)
def test_a_gap_of_80_is_finite(loss: str, kl: dict[str, Any]) -> None:
    algorithm = algorithm_of(loss, **kl)
    for gap in GAPS.values():
        far = NEW + gap
        every = {"old": far, "ref": far, "rollout": far}
        for changes in ({"ref": far}, {"old": far}, {"rollout": far}, every):
            assert_finite(algorithm, columns(**changes))
        assert_finite(algorithm.model_copy(update={"old": "rollout"}), columns(rollout=far))


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_of_a_gap_of_80(name: str, gap: str) -> None:
    bounds = {"low": 0.9, "high": 1.1, "threshold": 0.01}
    chosen = {key: bounds[key] for key, value in CORRECTIONS[name].options.items() if value is None}
    flat, correct = columns(rollout=NEW + GAPS[gap]), CORRECTIONS[name].having(chosen)
    if not CORRECTIONS[name].each_update:
        live = torch.ones(TOKENS, dtype=torch.bool)
        assert flat.old is not None and flat.rollout is not None
        mismatch = corrections.measure(flat.old, flat.rollout, live=live, sequence=SEQUENCE, sequences=4)
        found = corrections.apply([correct], mismatch)
        weights = found.weights
        if weights is not None:
            weights = corrections.self_normalise(weights, live)
            assert weights.isfinite().all()
        keep = None if found.keep is None else found.keep.float()
        flat = replace(flat, weights=weights, keep=keep)
    for loss in OF_A_MODEL:
        assert_finite(algorithm_of(loss).model_copy(update={"corrections": (correct,)}), flat)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "k1") for name in ADVANTAGES), *(("gae", kind) for kind in KINDS if kind != "k1")]
)
def test_a_kl_of_80_in_the_reward(golden, name: str, kind: str) -> None:
    estimator, members = ADVANTAGES[name].having({"drpo_kl_damp": 0.75}), torch.ones(4).double()
    for gap in (80.0, -80.0, 80.0 * (-1) ** golden.position):
        inputs = golden.members(
            token_penalties=0.1 * KINDS[kind].function(golden.old, golden.old - gap),
            values=golden.old,
            greedy=0 * members,
            components=torch.eye(4).double(),
            component_weights=members,
            domain_weights=members,
            drift=80 * members,
        )
        if name == "max_rl" and (inputs.scores < 0).any():
            with pytest.raises(ConfigError, match="rewards >= 0"):
                compute(estimator, inputs)
        else:
            assert compute(estimator, inputs).values.isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_log_prob_that_is_not_finite_is_never_hidden(loss: str, value: float) -> None:
    """At any token: selected or not, clipped or not, with an advantage of 0, alone in its row."""
    algorithm = algorithm_of(loss, coef=0.0)  # without a KL, which would not hide it either
    for token in (0, 1, 6, 7, 8, 11, 12):
        new = NEW.index_fill(0, torch.tensor(token), value)
        assert not loss_of(algorithm, new, columns())[0].isfinite(), token
    dead = columns(scales=torch.full((TOKENS,), 1 / TOKENS).where(SEQUENCE != 2, 0.0))
    broken = NEW.where(SEQUENCE != 2, value)
    assert loss_of(algorithm, broken, dead)[0].isfinite()  # nobody trains on it


# -- a model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(family_of: Callable[..., Any], load: Callable[..., Any]) -> LocalBackend:
    return LocalBackend(load("qwen3"), family_of("qwen3"), TrainConfig())


@pytest.fixture
def backend(shared: LocalBackend, batch: Batch) -> Iterator[LocalBackend]:
    """After one update, so that there is a state; what a test changes is undone."""
    if not any(tensor.any() for tensor in snapshot(shared)[1].values()):
        assert not shared.train_step([batch], PolicyLoss(algorithm_of("pg"), Scoring()), lr=1e-4).skipped
    weights, state = snapshot(shared)
    yield shared
    assert shared.optimizer is not None
    with torch.no_grad():
        for name, weight in shared.weights():
            weight.copy_(weights[name])
        for name, tensor in shared.optimizer.state().items():
            tensor.copy_(state[name])


def snapshot(backend: LocalBackend) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    assert backend.optimizer is not None
    return (
        {name: weight.detach().clone() for name, weight in backend.weights()},
        {name: tensor.clone() for name, tensor in backend.optimizer.state().items()},
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def batch(shared: LocalBackend, grow: Callable[..., Any]) -> Batch:
    rng = np.random.default_rng(0)
    group = grow(rng, shared.family, images=0, depth=1)
    (packed,) = pack([group], micro_tokens=9999)
    ((new, _),) = shared.logprobs([packed], Scoring())
    reads = len(new)
    return replace(
        packed,
        scales=np.full(reads, 1 / reads, np.float32),
        old_logprobs=new,
        ref_logprobs=new,
        rollout_logprobs=new,
        rewards=packed.advantages,
        selected=(np.arange(reads) % 3 == 0).astype(np.float32),
    )


@pytest.mark.parametrize("logit", ["row of the head", -torch.inf, torch.nan])
@pytest.mark.parametrize("loss", OF_A_MODEL)
def test_an_infinite_logit_is_no_update_and_a_gap_of_80_is_one(
    backend: LocalBackend, batch: Batch, monkeypatch: pytest.MonkeyPatch, loss: str, logit: float | str
) -> None:
    head: Any = backend.model.lm_head
    token = torch.tensor([int(batch.targets[0])])
    if isinstance(logit, float):
        forward = head.forward
        monkeypatch.setattr(head, "forward", lambda x: forward(x).index_fill(-1, token, logit))
    else:
        with torch.no_grad():
            head.weight[token] = torch.inf
    before = snapshot(backend)
    update = backend.train_step([batch], PolicyLoss(algorithm_of(loss, coef=0.0), Scoring()), lr=1e-4)
    means = update.metrics.means()
    assert update.skipped and means["guard/nonfinite"] == means["policy/update_skipped"] == 1
    assert all(map(same, before, snapshot(backend)))
    assert backend.optimizer is not None and not backend.optimizer.gradients
    monkeypatch.undo()
    with torch.no_grad():
        head.weight[token] = 0.0
    for gap in (80, -80):
        far: Any = {name: getattr(batch, name) + np.float32(gap) for name in ("ref_logprobs", "rollout_logprobs")}
        far["old_logprobs"] = batch.old_logprobs - np.float32(gap)
        update = backend.train_step([replace(batch, **far)], PolicyLoss(algorithm_of(loss), Scoring()), lr=1e-4)
        weights, state = snapshot(backend)
        assert not update.skipped and np.isfinite(list(update.metrics.means().values())).all()
        assert all(tensor.isfinite().all() for tensor in (weights | state).values())
