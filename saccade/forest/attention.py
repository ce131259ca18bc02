"""Forest attention: a token attends causally to its own node and to all of its ancestors.

One implementation is registered with transformers, so that a family's own modules run unchanged;
what it computes is decided by the plan that a forward passes under the keyword `attention_plan`.
Training passes a forest plan, the embedded engine a plan that reads its cache. Vision towers come
through the same door with their segment boundaries. Knows nothing of models, images or rollouts.

    hidden = model(input_ids=ids, attention_plan=forest_plan(starts, parents, ids.device, dtype))

Legend: T tokens, K gathered keys, H query heads, G key heads, D head size, B trees, L tokens of the
longest tree of a bucket.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.errors import EnvironmentProblem
from saccade.forest.to_device import KERNELS, has_kernels, to_device

HALF = (torch.bfloat16, torch.float16)  # what flash attention and our kernels serve

# transformers takes the one-call path of a vision tower only when the name holds "flash".
NAME = "saccade_flash"
# What models pass beside the arguments below without changing what attention has to compute here: a
# plan knows its tokens, a segment of keys is one of queries. Anything else changes the result.
HARMLESS = (
    *("position_ids", "cache_position", "is_causal", "cu_seq_lens_k", "max_length_k"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
)
# A dense mask of a larger tree would cost more memory than it saves time; it is computed node by
# node instead.
LARGEST_DENSE_TREE = 4096


class AttentionPlan(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [T, H, D], k and v [T, G, D] of one layer → [T, H, D]."""
        ...


