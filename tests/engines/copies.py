"""An engine with weights of its own, as a foreign one has them, and ways in which such engines go
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from saccade.engines import Capabilities, Engine
from saccade.engines.embedded import EmbeddedEngine
from saccade.types import Completion, Request


class CopyEngine(Engine):
    """The embedded engine over a model of its own; weights come by name."""

    def __init__(
        self,
        model: Any,
        family: Any,
        *,
        request: Callable[[Request], Request] = lambda request: request,
        takes: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`request`: what becomes of requests; `takes`: which weights are loaded."""
        self.inner, self.request, self.takes, self.version = EmbeddedEngine(model, family), request, takes, 0

    @property
    def pending(self) -> int:
        return self.inner.pending

    def submit(self, request: Request) -> None:
        self.inner.submit(self.request(request))

    def poll(self) -> list[Completion]:
        return self.inner.poll()

    def update_weights(self, source: Any, version: int) -> None:
        mine = dict(self.inner.model.named_parameters())
        for name, weight in source.weights():
            if self.takes(name):
                mine[name].data.copy_(weight.detach())
        self.inner.update_weights(source, version)
        self.version = version

    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities(), shares_weights=False)

    def abort(self, key: str) -> None:
        self.inner.abort(key)

    def release(self, episode: str) -> None:
        self.inner.release(episode)

    def sleep(self) -> None:
        self.inner.sleep()


def remembering(features: Callable[..., Any], key: Callable[[Any], Any]) -> Callable[..., Any]:
    """The features of media, kept for good under a key of what they are made from."""
    kept: dict[Any, Any] = {}

    def read(model: Any, media: Any) -> Any:
        name = key(media)
        if name not in kept:
            kept[name] = features(model, media)
        return kept[name]

    return read
