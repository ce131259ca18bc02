"""A run whose rewards come from a service learns what it would learn at home."""

from contextlib import closing, contextmanager
from functools import partial

import pytest

from saccade.config import DataConfig, load
from saccade.config.schema import ServeConfig
from saccade.errors import ConfigError
from saccade.plugins.reward_models.learned_reward import load_learned
from saccade.plugins.serving.http_server import running
from saccade.plugins.serving.reward_service import RewardService, reward_app
from saccade.recipes import rl
from saccade.rewards.scorer import Scorer
from saccade.run.loggers import read_metrics

MODEL = {"verifier": "model", "args": {"path": "tiny:qwen2_vl"}}


@contextmanager
def serving(*terms, folder=None):
    config = load({"reward.terms": terms, "reward.workers": 1, "run.out": str(folder)})
    scorer = Scorer(
        config.reward,
        prompt_format="think_answer",
        max_tokens=64,
        isolate=True,
        load_model=partial(load_learned, config),
    )
    service = RewardService(scorer, ServeConfig(), DataConfig())
    with closing(scorer), running(reward_app(service, token=""), "127.0.0.1", 0) as url:
        yield url


def test_two_steps_with_a_service(tmp_path, rl_config):
    two = {"run.max_steps": 2}
    terms = [{"verifier": "remote"}, {"verifier": "format:think_answer", "weight": 0.5}]
    local = [{"verifier": "count"}, terms[1]]
    rl.run(rl_config(tmp_path / "home") | two | {"reward.terms": local})
    with serving("count") as address:
        away = {"reward.terms": terms, "reward.remote.url": address}
        rl.run(rl_config(tmp_path / "away") | two | away)
    home, other = (read_metrics(tmp_path / name / "run") for name in ("home", "away"))
    for one, two_ in zip(home, other, strict=True):
        assert one["reward/mean"] == two_["reward/mean"]
        assert one["reward/count"] == two_["reward/remote"] == two_["reward/accuracy"]
        assert two_["service/remote/samples"] == 16 and two_["service/remote/failures"] == 0


def test_a_model_scores_behind_the_service_as_at_home(tmp_path, rl_config):
    """Both see the pictures: untrained models of one seed are the same model."""
    learned = [{**MODEL, "name": "m"}]
    rl.run(rl_config(tmp_path / "home") | {"run.max_steps": 1, "reward.terms": learned})
    with serving(MODEL, folder=tmp_path) as url:
        away = {"reward.terms": [{"verifier": "remote", "name": "m"}], "reward.remote.url": url}
        with pytest.raises(ConfigError, match=r"set reward\.remote\.send_images=true"):
            rl.run(rl_config(tmp_path / "blind") | {"run.max_steps": 1} | away)
        away |= {"reward.remote.send_images": True}
        rl.run(rl_config(tmp_path / "away") | {"run.max_steps": 1} | away)
    (home,), (other,) = (read_metrics(tmp_path / name / "run") for name in ("home", "away"))
    assert home["reward/std"] > 1e-3
    assert other["reward/mean"] == pytest.approx(home["reward/mean"], abs=1e-5)
    assert other["reward/std"] == pytest.approx(home["reward/std"], abs=1e-5)
