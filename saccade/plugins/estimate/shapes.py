"""The sizes of a model that its work and memory depend on, read from its modules, which may be on the
meta device. Works for every architecture that transformers can build.

    shape_of(model, family.tower_of).text.weights
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import mul
from statistics import fmean
from typing import Any

SENSES = ("vision", "audio")
ATTENTION = re.compile(r"attn|attention")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")  # names in configs of experts per token
EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
OTHER_EXPERTS = "vision_moe."  # smaller experts, which image tokens pass instead
# Matrices of a projector that are applied to every token of a tower, before their number shrinks.
LOOKING = re.compile(r"(cross.?att|resampler).*\b(key|value|[kv]_proj)$|vit_merger\.self_attn")
CHUNK = 64  # tokens of a chunk of the gated delta rule
HEAD_NORM = re.compile(r"\b[qk]_(layer)?norm")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers of a tower. Values for one layer are means over all layers. Towers of images and sounds
    also have a first convolution over patches or frames, and a projector after them.
    """

    layers: int
    hidden: int
    queries: float  # numbers in the query of a token: heads times head size
    keys: float  # numbers in its key
    matrices: float  # weights of the matrices of one layer that every token passes
    last: float = 0.0  # weights of the last matrix
    wide: float = 0.0  # intermediate width of the MLP that every token passes
    head_norms: float = 0.0  # share of the layers that normalise queries and keys
    scales: float = 0.0  # trained vectors of a layer that scale the outputs of attention and MLP
    expert_size: float = 0.0  # weights of one expert
    expert_wide: float = 0.0  # its intermediate width
    experts: float = 0.0  # experts in a layer
    chosen: float = 0.0  # experts per token
    inputs: int = 0  # weights of the first convolution
    stem: float = 0  # weights of the other convolutions, per patch: divided by how much the image has shrunk
    projector: int = 0  # weights
    looking: int = 0  # weights of the projector that are applied to every token of the tower
    merge: int = 1  # side of the square of patches that becomes one token
    window: int | None = None  # attention window: side in merged patches, or frames
    full_layers: int = 0  # layers with full attention
    extra: int = 0  # tokens of an image in the tower that are no patches (a class token)
    stride: int = 1  # frames of a sound that become one token
    filled: int = 0  # tokens that a shorter sound is padded to

    @property
    def weights(self) -> float:
        """Weights of all layers that one token is multiplied with."""
        return self.layers * (self.matrices + self.chosen * self.expert_size)

    @property
    def expert_weights(self) -> float:
        """Weights of all experts of one layer."""
        return self.experts * self.expert_size

    @property
    def pair_flops(self) -> float:
        """FLOPs per query-key pair in one layer: the score, and the weighted value."""
        return 4.0 * self.queries

    def read_by(self, rows: float, *, matrix: float = 1.0, expert: float = 1.0) -> float:
        """Weights that a forward of `rows` tokens reads, if all experts are equally likely; in bytes, if
        `matrix` and `expert` are bytes per weight.
        """
        hit = self.experts * (1 - (1 - self.chosen / max(1, self.experts)) ** rows)
        return self.layers * (matrix * self.matrices + expert * hit * self.expert_size)


@dataclass(frozen=True, kw_only=True)
class Shape:
    text: Stack
    vocabulary: int
    pair_flops: Mapping[int | None, float]  # by window: per query-key pair, over all decoder layers with it
    token_flops: float = 0.0  # per token, of the delta rules of recurrent layers, without their projections
    queries_per_key: int = 1  # heads
    key_heads: int = 1
    senses: Mapping[str, Stack] = field(default_factory=dict)
    state_bytes: int = 0  # of the recurrent states of one sequence, independent of its length

    @property
    def head_weights(self) -> int:
        return self.text.hidden * self.vocabulary

    def kv_bytes(self, element: int) -> float:
        """Bytes of one token in the KV cache."""
        return 2 * self.text.layers * self.text.keys * element


