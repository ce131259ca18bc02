"""Terms that neither a rule, a judge nor a model scores: a service. By name.

What stands in `SERVICES` is a verifier for every config: `reward.terms=[{verifier: NAME, args: …}]`
opens it with the reward section and the arguments of the term, once for all terms that are alike.

    SERVICES["remote"](config.reward, {"url": "http://127.0.0.1:8400"}).submit(sample).result()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from saccade.config.schema import RewardConfig
from saccade.plugins.judges.remote import open_remote
from saccade.rewards.combine import Pending
from saccade.rewards.reward_sample import RewardSample


class Service(Protocol):
    def check(self) -> None:
        """Before the first sample: raises what would fail for all of them."""

    def submit(self, sample: RewardSample) -> Pending:
        """From any thread. A future holds a score, never an exception."""

    def metrics(self) -> dict[str, float]:
        """What happened since this was last called."""

    def close(self) -> None:
        """Whoever still waits gets an error."""


SERVICES: dict[str, Callable[[RewardConfig, Mapping[str, Any]], Service]] = {"remote": open_remote}
