"""What a forward reads, on the device; made one forest ahead in a thread, while the device works.

inputs = Ahead(lambda batch: inputs_of(batch, family, device, dtype, pixels=True))
inputs.begin(following)
...                                                    # backward of this one
inputs.get(following)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.attention import AttentionPlan, forest_plan
from saccade.models.families import Family
from saccade.models.load import media_inputs
from saccade.transfer import to_device
from saccade.types import Batch


@dataclass(frozen=True, kw_only=True)
class Inputs:
    ids: Tensor  # [T]
    positions: Tensor  # [axes, T]
    plan: AttentionPlan
    places: Tensor | None  # tokens that stand for media
    media: Mapping[str, Any] | None  # what the family's features are made of, where asked for


def inputs_of(
    batch: Batch, family: Family, device: torch.device, dtype: torch.dtype, *, pixels: bool
) -> Inputs:
    spans = [np.arange(span.start, span.end) for span in batch.media]
    return Inputs(
        ids=to_device(batch.ids, device),
        positions=to_device(batch.positions, device),
        plan=forest_plan(batch.node_starts, batch.parents, device, dtype),
        places=to_device(np.concatenate(spans), device) if spans else None,
        media=media_inputs(family, batch.media, device) if spans and pixels else None,
    )


class Ahead:
    """Inputs that were begun earlier, or are made when they are asked for."""

    def __init__(self, make: Callable[[Batch], Inputs]) -> None:
        self.make = make
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[int, tuple[Batch, Future[Inputs]]] = {}

    def begin(self, batch: Batch) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="inputs")
        self._begun[id(batch)] = (batch, self._thread.submit(self.make, batch))

    def get(self, batch: Batch) -> Inputs:
        begun = self._begun.pop(id(batch), None)
        return self.make(batch) if begun is None else begun[1].result()

    def clear(self) -> None:
        self._begun.clear()
