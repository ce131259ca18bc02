"""What a model is made of, as far as work and memory need it: layers, heads, matrices and windows,
read from its config. Knows no weights.

    shape_of(model.config).text.weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A tower of equal layers."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    intermediate: int
    linears: tuple[tuple[int, int], ...]  # (in, out) of every matrix of one layer, experts apart
    head_norms: bool = False  # queries and keys are normalised
    scales: bool = False  # results of attention and MLP are scaled by vectors that learn
    expert: tuple[tuple[int, int], ...] = ()  # (in, out) of every matrix of one expert
    experts: int = 0  # of a layer
    chosen: int = 0  # of them by each token

    @property
    def weights(self) -> int:
        """Of all matrices of all layers; of experts those that one token passes."""
        return self.layers * (_size(self.linears) + self.chosen * _size(self.expert))

    @property
    def expert_weights(self) -> int:
        """Of all experts of one layer."""
        return self.experts * _size(self.expert)

    @property
    def expert_width(self) -> int:
        """What the experts of one token have between their matrices."""
        return self.chosen * self.expert[-1][0] if self.expert else 0

    @property
    def queries_per_key(self) -> int:
        return self.heads // self.key_heads

    @property
    def pair_flops(self) -> float:
        """Of one query and one key in one layer: the score, and the value weighed with it."""
        return 4.0 * self.heads * self.head_size

    def read_by(self, rows: float, *, matrix: float = 1.0, expert: float = 1.0) -> float:
        """Weights that a forward of so many tokens reads, if they use all experts alike; or their
        bytes, from those of one weight of a matrix and of an expert.
        """
        hit = self.experts * (1 - (1 - self.chosen / max(1, self.experts)) ** rows)
        return self.layers * (matrix * _size(self.linears) + expert * hit * _size(self.expert))


def _size(matrices: Iterable[tuple[int, int]]) -> int:
    return sum(m * n for m, n in matrices)


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A tower over patches and the projector behind it, which merges M by M of them. A frame of a
    grid is a sequence of its own.
    """

    blocks: Stack
    patch_inputs: int  # numbers of one patch
    merge: int
    projector: tuple[tuple[int, int], ...]
    window: int | None  # side of an attention window in merged patches; None: all layers are full
    full_layers: int  # layers that attend to the whole picture
    extra: int = 0  # tokens of a frame in the tower that stand for no patch


@dataclass(frozen=True, kw_only=True)
class Audio:
    """A tower over mel frames and the projector behind it. The second of two convolutions halves
    the frames, a mean halves them again.
    """

    blocks: Stack
    mels: int  # numbers of one frame
    kernel: int  # frames that a convolution sees at a time
    projector: tuple[tuple[int, int], ...]
    window: int | None  # frames that attend to each other; None: those of the whole sound


@dataclass(frozen=True, kw_only=True)
class Shape:
    text: Stack
    vocabulary: int
    windows: tuple[int | None, ...]  # of each decoder layer
    vision: Vision | None = None
    audio: Audio | None = None

    @property
    def head_weights(self) -> int:
        return self.text.hidden * self.vocabulary

    def kv_bytes(self, element: int) -> int:
        """Of one token in the cache."""
        return 2 * self.text.layers * self.text.key_heads * self.text.head_size * element


# -- from a config ---------------------------------------------------------------------------------

