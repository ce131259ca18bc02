"""`saccade serve-reward`: the rewards of a config for runs on this machine or on others.

saccade serve-reward run.yaml reward.workers=8
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from saccade import checks
from saccade.config import Config, load
from saccade.rewards.scorer import Scorer

if TYPE_CHECKING:
    from saccade.plugins.reward_models.reward_model_term import RewardModel

GLANCE = 0.2  # seconds between two looks at whether to stop
GRACE = 30.0  # seconds for what is under way when the service is told to stop


def serve(
    config: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 8400,
    token: bool = True,
    say: Callable[[str], Any] = lambda line: print(line, flush=True),
) -> None:
    """Until SIGTERM or Ctrl-C; what clients wait for by then is still answered."""
    from saccade.plugins.serving.http_server import make_token, running, shown_token
    from saccade.plugins.serving.reward_service import PATH, RewardService, reward_app

    config = load(config)
    checks.check(config, "serve-reward")
    secret = make_token(host, wanted=token)
    scorer = Scorer(
        config.reward,
        prompt_format=config.prompt.format,
        max_tokens=config.rollout.max_tokens,
        isolate=True,
        load_model=partial(_load_model, config),
    )
    service = RewardService(scorer, config.reward.serve, config.data)
    stops: list[int] = []  # a list, because a handler must not wait for a lock
    try:
        with running(reward_app(service, token=secret), host, port) as address:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: stops.append(number))
            say(f"rewards at {address}{PATH}")
            if secret:
                say(f"token: {shown_token(secret)}")
            while not stops:
                time.sleep(GLANCE)
            say("stopping")
            if not service.drain(GRACE):
                say(f"some samples were not scored after {GRACE:g} s; their clients get no reply")
    finally:
        service.close()


def _load_model(config: Config, path: str) -> RewardModel:
    from saccade.plugins.reward_models.reward_loading import load_learned  # torch only where one scores
    from saccade.recipes.model_setup import quiet_libraries

    quiet_libraries()
    return load_learned(config, path)
