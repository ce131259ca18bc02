"""What vLLM and SGLang have in common: engines that load a model folder themselves, take the
trainer's weights by name, and free their memory between rollouts.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from saccade.engines import Engine, Settings, WeightSource, require_room
from saccade.errors import ConfigError, EnvironmentProblem, TrainingError
from saccade.models.families import Family
from saccade.plugins.engines.weights import HandOver, folder_shapes
from saccade.types import Completion, Request


class CopyEngine(Engine):
    name: str
    sleeps: bool  # gives memory back between rollouts
    renamed: Callable[[str], str]  # what names of one tensor have in common; empty: it is ignored

    def __init__(self, settings: Settings, family: Family, *, beside_trainer: bool = False) -> None:
        """`beside_trainer`: the source of weights stays readable, so that sleep may forget them."""
        self.settings, self.family, self.version = settings, family, 0
        self.longest = min(settings.max_length, family.max_positions)
        self._shapes = folder_shapes(settings.folder)  # a folder without weights is refused at once
        self._beside = beside_trainer
        self._running: dict[str, tuple[Request, str]] = {}  # with the engine's name of it
        self._source: WeightSource | None = None
        self._handed_over: int | None = None  # the version that came last
        self._asleep: set[str] = set()
        self._unusable = ""

    # -- what a subclass says --

    @abstractmethod
    def _start(self, request: Request) -> str:
        """Begin a request. Returns the engine's name of it."""

    @abstractmethod
    def _load(self, hand_over: HandOver, version: int) -> str:
        """Write weights and forget what was computed with others. Returns what went wrong."""

    @abstractmethod
    def _free(self, *, weights: bool) -> set[str]:
        """Free memory, that of the weights only if they will be handed over again. Returns the
        parts to `_take_back`.
        """

    @abstractmethod
    def _take_back(self, part: str) -> None: ...

    # -- requests --

    def submit(self, request: Request) -> None:
        if self._unusable:
            raise EnvironmentProblem(self._unusable)
        require_room(request, self.longest)
        assert request.key not in self._running, f"request {request.key} was submitted twice"
        self.wake()
        self._running[request.key] = (request, self._start(request))

    @property
    def pending(self) -> int:
        return len(self._running)

    def _completion(self, key: str, ids: Sequence[int], logprobs: Sequence[float], finish: Any) -> Completion:
        found = np.array(logprobs, dtype=np.float32)
        if self.settings.finite:
            require_finite(found)
        versions = np.full(len(ids), self.version, dtype=np.int32)
        return Completion(key=key, ids=np.array(ids, dtype=np.int64), logprobs=found, versions=versions, finish=finish)

    # -- weights --

    def update_weights(self, source: WeightSource, version: int) -> None:
        assert not self._running, "weights change while sequences are running"
        if version == self._handed_over:
            return
        self._rouse("weights")
        self._hand_over(source, version)
        self._source = source if self._beside else None

    def _hand_over(self, source: WeightSource, version: int) -> None:
        self._unusable = f"{self.name}: the hand-over of weights {version} did not end"
        self._handed_over = None
        hand_over = HandOver(weights=source.weights(), shapes=self._shapes, renamed=self.renamed)
        problem = self._load(hand_over, version)
        if problem := hand_over.drift() or problem:
            misfit = f"weights {version} do not fit the model that it loaded from {self.settings.folder} ({problem})"
            fix = "start again from the model.path that is trained, or use rollout.engine=embedded"
            self._unusable = f"{self.name}: {misfit}, so nothing more is sampled with them; {fix}"
            raise EnvironmentProblem(self._unusable)
        self.version = self._handed_over = version
        self._unusable = ""

    # -- memory --

    def sleep(self) -> None:
        """Drop weights that a trainer can hand over again; else keep them."""
        assert not self._running, "sleep while sequences are running"
        if self.sleeps and not self._asleep:
            self._asleep = self._free(weights=self._source is not None)

    def wake(self) -> None:
        """Weights, hand-over, cache: in this order there is room for each."""
        if "weights" in self._asleep:
            self._rouse("weights")
            if self._source is not None:
                self._hand_over(self._source, self.version)
        self._rouse("kv_cache")

    def _rouse(self, part: str) -> None:
        if part in self._asleep:
            self._take_back(part)
            self._asleep.discard(part)


def require_finite(logprobs: np.ndarray) -> None:
    """Refuse log-probs that are not finite, in engines over a copy of the weights."""
    if not np.isfinite(logprobs).all():
        fix = "`saccade doctor MODEL` names the weight they come from, or whether a number overflows"
        raise TrainingError(f"log-probs are not finite; {fix} (model.dtype=float32)")


def collapsed(request: Request) -> list[int]:
    """Ids with one placeholder per image, for an engine that expands it again."""
    keep = np.ones(len(request.ids), dtype=bool)
    for span in request.media:
        if span.media.kind != "image":
            why = f"the prompt has {span.media.kind}, but this engine takes images only"
            raise ConfigError(f"request {request.key}: {why}; use rollout.engine=embedded")
        keep[span.start + 1 : span.end] = False
    return request.ids[keep].tolist()


def reads_differently(request: Request, engine: str, tokens: int | None) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"request {request.key}: {engine} reads {tokens} prompt tokens where we have {len(request.ids)}: it expands "
        "images or text differently; compare the preprocessor_config.json of the model, or use rollout.engine=embedded"
    )
