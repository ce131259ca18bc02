"""Scores of learned reward models as terms of the reward: collected during a rollout, then scored
together.

Knows nothing of models: whoever builds the scorer says how a folder becomes something that scores.

    {verifier: model, weight: 0.5, args: {path: runs/rm/checkpoints/step-100, normalise: true}}
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from saccade.config import RewardConfig
from saccade.rewards.sample import RewardSample
from saccade.types import Score

STEPS = ("mean", "min", "last")
TOO_LONG = Score(kind="error", reason="unscored: longer than the reward model can read")


class RewardModel(Protocol):
    def score(
        self,
        samples: Sequence[RewardSample],
        *,
        head: str | None = None,
        normalise: bool = False,
        steps: str = "mean",
    ) -> list[float]:
        """One number for each sample; NaN where there is none."""
        ...

    def check(self, *, head: str | None = None, normalise: bool = False) -> None:
        """Refuse, with a ConfigError, what this model cannot give."""
        ...


def model(
    sample: RewardSample,
    *,
    path: str,
    head: str | None = None,
    normalise: bool = False,
    steps: str = "mean",
) -> Score:
    """The score of a reward model's folder. `head` names one of several, `normalise` takes off the
    mean of its scores and divides by their deviation, `steps` sums up those of a process.
    """
    if not path.startswith("tiny:") and not (Path(path) / "config.json").is_file():
        raise ValueError(f"path={path} has no config.json; give the folder of a reward model")
    if steps not in STEPS:
        raise ValueError(f"steps={steps}: choose one of {', '.join(STEPS)}")
    return Score(kind="abstain", reason="unscored: its model is not loaded")


def model_terms(reward: RewardConfig) -> Iterator[dict[str, Any]]:
    """Arguments of all terms of models, wherever the config has them."""
    by_source = [v for v in reward.by_source.values() if not isinstance(v, str)]
    listed = [term for v in by_source for term in ([v] if isinstance(v, Mapping) else v)]
    plain = [term for term in listed if isinstance(term, Mapping)]
    for term in [*(term.model_dump() for term in reward.terms), *plain]:
        if term.get("verifier") == "model":
            yield term["args"]


class Learned:
    """Models by their folders, and what waits to be scored by them."""

    def __init__(self, load: Callable[[str], RewardModel]) -> None:
        self._load = load
        self._models: dict[str, RewardModel] = {}
        self._waiting: list[tuple[Mapping[str, Any], RewardSample, Future[Score]]] = []
        self._lock, self._scoring = threading.Lock(), threading.Lock()

    def prepare(self, args: Mapping[str, Any]) -> None:
        """Load the model of a term, unless another term has it; refuse what it cannot give."""
        path = args["path"]
        if path not in self._models:
            self._models[path] = self._load(path)
        wanted = {name: args[name] for name in ("head", "normalise") if name in args}
        self._models[path].check(**wanted)

    def submit(self, args: Mapping[str, Any], sample: RewardSample) -> Future[Score]:
        future: Future[Score] = Future()
        with self._lock:
            self._waiting.append((args, sample, future))
        return future

    def flush(self) -> None:
        """Score all that waits, every term in one go."""
        with self._scoring:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            terms: dict[str, list[tuple[Mapping[str, Any], RewardSample, Future[Score]]]] = {}
            for entry in waiting:
                terms.setdefault(repr(sorted(entry[0].items())), []).append(entry)
            for entries in terms.values():
                found = self._scored(entries[0][0], [sample for _, sample, _ in entries])
                for (_, _, future), score in zip(entries, found, strict=True):
                    future.set_result(score)

    def _scored(self, args: Mapping[str, Any], samples: Sequence[RewardSample]) -> list[Score]:
        options = {name: value for name, value in args.items() if name != "path"}
        try:
            found = self._models[args["path"]].score(samples, **options)
        except Exception as error:  # others wait for these scores: a service has many clients
            why = f"raised: {type(error).__name__}: {error}"
            return [Score(kind="error", reason=why)] * len(samples)
        return [Score(kind="value", value=v) if isfinite(v) else TOO_LONG for v in found]