def shape_of(model: Any, tower_of: Callable[[str], str]) -> Shape:
    """The shape of a model; `tower_of` gives the tower of a parameter by its name."""
    text, layers = model.config.get_text_config(), _layers(model, tower_of)
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    first = (getattr(text, "per_layer_config", None) or [text])[0]
    size = getattr(first, "head_dim", None) or text.hidden_size // heads
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * len(layers["llm"])
    widths, pair_flops = [], dict[int | None, float]()
    for layer, kind in zip(layers["llm"], kinds, strict=False):
        asked, kept = _attention_widths(layer, heads * size, key_heads * size)
        attends = kind not in ("linear_attention", "conv")
        widths.append((asked, kept if attends else 0.0))
        if attends:
            near = window if kind == "sliding_attention" else None
            pair_flops[near] = pair_flops.get(near, 0.0) + 4.0 * asked
    recurrent = kinds.count("linear_attention")
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    states, key, value = (getattr(text, name) if recurrent else 0 for name in names)
    queries, keys = (fmean(column) for column in zip(*widths, strict=True))
    chosen = next(filter(None, (getattr(text, name, None) for name in CHOSEN)), 1)
    stack = _stack(layers["llm"], text.hidden_size, queries=queries, keys=keys, chosen=chosen)
    beside = _beside("llm", layers["llm"], model, tower_of)  # such as Gemma's projections of per-layer inputs
    return Shape(
        text=replace(stack, matrices=stack.matrices + sum(m * n for m, n in beside) / stack.layers),
        vocabulary=text.vocab_size,
        pair_flops=pair_flops,
        # Read, correct and query the state; products of keys and values within a chunk, and its linear solve.
        token_flops=recurrent * states * (6.0 * key * value + CHUNK * (6 * key + 4 * value + CHUNK * 2 / 3)),
        queries_per_key=heads // key_heads,
        key_heads=key_heads,
        senses={s: _sense(s, layers[s], model, tower_of) for s in SENSES if layers.get(s)} or _bridge(model, tower_of),
        state_bytes=4 * recurrent * states * key * value,
    )


def _attention_widths(layer: Any, queries: float, keys: float) -> tuple[float, float]:
    """Size of a token's query and of its cached key, each over all heads; if values have another size, the mean of
    both. `queries` and `keys`, from the config, are for layers whose matrices have other names.
    """
    sizes = {name.rpartition(".")[2]: (m, n) for name, m, n in _matrices(layer) if ATTENTION.search(name)}
    if "o_proj" not in sizes or not sizes.keys() & {"q_proj", "kv_b_proj"}:
        return queries, keys
    values = sizes["o_proj"][0]
    if "kv_b_proj" in sizes:  # latent attention, cached as keys and values of every head
        queries = (sizes.get("q_b_proj") or sizes["q_proj"])[1]
        return (queries + values) / 2, (queries + values) / 2
    return values, sizes.get("k_proj", (0, 0))[1]  # 0 for layers that use the keys of another layer


def _layers(model: Any, tower_of: Callable[[str], str]) -> dict[str, list[Any]]:
    """The longest list of layers of each tower. Layers marked as `unread` never run."""
    from torch.nn import ModuleList

    lists: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, ModuleList) and not inside:
            lists[name] = module
    found: dict[str, list[Any]] = {}
    for name, module in lists.items():
        layers = [layer for layer in module if not hasattr(layer, "unread")]
        tower = tower_of(f"{name}.")
        found[tower] = max(found.get(tower, []), layers, key=len)
    return found


def _stack(layers: list[Any], hidden: int, **widths: float) -> Stack:
    """Means over the layers; `widths`, from the config, override them."""
    rows = [_layer(layer, hidden) for layer in layers]
    # Sizes of experts are a maximum, since some layers may have no experts.
    mean: dict[str, Any] = {n: (max if n.startswith("expert_") else fmean)(row[n] for row in rows) for n in rows[0]}
    chosen = widths.pop("chosen", 0) * fmean(row["experts"] > 0 for row in rows)
    return Stack(layers=len(layers), hidden=hidden, **(mean | widths), chosen=chosen)


def _layer(layer: Any, hidden: int) -> dict[str, float]:
    linears = list(_matrices(layer))
    shared = [(name, m, n) for name, m, n in linears if not EXPERTS.search(name)]
    attention = [m for name, m, _ in shared if ATTENTION.search(name)] or [hidden]
    wide = [m for name, m, n in shared if n == hidden and not ATTENTION.search(name)] or [0]
    # Experts are stacked in 3-dimensional tensors, or are a list of modules.
    named = dict(layer.named_parameters())
    stacked = [p.shape for n, p in named.items() if p.ndim == 3 and EXPERTS.search(n) and OTHER_EXPERTS not in n]
    single = [(EXPERTS.split(name)[-1], m * n) for name, m, n in linears if EXPERTS.search(name)]
    listed = len({name.partition(".")[0] for name, _ in single})
    sizes = [m * n for _, m, n in stacked] or [size for _, size in single]
    vectors = [p for name, p in named.items() if not name.endswith(("weight", "bias"))]
    return {
        "queries": attention[-1],
        "keys": attention[-1],
        "matrices": sum(m * n for _, m, n in shared),
        "last": shared[-1][1] * shared[-1][2],
        "wide": wide[-1],
        "head_norms": any(map(HEAD_NORM.search, named)),
        "scales": sum(tuple(vector.shape) == (hidden,) for vector in vectors),
        "experts": stacked[0][0] if stacked else listed,
        "expert_size": sum(sizes) / (1 if stacked else max(1, listed)),
        "expert_wide": min(sizes, default=0) / hidden,
    }


