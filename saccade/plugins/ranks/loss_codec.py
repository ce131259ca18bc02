"""Losses as JSON, to be sent to a rank. The algorithm is not sent: a rank resolves it from the same config and gets
only the coefficients that change from step to step. A teacher is not sent either: the rank holds it.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.plugins.imitation.imitation_sources import DistillationLoss, SupervisedLoss
from saccade.plugins.preferences.preference_losses import PreferenceLoss
from saccade.plugins.reward_models.reward_losses import RatingLoss, StepsLoss
from saccade.recipes.sft import SUPERVISED
from saccade.trainer import Loss, Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss, ValueLoss

# Losses whose fields are plain JSON: numbers, names and lists of them.
PLAIN: Mapping[str, Any] = {kind.__name__: kind for kind in (ValueLoss, PreferenceLoss, RatingLoss, StepsLoss)}


def encode_loss(loss: Any) -> dict[str, Any]:
    kind = type(loss).__name__
    if isinstance(loss, StepsLoss):
        loss = replace(loss, labels={sample: labels.tolist() for sample, labels in loss.labels.items()})
    if kind in PLAIN:
        return {"kind": kind, "fields": asdict(loss)}
    if isinstance(loss, DistillationLoss):
        return {"kind": kind, "kd_coef": loss.kd_coef}
    assert isinstance(loss, PolicyLoss), f"{kind} is not sent to ranks"
    coefficients = {"kl": loss.algorithm.kl.coef, "entropy": loss.algorithm.entropy_coef}
    return {"kind": kind, "scoring": asdict(loss.scoring), "rl": loss.algorithm is not SUPERVISED, **coefficients}


def decode_loss(row: Mapping[str, Any], algorithm: Algorithm | None, teacher: LocalTrainer | None = None) -> Loss:
    if row["kind"] in PLAIN:
        return PLAIN[row["kind"]](**row["fields"])
    if "kd_coef" in row:
        assert teacher is not None
        return DistillationLoss(teacher, row["kd_coef"])
    scoring = Scoring(**row["scoring"])
    if not row["rl"]:
        return SupervisedLoss(SUPERVISED, scoring)
    assert algorithm is not None
    kl = algorithm.kl.model_copy(update={"coef": row["kl"]})
    return PolicyLoss(algorithm.model_copy(update={"kl": kl, "entropy_coef": row["entropy"]}), scoring)
