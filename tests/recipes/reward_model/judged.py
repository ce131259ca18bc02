"""What the tests of reward models have in common: rows that are judged, and their scores."""

import numpy as np
import torch

from saccade.config import load
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_rows import rows_of
from saccade.recipes import model_setup
from saccade.rewards.reward_sample import reward_sample
from saccade.types import replace

OTHER = {"red": "blue", "blue": "red"}
MARK = "black"  # a word of the tiny model that no scene of these shows

DEEP = {
    "reward_model.loss": "hps", "reward_model.pooling": "attention", "reward_model.head": "mlp",
    "reward_model.bounded": True, "reward_model.probe_layer": 0,
}  # fmt: skip
PROCESS = {"reward_model.kind": "process", "reward_model.placeholder": MARK, "reward_model.tokens": ["1", "2"]}


def scores_of(folder, config, **options):
    """[pairs, sides] of the training rows."""
    resolved = load(config, command="reward-model")
    task = rows_of(resolved, model_setup.family_of(resolved, resolved.model.path))
    samples = task.load(resolved.data.train).samples
    model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    replies = [
        replace(reward_sample(sample, side[-1].text), replied=side) for sample in samples for side in sample.candidates
    ]
    return np.array(model.score(replies, **options)).reshape(-1, 2)
