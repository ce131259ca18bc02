"""Forest attention: a token attends causally to its own node and to all of its ancestors.

A plan computes attention for the tokens of one forward; the model's own modules call it through the
function in interface.py. Layers may attend within a sliding window or a chunk of the row; tokens of an
image may attend to each other in both directions. Knows nothing of models, images or rollouts.

    hidden = model(input_ids=ids, attention_plan=forest_plan(starts, parents, ids.device, dtype))

Legend: T tokens, K gathered keys, H query heads, G key heads, D head size, B trees, L tokens of the
longest tree of a bucket.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.forest.device_ops import KERNELS, has_kernels, to_device
from saccade.registry import HOOKS

HALF = (torch.bfloat16, torch.float16)  # dtypes that flash attention and our kernels support

# A dense mask of a larger tree would cost more memory than it saves time; it is computed node by
# node instead.
LARGEST_DENSE_TREE = 4096
LARGEST_FLASH_HEAD = 256


# Which earlier tokens a token attends to. None: all; n: itself and the n - 1 before; -n: those in its own
# chunk of n tokens of the row.
Window = int | None
# (layer, q [T, H, D], k [T, G, D], v [T, G, Dv], scale, window) → [T, H, Dv]
AttentionPlan = Callable[[int, Tensor, Tensor, Tensor, float, Window], Tensor]


class ForwardPlan:
    """An attention plan, and `recurrent_plan`, by which recurrent layers traverse the tokens; created on first use."""

    def __init__(self, attend: AttentionPlan, make_recurrent_plan: Callable[[], Any]) -> None:
        self._attend, self._make_recurrent_plan = attend, make_recurrent_plan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        return self._attend(layer, q, k, v, scale, window)

    @functools.cached_property
    def recurrent_plan(self) -> Any:
        return self._make_recurrent_plan()


def first_seen(place: Any, window: int) -> Any:
    """The first position that the token at `place` (an int or array) attends to. With a sliding window it
    may be negative.
    """
    return place - window + 1 if window > 0 else place - place % -window


# -- forests ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tokens with the same number, such as those of an image, attend to each other in both directions, as
    far as a window reaches back.
    """

    numbers: np.ndarray  # [T]; -1: causal
    everywhere: bool  # False: only in layers with a window

    def applies_to(self, window: Window) -> bool:
        return self.everywhere or window is not None


def blocks_at(kind: str, ids: np.ndarray, placeholders: Mapping[str, int]) -> Blocks | None:
    """Blocks of the runs of image and video placeholders in ids. `kind`: for "all" layers, for those with "windows", or
    for none ("").
    """
    seen = [placeholders[medium] for medium in ("image", "video") if medium in placeholders]
    places = np.flatnonzero(np.isin(ids, seen if kind else []))
    if not len(places):
        return None
    numbers = np.full(len(ids), -1, dtype=np.int64)
    numbers[places] = np.cumsum(np.diff(places, prepend=places[0]) > 1)
    return Blocks(numbers=numbers, everywhere=kind == "all")


def forest_plan(
    starts: np.ndarray, parents: np.ndarray, device: torch.device, dtype: torch.dtype, *, blocks: Blocks | None = None
) -> ForwardPlan:
    """The fastest plan for the device: variable-length flash calls, or dense masks over padded
    trees.
    """
    make = _varlen_plan if device.type == "cuda" and dtype in HALF else _dense_plan
    return ForwardPlan(make(starts, parents, device, blocks), lambda: HOOKS["recurrent_plan"](starts, parents, device))


def paths(parents: np.ndarray) -> list[list[int]]:
    """Nodes from the root to each node, itself included."""
    result: list[list[int]] = []
    for node, parent in enumerate(parents.tolist()):
        result.append([*result[parent], node] if parent >= 0 else [node])
    return result


