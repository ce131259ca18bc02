"""The key/value cache of the embedded engine and the attention plans that fill and read it.

One slot per sequence. A group's prompt is computed in one slot and copied to the others. Legend: S
slots, G key heads, C capacity of a slot, D head size, B sequences of a call, T its new tokens, L
longest cached length among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.attention import AttentionPlan

CAPACITY_STEP = 64  # slots grow in steps, so that a longer prompt rarely reallocates


class Cache:
    """keys and values: [layers, S, G, C, D]. Grows on demand and keeps what it holds; `clear` gives
    it all back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        heads = config.num_attention_heads
        self.layers = config.num_hidden_layers
        self.key_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.clear()

    def clear(self) -> None:
        shape = (self.layers, 0, self.key_heads, 0, self.head_size)
        self.keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.values = torch.empty_like(self.keys)

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def bytes_per_slot(self, capacity: int) -> int:
        return (
            2 * self.layers * self.key_heads * capacity * self.head_size * self.keys.element_size()
        )

    def reserve(self, slots: int, capacity: int) -> None:
        capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        if slots <= self.slots and capacity <= self.capacity:
            return
        slots, capacity = max(slots, self.slots), max(capacity, self.capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            # Zeros, not empty: a masked key still enters a product, and 0 · NaN is NaN.
            new = old.new_zeros((self.layers, slots, self.key_heads, capacity, self.head_size))
            new[:, : old.shape[1], :, : old.shape[3]] = old
            setattr(self, name, new)

    def copy_prefix(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """The first `length` tokens of slots `source` into slots `target`, pairwise."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Fresh prompts: attention among themselves by `inner`, keys and values into the cache on the
    way.
    """

    cache: Cache
    inner: AttentionPlan
    slots: Tensor  # [T]
    places: Tensor  # [T]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        self.cache.keys[layer][self.slots, :, self.places] = k
        self.cache.values[layer][self.slots, :, self.places] = v
        return self.inner(layer, q, k, v, scale, window)


@dataclass(frozen=True, kw_only=True)
class ExtendPlan:
    """New tokens of sequences that are already in the cache: one each while decoding, several for a
    new turn.
    """

    cache: Cache
    slots: Tensor  # [T]
    places: Tensor  # [T]
    rows: Tensor | slice  # slots whose cache is read, [B]
    index: Tensor | None  # [T] place of each new token among the padded queries; None: in order
    width: int  # most new tokens of one sequence
    mask: Tensor  # [B, 1, width, L]
    count: int  # B

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        assert window is None, "sliding windows are refused when the engine is built"
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots, :, self.places] = k
        values[self.slots, :, self.places] = v
        length = self.mask.shape[-1]
        heads, size = q.shape[1:]
        groups = heads // k.shape[1]
        padded = q
        if self.index is not None:
            padded = q.new_zeros((self.count * self.width, heads, size))
            padded[self.index] = q
        # Query heads that share a key head become queries of that head: no copy of the cache is
        # ever expanded.
        padded = padded.view(self.count, self.width, k.shape[1], groups, size).permute(
            0, 2, 3, 1, 4
        )
        queries = padded.reshape(self.count, k.shape[1], groups * self.width, size)
        out = sdpa(
            queries,
            keys[self.rows, :, :length],
            values[self.rows, :, :length],
            attn_mask=self.mask if self.width == 1 else self.mask.repeat(1, 1, groups, 1),
            scale=scale,
        )
        out = out.view(self.count, k.shape[1], groups, self.width, size).permute(0, 3, 1, 2, 4)
        out = out.reshape(self.count * self.width, heads, size)
        return out if self.index is None else out[self.index]


def extend_plan(cache: Cache, slots: np.ndarray, cached: np.ndarray, new: np.ndarray) -> ExtendPlan:
    """Sequences in `slots` hold `cached` tokens and get `new` more (all arrays [B])."""
    rows: Tensor | slice
    top = int(slots.max()) + 1
    if top <= 2 * len(slots):
        # Reading every slot up to the highest costs less than gathering the busy ones out of the
        # cache.
        rows, count, row_of = slice(0, top), top, slots
    else:
        rows, count, row_of = (
            torch.from_numpy(slots).to(cache.device),
            len(slots),
            np.arange(len(slots)),
        )
    width = int(new.max())
    offsets = (
        np.concatenate([np.arange(n) for n in new]) if width > 1 else np.zeros(len(slots), int)
    )
    owner = np.repeat(np.arange(len(slots)), new)
    places = cached[owner] + offsets
    length = int((cached + new).max())
    last = np.zeros(
        (count, width), dtype=np.int64
    )  # an idle row reads its first key, so no softmax is empty
    last[row_of[owner], offsets] = places
    mask = np.arange(length)[None, None, :] <= last[:, :, None]
    index = row_of[owner] * width + offsets
    full = len(index) == count * width and bool((np.diff(index) == 1).all())
    move = lambda x: torch.from_numpy(x).to(cache.device)  # noqa: E731
    return ExtendPlan(
        cache=cache,
        slots=move(slots[owner]),
        places=move(places),
        rows=rows,
        index=None if full else move(index),
        width=width,
        mask=move(mask)[:, None],
        count=count,
    )