def _matrices(part: Any) -> Iterator[tuple[str, int, int]]:
    """(name, in, out) of every matrix that tokens are multiplied with, without adapters."""
    from torch.nn import Embedding, Linear

    for name, module in part.named_modules():
        if isinstance(module, Linear):
            if ".lora_" not in name:
                yield name.removesuffix(".base_layer"), module.in_features, module.out_features
        elif not isinstance(module, Embedding):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2:  # a router
                    yield name, parameter.shape[1], parameter.shape[0]


def _beside(tower: str, layers: list[Any], model: Any, tower_of: Callable[[str], str]) -> list[tuple[int, int]]:
    """(in, out) of the linear layers of a tower outside of `layers`, except the head."""
    from torch.nn import Linear

    known = {id(module) for layer in layers for module in layer.modules()} | {id(model.get_output_embeddings())}
    return [
        (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and ".lora_" not in name and tower_of(f"{name}.") == tower
        if id(module) not in known and not hasattr(module, "unread")
    ]


def _bridge(model: Any, tower_of: Callable[[str], str]) -> dict[str, Stack]:
    """The shape of vision in a model without a tower, which only projects patches."""
    if any(tower_of(name) in SENSES for name, _ in model.named_parameters()):
        return {}
    weights = sum(m * n for name, m, n in _matrices(model) if tower_of(name) == "projector")
    hidden = model.config.get_text_config().hidden_size
    bare = Stack(layers=0, hidden=hidden, queries=0.0, keys=0.0, matrices=0.0, projector=weights)
    return {"vision": bare} if weights else {}


def _sense(sense: str, layers: list[Any], model: Any, tower_of: Callable[[str], str]) -> Stack:
    from torch.nn import Conv1d, Conv2d, Conv3d

    settings: Any = getattr(model.config, f"{sense}_config", None)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = (m for name, m in model.named_modules() if tower_of(f"{name}.") == sense and id(m) not in inside)
    convolutions = [module for module in outside if isinstance(module, Conv1d | Conv2d | Conv3d)]
    convolved = [module.weight for module in convolutions]
    alone = len([name for name in SENSES if hasattr(model.config, f"{name}_config")]) == 1
    projectors = [(name, m * n) for name, m, n in _matrices(model) if tower_of(name) == "projector"]
    own = [(name, size) for name, size in projectors if alone or ("audio" in name) == (sense == "audio")]
    looking = sum(size for name, size in own if LOOKING.search(name))
    merge, full = getattr(settings, "spatial_merge_size", 1), set(range(len(layers)))
    window = 2 * getattr(settings, "n_window", 0) or None  # frames
    if hasattr(settings, "fullatt_block_indexes"):
        window = settings.window_size // merge // settings.patch_size
        full &= set(settings.fullatt_block_indexes)
    elif hasattr(settings, "global_attn_indexes"):
        window, full = settings.window_size, full & set(settings.global_attn_indexes)
    tokens = ("cls_token", "class_embedding")
    hidden, first = settings.hidden_size if not convolved else convolved[0].shape[0], 0
    if convolved:
        first = convolved[0].numel()
    elif beside := _beside(sense, layers, model, tower_of):  # a linear layer over patches instead
        first = beside[0][0] * beside[0][1]
    later = [module.weight.numel() for module in convolutions[1:]]
    shrinking = accumulate((prod(module.stride) for module in convolutions[1:]), mul)
    return replace(
        _stack(layers, hidden),
        inputs=first,
        stem=sum(size / (shrunk if sense == "vision" else 1) for size, shrunk in zip(later, shrinking, strict=True)),
        projector=sum(size for _, size in own) - looking,
        looking=looking,
        merge=merge,
        window=window,
        full_layers=len(full),
        extra=any(n.endswith(tokens) and tower_of(n) == sense for n, _ in model.named_parameters()),
        stride=prod(module.stride[0] for module in convolutions),
        filled=getattr(settings, "max_source_positions", 0) if window is None else 0,
    )