# Decoders with four attention matrices and a gated MLP in every layer.
GATED = (
    *("qwen2", "qwen3", "llama"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen2_5_omni_text"),
)
# Experts in every layer instead of the MLP.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text")
KNOWN = (*GATED, *MIXTURES)


def shape_of(config: Any) -> Shape | None:
    """From a transformers config; None for an architecture that is not known here."""
    text = config.get_text_config()
    known = text is config or config.model_type in TOWERS
    if text.model_type not in KNOWN or not known:
        return None
    if getattr(text, "mlp_only_layers", None) or getattr(text, "decoder_sparse_step", 1) != 1:
        return None  # layers that differ
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    window = getattr(text, "sliding_window", None)
    kinds = (
        getattr(text, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    )
    hidden = text.hidden_size
    mlp = _mixture if text.model_type in MIXTURES else _gated
    return Shape(
        text=Stack(
            layers=text.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            key_heads=key_heads,
            head_size=size,
            head_norms=text.model_type.startswith("qwen3"),
            **mlp(
                text,
                (hidden, heads * size),
                (hidden, key_heads * size),
                (hidden, key_heads * size),
                (heads * size, hidden),
            ),
        ),
        vocabulary=text.vocab_size,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        **({} if text is config else TOWERS[config.model_type](config)),
    )


def _gated(text: Any, *attention: tuple[int, int]) -> dict[str, Any]:
    hidden, wide = text.hidden_size, text.intermediate_size
    return {"intermediate": wide, "linears": (*attention, *_halves(hidden, wide))}


def _mixture(text: Any, *attention: tuple[int, int]) -> dict[str, Any]:
    """A router, its experts, and one more that all tokens pass, with a gate of its own."""
    hidden = text.hidden_size
    shared = getattr(text, "shared_expert_intermediate_size", 0)
    always = (*_halves(hidden, shared), (hidden, 1)) if shared else ()
    own = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    return {
        "intermediate": shared,
        "linears": (*attention, (hidden, text.num_experts), *always),
        "expert": _halves(hidden, own),
        "experts": text.num_experts,
        "chosen": text.num_experts_per_tok,
    }


def _halves(hidden: int, wide: int) -> tuple[tuple[int, int], ...]:
    return ((hidden, wide), (hidden, wide), (wide, hidden))


def _qwen2_5_vision(vision: Any) -> Vision:
    hidden, wide = vision.hidden_size, vision.intermediate_size
    return _tower(
        vision,
        hidden,
        wide,
        mlp=_halves(hidden, wide),
        out=vision.out_hidden_size,
        window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
        full=len(set(vision.fullatt_block_indexes) & set(range(vision.depth))),
    )


def _qwen2_vision(vision: Any) -> Vision:
    hidden, wide = vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio)
    return _tower(
        vision,
        hidden,
        wide,
        mlp=((hidden, wide), (wide, hidden)),
        out=vision.hidden_size,
        window=None,
        full=vision.depth,
    )


def _qwen3_vision(vision: Any) -> Vision:
    """Some layers have a projector of their own; the decoder adds what it gives."""
    hidden, wide = vision.hidden_size, vision.intermediate_size
    last = _tower(
        vision,
        hidden,
        wide,
        mlp=((hidden, wide), (wide, hidden)),
        out=vision.out_hidden_size,
        window=None,
        full=vision.depth,
    )
    return replace(last, projector=last.projector * (1 + len(vision.deepstack_visual_indexes)))


def _tower(
    vision: Any,
    hidden: int,
    wide: int,
    *,
    mlp: tuple[tuple[int, int], ...],
    out: int,
    window: int | None,
    full: int,
) -> Vision:
    merge, patch = vision.spatial_merge_size, vision.patch_size
    merged = hidden * merge**2
    return Vision(
        blocks=Stack(
            layers=vision.depth,
            hidden=hidden,
            heads=vision.num_heads,
            key_heads=vision.num_heads,
            head_size=hidden // vision.num_heads,
            intermediate=wide,
            linears=((hidden, 3 * hidden), (hidden, hidden), *mlp),
        ),
        patch_inputs=3 * vision.temporal_patch_size * patch**2,
        merge=merge,
        projector=((merged, merged), (merged, out)),
        window=window,
        full_layers=full,
    )


def _internvl_vision(config: Any) -> Vision:
    vision = config.vision_config
    return _squares(
        vision,
        vision.num_hidden_layers,
        patch=vision.patch_size[0],
        merge=round(1 / config.downsample_ratio),
        out=config.text_config.hidden_size,
        extra=1,
        head_norms=vision.use_qk_norm,
        scales=True,
    )


# Tokens beside patches, by the type of a tower of LLaVA.
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


def _llava_vision(config: Any) -> Vision:
    vision, chosen = config.vision_config, config.vision_feature_layer
    tower = _squares(
        vision,
        layers_read(vision.num_hidden_layers, chosen),
        patch=vision.patch_size,
        merge=1,
        out=config.text_config.hidden_size,
        extra=CLASS_TOKENS[vision.model_type],
    )
    (width, out), *rest = tower.projector
    joined = 1 if isinstance(chosen, int) else len(chosen)
    return replace(tower, projector=((width * joined, out), *rest))


def layers_read(layers: int, chosen: int | list[int]) -> int:
    """Those that run for the hidden states that are chosen, of which the first are no layer's."""
    all_chosen = [chosen] if isinstance(chosen, int) else chosen
    return max(index if index >= 0 else layers + 1 + index for index in all_chosen)


def _squares(
    vision: Any,
    layers: int,
    *,
    patch: int,
    merge: int,
    out: int,
    extra: int,
    head_norms: bool = False,
    scales: bool = False,
) -> Vision:
    """A tower of squares and a projector of two matrices."""
    hidden, wide = vision.hidden_size, vision.intermediate_size
    return Vision(
        blocks=Stack(
            layers=layers,
            hidden=hidden,
            heads=vision.num_attention_heads,
            key_heads=vision.num_attention_heads,
            head_size=hidden // vision.num_attention_heads,
            intermediate=wide,
            linears=(*[(hidden, hidden)] * 4, (hidden, wide), (wide, hidden)),
            head_norms=head_norms,
            scales=scales,
        ),
        patch_inputs=3 * patch**2,
        merge=merge,
        projector=((hidden * merge**2, out), (out, out)),
        window=None,
        full_layers=layers,
        extra=extra,
    )


def _hearing(audio: Any, *, out: int, window: int | None) -> Audio:
    hidden, wide = audio.d_model, audio.encoder_ffn_dim
    return Audio(
        blocks=Stack(
            layers=audio.encoder_layers,
            hidden=hidden,
            heads=audio.encoder_attention_heads,
            key_heads=audio.encoder_attention_heads,
            head_size=hidden // audio.encoder_attention_heads,
            intermediate=wide,
            linears=(*[(hidden, hidden)] * 4, (hidden, wide), (wide, hidden)),
        ),
        mels=audio.num_mel_bins,
        kernel=3,
        projector=((hidden, out),),
        window=window,
    )


# What stands before a decoder, by the type of the whole.
TOWERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "qwen2_vl": lambda config: {"vision": _qwen2_vision(config.vision_config)},
    "qwen2_5_vl": lambda config: {"vision": _qwen2_5_vision(config.vision_config)},
    "qwen3_vl": lambda config: {"vision": _qwen3_vision(config.vision_config)},
    "qwen3_vl_moe": lambda config: {"vision": _qwen3_vision(config.vision_config)},
    "internvl": lambda config: {"vision": _internvl_vision(config)},
    "llava": lambda config: {"vision": _llava_vision(config)},
    "qwen2_audio": lambda config: {
        "audio": _hearing(config.audio_config, out=config.text_config.hidden_size, window=None)
    },
    "qwen2_5_omni_thinker": lambda config: {
        "vision": _qwen2_5_vision(config.vision_config),
        "audio": _hearing(
            config.audio_config,
            out=config.audio_config.output_dim,
            window=2 * config.audio_config.n_window,
        ),
    },
}
