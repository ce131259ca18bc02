"""Qwen3-VL and Qwen3.5, which read when each part of a video is seen.

An image is that of Qwen2.5-VL. In the place of a video's placeholder each pair of frames is an image with its time:

    <0.2 seconds><|vision_start|>…<|vision_end|><1.2 seconds><|vision_start|>…<|vision_end|>

The span of the video holds all of that. The rows of its words among the features are zeros, which are put nowhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.models.families import QWEN_VL, Family
from saccade.models.families.qwen_vl import patch_embedding_as_matrix
from saccade.models.load import decoder_inputs
from saccade.types import Media, MediaSpan

KEPT = 4096  # videos whose ids are remembered


def times(media: Media, layers: int) -> list[float]:
    """The second in the middle of each layer of frames."""
    seconds = [frame / (media.rate or media.fps) for frame in media.frames]
    together = len(seconds) // layers
    return [(seconds[n] + seconds[n + together - 1]) / 2 for n in range(0, len(seconds), together)]


def with_times(family: Family, trusted: bool) -> Family:
    """A family of images and videos, whose videos have times."""
    tokenizer, placeholders = family.chat.tokenizer, family.chat.placeholders
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])

    @lru_cache(KEPT)
    def ids_of(media: Media) -> np.ndarray:
        (layers, *_), tokens = family.measure(media)
        seen = [placeholders[media.kind]] * (tokens // layers)
        if media.kind == "image":
            return np.array(seen)
        found: list[int] = []
        for time in times(media, layers):
            opening = tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False)
            found += [*opening, start, *seen, end]
        return np.array(found)

    def pictures(spans: Sequence[MediaSpan]) -> tuple[MediaSpan, ...]:
        """Each layer of a video as an image."""
        found: list[MediaSpan] = []
        for span in spans:
            seen = np.flatnonzero(ids_of(span.media) == placeholders[span.media.kind]).reshape(span.grid[0], -1)
            starts, grid = (span.start + seen[:, 0]).tolist(), (1, *span.grid[1:])
            found += [replace(span, start=start, length=seen.shape[1], grid=grid) for start in starts]
        return tuple(found)

    def host_media(spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        made = dict(family.media(spans))
        if all(span.media.kind == "image" for span in spans):
            return made
        ends = np.cumsum([span.length for span in spans]).tolist()
        alone = [replace(span, start=end - span.length) for span, end in zip(spans, ends, strict=True)]
        rows = np.concatenate([np.arange(one.start, one.end) for one in pictures(alone)])
        return {"seen": made, "rows": torch.from_numpy(rows), "tokens": ends[-1]}

    def features(model: Any, media: Mapping[str, Any]) -> Tensor:
        if "seen" not in media:
            return family.features(model, media)
        found = family.features(model, media["seen"])
        return found.new_zeros(media["tokens"], found.shape[1]).index_copy(0, media["rows"], found)

    return replace(
        family,
        chat=replace(family.chat, ids_of=ids_of),
        positions=lambda ids, media: family.positions(ids, pictures(media)),
        media=host_media,
        features=features,
        embed=partial(decoder_inputs, seen=list(placeholders.values())),
    )


def prepare_deepstack(model: Any) -> None:
    """What the first layers add to media tokens is added by their places, where those are given:
    to read a mask is to wait for the device.
    """
    patch_embedding_as_matrix(model)
    decoder = model.get_decoder()
    by_mask = decoder._deepstack_process

    def add(hidden: Tensor, places: Tensor, added: Tensor) -> Tensor:
        if places.ndim > 1:  # a mask of rows: transformers' own forward
            return by_mask(hidden, places, added)
        return hidden.index_add(1, places, added[None])

    decoder._deepstack_process = add


QWEN3_VL = replace(
    QWEN_VL,
    towers={**QWEN_VL.towers, "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list.")},
    prepare=prepare_deepstack,
    finish=with_times,
)