def register() -> None:
    """Make NAME known to transformers. Plans need no mask, so the mask function returns none."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def use_in(model: torch.nn.Module) -> None:
    # A model of several parts may leave it to its decoder to say so.
    parts = (model, getattr(model.base_model, "language_model", None))
    if not any(getattr(part, "_supports_attention_backend", False) for part in parts):
        raise EnvironmentProblem(
            f"{type(model).__name__} computes its own attention, so packed rows would leak into "
            "each other; use a model whose class sets _supports_attention_backend"
        )
    # Set on the config after loading: transformers would look for a flash-attn package under this
    # name otherwise.
    register()
    model.config._attn_implementation = NAME  # type: ignore[union-attr]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _refuse_unknown(module, kwargs)
    if attention_plan is None and cu_seq_lens_q is None and not getattr(module, "is_causal", True):
        # An encoder of padded rows, such as an audio tower: every row looks at what its mask shows.
        out = sdpa(query, key, value, attn_mask=attention_mask, scale=scaling)
        return out.transpose(1, 2), None
    # Not x[0]: its gradient would be copied into zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seq_lens_q is not None:
        out = segment_attention(q, k, v, cu_seq_lens_q, scale, max_length_q)
    else:
        assert attention_plan is not None, "a forward of the text half needs attention_plan="
        out = attention_plan(module.layer_idx, q, k, v, scale, sliding_window)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


def _refuse_unknown(module: torch.nn.Module, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is None or value is False or name in HARMLESS:
            continue
        if name == "dropout" and value == 0:
            continue
        raise EnvironmentProblem(
            f"{type(module).__name__} passes {name}= to its attention, which would be computed "
            "without it; use another model" + (", or set its attention_dropout to 0" if name == "dropout" else "")
        )


# -- segments: the vision tower --------------------------------------------------------------------


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float, longest: int | None = None
) -> Tensor:
    """Full attention inside each segment [boundaries[i], boundaries[i+1])."""
    if q.is_cuda and q.dtype in HALF:
        cu = boundaries.to(torch.int32)
        longest = int((cu[1:] - cu[:-1]).max()) if longest is None else int(longest)
        return varlen(q, k, v, cu, cu, longest, longest, scale=scale, causal=False, window=None)
    starts = boundaries.cpu().numpy()
    lengths, out = np.diff(starts), torch.empty_like(q)
    if len(lengths) and (lengths == lengths[0]).all():  # most towers: a view instead of copies
        q, k, v = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        index = torch.from_numpy(starts[rows][:, None] + np.arange(length)).to(q.device)
        part_q, part_k, part_v = (x[index].transpose(1, 2) for x in (q, k, v))
        out = out.index_put((index,), sdpa(part_q, part_k, part_v, scale=scale).transpose(1, 2))
    return out


# -- forests ---------------------------------------------------------------------------------------


def forest_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device, dtype: torch.dtype) -> AttentionPlan:
    """The fastest plan for the device: one variable-length flash call, or dense masks over padded
    trees.
    """
    if device.type == "cuda" and dtype in HALF:
        return _varlen_plan(starts, parents, device)
    return _dense_plan(starts, parents, device)


def paths(parents: np.ndarray) -> list[list[int]]:
    """Nodes from the root to each node, itself included."""
    result: list[list[int]] = []
    for node, parent in enumerate(parents.tolist()):
        result.append([*result[parent], node] if parent >= 0 else [node])
    return result


@dataclass(frozen=True, kw_only=True)
class _VarlenPlan:
    keys: Tensor  # [K] token index of each gathered key
    places: Tensor  # [K] where the keys of each token were gathered to, token after token
    offsets: Tensor  # [T + 1] where those of each token begin
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        back = self.keys, self.places, self.offsets
        k, v = _GatherRows.apply(k, *back), _GatherRows.apply(v, *back)
        return varlen(q, k, v, self.cu_q, self.cu_k, self.max_q, self.max_k, scale=scale, causal=True, window=window)


def _varlen_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device) -> AttentionPlan:
    spans = [np.arange(starts[i], starts[i + 1]) for i in range(len(parents))]
    gathered = [np.concatenate([spans[node] for node in path]) for path in paths(parents)]
    key_lengths = np.array([len(index) for index in gathered])
    move = functools.partial(to_device, device=device)
    keys = move(np.concatenate(gathered))
    sorted_keys, places = torch.sort(keys, stable=True)
    tokens = torch.arange(int(starts[-1]) + 1, device=device)
    return _VarlenPlan(
        keys=keys,
        places=places,
        offsets=torch.searchsorted(sorted_keys, tokens),
        cu_q=move(starts.astype(np.int32)),
        cu_k=move(np.concatenate([[0], key_lengths.cumsum()]).astype(np.int32)),
        max_q=int(np.diff(starts).max()),
        max_k=int(key_lengths.max()),
    )


class _GatherRows(torch.autograd.Function):
    """Rows by index. A key shared by n leaves gets n gradients: they are summed in fp32, not in
    bf16.
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


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Trees of about one size, padded to the longest of them."""

    index: Tensor  # [B, L] token of each padded place, 0 where it is padding
    valid: Tensor  # [B, L]
    mask: Tensor  # [B, 1, L, L]


@dataclass(frozen=True, kw_only=True)
class _DensePlan:
    """Padded trees with boolean masks, a product per bucket; large trees node by node."""

    buckets: tuple[_Bucket, ...]
    nodes: tuple[tuple[slice, Tensor], ...]  # of large trees: (queries, keys)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        out = torch.zeros_like(q)
        shared = k.shape[1] != q.shape[1]
        for bucket in self.buckets:
            mask = bucket.mask
            if window is not None:
                depth = mask.sum(-1)  # of a token on its path
                mask = mask & (depth[..., None] - depth[..., None, :] < window)
            tree_q, tree_k, tree_v = (x[bucket.index].transpose(1, 2) for x in (q, k, v))
            trees = sdpa(tree_q, tree_k, tree_v, attn_mask=mask, scale=scale, enable_gqa=shared)
            valid = bucket.valid
            out = out.index_put((bucket.index[valid],), trees.transpose(1, 2)[valid])
        for queries, keys in self.nodes:
            out = out.index_put(
                (torch.arange(queries.start, queries.stop, device=q.device),),
                one_node(q[queries], k[keys], v[keys], scale, window),
            )
        return out


def one_node(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """The last tokens of a row attend to all of it: q [Q, heads, D], k and v [K, G, D]."""
    before = k.shape[0] - q.shape[0]
    query_place = torch.arange(before, k.shape[0], device=q.device)[:, None]
    key_place = torch.arange(k.shape[0], device=q.device)[None, :]
    mask = key_place <= query_place
    if window is not None:
        mask = mask & (query_place - key_place < window)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return out[0].transpose(0, 1)


def _dense_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device) -> AttentionPlan:
    node_paths = paths(parents)
    roots = np.array([path[0] for path in node_paths])
    sizes = np.diff(starts)
    tree_nodes = [np.flatnonzero(roots == root) for root in np.flatnonzero(parents < 0)]
    # Padding to the next power of two at most: the square of a size is what a tree costs.
    buckets: dict[int, list[np.ndarray]] = {}
    large: list[np.ndarray] = []
    for nodes in tree_nodes:
        size = int(sizes[nodes].sum())
        fits = size <= LARGEST_DENSE_TREE
        (buckets.setdefault((size - 1).bit_length(), []) if fits else large).append(nodes)
    move = functools.partial(to_device, device=device)
    spans = [np.arange(starts[i], starts[i + 1]) for i in range(len(parents))]
    by_node = tuple(
        (
            slice(int(starts[node]), int(starts[node + 1])),
            move(np.concatenate([spans[ancestor] for ancestor in node_paths[node]])),
        )
        for nodes in large
        for node in nodes
    )
    return _DensePlan(
        buckets=tuple(
            _Bucket(**{n: move(x) for n, x in _pad_trees(trees, spans, node_paths, sizes).items()})
            for _, trees in sorted(buckets.items())
        ),
        nodes=by_node,
    )


def _pad_trees(
    trees: Sequence[np.ndarray], spans: Sequence[np.ndarray], node_paths: Sequence[list[int]], sizes: np.ndarray
) -> dict[str, np.ndarray]:
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
    return {"index": index, "valid": valid, "mask": mask[:, None]}


# -- the variable-length call ----------------------------------------------------------------------


@functools.cache
def _varlen_call() -> tuple[Callable[..., Any], frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """torch's flash call, whose signature moved between releases: options are used where they
    exist.
    """
    call, parameters = _varlen_call()
    options: dict[str, Any] = {"scale": scale}
    if k.shape[1] != q.shape[1] and "enable_gqa" in parameters:  # older ones do not ask
        options["enable_gqa"] = True
    if "window_size" in parameters:
        options["window_size"] = (-1 if window is None else window - 1, 0 if causal else -1)
    elif window is None:
        options["is_causal"] = causal
    else:
        raise ValueError("this torch has no sliding window in varlen_attn; use torch 2.12 or newer")
    return call(q.contiguous(), k.contiguous(), v.contiguous(), cu_q, cu_k, max_q, max_k, **options)
