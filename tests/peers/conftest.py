"""Random ragged rows for TRL, and what we make of the same rows.

Without TRL all is skipped. It gets padded rows with garbage where no token counts, we get the flat
tokens; value and gradient must agree. Only its arithmetic runs, no model. Where it deviates on
purpose or by mistake a comment says so, and the rest is compared.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.algorithms.aggregation import token_scales
from saccade.algorithms.build import resolve
from saccade.algorithms.objective import objective
from saccade.algorithms.policy_losses import LossInputs
from saccade.config import AlgorithmConfig

WIDEST = 13  # tokens of a completion, for a loss with a fixed length
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


def ours(algorithm, rows, **columns):
    """Columns are of the flat tokens."""
    mask, sequence = rows.mask, rows.sequence
    new = rows.new.clone().requires_grad_()
    scales, _ = token_scales(algorithm.aggregate, sequence, live=torch.ones(len(mask), dtype=torch.bool))
    loss, _ = objective(
        algorithm,
        new[mask],
        rows.entropies[mask],
        LossInputs(
            advantages=rows.advantages[sequence],
            scales=scales.to(new.dtype),
            sequence=sequence,
            sequences=len(mask),
            old=rows.old[mask],
            rollout=rows.rollout[mask],
            ref=rows.ref[mask],
            **columns,
        ),
    )
    return loss.detach(), torch.autograd.grad(loss, new)[0]


@pytest.fixture(scope="session")
def drawn():
    return [draw(seed) for seed in range(3)]


@pytest.fixture(scope="session")
def assert_ours():
    """Value and gradient of the algorithm with these options are theirs."""

    def check(options, rows, theirs, tolerance, **columns):
        config = {"old": "recompute", "kl": {"coef": 0.0}} | options
        algorithm = resolve(AlgorithmConfig.model_validate(config), max_tokens=WIDTH)
        value, gradient = ours(algorithm, rows, **columns)
        assert value.item() == pytest.approx(theirs[0].item(), rel=tolerance, abs=tolerance)
        assert theirs[1].norm() > 1e-3
        torch.testing.assert_close(gradient, theirs[1], rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture(scope="session")
def trl_trainer(tmp_path_factory, word_model):
    """TRL's own trainer, GRPO or DPO, around a tiny vision model."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    def make(kind, rows, options, **more):
        plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
        folder = str(tmp_path_factory.mktemp("trl"))
        made = getattr(trl, f"{kind}Trainer")(
            model=word_model,
            args=getattr(trl, f"{kind}Config")(output_dir=folder, **plain, **options),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=AutoTokenizer.from_pretrained(word_model),
            **more,
        )
        made.model.train()
        made.current_gradient_accumulation_steps = 1  # as its loop sets it
        return made

    return make


@pytest.fixture(scope="session")
def trainer(trl_trainer):
    options = {"per_device_train_batch_size": 12, "num_generations": 4, "max_completion_length": WIDEST}
    options |= {"beta": 0.0, "loss_type": "grpo", "temperature": 1.0}
    rewards = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    return trl_trainer("GRPO", {"prompt": ["how many ?"]}, options, reward_funcs=rewards)
