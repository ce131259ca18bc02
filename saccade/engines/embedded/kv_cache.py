"""The key/value cache of the embedded engine, and the attention plans that fill and read it.

Keys and values lie in pages of one pool per layer. Where the Triton kernels serve a model (a GPU,
half precision) a page holds PAGE tokens, a group shares the full pages of its prompt, and kernels
find the pool through `bases`, so captured graphs stay valid when it moves. Elsewhere a page holds a
whole sequence: torch attends over the pages in place, without gathering them first. A finished turn
keeps its pages without a slot. The pool grows on demand; `clear` frees it. If a model has recurrent
layers, a slot also has a row of their states.

Legend: N sequences of a call, T their new tokens, P pages that it reads, L the longest length among
them, G key heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.engines.embedded.pages import POOL_SHARE, Pages
from saccade.engines.embedded.sequences import IdleTurn
from saccade.forest.attention import (
    HALF,
    LARGEST_FLASH_HEAD,
    AttentionPlan,
    Blocks,
    ForwardPlan,
    Window,
    first_seen,
    forest_plan,
    one_node,
    varlen,
)
from saccade.forest.device_ops import KERNELS, to_device
from saccade.models.families import Family
from saccade.models.load import hidden_states
from saccade.registry import HOOKS
from saccade.system.devices import free_gpu_bytes

PAGE = 16  # tokens: small, so that little of a prompt is copied and little of a last page is empty
POOL_STEP = 4096  # pages of that size by which the pool grows at least
WHOLE_STEP = 64  # pages of whole sequences grow in steps, so that a longer prompt rarely reallocates
CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.6  # of the free memory of a GPU, for pages of whole sequences


class LayerShape(NamedTuple):
    """Shape of the keys and values of one token in one layer."""

    heads: int  # of queries
    key_heads: int
    key_size: int
    value_size: int
    source: int  # the layer whose keys and values it reads: itself, mostly


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Shape of the cache of a model."""

    layers: tuple[LayerShape, ...]
    device: torch.device
    dtype: torch.dtype
    state_bytes: int = 0  # recurrent states of one sequence, of any length

    @property
    def bytes_per_token(self) -> int:
        own = [layer for index, layer in enumerate(self.layers) if layer.source == index]
        return sum(x.key_heads * (x.key_size + x.value_size) for x in own) * self.dtype.itemsize


