"""Log-probs that are far apart give a finite loss and gradient; those that are not finite never do."""

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
from saccade.config import AlgorithmConfig
from saccade.errors import ConfigError

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
        "advantages": ADVANTAGE, "scales": torch.full((TOKENS,), 1 / TOKENS), "sequence": SEQUENCE, "sequences": 4,
        "old": NEW + 0.1 * SIGN, "rollout": NEW, "ref": NEW, "rewards": ADVANTAGE, "selected": SEQUENCE == 2,
    }  # fmt: skip
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


@pytest.mark.parametrize(("loss", "kl"), [
    *((loss, {"kind": "k3", "ratio_correct": True}) for loss in LOSSES),
    *(("clip", {"kind": kind, "ratio_correct": r}) for kind in IN_LOSS for r in (False, True)),
    ("clip", {"kind": "k3", "clamp": "zero"}),
])  # fmt: skip
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
    flat, correct = columns(rollout=NEW + GAPS[gap]), CORRECTIONS[name].with_options(chosen)
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
    estimator, members = ADVANTAGES[name].with_options({"drpo_kl_damp": 0.75}), torch.ones(4).double()
    for gap in (80.0, -80.0, 80.0 * (-1) ** golden.position):
        inputs = golden.members(
            token_penalties=0.1 * KINDS[kind].function(golden.old, golden.old - gap), values=golden.old,
            greedy=0 * members, components=torch.eye(4).double(), component_weights=members, domain_weights=members,
            drift=80 * members,
        )  # fmt: skip
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
