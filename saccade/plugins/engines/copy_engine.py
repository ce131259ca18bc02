"""The base of the vLLM and SGLang engines, which load a model folder themselves, take the trainer's
weights by name, and free their memory between rollouts.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from saccade.engines import Capabilities, Engine, Settings, WeightSource, require_room
from saccade.errors import ConfigError, EnvironmentProblem, TrainingError
from saccade.media.images import open_media
from saccade.models.families import Family
from saccade.plugins.engines.weights import HandOver, folder_files, folder_shapes, stored_form
from saccade.plugins.families.picture_text import collapse
from saccade.plugins.families.pixel_options import call_options
from saccade.types import Completion, Message, Request, Sampling

TAKEN = ("image", "video")  # kinds of media that these engines accept
NO_LIMIT = 1 << 30  # pixels
SIZES = ((60, 50), (140, 70))  # (height, width) of the pictures in a test prompt when an engine starts


class CopyEngine(Engine):
    name: str
    sleeps: bool  # frees memory between rollouts
    live_updates = False  # see `Capabilities`
    renamed: Callable[[str], str]  # maps all names of a tensor to one; empty: the engine ignores it

    def __init__(self, settings: Settings, family: Family, *, beside_trainer: bool = False) -> None:
        """`beside_trainer`: the trainer's weights stay readable, so that `sleep` may drop the copy."""
        self.settings, self.family, self.version = settings, family, 0
        self.longest = min(settings.max_length, family.max_positions)
        self._shapes = folder_shapes(settings.folder)  # a folder without weights is refused at once
        auto, trusted = family.spec.auto_class, settings.trust_remote_code
        self._stored, constant = stored_form(settings.folder, auto, self._shapes, trust_remote_code=trusted)
        files = folder_files(Path(settings.folder)) if constant else ()
        self._constant = [(name, tensor) for f in files for name, tensor in load_file(f).items() if name in constant]
        self._beside = beside_trainer
        self._running: dict[str, tuple[Request, str, int]] = {}  # with the engine's id for it, and its version
        self._source: WeightSource | None = None
        self._handed_over: int | None = None  # the version of the last complete update
        self._asleep: set[str] = set()
        self._unusable = ""

    # -- implemented by subclasses --

    @abstractmethod
    def _start(self, request: Request) -> str:
        """Start a request. Returns the engine's id for it."""

    @abstractmethod
    def _load(self, hand_over: HandOver, version: int) -> str:
        """Load weights and drop what was cached under others. Returns what went wrong, or an empty string."""

    @abstractmethod
    def _free(self, *, weights: bool) -> set[str]:
        """Free memory; `weights`: also that of the weights, because they will be loaded again. Returns
        the parts to `_take_back`.
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
        self._running[request.key] = (request, self._start(request), self.version)

    @property
    def pending(self) -> int:
        return len(self._running)

    def _completion(
        self, key: str, ids: Sequence[int], logprobs: Sequence[float], finish: Any, version: int
    ) -> Completion:
        """Every token gets the version of the weights at submission, because it is not known when the engine began with
        the request.
        """
        found = np.array(logprobs, dtype=np.float32)
        if self.settings.check_nan:
            require_finite(found)
        versions = np.full(len(ids), version, dtype=np.int32)
        return Completion(key=key, ids=np.array(ids, dtype=np.int64), logprobs=found, versions=versions, finish=finish)

    # -- weights --

    def update_weights(self, source: WeightSource, version: int) -> None:
        assert self.live_updates or not self._running, "weights change while sequences are running"
        if version == self._handed_over:
            return
        self._rouse("weights")
        self._hand_over(source, version)
        self._source = source if self._beside else None

    def _hand_over(self, source: WeightSource, version: int) -> None:
        self._unusable = f"{self.name}: the hand-over of weights {version} did not end"
        self._handed_over = None
        weights = chain(self._stored(source.weights()), self._constant)
        hand_over = HandOver(weights=weights, shapes=self._shapes, renamed=self.renamed)
        problem = self._load(hand_over, version)
        if problem := hand_over.drift() or problem:
            misfit = f"weights {version} do not fit the model that it loaded from {self.settings.folder} ({problem})"
            fix = "start again from the model.path that is trained, or use rollout.engine=embedded"
            self._unusable = f"{self.name}: {misfit}, so nothing more is sampled with them; {fix}"
            raise EnvironmentProblem(self._unusable)
        self.version = self._handed_over = version
        self._unusable = ""

    def capabilities(self) -> Capabilities:
        return Capabilities(live_updates=self.live_updates)

    # -- memory --

    def sleep(self) -> None:
        """Free memory. The weights are dropped if the trainer can provide them again, else they are kept."""
        assert not self._running, "sleep while sequences are running"
        if self.sleeps and not self._asleep:
            self._asleep = self._free(weights=self._source is not None)

    def wake(self) -> None:
        """Take memory back in the order weights, weight update, cache: so there is room for each."""
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


def collapsed(request: Request, family: Family) -> list[int]:
    """Prompt ids with one placeholder per medium, as a chat template renders it; the engine expands it again."""
    ids = request.ids.copy()
    keep = np.ones(len(ids), dtype=bool)
    for span in request.media:
        if span.media.kind not in TAKEN:
            why = f"the prompt has {span.media.kind}, but this engine takes {' and '.join(TAKEN)} only"
            raise ConfigError(f"request {request.key}: {why}; use rollout.engine=embedded")
        ids[span.start] = family.chat.placeholders[span.media.kind]
        keep[span.start + 1 : span.end] = False
    if family.reader is not None and request.media:
        return collapse(family.reader, request.ids, request.media)
    return ids[keep].tolist()


def shown_by(request: Request, family: Family) -> dict[str, Any]:
    """Settings with which the engine's processor cuts the images of a request as they are cut here. If the model sees
    an image in one piece, it is sent resized instead; beside a video, resizing is then off, because some processors
    limit the pixels of all frames together.
    """
    if family.spec.whole:
        return {"do_resize": False} if any(span.media.kind == "video" for span in request.media) else {}
    budgets = {(s.media.min_pixels, s.media.max_pixels) for s in request.media if s.media.kind == "image"}
    found = [call_options(family.budget(*one)) for one in sorted(budgets)]
    if any(one != found[0] for one in found):
        why = f"its images have different pixel budgets, and this engine cuts all of them with {found[0]}"
        fix = "give env.min_pixels and env.max_pixels the values of data, or use rollout.engine=embedded"
        raise ConfigError(f"request {request.key}: {why}; {fix}")
    return found[0] if found else {}


def two_pictures(family: Family, longest: int, most: int) -> Request | None:
    """A short prompt with up to `most` pictures of different sizes; None if it is too long or the family takes none."""
    shown = (np.full((height, width, 3), 127, np.uint8) for width, height in SIZES[:most])
    pictures = [open_media(pixels, max_pixels=NO_LIMIT) for pixels in shown]  # as the folder alone says
    if family.spec.image_token is None or not pictures:
        return None
    parts = [part for picture in pictures for part in ("See ", picture)]
    prompt = family.render([Message(role="user", parts=(*parts, "?"))])
    request = Request(key="two pictures", ids=prompt.ids, media=prompt.media, sampling=Sampling(max_tokens=1))
    return request if len(prompt.ids) < longest else two_pictures(family, longest, most - 1)


def require_same_prompt(
    request: Request, family: Family, engine: str, theirs: Sequence[int] | None, count: int | None
) -> None:
    """Refuse a prompt that the engine tokenizes differently, naming the first token that differs. `theirs`: the
    engine's ids, None if it does not return them; then only `count`, the number of them, is compared.
    """
    ours, read = request.ids.tolist(), list(request.ids) if theirs is None else list(theirs)
    if read == ours and count == len(ours):
        return
    first = next((n for n, (a, b) in enumerate(zip(read, ours, strict=False)) if a != b), min(len(read), len(ours)))
    there, here = (family.chat.decode(ids[max(0, first - 4) : first + 5], special=True) for ids in (read, ours))
    where = "" if read == ours else f", token {first} is the first to differ: it has {there!r}, here it is {here!r}"
    raise EnvironmentProblem(
        f"request {request.key}: {engine} reads {count} prompt tokens of a {family.name} model where we have "
        f"{len(ours)}{where}: it expands images or text differently; compare the preprocessor_config.json of the "
        "model, or use rollout.engine=embedded"
    )
