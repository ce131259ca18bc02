"""Losses of TRL's own trainer. Only its log-probs are replaced: by the same random ones."""

import pytest
import torch

from saccade.algorithms.filters import high_entropy

pytest.importorskip("trl")
pytest.importorskip("datasets")

FIXED = 13  # of the trainer


def trl_loss(trainer, patch, rows, options, **inputs):
    new = rows.new.clone().requires_grad_()
    ones = torch.ones_like(rows.mask, dtype=torch.int64)
    with patch.context() as changed:
        for name, value in {**PLAIN, **options}.items():
            holder = trainer if hasattr(trainer, name) else trainer.args
            assert hasattr(holder, name), name
            changed.setattr(holder, name, value)
        changed.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (new, rows.entropies, None))
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": ones[:, :1],
                "prompt_mask": ones[:, :1],
                "completion_ids": ones,
                "completion_mask": ones,
                "tool_mask": rows.mask.long(),
                "advantages": rows.advantages,
                "old_per_token_logps": rows.old,
                "ref_per_token_logps": rows.ref,
                "sampling_per_token_logps": rows.rollout,
                "num_items_in_batch": rows.mask.sum(),
                **inputs,
            },
        )
    return loss.detach(), torch.autograd.grad(loss, new)[0]


PLAIN = {  # whatever the defaults of this version
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
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
def test_losses(trainer, monkeypatch, drawn, assert_ours, case):
    theirs, mine = TRL[case]
    # Its temperatures are fp32: 1.05 is off by 5e-8.
    tolerance = 1e-6 if case == "sapo" else 1e-9
    for rows in drawn:
        loss = trl_loss(trainer, monkeypatch, rows, {"loss_type": case.split()[0], **theirs})
        assert_ours(mine, rows, loss, tolerance)


def test_entropy_quantile(trainer, monkeypatch, drawn, assert_ours):
    """The filter holds for the policy term, not for the KL."""
    options = {"loss_type": "grpo", "top_entropy_quantile": 0.3, "beta": 0.1}
    for rows in drawn:
        live = torch.ones(rows.tokens, dtype=torch.bool)
        keep = high_entropy(rows.entropies[rows.mask], live, rows.sequence, fraction=0.3)
        assert 0 < keep.sum() < rows.tokens
        theirs = trl_loss(trainer, monkeypatch, rows, options)
        assert_ours({"kl": K3, **HIGHER}, rows, theirs, 1e-9, keep=keep.double())
