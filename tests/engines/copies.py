"""An engine with weights of its own, as a foreign one has them, and ways in which such engines go wrong."""

from dataclasses import replace
from typing import Any

from saccade.engines import Engine
from saccade.engines.embedded import EmbeddedEngine


class CopyEngine(Engine):
    """The embedded engine over a model of its own; weights come by name."""

    def __init__(self, model, family, *, request=lambda request: request, takes=lambda name: True):
        """`request`: what becomes of requests; `takes`: which weights are loaded."""
        self.inner, self.request, self.takes, self.version = EmbeddedEngine(model, family), request, takes, 0

    @property
    def pending(self):
        return self.inner.pending

    def submit(self, request):
        self.inner.submit(self.request(request))

    def poll(self):
        return self.inner.poll()

    def update_weights(self, source, version):
        mine = dict(self.inner.model.named_parameters())
        for name, weight in source.weights():
            if self.takes(name):
                mine[name].data.copy_(weight.detach())
        self.inner.update_weights(source, version)
        self.version = version

    def capabilities(self):
        return replace(self.inner.capabilities(), shares_weights=False)

    def abort(self, key):
        self.inner.abort(key)

    def release(self, episode):
        self.inner.release(episode)

    def sleep(self):
        self.inner.sleep()


def remembering(features, key):
    """The features of media, kept for good under a key of what they are made from."""
    kept: dict[Any, Any] = {}

    def read(model, media):
        name = key(media)
        if name not in kept:
            kept[name] = features(model, media)
        return kept[name]

    return read