def _varlen_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device, blocks: Blocks | None) -> AttentionPlan:
    """One flash call, also with a sliding window. For chunks and blocks, nodes are split at their
    boundaries, and blocks get a second call without a causal mask.
    """
    every = np.arange(len(parents))
    made: dict[Any, AttentionPlan] = {(False, 0): _flash_call(starts, parents, every, device, causal=True, chunk=0)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        chunk = 0 if window is None or window > 0 else -window
        numbers = None if blocks is None or not blocks.applies_to(window) else blocks.numbers
        if q.shape[-1] > LARGEST_FLASH_HEAD or (chunk and numbers is not None):  # a block may span two chunks
            if "dense" not in made:
                made["dense"] = _dense_plan(starts, parents, device, blocks)
            return made["dense"](layer, q, k, v, scale, window)
        key = numbers is not None, chunk
        if key not in made:
            made[key] = _cut_plan(starts, parents, device, numbers, chunk)
        return made[key](layer, q, k, v, scale, None if chunk else window)

    return attend


def _cut_plan(
    starts: np.ndarray, parents: np.ndarray, device: torch.device, numbers: np.ndarray | None, chunk: int
) -> AttentionPlan:
    """Flash calls over pieces of nodes: a causal one for text, and one without a causal mask for blocks."""
    ends, above, last, before = [0], list[int](), list[int](), list[int]()
    numbers = np.full(starts[-1], -1) if numbers is None else numbers
    for node, parent in enumerate(parents.tolist()):
        first, end = int(starts[node]), int(starts[node + 1])
        before.append(before[parent] + int(starts[parent + 1] - starts[parent]) if parent >= 0 else 0)
        cuts = np.diff(numbers[first:end], prepend=numbers[first]) != 0
        if chunk:
            cuts |= (np.arange(end - first) + before[node]) % chunk == 0
        cuts[0] = False
        upper = last[parent] if parent >= 0 else -1
        for cut in (*(np.flatnonzero(cuts) + first).tolist(), end):
            ends.append(cut)
            above.append(upper)
            upper = len(above) - 1
        last.append(upper)
    pieces, parts = np.array(ends), np.array(above)
    both = numbers[pieces[:-1]] >= 0
    calls = []
    for kind in (False, True):
        nodes = np.flatnonzero(both == kind)
        if len(nodes):
            tokens = np.concatenate([np.arange(*pieces[node : node + 2]) for node in nodes])
            calls.append((tokens, _flash_call(pieces, parts, nodes, device, causal=not kind, chunk=chunk)))
    order = to_device(np.argsort(np.concatenate([tokens for tokens, _ in calls])), device)
    there = [(to_device(tokens, device), call) for tokens, call in calls]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        return torch.cat([call(layer, q[tokens], k, v, scale, window) for tokens, call in there])[order]

    return attend


def _flash_call(
    starts: np.ndarray, parents: np.ndarray, nodes: np.ndarray, device: torch.device, *, causal: bool, chunk: int
) -> AttentionPlan:
    """One flash call for the queries of `nodes` over the keys of their paths; with `chunk`, of their own chunk only."""
    spans = [np.arange(starts[i], starts[i + 1]) for i in range(len(parents))]
    whole = paths(parents)
    gathered = [np.concatenate([spans[node] for node in whole[n]]) for n in nodes]
    if chunk:
        gathered = [index[(len(index) - 1) // chunk * chunk :] for index in gathered]
    sizes, key_lengths = np.diff(starts)[nodes], np.array([len(index) for index in gathered])
    keys = to_device(np.concatenate(gathered), device)  # [K] token of each gathered key
    # For backward: the places among gathered keys, sorted by token, and where those of each token begin.
    sorted_keys, places = torch.sort(keys, stable=True)
    offsets = torch.searchsorted(sorted_keys, torch.arange(int(starts[-1]) + 1, device=device))
    bounds = (np.concatenate([[0], each.cumsum()]).astype(np.int32) for each in (sizes, key_lengths))
    cu_q, cu_k = (to_device(each, device) for each in bounds)
    longest = int(sizes.max()), int(key_lengths.max())

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        k, v = (_GatherRows.apply(x, keys, places, offsets) for x in (k, v))
        return varlen(q, k, v, (cu_q, cu_k), longest, scale, window, causal)

    return attend


class _GatherRows(torch.autograd.Function):
    """Gather rows by index. A key gathered for n nodes gets n gradients, which backward sums in fp32, not
    in bf16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(index, places, offsets)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, places, offsets = ctx.saved_tensors
        if has_kernels(grad.device):
            return KERNELS["sum_rows"](grad, places, offsets), None, None, None
        shape = (offsets.shape[0] - 1, *grad.shape[1:])
        total = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None, None, None


def _dense_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device, blocks: Blocks | None) -> AttentionPlan:
    """Padded trees with boolean masks, one call per bucket of similar sizes; large trees node by node."""
    node_paths = paths(parents)
    roots, sizes = np.array([path[0] for path in node_paths]), np.diff(starts)
    spans = [np.arange(starts[i], starts[i + 1]) for i in range(len(parents))]
    # Buckets by power of two limit padding: the cost of a tree grows with the square of its padded size.
    similar: dict[int, list[np.ndarray]] = {}
    large: list[tuple[np.ndarray, np.ndarray]] = []  # queries and keys of each node
    for root in np.flatnonzero(parents < 0):
        nodes = np.flatnonzero(roots == root)
        size = int(sizes[nodes].sum())
        if size <= LARGEST_DENSE_TREE:
            similar.setdefault((size - 1).bit_length(), []).append(nodes)
        else:
            large += [(spans[n], np.concatenate([spans[above] for above in node_paths[n]])) for n in nodes]
    padded = [_pad_trees(trees, spans, node_paths, sizes) for _, trees in sorted(similar.items())]
    buckets, by_node = ([[to_device(x, device) for x in each] for each in found] for found in (padded, large))
    numbers: Tensor | None = None
    if blocks is not None:  # a run may continue into a node of another sequence: number it by node
        own, node = blocks.numbers, np.repeat(np.arange(len(parents)), sizes)
        numbers = to_device(np.where(own < 0, -1, own + node * len(own)), device)
    masks: dict[Window, list[Tensor]] = {}  # a mask per bucket

    def mask_of(window: Window, index: Tensor, valid: Tensor, mask: Tensor) -> Tensor:
        causal = mask
        if numbers is not None and blocks is not None and blocks.applies_to(window):
            inside = numbers[index].masked_fill(~valid, -1)
            mask = mask | _same_block(inside, inside)[:, None]
        if window is not None:
            place = causal.sum(-1) - 1  # position of each token on its path
            mask = mask & (place[..., None, :] >= first_seen(place[..., None], window))
        return mask

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        out = q.new_zeros((*q.shape[:2], v.shape[-1]))
        shared = k.shape[1] != q.shape[1]
        if window not in masks:
            masks[window] = [mask_of(window, *bucket) for bucket in buckets]
        for (index, valid, _), mask in zip(buckets, masks[window], strict=True):
            tree_q, tree_k, tree_v = (x[index].transpose(1, 2) for x in (q, k, v))
            trees = sdpa(tree_q, tree_k, tree_v, attn_mask=mask, scale=scale, enable_gqa=shared)
            out = out.index_put((index[valid],), trees.transpose(1, 2)[valid])
        both = numbers if blocks is not None and blocks.applies_to(window) else None
        for queries, keys in by_node:
            inside = None if both is None else both[keys]
            out = out.index_put((queries,), one_node(q[queries], k[keys], v[keys], scale, window, inside))
        return out

    return attend


def _same_block(queries: Tensor, keys: Tensor) -> Tensor:
    """Block numbers [..., Q] and [..., K] → [..., Q, K] bool: both are in the same block."""
    return (queries[..., None] == keys[..., None, :]) & (queries >= 0)[..., None]


def one_node(q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, numbers: Tensor | None = None) -> Tensor:
    """Attention of the last tokens of a row to all of it: q [Q, H, D], k and v [K, G, D]; `numbers` [K]:
    block of each token.
    """
    before = k.shape[0] - q.shape[0]
    query_place = torch.arange(before, k.shape[0], device=q.device)[:, None]
    key_place = torch.arange(k.shape[0], device=q.device)[None, :]
    mask = key_place <= query_place
    if numbers is not None:
        mask = mask | _same_block(numbers[before:], numbers)
    if window is not None:
        mask = mask & (key_place >= first_seen(query_place, window))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return out[0].transpose(0, 1)


def _pad_trees(
    trees: Sequence[np.ndarray], spans: Sequence[np.ndarray], node_paths: Sequence[list[int]], sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token at each padded place [B, L] (0 for padding), whether it is not padding [B, L], mask [B, 1, L, L]."""
    longest = max(int(sizes[nodes].sum()) for nodes in trees)
    index = np.zeros((len(trees), longest), dtype=np.int64)
    valid = np.zeros((len(trees), longest), dtype=bool)
    # A padding row attends to itself: an empty row of a softmax would be NaN.
    mask = np.broadcast_to(np.eye(longest, dtype=bool), (len(trees), longest, longest)).copy()
    causal = np.tri(longest, dtype=bool)
    for row, nodes in enumerate(trees):
        place = {int(node): i for i, node in enumerate(nodes)}
        ancestor = np.zeros((len(nodes), len(nodes)), dtype=bool)
        for i, node in enumerate(nodes):
            ancestor[i, [place[n] for n in node_paths[node]]] = True
        owner = np.repeat(np.arange(len(nodes)), sizes[nodes])
        n = len(owner)
        index[row, :n] = np.concatenate([spans[node] for node in nodes])
        valid[row, :n] = True
        mask[row, :n, :n] = ancestor[owner[:, None], owner[None, :]] & causal[:n, :n]
    return index, valid, mask[:, None]


# -- the variable-length call ----------------------------------------------------------------------


@functools.cache
def _varlen_call() -> tuple[Callable[..., Any], frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """torch's flash attention over packed sequences; `bounds`: cumulative lengths of queries and of keys.
    Its signature differs between releases: options are passed if they exist.
    """
    size = v.shape[-1]
    if size < q.shape[-1]:  # flash attention needs one head size for q, k and v
        v = pad(v, (0, q.shape[-1] - size))
    call, parameters = _varlen_call()
    options: dict[str, Any] = {"scale": scale}
    if k.shape[1] != q.shape[1] and "enable_gqa" in parameters:  # older releases need no flag
        options["enable_gqa"] = True
    if "window_size" in parameters:
        options["window_size"] = (-1 if window is None else window - 1, 0 if causal else -1)
    elif window is None:
        options["is_causal"] = causal
    else:
        raise ValueError("this torch has no sliding window in varlen_attn; use torch 2.12 or newer")
    out = call(q.contiguous(), k.contiguous(), v.contiguous(), *bounds, *longest, **options)
    return out if size == out.shape[-1] else out[..., :size]
