"""Learned reward models as reward terms: samples are collected during a rollout, then scored in one batch.

Imports no model code: the caller passes the function that loads a folder as a `LearnedReward`.

    {verifier: model, weight: 0.5, args: {path: runs/rm/checkpoints/step-100, normalise: true}}
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from math import isfinite
from typing import Any

import numpy as np

from saccade.config import RewardConfig
from saccade.plugins.judges.service_protocol import CHAT_MARK
from saccade.rewards.resolve import read_terms
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import Verifier
from saccade.types import Media, Message, Score

MEDIA = re.compile("<(image|video|audio|series)>")  # placeholders of media in a text
NOT_LOADED = "unscored: its model is not loaded"
SUMMARIES: Mapping[str, Callable[[np.ndarray], float]] = {"mean": np.mean, "min": np.min, "last": lambda v: v[-1]}


def model(
    sample: RewardSample, *, path: str, head: str | None = None, normalise: bool = False, steps: str = "mean"
) -> Score:
    """The score of the reward model in the folder `path`. `head` selects one of several heads, `normalise` subtracts
    the mean and divides by the standard deviation, `steps` aggregates the steps of a process reward model.
    """
    if steps not in SUMMARIES:
        raise ValueError(f"steps={steps}: expected one of {', '.join(SUMMARIES)}")
    return Score(kind="abstain", reason=NOT_LOADED)


MODEL = Verifier(function=model, needs_answer=False, uses_model=True)


def model_terms(reward: RewardConfig) -> list[dict[str, Any]]:
    """Arguments of all `model` terms, in reward.terms and reward.by_source."""
    places = {"reward.terms": reward.terms, **reward.by_source}
    rows = [row for name, value in places.items() for row in read_terms(name, value)]
    return [row.args for row in rows if row.verifier == "model" and "path" in row.args]


class LearnedTerms:
    """Loaded reward models by folder, and the samples that wait to be scored."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self._load = load
        self.models: dict[str, Any] = {}
        self._waiting: list[tuple[Mapping[str, Any], RewardSample, Future[Score]]] = []
        self._lock, self._scoring = threading.Lock(), threading.Lock()

    def prepare(self, args: Mapping[str, Any]) -> None:
        """Load the model of a term unless it is loaded; refuse arguments that it does not support."""
        path = args["path"]
        if path not in self.models:
            self.models[path] = self._load(path)
        wanted = {name: args[name] for name in ("head", "normalise", "steps") if name in args}
        self.models[path].check(**wanted)

    def check_media(self, media: Sequence[Media]) -> None:
        for model in self.models.values():
            model.check_media(media)

    def submit(self, args: Mapping[str, Any], sample: RewardSample) -> Future[Score]:
        future: Future[Score] = Future()
        with self._lock:
            self._waiting.append((args, sample, future))
        return future

    def flush(self) -> None:
        """Score all waiting samples. Terms that share a model share its forward pass."""
        with self._scoring:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            samples: dict[str, dict[int, RewardSample]] = {}  # by model; each sample object once
            for args, sample, _ in waiting:
                samples.setdefault(args["path"], {})[id(sample)] = sample
            found = {path: self._read(path, own) for path, own in samples.items()}
            for args, sample, future in waiting:
                future.set_result(self._score(args, found[args["path"]][id(sample)]))

    def _read(self, path: str, samples: Mapping[int, RewardSample]) -> dict[int, np.ndarray | str]:
        try:
            found = self.models[path].read(list(samples.values()))
        except Exception as error:  # fail these scores only: other threads or clients wait for the rest
            if isinstance(error, self.models[path].fatal):
                raise
            return dict.fromkeys(samples, f"raised: {type(error).__name__}: {error}")
        return dict(zip(samples, found, strict=True))

    def _score(self, args: Mapping[str, Any], numbers: np.ndarray | str) -> Score:
        if isinstance(numbers, str):
            return Score(kind="abstain" if numbers == NOT_LOADED else "error", reason=numbers)
        options = {name: value for name, value in args.items() if name != "path"}
        value = self.models[args["path"]].value(numbers, **options)
        if not isfinite(value):
            return Score(kind="error", reason=f"nan: the reward model gave {value}")
        return Score(kind="value", value=value)


def conversation_of(sample: RewardSample) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Returns (question, reply turns) with their images in place. For a sample from a request both are rebuilt from its
    texts, where each <image> stands for the next of its media; raises ValueError if that cannot restore all media.
    """
    return tuple(sample.asked) or _asked(sample), tuple(sample.replied) or _replied(sample)


def _asked(sample: RewardSample) -> tuple[Message, ...]:
    messages = sample.messages or [{"role": "user", "content": sample.prompt}]
    if not any(message["content"] for message in messages):
        raise ValueError("no question came with it; send prompts")
    if not sample.messages and (mark := CHAT_MARK.search(sample.prompt)):
        raise ValueError(f"the prompt is text of a chat template ({mark[0]}); send its messages as JSON")
    pieces = [MEDIA.split(str(message["content"])) for message in messages]  # odd indices: kinds of media
    kinds = [kind for split in pieces for kind in split[1::2]]
    if other := set(kinds) - {"image"}:
        raise ValueError(f"the question shows a medium (<{min(other)}>) that no request can carry")
    came, wanted = len(sample.media), max(len(kinds), len(sample.images))
    if not wanted <= came <= len(kinds):
        shows = f"the question has places for {len(kinds)} images, shows {wanted}, and {came} came with it"
        raise ValueError(f"{shows}; set reward.remote.send_images=true where it is asked")
    media = iter(sample.media)
    parts = [tuple(next(media) if n % 2 else text for n, text in enumerate(split) if n % 2 or text) for split in pieces]
    return tuple(Message(role=m["role"], parts=shown) for m, shown in zip(messages, parts, strict=True))


def _replied(sample: RewardSample) -> tuple[Message, ...]:
    turns, seen = list(sample.turns) or [sample.response], list(sample.observations)
    # Without `roles`, one observation follows each turn.
    roles = sample.roles or (["assistant", "user"] * len(turns))[: len(turns) + len(seen)]
    said = sum(role == "assistant" for role in roles)
    if (said, len(roles) - said) != (len(turns), len(seen)):
        raise ValueError(f"{len(turns)} turns and {len(seen)} observations; send roles, which give their order")
    if hidden := MEDIA.search("\n".join(seen)):
        raise ValueError(f"an observation shows a medium ({hidden[0]}) that no request can carry")
    return tuple(
        Message(role=role, parts=((turns if role == "assistant" else seen).pop(0),))  # type: ignore[arg-type]
        for role in roles
    )
