"""The paged key/value cache of the embedded engine on a GPU, and the attention plans over it.

Keys and values lie in pages of one pool per layer. A group shares the full pages of its prompt; a
finished turn keeps its pages without a slot. The pool grows with what is asked for and is given
back by `clear`; kernels find it through `bases`, so graphs outlive it. Legend as in kernels.py; T
tokens of a call, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.devices import free_bytes
from saccade.engines.embedded import kernels
from saccade.engines.embedded.cache import Shape
from saccade.engines.embedded.pages import POOL_SHARE, Pages
from saccade.forest.attention import HALF, AttentionPlan, forest_plan, one_node, varlen
from saccade.forest.to_device import to_device

PAGE = 16  # tokens: small, so that little of a prompt is copied and little of a last page is empty
POOL_STEP = 4096  # pages by which the pool grows at least


class PagedCache:
    """keys and values: one tensor [pages, PAGE, G, D] per layer."""

    paged = True

    def __init__(self, shape: Shape, slots: int) -> None:
        self.shape, self.slots = shape, slots
        self.device, self.dtype = shape.device, shape.dtype
        self.bases = torch.zeros((shape.layers, 2), dtype=torch.int64, device=self.device)
        self.clear()

    def clear(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.pages = Pages(page=PAGE)
        self.pages.reshape(self.slots, 0)
        self.free = list(range(self.slots))[::-1]

    # -- memory --

    @property
    def bytes_per_page(self) -> int:
        return PAGE * self.shape.bytes_per_token

    def reserve(self, tokens: int, longest: int) -> None:
        """Pages for about `tokens` in all, as far as memory allows; the longest sequence fits into
        the table.
        """
        self.pages.reshape(self.slots, longest)
        wanted = int(self.pages.pages_for(tokens))
        if wanted <= self.pages.count:
            return
        wanted = max(wanted, self.pages.count + POOL_STEP)
        affordable = self._budget() // self.bytes_per_page
        if (count := min(wanted, affordable)) > self.pages.count:
            self._allocate(count)

    def _budget(self) -> int:
        """Bytes that the whole pool may take."""
        mine = self.pages.count * self.bytes_per_page
        return int(POOL_SHARE * (free_bytes(self.device) + mine))

    def _allocate(self, count: int) -> None:
        size = (count, PAGE, self.shape.key_heads, self.shape.head_size)
        for tensors in (self.keys, self.values):
            for layer in range(self.shape.layers):  # one after the other: no second pool at a time
                new = torch.empty(size, dtype=self.dtype, device=self.device)
                if layer < len(tensors):
                    new[: self.pages.count] = tensors[layer]
                    tensors[layer] = new
                else:
                    tensors.append(new)
        addresses = [
            [k.data_ptr(), v.data_ptr()] for k, v in zip(self.keys, self.values, strict=True)
        ]
        self.bases.copy_(self._tensor(np.array(addresses)))
        self.pages.grow(count)

    # -- slots --

    def take(self) -> int | None:
        return self.free.pop() if self.free else None

    def release(self, slot: int) -> None:
        self.pages.drop(self.pages.detach(slot))
        self.free.append(slot)

    def park(self, slot: int) -> np.ndarray:
        """Keep the pages of a slot and give the slot back."""
        self.free.append(slot)
        return self.pages.detach(slot)

    def resume(self, parked: np.ndarray) -> int | None:
        slot = self.take()
        if slot is not None:
            self.pages.attach(slot, parked)
        return slot

    def drop(self, parked: np.ndarray) -> None:
        self.pages.drop(parked)

    def contents(self, slot: int) -> np.ndarray:
        return self.pages.of(slot)

    def begin_alike(self, groups: Sequence[tuple[np.ndarray, int, Sequence[int]]]) -> None:
        """(source, tokens, targets): empty slots `targets` begin with the `tokens` that lie in
        pages `source`.
        """
        copies = [
            self.pages.fork(source, tokens, slot)
            for source, tokens, targets in groups
            for slot in targets
        ]
        pairs = [pair for pair in copies if pair is not None]
        if pairs:
            here, there = self._tensor(np.array(pairs).T)
            words = self.bytes_per_page // (2 * self.shape.layers) // 4
            kernels.copy_pages(here, there, bases=self.bases, words=words)

    # -- plans --

    def plan(self, slots: np.ndarray, cached: np.ndarray, new: np.ndarray) -> AttentionPlan:
        """Sequences in `slots` hold `cached` tokens and get `new` more (all arrays [N])."""
        places = np.concatenate(
            [
                self.pages.places(slot, first, first + count)
                for slot, first, count in zip(slots, cached, new, strict=True)
            ]
        )
        starts = np.concatenate([[0], new.cumsum()])
        if not cached.any():
            nowhere = np.full(len(new), -1)
            inner: Any = forest_plan(starts, nowhere, self.device, self.dtype)
        else:
            lengths = cached + new
            index = [self.pages.places(s, 0, n) for s, n in zip(slots, lengths, strict=True)]
            inner = _OverPages(
                cache=self,
                index=self._tensor(np.concatenate(index)),
                starts_q=starts,
                starts_k=np.concatenate([[0], lengths.cumsum()]),
                cu_q=self._tensor(starts.astype(np.int32)),
                cu_k=self._tensor(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)),
            )
        return PagedPlan(cache=self, places=self._tensor(places), inner=inner)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


@dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """Prompts and turns: keys and values into their pages, then attention by `inner`."""

    cache: PagedCache
    places: Tensor  # [T]
    inner: AttentionPlan

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        kernels.write_pages(k, v, bases=self.cache.bases, layer=layer, places=self.places)
        return self.inner(layer, q, k, v, scale, window)


@dataclass(frozen=True, kw_only=True)
class _OverPages:
    """New tokens of sequences that began before: each attends to all that lies in its pages."""

    cache: PagedCache
    index: Tensor  # [all keys] their places, sequence after sequence
    starts_q: np.ndarray  # [N + 1]
    starts_k: np.ndarray
    cu_q: Tensor  # the same on the device
    cu_k: Tensor

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys = self.cache.keys[layer].flatten(0, 1).index_select(0, self.index)
        values = self.cache.values[layer].flatten(0, 1).index_select(0, self.index)
        if q.is_cuda and q.dtype in HALF:
            longest = [int(np.diff(starts).max()) for starts in (self.starts_q, self.starts_k)]
            return varlen(
                q, keys, values, self.cu_q, self.cu_k, *longest, scale=scale, causal=True,
                window=window,
            )  # fmt: skip
        return torch.cat(
            [
                one_node(q[a:b], keys[c:d], values[c:d], scale, window)
                for a, b, c, d in zip(
                    self.starts_q, self.starts_q[1:], self.starts_k, self.starts_k[1:], strict=False
                )
            ]
        )


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """One new token per row, written to its page and attending to all of its row."""

    bases: Tensor
    table: Tensor  # [B, columns]
    lengths: Tensor  # [B]
    shared: Tensor  # [B] tokens that its family reads for it
    families: Tensor  # [3, families], as in rows.py
    splits: tuple[int, int]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        return kernels.decode_attention(
            q,
            k,
            v,
            bases=self.bases,
            layer=layer,
            table=self.table,
            lengths=self.lengths,
            shared=self.shared,
            families=self.families,
            page=PAGE,
            scale=scale,
            splits=self.splits,
        )
