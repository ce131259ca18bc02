"""Inputs of a forward and of a loss, on the device. Those of a forward are prepared one forest ahead, in
a background thread, while the device works.

inputs = InputPrefetcher(lambda batch: inputs_of(batch, family, device, dtype, pixels=True))
inputs.begin(following)
...                                                    # backward of this one
inputs.get(following)
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.policy_losses import LossInputs
from saccade.forest.attention import AttentionPlan, blocks_at, forest_plan
from saccade.forest.batch import Batch
from saccade.forest.device_ops import to_device
from saccade.models.families import Family
from saccade.models.load import media_inputs
from saccade.types import MediaSpan

FEATURE_BYTES = 1 << 30
COLUMNS = (
    *("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "scales"),
    *("keep", "weights", "rewards", "selected", "ages"),
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    ids: Tensor  # [T]
    positions: Tensor  # [axes, T]
    plan: AttentionPlan
    places: Tensor | None  # indices of media placeholders
    media: Mapping[str, Any] | None  # inputs of the media towers; None without media or `pixels`


def inputs_of(batch: Batch, family: Family, device: torch.device, dtype: torch.dtype, *, pixels: bool) -> Inputs:
    spans = [np.arange(span.start, span.end) for span in batch.media]
    places = np.concatenate(spans) if spans else np.zeros(0, np.int64)
    blocks = blocks_at(family.blocks, batch.ids, family.chat.placeholders)
    return Inputs(
        ids=to_device(batch.ids, device),
        positions=to_device(batch.positions(family.positions), device),
        plan=forest_plan(batch.node_starts, batch.parents, device, dtype, blocks=blocks),
        places=to_device(places, device) if spans else None,
        media=media_inputs(family, batch.media, device) if spans and pixels else None,
    )


def loss_inputs(batch: Batch, new: Tensor, *, images: bool) -> LossInputs:
    """The columns of a batch, with the device and dtype of the log-probs `new`. Without old log-probs,
    the detached current ones are used, so that the ratio is exactly 1.
    """
    given = {name: batch.per_target(name) for name in COLUMNS}
    found = {n.removesuffix("_logprobs"): column(v, new) for n, v in given.items() if v is not None}
    if "selected" in found:
        found["selected"] = found["selected"].bool()
    if images:
        found["images"] = column(batch.has_media[batch.sequence], new, torch.bool)
    return LossInputs(
        **{"old": new.detach()} | found, sequence=column(batch.sequence, new, torch.int64), sequences=len(batch.keys)
    )


def column(values: np.ndarray | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    assert values is not None, "the batch was not given what its loss reads"
    return to_device(values, like.device).to(dtype or like.dtype)


class InputPrefetcher:
    """Makes the inputs of the next forest in a background thread, and those of any other on demand."""

    def __init__(self, make: Callable[[Batch], Inputs]) -> None:
        self.make = make
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[Batch, Future[Inputs]] | None = None

    def begin(self, batch: Batch) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="inputs")
        self._begun = (batch, self._thread.submit(self.make, batch))

    def get(self, batch: Batch) -> Inputs:
        begun, self._begun = self._begun, None
        return begun[1].result() if begun is not None and begun[0] is batch else self.make(batch)


class FeatureCache:
    """LRU cache of media features from frozen towers, on the device: every pass of a step uses the same ones."""

    def __init__(self, max_bytes: int = FEATURE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._features: dict[Any, Tensor] = {}  # least recently used first

    def read(self, media: Sequence[MediaSpan], compute: Callable[[Sequence[MediaSpan]], Tensor]) -> Tensor:
        """Features [media tokens, hidden] in the order of the spans; missing ones are computed in one call."""
        wanted = {span.media.key: span for span in media}
        found = {key: self._features.pop(key) for key in wanted if key in self._features}
        missing = [span for key, span in wanted.items() if key not in found]
        if missing:
            with torch.no_grad():
                rows = compute(missing).split([span.length for span in missing])
            # Clone: a view would keep the features of all of them in memory.
            found |= {s.media.key: r.clone() for s, r in zip(missing, rows, strict=True)}
        self._features |= {key: found[key] for key in wanted}
        size = sum(rows.nbytes for rows in self._features.values())
        while size > self.max_bytes:
            size -= self._features.pop(next(iter(self._features))).nbytes
        return torch.cat([found[span.media.key] for span in media])

    def clear(self) -> None:
        self._features.clear()
