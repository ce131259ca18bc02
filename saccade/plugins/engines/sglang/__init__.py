"""SGLang, in this process or behind its HTTP server, with its own copy of the weights.

Written against the sources of SGLang 0.5.23; docs/engines.md says what of it has run. Images are
named after the version of the weights: flushing SGLang's cache drops prefixes, but not outputs of
the vision tower. Kept ids of truncated sampling are not returned.

    engine = SglangEngine(Settings(engine="sglang", folder="my-model", dtype="bfloat16"), family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Iterator
from functools import lru_cache

from PIL import Image
from torch import Tensor

from saccade.engines import Capabilities, WeightSource
from saccade.engines.requests import require_finite, require_room
from saccade.engines.settings import Settings
from saccade.engines.weights import folder_shapes
from saccade.errors import EnvironmentProblem
from saccade.models.families import Family
from saccade.plugins.engines.sglang.sglang_messages import body_of, completion_of
from saccade.plugins.engines.sglang.sglang_transport import InProcess, OverHttp
from saccade.types import Completion, Media, Request

PICTURES = 1024  # encoded images that are kept


class SglangEngine:
    def __init__(self, settings: Settings, family: Family, *, beside_trainer: bool = False) -> None:
        """`beside_trainer`: the source of weights stays readable, so that sleep may forget them."""
        self.settings, self.family, self.version = settings, family, 0
        self._beside, self._shapes = beside_trainer, folder_shapes(settings.folder)
        self._sglang: InProcess | OverHttp
        if url := settings.args.get("url"):  # a server that runs already
            self._sglang = OverHttp(url, settings.args.get("key", ""))
        else:
            self._sglang = InProcess(settings, family)
        self._encode = lru_cache(maxsize=PICTURES)(self._encoded)
        self._running: dict[str, Request] = {}  # by SGLang's name of it
        self._names: dict[str, str] = {}  # by key
        self._aborted: set[str] = set()  # names
        self._source: WeightSource | None = None
        self._asleep: set[str] = set()
        self._unusable = ""

    def submit(self, request: Request) -> None:
        if self._unusable:
            raise EnvironmentProblem(self._unusable)
        require_room(request, min(self.settings.max_length, self.family.max_positions))
        assert request.key not in self._names, f"request {request.key} was submitted twice"
        self.wake()
        # SGLang aborts whatever begins with a name, so no name may begin with another.
        name, body = uuid.uuid4().hex, body_of(request, self.family, self._encode, self.version)
        self._sglang.start(name, body)
        self._running[name], self._names[request.key] = request, name

    def _encoded(self, media: Media) -> str:
        """A PNG of the size that the model sees, so that SGLang does not resize it."""
        file = io.BytesIO()
        Image.fromarray(self.family.picture(media)).save(file, "PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def poll(self) -> list[Completion]:
        done = []
        for name, answer in self._sglang.wait() if self._running else ():
            request, aborted = self._running.pop(name), name in self._aborted
            del self._names[request.key]
            self._aborted.discard(name)
            done.append(completion_of(request, answer, version=self.version, aborted=aborted))
            if self.settings.finite:
                require_finite(done[-1].logprobs)
        return done

    @property
    def pending(self) -> int:
        return len(self._running)

    def abort(self, key: str) -> None:
        if key in self._names:
            self._aborted.add(self._names[key])
            self._sglang.abort(self._names[key])

    def release(self, episode: str) -> None:
        pass  # SGLang keeps prefixes by content, not by episode

    def update_weights(self, source: WeightSource, version: int) -> None:
        assert not self._running, "weights change while sequences are running"
        self._rouse("weights")
        self._unusable = f"sglang: the hand-over of weights {version} did not end"
        self._sglang.load(as_in_folder(source, self._shapes), version)
        self.version, self._unusable = version, ""
        self._source = source if self._beside else None

    def sleep(self) -> None:
        """Drop weights that a trainer can hand over again; else keep them."""
        assert not self._running, "sleep while sequences are running"
        if self._sglang.sleeps and not self._asleep:
            self._asleep = {"kv_cache", "weights"} if self._source else {"kv_cache"}
            self._sglang.memory("release", sorted(self._asleep))

    def wake(self) -> None:
        """Weights, hand-over, cache: in this order there is room for each."""
        if "weights" in self._asleep and self._source is not None:
            self.update_weights(self._source, self.version)
        self._rouse("kv_cache")

    def _rouse(self, part: str) -> None:
        if part in self._asleep:
            self._sglang.memory("resume", [part])
            self._asleep.discard(part)

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=True, support=False, shares_weights=False, live_episodes=False)

    def close(self) -> None:
        self._sglang.close()


def as_in_folder(source: WeightSource, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names of the folder that SGLang loaded, which it understands. Names
    and shapes are compared both ways.
    """
    left = {_plain(name): name for name in shapes}
    problem = ""
    for name, weight in source.weights():
        known = left.pop(_plain(name), None)
        if known is None or shapes[known] != tuple(weight.shape):
            problem = f"{name} {list(weight.shape)} is handed over, the folder has "
            problem += "none" if known is None else f"{known} {list(shapes[known])}"
            break
        yield known, weight.detach()
    left.pop("lm_head.weight", None)  # some folders hold it twice, tied
    if left and not problem:
        problem = f"nothing is handed over for {', '.join(sorted(left.values())[:3])}"
    if problem:
        raise EnvironmentProblem(
            f"sglang: names of weights have drifted apart: {problem}; start again from the "
            "model.path that is trained, or use rollout.engine=embedded"
        )


def _plain(name: str) -> str:
    """Folders of the same model differ in where they put the two towers."""
    for long, short in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        name = short + name.removeprefix(long) if name.startswith(long) else name
    return name
