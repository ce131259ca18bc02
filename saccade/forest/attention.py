"""Forest attention: a token attends causally to its own node and to all of its ancestors.

One implementation is registered with transformers, so that a family's own modules run unchanged;
what it computes is decided by the plan that a forward passes under the keyword `attention_plan`.
Training passes a forest plan, the embedded engine a plan that reads its cache. Vision towers come
through the same door with their segment boundaries. Knows nothing of models, images or rollouts.

    hidden = model(input_ids=ids, attention_plan=forest_plan(starts, parents, ids.device, dtype))

Legend: T tokens, K gathered keys, H query heads, G key heads, D head size, B trees, L tokens of the
longest tree of a bucket.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.errors import EnvironmentProblem
from saccade.forest.device_ops import KERNELS, has_kernels, to_device

HALF = (torch.bfloat16, torch.float16)  # what flash attention and our kernels serve

# transformers takes the one-call path of a vision tower only when the name holds "flash".
NAME = "saccade_flash"
READ = ("scaling", "sliding_window", "attention_plan", "cu_seq_lens_q", "max_length_q")  # what models pass
# What they pass beside these without changing what attention has to compute here: a plan knows its tokens, a
# segment of keys is one of queries. Anything else changes the result.
HARMLESS = (
    *("position_ids", "cache_position", "is_causal", "cu_seq_lens_k", "max_length_k"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
)
# A dense mask of a larger tree would cost more memory than it saves time; it is computed node by
# node instead.
LARGEST_DENSE_TREE = 4096


# (layer, q [T, H, D], k and v [T, G, D], scale, window) → [T, H, D]
AttentionPlan = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]


def use_in(model: torch.nn.Module) -> None:
    """From now on the model's forwards need a plan."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # A model of several parts may leave it to its decoder to say so.
    parts = (model, getattr(model.base_model, "language_model", None))
    if not any(getattr(part, "_supports_attention_backend", False) for part in parts):
        why = "computes its own attention, so packed rows would leak into each other"
        hint = "use a model whose class sets _supports_attention_backend"
        raise EnvironmentProblem(f"{type(model).__name__} {why}; {hint}")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # a plan needs no mask
    # Set on the config after loading: transformers would look for a flash-attn package under this
    # name otherwise.
    model.config._attn_implementation = NAME  # type: ignore[union-attr]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    scale, window, plan, boundaries, longest = (options.pop(name, None) for name in READ)
    _refuse_unknown(module, options)
    if plan is None and boundaries is None and not getattr(module, "is_causal", True):
        # An encoder of padded rows, such as an audio tower: every row looks at what its mask shows.
        out = sdpa(query, key, value, attn_mask=attention_mask, scale=scale)
        return out.transpose(1, 2), None
    # Not x[0]: its gradient would be copied into zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if boundaries is not None:
        out = segment_attention(q, k, v, boundaries, scale, longest)
    else:
        assert plan is not None, "a forward of the text half needs attention_plan="
        out = plan(module.layer_idx, q, k, v, scale, window)
    return out.unsqueeze(0), None


def _refuse_unknown(module: torch.nn.Module, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is None or value is False or name in HARMLESS or (name == "dropout" and value == 0):
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
        return varlen(q, k, v, (cu, cu), (longest, longest), scale, window=None, causal=False)
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


def _varlen_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device) -> AttentionPlan:
    spans = [np.arange(starts[i], starts[i + 1]) for i in range(len(parents))]
    gathered = [np.concatenate([spans[node] for node in path]) for path in paths(parents)]
    key_lengths = np.array([len(index) for index in gathered])
    keys = to_device(np.concatenate(gathered), device)  # [K] token of each gathered key
    # Where the keys of each token were gathered to, token after token, and where those of each begin.
    sorted_keys, places = torch.sort(keys, stable=True)
    offsets = torch.searchsorted(sorted_keys, torch.arange(int(starts[-1]) + 1, device=device))
    bounds = (starts, np.concatenate([[0], key_lengths.cumsum()]))
    cu_q, cu_k = (to_device(each.astype(np.int32), device) for each in bounds)
    longest = int(np.diff(starts).max()), int(key_lengths.max())

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        k, v = (_GatherRows.apply(x, keys, places, offsets) for x in (k, v))
        return varlen(q, k, v, (cu_q, cu_k), longest, scale, window)

    return attend


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


def _dense_plan(starts: np.ndarray, parents: np.ndarray, device: torch.device) -> AttentionPlan:
    """Padded trees with boolean masks, a product for those of about one size; large trees node by node."""
    node_paths = paths(parents)
    roots, sizes = np.array([path[0] for path in node_paths]), np.diff(starts)
    spans = [np.arange(starts[i], starts[i + 1]) for i in range(len(parents))]
    # Padding to the next power of two at most: the square of a size is what a tree costs.
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

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        out = torch.zeros_like(q)
        shared = k.shape[1] != q.shape[1]
        for index, valid, mask in buckets:
            if window is not None:
                depth = mask.sum(-1)  # of a token on its path
                mask = mask & (depth[..., None] - depth[..., None, :] < window)
            tree_q, tree_k, tree_v = (x[index].transpose(1, 2) for x in (q, k, v))
            trees = sdpa(tree_q, tree_k, tree_v, attn_mask=mask, scale=scale, enable_gqa=shared)
            out = out.index_put((index[valid],), trees.transpose(1, 2)[valid])
        for queries, keys in by_node:
            out = out.index_put((queries,), one_node(q[queries], k[keys], v[keys], scale, window))
        return out

    return attend


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


def _pad_trees(
    trees: Sequence[np.ndarray], spans: Sequence[np.ndarray], node_paths: Sequence[list[int]], sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[B, L] token of each padded place (0 where it is padding), [B, L] whether it is one, [B, 1, L, L] mask."""
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
    """torch's flash call over the sequences of queries and of keys between `bounds`. Its signature
    moved between releases: options are used where they exist.
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
    return call(q.contiguous(), k.contiguous(), v.contiguous(), *bounds, *longest, **options)
