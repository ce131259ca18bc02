"""Reward models that the terms of a reward name.

model = load_learned(config, "runs/rm/checkpoints/step-100")
"""

from __future__ import annotations

from pathlib import Path

from saccade.config import Config
from saccade.errors import ConfigError
from saccade.models.load import pick_dtype
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_card import flaw
from saccade.plugins.reward_models.reward_model_term import model_terms
from saccade.recipes import model_setup


def load_learned(config: Config, path: str) -> LearnedReward:
    """In this process, beside the policy."""
    device = model_setup.device_of(config)
    return LearnedReward.load(
        model_setup.model_folder(config, path),
        device=device,
        dtype=pick_dtype(config.model.dtype, device),
        micro_tokens=config.train.micro_tokens,
        offload=config.reward.offload,
        trust_remote_code=config.model.trust_remote_code,
        untrained=path.startswith("tiny:"),
    )


def require_folders(config: Config) -> None:
    """Refuse folders that are no reward models, before a run has a folder of its own."""
    for args in model_terms(config.reward):
        if not args["path"].startswith("tiny:") and (wrong := flaw(Path(args["path"]))):
            raise ConfigError(f"reward.terms: {wrong}")
