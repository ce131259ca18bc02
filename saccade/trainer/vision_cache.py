"""Features of images from towers that stand still: every pass of a step reads the same ones.

features = cache.read(batch.media, lambda spans: media_features(model, family, spans))
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.types import MediaSpan

MAX_BYTES = 1 << 30


class FeatureCache:
    """On the device, the least recently used images dropped first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Any, Tensor] = OrderedDict()
        self._bytes = 0

    def read(self, media: Sequence[MediaSpan], compute: Callable[[Sequence[MediaSpan]], Tensor]) -> Tensor:
        """[media tokens, hidden] in the order of the spans; what is not known is computed in one
        call.
        """
        wanted = {span.media.key: span for span in media}
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        missing = [span for key, span in wanted.items() if key not in found]
        if missing:
            with torch.no_grad():
                rows = compute(missing).split([span.length for span in missing])
            # A copy of its own: a view would hold the features of all of them.
            found |= {s.media.key: r.clone() for s, r in zip(missing, rows, strict=True)}
        for key in wanted:
            self._keep(key, found[key])
        return torch.cat([found[span.media.key] for span in media])

    def _keep(self, key: Any, rows: Tensor) -> None:
        if key not in self._kept:
            self._bytes += rows.nbytes
        self._kept[key] = rows
        self._kept.move_to_end(key)
        while self._bytes > self.max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0
