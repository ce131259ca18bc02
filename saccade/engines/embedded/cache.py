"""The slot cache of the embedded engine and the attention plans that fill and read it: any device,
any type. On a GPU in half precision paged.py takes its place.

One slot per sequence. A group's prompt is computed in one slot and copied to the others. Legend: S
slots, G key heads, C capacity of a slot, D head size, B sequences of a call, T its new tokens, L
longest cached length among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.devices import free_bytes
from saccade.forest.attention import HALF, AttentionPlan, forest_plan

CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.6  # of the memory that is free when the cache grows
CAPACITY_STEP = 64  # slots grow in steps, so that a longer prompt rarely reallocates


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of what a model keeps per token."""

    layers: int
    key_heads: int
    head_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.key_heads * self.head_size * self.dtype.itemsize


def shape_of(model: torch.nn.Module) -> Shape:
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = config.num_attention_heads
    parameter = next(model.parameters())
    return Shape(
        layers=config.num_hidden_layers,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        device=parameter.device,
        dtype=parameter.dtype,
    )


def can_page(shape: Shape) -> bool:
    """Whether the kernels of the paged cache serve a model."""
    return shape.device.type == "cuda" and not hindrance(shape)


def hindrance(shape: Shape) -> str:
    """Why those kernels would not serve it on any GPU; empty: they do."""
    if shape.dtype not in HALF:  # there greedy tokens are those of transformers, bit by bit
        return f"its weights are {shape.dtype}"
    if not (16 <= shape.head_size <= 256 and shape.head_size.bit_count() == 1):
        return f"its heads of {shape.head_size} are no power of two between 16 and 256"
    return "" if find_spec("triton") is not None else "triton is not installed"


def _in_steps(capacity: int) -> int:
    return -(-capacity // CAPACITY_STEP) * CAPACITY_STEP


class Cache:
    """keys and values: [layers, S, G, C, D]. Grows on demand and keeps what it holds; `clear` gives
    it all back. A finished turn that is kept stays in its slot.
    """

    paged = False

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.device, self.dtype = shape.device, shape.dtype
        self.clear()

    def clear(self) -> None:
        shape = (self.shape.layers, 0, self.shape.key_heads, 0, self.shape.head_size)
        self.keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.values = torch.empty_like(self.keys)
        self.free: list[int] = []

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def bytes_per_slot(self, capacity: int) -> int:
        """Of one that holds so many tokens, in the size that `reserve` gives it."""
        return _in_steps(capacity) * self.shape.bytes_per_token

    def affordable(self, capacity: int) -> int:
        """Slots of this capacity that there is memory for, those that it has included."""
        budget = CPU_CACHE_BYTES
        if self.device.type == "cuda":
            mine = self.bytes_per_slot(self.capacity) * self.slots
            budget = int(GPU_CACHE_SHARE * (free_bytes(self.device) + mine))
        return max(1, budget // self.bytes_per_slot(capacity))

    def reserve(self, slots: int, capacity: int) -> None:
        capacity = _in_steps(capacity)
        if slots <= self.slots and capacity <= self.capacity:
            return
        slots, capacity = max(slots, self.slots), max(capacity, self.capacity)
        self.free += range(self.slots, slots)
        for name in ("keys", "values"):
            old = getattr(self, name)
            # Zeros, not empty: a masked key still enters a product, and 0 · NaN is NaN.
            layers, _, heads, _, size = old.shape
            new = old.new_zeros((layers, slots, heads, capacity, size))
            new[:, : old.shape[1], :, : old.shape[3]] = old
            setattr(self, name, new)

    # -- slots --

    def take(self) -> int | None:
        """The lowest one: decoding reads every slot up to the highest busy one."""
        slot = min(self.free, default=None)
        if slot is not None:
            self.free.remove(slot)
        return slot

    def release(self, slot: int) -> None:
        self.free.append(slot)

    def park(self, slot: int) -> int:
        return slot

    def resume(self, parked: int) -> int:
        return parked

    def drop(self, parked: int) -> None:
        self.free.append(parked)

    def contents(self, slot: int) -> int:
        return slot

    def begin_alike(self, groups: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """(source, tokens, targets): slots `targets` begin with the first `tokens` of `source`."""
        pairs = [(source, target) for source, _, targets in groups for target in targets]
        if pairs:  # what lies behind a shorter beginning is copied too, and never read
            length = max(tokens for _, tokens, _ in groups)
            sources, targets = (list(column) for column in zip(*pairs, strict=True))
            for tensor in (self.keys, self.values):
                tensor[:, targets, :, :length] = tensor[:, sources, :, :length]

    # -- plans --

    def plan(self, slots: np.ndarray, cached: np.ndarray, new: np.ndarray) -> AttentionPlan:
        """Sequences in `slots` hold `cached` tokens and get `new` more (all arrays [B])."""
        if cached.any():
            return extend_plan(self, slots, cached, new)
        starts = np.concatenate([[0], new.cumsum()])
        move = lambda x: torch.from_numpy(x).to(self.device)  # noqa: E731
        return PrefillPlan(
            cache=self,
            inner=forest_plan(starts, np.full(len(new), -1), self.device, self.dtype),
            slots=move(np.repeat(slots, new)),
            places=move(np.concatenate([np.arange(n) for n in new])),
        )


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
