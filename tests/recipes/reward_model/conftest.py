"""Two reward models that have learned."""

import pytest

import saccade
from saccade.plugins.reward_models import reward_training
from tests.recipes.reward_model.judged import DEEP


@pytest.fixture(scope="session")
def trained(tmp_path_factory, config, rows):
    """The folder of a reward model that knows the colours."""
    out = tmp_path_factory.mktemp("trained")
    held = str(rows / "held-pairs.jsonl")
    saccade.reward_model(config(out, run__max_steps=15, data__val=held, val__every=15))
    return out / "run" / "checkpoints" / "step-15"


@pytest.fixture(scope="session")
def deep(tmp_path_factory, config):
    """One whose score is no linear function of the last states."""
    out = tmp_path_factory.mktemp("deep")
    reward_training.run(config(out, run__max_steps=12) | DEEP)
    return out / "run" / "checkpoints" / "step-12"
