"""A run whose rewards come from a service learns what it would learn at home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.config import DataConfig, RewardConfig
from saccade.errors import ConfigError, RewardError
from saccade.recipes import rl
from saccade.rewards.scorer import Scorer
from saccade.schema import ServeConfig
from saccade.serving.reward_server import open_server
from saccade.serving.rewards import RewardService
from saccade.tracking.loggers import read_metrics
from tests.endpoints import Says, scripted

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def address() -> Iterator[str]:
    config = RewardConfig(terms=["count"], workers=1)
    scorer = Scorer(config, prompt_format="think_answer", max_tokens=64, isolate=True)
    service = RewardService(scorer, ServeConfig(), DataConfig())
    server = open_server(service, "127.0.0.1", 0, token="")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    service.close()
    thread.join()


def test_two_steps_with_a_service(tmp_path: Path, rl_config: Make, address: str) -> None:
    two = {"run.max_steps": 2}
    terms = [{"verifier": "remote"}, {"verifier": "format:think_answer", "weight": 0.5}]
    local = [{"verifier": "count"}, terms[1]]
    rl.run(rl_config(tmp_path / "home") | two | {"reward.terms": local})
    away = {"reward.terms": terms, "reward.remote.url": address}
    rl.run(rl_config(tmp_path / "away") | two | away)
    home, other = (read_metrics(tmp_path / name / "run") for name in ("home", "away"))
    for one, two_ in zip(home, other, strict=True):
        assert one["reward/mean"] == two_["reward/mean"]
        assert one["reward/count"] == two_["reward/remote"] == two_["reward/accuracy"]
        assert two_["service/remote/samples"] == 16 and two_["service/remote/failures"] == 0


def test_a_service_that_fails_stops_the_run(tmp_path: Path, rl_config: Make) -> None:
    with scripted(lambda body: Says(status=422, body={"error": "no"})) as service:
        config = rl_config(tmp_path) | {"reward.terms": ["remote"]}
        with pytest.raises(RewardError, match="remote"):
            rl.run(config | {"reward.remote.url": service.url})


def test_an_address_that_nobody_asks_is_refused(tmp_path: Path, rl_config: Make) -> None:
    config = rl_config(tmp_path) | {"reward.remote.url": "http://127.0.0.1:8400"}
    with pytest.raises(ConfigError, match=r"reward\.remote\.url: has no effect .* add remote"):
        rl.run(config)
