"""Losses of TRL's own trainer. Only its log-probs are replaced, by the same random ones. It gets padded rows, garbage
where no token counts, we get flat tokens. Where it deviates on purpose or by mistake a comment says so.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.algorithms.aggregation import token_scales
from saccade.algorithms.build import resolve
from saccade.algorithms.filters import high_entropy
from saccade.algorithms.objective import objective
from saccade.algorithms.policy_losses import LossInputs
from saccade.config import AlgorithmConfig

FIXED = 13  # of the trainer
COUNT, WIDTH = 12, 11


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Padded, [B, T] unless said; random numbers also where the mask is False."""

    mask: Tensor  # with holes, as tools leave them, and another number of tokens in each row
    new: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    entropies: Tensor
    advantages: Tensor  # [B]

    @property
    def tokens(self):
        return int(self.mask.sum())

    @property
    def sequence(self):
        return torch.arange(len(self.mask))[:, None].expand_as(self.mask)[self.mask]


def draw(seed):
    rng = np.random.default_rng(seed)
    shape = (COUNT, WIDTH)

    def normal(size, spread):
        return torch.from_numpy(rng.normal(0, spread, size))

    lengths = rng.integers(1, WIDTH + 1, shape[0])
    mask = (np.arange(WIDTH) < lengths[:, None]) & (rng.random(shape) < 0.8)
    mask[:, 0] = True
    old = -normal(shape, 1.0).abs() - 0.05
    return Rows(
        mask=torch.from_numpy(mask),
        old=old,
        new=(old + normal(shape, 0.5)).clamp(max=-1e-3),  # ratios from 0.2 to 5: many are clipped
        rollout=old + normal(shape, 0.1),
        ref=old + normal(shape, 0.4),
        entropies=normal(shape, 1.0).abs().float().double(),  # TRL takes the quantile in fp32
        advantages=normal(shape[:1], 1.0),
    )


DRAWN = [draw(seed) for seed in range(3)]


def assert_ours(options, rows, theirs, tolerance, **columns):
    """Value and gradient of the algorithm with these options are theirs; columns are of the flat tokens."""
    config = {"old": "recompute", "kl": {"coef": 0.0}} | options
    algorithm = resolve(AlgorithmConfig.model_validate(config), max_tokens=WIDTH)
    mask, sequence = rows.mask, rows.sequence
    new = rows.new.clone().requires_grad_()
    scales, _ = token_scales(algorithm.aggregate, sequence, live=torch.ones(len(mask), dtype=torch.bool))
    known = LossInputs(
        advantages=rows.advantages[sequence], scales=scales.to(new.dtype), sequence=sequence, sequences=len(mask),
        old=rows.old[mask], rollout=rows.rollout[mask], ref=rows.ref[mask], **columns,
    )  # fmt: skip
    loss, _ = objective(algorithm, new[mask], rows.entropies[mask], known)
    assert loss.item() == pytest.approx(theirs[0].item(), rel=tolerance, abs=tolerance)
    assert theirs[1].norm() > 1e-3
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], theirs[1], rtol=tolerance, atol=tolerance)


def trl_loss(trainer, patch, rows, options):
    new = rows.new.clone().requires_grad_()
    ones = torch.ones_like(rows.mask, dtype=torch.int64)
    with patch.context() as changed:
        for name, value in {**PLAIN, **options}.items():
            holder = trainer if hasattr(trainer, name) else trainer.args
            assert hasattr(holder, name), name
            changed.setattr(holder, name, value)
        changed.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (new, rows.entropies, None))
        inputs = {
            **dict.fromkeys(("prompt_ids", "prompt_mask"), ones[:, :1]),
            **dict.fromkeys(("completion_ids", "completion_mask"), ones),
            **{"tool_mask": rows.mask.long(), "num_items_in_batch": rows.mask.sum(), "advantages": rows.advantages},
            **{"old_per_token_logps": rows.old, "ref_per_token_logps": rows.ref},
            "sampling_per_token_logps": rows.rollout,
        }
        loss = trainer._compute_loss(trainer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, new)[0]


PLAIN = {  # whatever the defaults of this version
    **{"importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28},
    **{"beta": 0.0, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
}
WIDTHS = {"clip_low": 0.2, "clip_high": 0.28}
HIGHER = {"args": WIDTHS}
K3 = {"coef": 0.1, "kind": "k3"}
TRL = {  # their options, ours
    "grpo": ({}, {"aggregation": "seq_mean", **HIGHER}),
    "dapo": ({}, {"aggregation": "token_mean", **HIGHER}),
    "dr_grpo": ({}, {"aggregation": "fixed", "args": {"fixed_length": FIXED, **WIDTHS}}),
    "cispo": (
        {"epsilon_high": 2.0},
        {"policy_loss": "cispo", "args": {"weight_cap": 2.0}, "aggregation": "token_mean"},
    ),
    "sapo": ({}, {"policy_loss": "sapo", "aggregation": "seq_mean"}),
    "grpo gspo": ({"importance_sampling_level": "sequence"}, {"policy_loss": "gspo", **HIGHER}),
    "luspo": ({"importance_sampling_level": "sequence"}, {"policy_loss": "luspo", **HIGHER}),
    "vespo": ({}, {"policy_loss": "vespo", "aggregation": "token_mean"}),
    "dapo delta": ({"delta": 1.5}, {"aggregation": "token_mean", "args": {"delta": 1.5, **WIDTHS}}),
    "grpo k3": ({"beta": 0.1}, {"kl": K3, **HIGHER}),
    "dr_grpo k3": ({"beta": 0.1}, {"kl": K3, "aggregation": "fixed", "args": {"fixed_length": FIXED, **WIDTHS}}),
    # Where TRL has one ratio per sequence it multiplies the KL by that, we always by the token's.
    "grpo corrected k3": (
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"kl": {**K3, "ratio_correct": True}, **HIGHER},
    ),
    "grpo opsm": ({"off_policy_mask_threshold": 0.05}, {"correct": [{"name": "opsm", "threshold": 0.05}], **HIGHER}),
    # TRL's bonus is a token mean whatever the loss divides by, ours follows the aggregation.
    "dapo bonus": (
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.01},
        {"entropy_coef": 0.01, "aggregation": "token_mean", **HIGHER},
    ),
}


@pytest.mark.parametrize("case", TRL)
def test_losses(trainer, monkeypatch, case):
    theirs, mine = TRL[case]
    # Its temperatures are fp32: 1.05 is off by 5e-8.
    tolerance = 1e-6 if case == "sapo" else 1e-9
    for rows in DRAWN:
        loss = trl_loss(trainer, monkeypatch, rows, {"loss_type": case.split()[0], **theirs})
        assert_ours(mine, rows, loss, tolerance)


def test_entropy_quantile(trainer, monkeypatch):
    """The filter holds for the policy term, not for the KL."""
    options = {"loss_type": "grpo", "top_entropy_quantile": 0.3, "beta": 0.1}
    for rows in DRAWN:
        live = torch.ones(rows.tokens, dtype=torch.bool)
        keep = high_entropy(rows.entropies[rows.mask], live, rows.sequence, fraction=0.3)
        assert 0 < keep.sum() < rows.tokens
        theirs = trl_loss(trainer, monkeypatch, rows, options)
        assert_ours({"kl": K3, **HIGHER}, rows, theirs, 1e-9, keep=keep.double())
