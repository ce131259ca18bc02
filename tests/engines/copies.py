"""An engine with weights of its own, as a foreign one has them, and ways in which such engines go wrong."""

from dataclasses import replace

from saccade.engines.embedded import EmbeddedEngine


class CopyEngine(EmbeddedEngine):
    """Over a model of its own; weights come by name."""

    def __init__(self, model, family, *, request=lambda request: request, takes=lambda name: True):
        """`request`: what becomes of requests; `takes`: which weights are loaded."""
        super().__init__(model, family)
        self.request, self.takes = request, takes

    def submit(self, request):
        super().submit(self.request(request))

    def update_weights(self, source, version):
        mine = dict(self.model.named_parameters())
        for name, weight in source.weights():
            if self.takes(name):
                mine[name].data.copy_(weight.detach())
        super().update_weights(source, version)

    def capabilities(self):
        return replace(super().capabilities(), shares_weights=False)


def remembering(features, key):
    """The features of media, kept for good under a key of what they are made from."""
    kept = {}

    def read(model, media):
        name = key(media)
        if name not in kept:
            kept[name] = features(model, media)
        return kept[name]

    return read