@torch.no_grad()
def cache_shape(model: torch.nn.Module, family: Family) -> CacheShape:
    """Found by a forward of one token, as configs express it in many ways."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    first: dict[int, int] = {}  # memory of keys → the layer that made them

    def note(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        seen[layer] = q, k, v
        first.setdefault(k.untyped_storage().data_ptr(), layer)
        return q.new_zeros((*q.shape[:2], v.shape[-1]))

    parameter, training = next(model.parameters()), model.training
    states: list[Any] = []

    def plan() -> Any:
        states.append(HOOKS["recurrent_states"](parameter.device, 1))
        return states[0].plan(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))

    nothing = torch.zeros((family.axes, 1), dtype=torch.int64, device=parameter.device)
    model.eval()
    try:
        hidden_states(model, family, nothing[0], nothing, (), ForwardPlan(note, plan))
    finally:
        model.train(training)
    shapes = [LayerShape(0, 0, 0, 0, layer) for layer in range(max(seen, default=-1) + 1)]  # zeros for recurrent layers
    for layer, (q, k, v) in seen.items():
        source = first[k.untyped_storage().data_ptr()]
        shapes[layer] = LayerShape(q.shape[1], k.shape[1], k.shape[2], v.shape[2], source)
    made = {"device": parameter.device, "dtype": parameter.dtype, "state_bytes": sum(each.bytes for each in states)}
    return CacheShape(layers=tuple(shapes), **made)


def use_kernels(shape: CacheShape) -> bool:
    """Whether the Triton kernels support a model on its device."""
    return shape.device.type == "cuda" and not why_no_kernels(shape)


def why_no_kernels(shape: CacheShape) -> str:
    """Why the Triton kernels do not support a model on any GPU; empty if they do."""
    if shape.dtype not in HALF:  # full precision: greedy tokens equal those of transformers, bit by bit
        return f"its weights are {shape.dtype}"
    for layer in shape.layers:
        for size in (layer.key_size, layer.value_size):  # 0 for a recurrent layer
            if size % 8 or size > 512:
                return f"its heads of {size} are no multiple of 8 up to 512"
    return "" if find_spec("triton") is not None else "triton is not installed"


class KVCache:
    """keys and values: one tensor [pages, tokens of a page, G, D] per layer; layers that share them
    share the tensor.
    """

    def __init__(self, shape: CacheShape, slots: int) -> None:
        self.shape, self.slots = shape, slots
        self.device, self.dtype = shape.device, shape.dtype
        self.kernels: Any = KERNELS if use_kernels(shape) else None  # None: torch, with pages of whole sequences
        # [layers, 2]: int32 words of a page of keys, and of values; 0 for a layer without its own.
        each = np.array(
            [(x.source == n) * x.key_heads * np.array([x.key_size, x.value_size]) for n, x in enumerate(shape.layers)]
        )
        self.words = self._tensor(each * PAGE * shape.dtype.itemsize // 4)
        self.bases = torch.zeros((len(shape.layers), 2), dtype=torch.int64, device=self.device)
        # States of recurrent layers, or None. Graphs hold its addresses, so `clear` does not replace it.
        self.states: Any = HOOKS["recurrent_states"](self.device, 0) if shape.state_bytes else None
        self.clear()

    def clear(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        whole = self.kernels is None
        # Lowest pages first: torch reads all pages up to the highest busy one.
        self.pages = Pages(page=WHOLE_STEP if whole else PAGE, lowest_first=whole)
        self.pages.reshape(self.slots, 1)
        self.free_slots = list(range(self.slots))  # a heap
        self.rows = np.zeros(self.slots, np.int64)  # row of each slot in `states`
        if self.states is not None:
            self.states.clear()

    # -- memory --

    @property
    def bytes_per_page(self) -> int:
        return self.pages.page * self.shape.bytes_per_token

    def reserve(self, lengths: Sequence[int], kept: int) -> bool:
        """Allocate pages for sequences that may grow to `lengths` tokens, and for `kept` turns, as
        far as memory allows. Returns whether the longest sequence has room.
        """
        pages, longest, state = self.pages, max(lengths, default=0), self.shape.state_bytes
        if self.kernels is None:
            page = max(pages.page, -(-longest // WHOLE_STEP) * WHOLE_STEP)
            affordable = max(1, self._budget() // (page * self.shape.bytes_per_token + state))
            if page > pages.page and pages.count > affordable:
                return False
            wanted = max(min(self.slots, len(lengths) + kept, affordable), pages.count)
            self._allocate(wanted, page, wanted)
            return True
        pages.reshape(self.slots, longest)
        wanted, rows = int(pages.pages_for(sum(lengths))), self.state_rows
        if state and (few := min(self.slots, len(lengths)) + kept) > rows:
            # As many rows as fit into memory together with an average sequence's pages each.
            each = state + wanted * self.bytes_per_page // max(1, len(lengths))
            rows = max(rows, min(few, max(1, self._budget() // each)))
        if wanted > pages.count:
            wanted = max(wanted, pages.count + POOL_STEP)
            affordable = (self._budget() - rows * state) // self.bytes_per_page
            wanted = min(wanted, affordable)
        self._allocate(max(wanted, pages.count), PAGE, rows)
        return longest <= pages.count * PAGE

    @property
    def state_rows(self) -> int:
        return 0 if self.states is None else len(self.states.lengths)

    def _budget(self) -> int:
        """Bytes that the whole pool may take."""
        if self.device.type == "cpu":
            return CPU_CACHE_BYTES
        mine = self.pages.count * self.bytes_per_page + self.state_rows * self.shape.state_bytes
        share = GPU_CACHE_SHARE if self.kernels is None else POOL_SHARE
        return int(share * (free_gpu_bytes(self.device) + mine))

    def _allocate(self, count: int, page: int, rows: int) -> None:
        """Resize the pool to `count` pages of `page` tokens, and the states to `rows`; contents are preserved."""
        if rows > self.state_rows and self.states is not None:
            self.states.resize(rows)
        if (count, page) == (self.pages.count, self.pages.page):
            return
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        for tensors, which in ((self.keys, "key_size"), (self.values, "value_size")):
            for layer, shape in enumerate(self.shape.layers):  # layer by layer, so that no second pool exists
                heads, size = shape.key_heads, getattr(shape, which)
                if shape.source != layer:
                    new = tensors[shape.source]
                elif self.kernels is None:
                    # Zeros, as a masked key still enters a product, and 0 · NaN is NaN. In memory
                    # the tokens of a head are contiguous, which is the order that attention reads.
                    new = torch.zeros((count, heads, page, size), **options).transpose(1, 2)
                else:
                    new = torch.empty((count, page, heads, size), **options)
                if layer == len(tensors):
                    tensors.append(new)
                    continue
                if shape.source == layer:
                    old = tensors[layer]
                    new[: old.shape[0], : old.shape[1]] = old
                tensors[layer] = new
        addresses = [[k.data_ptr(), v.data_ptr()] for k, v in zip(self.keys, self.values, strict=True)]
        self.bases.copy_(self._tensor(np.array(addresses, np.int64).reshape(-1, 2)))
        self.pages.grow(count)
        self.pages.page = page

    # -- slots --

    def take(self, turn: IdleTurn | None) -> int | None:
        """Take a free slot, which continues from the cache of `turn` if given. None if there is none."""
        if not self.free_slots or not self.has_row(turn):
            return None
        slot = heappop(self.free_slots)
        if turn is not None:
            self.pages.attach(slot, turn.pages)
        if self.states is not None:
            self.rows[slot] = heappop(self.states.free) if turn is None else turn.row
        return slot

    def has_row(self, turn: IdleTurn | None) -> bool:
        """Whether there is a row for the states of one more sequence."""
        return self.states is None or turn is not None or bool(self.states.free)

    def state_length(self, slot: int) -> int | None:
        """Number of tokens that the recurrent states of a slot have read; None without such states."""
        return None if self.states is None else int(self.states.lengths[self.rows[slot]])

    def detach(self, slot: int) -> tuple[np.ndarray, int]:
        """Free a slot. Returns its pages and the row of its states, which stay allocated."""
        heappush(self.free_slots, slot)
        return self.pages.detach(slot), int(self.rows[slot])

    def drop(self, pages: np.ndarray, row: int) -> None:
        self.pages.drop(pages)
        if self.states is not None:
            heappush(self.states.free, row)

    def fork_prompts(self, groups: Sequence[tuple[int, np.ndarray, int, Sequence[int]]]) -> None:
        """For each (first, source, tokens, targets): let empty slots `targets` begin with the first
        `tokens` tokens in pages `source`, and with a copy of the states of slot `first`.
        """
        copies = [self.pages.fork(source, tokens, slot) for _, source, tokens, targets in groups for slot in targets]
        pairs = [pair for pair in copies if pair is not None]
        alike = [(first, slot) for first, _, _, targets in groups for slot in targets]
        if self.states is not None and alike:
            self.states.copy(*self.rows[np.array(alike).T])
        if not pairs:
            return
        here, there = self._tensor(np.array(pairs).T)
        if self.kernels is not None:
            self.kernels["copy_pages"](here, there, bases=self.bases, words=self.words)
            return
        length = max(tokens for _, _, tokens, _ in groups)  # copied tokens after the end of a shorter one are not read
        for tensors in (self.keys, self.values):
            for tensor in {id(each): each for each in tensors}.values():
                tensor[there, :length] = tensor[here, :length]

    # -- plans --

    def plan(self, slots: np.ndarray, cached: np.ndarray, new: np.ndarray, blocks: Blocks | None = None) -> ForwardPlan:
        """The plan for sequences in `slots` with `cached` tokens and `new` more (all arrays [N]), some of
        them in `blocks`: write keys and values into their pages, then attend.
        """
        places, starts = self.pages.places(slots, cached, new), np.concatenate([[0], new.cumsum()])
        inner: AttentionPlan
        if not cached.any():
            inner = forest_plan(starts, np.full(len(new), -1), self.device, self.dtype, blocks=blocks)
        elif self.kernels is None and (new == 1).all() and blocks is None:
            inner = self._over_whole_pages(slots, cached)
        else:
            inner = self._over_pages(slots, starts, cached + new, blocks)
        where = self._where(places)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
            if self.shape.layers[layer].source != layer:
                pass  # written by the layer that made them
            elif self.kernels is not None:
                self.kernels["write_pages"](k, v, bases=self.bases, layer=layer, places=where[0])
            else:
                self.keys[layer][where] = k
                self.values[layer][where] = v
            return inner(layer, q, k, v, scale, window)

        return ForwardPlan(attend, lambda: self.states.plan(self.rows[slots], cached, new))

    def _over_pages(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, blocks: Blocks | None
    ) -> AttentionPlan:
        """New tokens of sequences with cached tokens: each attends to all tokens before it in its pages."""
        ends = np.concatenate([[0], lengths.cumsum()])
        index = self._where(self.pages.places(slots, np.zeros_like(lengths), lengths))
        cu_q, cu_k = (self._tensor(each.astype(np.int32)) for each in (starts, ends))
        longest = int(np.diff(starts).max()), int(lengths.max())
        numbers = None
        if blocks is not None:  # of new tokens only: blocks of cached tokens are complete
            own = np.full(ends[-1], -1)
            own[np.arange(starts[-1]) + np.repeat(ends[1:] - starts[1:], np.diff(starts))] = blocks.numbers
            numbers = self._tensor(own)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
            pools = self.keys[layer], self.values[layer]
            if self.kernels is None:
                keys, values = (pool[index] for pool in pools)
            else:
                keys, values = (pool.flatten(0, 1).index_select(0, index[0]) for pool in pools)
            inside = numbers if blocks is not None and blocks.applies_to(window) else None
            usual = inside is None and (window is None or window > 0) and q.shape[-1] <= LARGEST_FLASH_HEAD
            if q.is_cuda and q.dtype in HALF and usual:
                return varlen(q, keys, values, (cu_q, cu_k), longest, scale, window)
            rows = []
            for a, b, c, d in zip(starts, starts[1:], ends, ends[1:], strict=False):
                own = None if inside is None else inside[c:d]
                rows.append(one_node(q[a:b], keys[c:d], values[c:d], scale, window, own))
            return torch.cat(rows)

        return attend

    def _over_whole_pages(self, slots: np.ndarray, cached: np.ndarray) -> AttentionPlan:
        """One new token each, if a page holds a sequence."""
        numbers = self.pages.table[slots, 0].astype(np.int64)
        top = int(numbers.max()) + 1
        read: Tensor | slice = slice(0, top)
        # Reading every page up to the highest costs less than gathering the busy ones.
        count, row_of = top, numbers
        if top > 2 * len(slots):
            read, count, row_of = self._tensor(numbers), len(slots), np.arange(len(slots))
        length = int(cached.max()) + 1
        # An idle row reads its first key, so no softmax is empty.
        last = np.zeros((count, 1), dtype=np.int64)
        last[row_of, 0] = cached
        masks: dict[Window, Tensor] = {}

        def mask_of(window: Window) -> Tensor:
            """[rows, 1, 1, length]"""
            mask = (places := np.arange(length)) <= last
            if window is not None:
                mask = mask & (places >= first_seen(last, window))
            return self._tensor(mask)[:, None, None]

        full = len(slots) == count and bool((np.diff(row_of) == 1).all())
        index = None if full else self._tensor(row_of)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
            if window not in masks:
                masks[window] = mask_of(window)
            keys, values = (tensors[layer][read, :length].transpose(1, 2) for tensors in (self.keys, self.values))
            heads, size = q.shape[1:]
            padded = q
            if index is not None:
                padded = q.new_zeros((count, heads, size))
                padded[index] = q
            # Query heads that share a key head become queries of that head: no copy of the cache is
            # ever expanded.
            padded = padded.view(count, k.shape[1], heads // k.shape[1], size)
            out = sdpa(padded, keys, values, attn_mask=masks[window], scale=scale)
            out = out.reshape(count, heads, v.shape[-1])
            return out if index is None else out[index]

        return attend

    def _where(self, places: np.ndarray) -> tuple[Tensor, ...]:
        """Indices in the pool for the kernels; pages and offsets for torch."""
        return tuple(map(self._tensor, (places,) if self.kernels else np.divmod(places, self.pages.page)))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
