"""Everything that differs between model families, as a table of small bundles of functions.

A `Family` is bound to one model folder: it renders messages, measures and processes media, computes position ids, and
says which ids may never be sampled. The rest of the system uses it and never checks a model type.

    family = load_family("path/to/Qwen2.5-VL-3B-Instruct")
    family.render(messages).ids
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import SeriesConfig
from saccade.errors import EnvironmentProblem
from saccade.media.images import ImageError
from saccade.media.kinds import KINDS, PAIR
from saccade.media.pixel_cache import ImageCache, in_background
from saccade.models.chat import Chat, Grid, load_chat
from saccade.models.families import qwen_vl
from saccade.models.files import model_json
from saccade.registry import HOOKS, Table
from saccade.types import Media, MediaSpan, Message, Rendered

# Bytes of pixels to prefetch, a quarter of their cache: more would evict those that are trained on.
LOOK_AHEAD = 512 << 20
# Special tokens of other modalities that some text tokenizers carry too.
PLACEHOLDER_TOKENS = (
    *("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_pad|>"),
    *("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<image>", "<video>"),
)
SEEING = ("fuyu",)  # vision model types whose config has no vision section
NO_PIXELS = ImageCache(0, make=lambda media: np.empty(0))


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One row of the table: a family that is not bound to a model folder yet."""

    auto_class: str  # class name in transformers
    towers: Mapping[str, tuple[str, ...]]  # name → prefixes of its parameters
    # (config.json, processor settings) → fields of `Family`; the defaults are those of text models
    bind: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = lambda config, processor: {}
    placeholders: tuple[str, ...] = ()  # config keys of ids that are never sampled
    media_tokens: Mapping[str, str] = field(default_factory=dict)  # kind of media → config key of
    # its placeholder id
    whole: bool = True  # an image is one piece with sides that are multiples of the unit; False: the processor decides
    segments: bool = False  # its towers pass segment boundaries (cu_seqlens) to our attention
    prepare: Callable[[Any], None] = lambda model: None
    # (Family, trust_remote_code) → the Family, completed from further files of its folder
    finish: Callable[[Any, bool], Any] = lambda family, trusted: family
    # (model, Family): refuses a model that computes something else here than in transformers
    prove: Callable[[Any, Any], None] | None = None
    section: str = ""  # of config.json: the model to load from a folder with several
    beside: tuple[str, ...] = ()  # tensor name prefixes of the models that are not loaded

    @property
    def image_token(self) -> str | None:
        return self.media_tokens.get("image")


def refuse_noise(model: Any) -> None:
    """Refuse router noise: in training it would route tokens differently from the policy that sampled them."""
    if noise := getattr(model.config, "router_jitter_noise", 0.0):
        what = f"router_jitter_noise={noise:g} in the model's config.json"
        raise EnvironmentProblem(f"{what} makes experts random in training; set it to 0")


_TEXT = FamilySpec(auto_class="AutoModelForCausalLM", towers={"llm": ("model.",)})
_MIXTURE = replace(_TEXT, prepare=refuse_noise)
QWEN_VL = FamilySpec(
    auto_class="AutoModelForImageTextToText",
    towers={"projector": ("model.visual.merger.",), "vision": ("model.visual.",), "llm": ("model.language_model.",)},
    bind=qwen_vl.bind,
    placeholders=("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    media_tokens={"image": "image_token_id", "video": "video_token_id"},
    segments=True,
    prepare=qwen_vl.patch_embedding_as_matrix,
)
FAMILIES: Table[FamilySpec] = Table(
    "families",
    {
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), QWEN_VL),
        **dict.fromkeys(("qwen2", "qwen3", "llama"), _TEXT),
        **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), _MIXTURE),
    },
)


def _unused(*arguments: Any) -> Any:
    raise AssertionError("this family has no such media, or engines that ask for it are refused")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family bound to a model folder."""

    name: str
    path: str
    spec: FamilySpec
    chat: Chat
    vocabulary: int
    banned: np.ndarray  # [vocabulary] bool: never sampled, masked in the trainer's softmax
    max_positions: int
    axes: int = 1  # number of axes of position ids
    measure: Callable[[Media], tuple[Grid, int]] = _unused
    positions: Callable[[np.ndarray, tuple[MediaSpan, ...]], np.ndarray] = lambda ids, media: np.arange(len(ids))[None]
    picture: Callable[[Media], np.ndarray] = _unused  # uint8 [height, width, 3], resized
    # for the model; of a video [frames, height, width, 3]
    untouched: Callable[[int, int], Mapping[str, int]] = lambda tokens, pixels: {}  # (max tokens,
    # max pixels) → `size` setting of the model's processor with which it does not resize images up to these limits
    cache: Callable[[Media], ImageCache] = lambda media: NO_PIXELS  # computes and caches its model inputs
    media: Callable[[Sequence[MediaSpan]], Mapping[str, Any]] = _unused  # inputs of `features`, on the host
    features: Callable[[Any, Mapping[str, Any]], Any] = _unused  # (model, media) → [media tokens,
    # hidden], or a multiple of hidden: further columns are added in the first decoder layers (deepstack)
    embed: Callable[..., dict[str, Any]] | None = None  # (model, ids, places, features) → decoder inputs;
    # None: embed the ids and replace those at `places` by the features
    vision: Callable[..., Mapping[str, Any]] = lambda spans, device, dtype: {}  # arguments of transformers' forward
    unit: int = 1  # side in pixels of the square behind one token
    budget: Callable[[int, int], Mapping[str, Any]] = lambda low, high: {}  # (min_pixels,
    # max_pixels) → settings of the model's processor for the same pixel budget
    shown: Mapping[str, Any] = field(default_factory=dict)  # those of this run, stored with its checkpoints
    blocks: str = ""  # layers in which the tokens of an image or video attend to each other in both directions:
    # "all", "windows" (sliding-window layers) or none ("")
    reader: Any = None  # wraps the folder's own processor, if that is used
    series: SeriesConfig | None = None  # options of the attached series encoder, if any

    def __post_init__(self) -> None:
        # Cached, so a prompt is rendered once however often its sample recurs.
        cached = lru_cache(maxsize=16_384)(lambda m: self.chat.render(m, self.measure, generation=True))
        object.__setattr__(self, "_render", cached)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render the prompt of a generation; cached."""
        return self._render(tuple(messages))  # type: ignore[attr-defined]

    def render_dialogue(self, messages: Sequence[Message]) -> Rendered:
        return self.chat.render_dialogue(messages, self.measure)

    def render_continuation(self, messages: Sequence[Message], *, last_id: int) -> Rendered:
        return self.chat.render_continuation(messages, self.measure, last_id=last_id)

    def prefetch(self, media: Sequence[Media]) -> None:
        """Compute model inputs of media in background threads, up to `LOOK_AHEAD` bytes. Errors are raised again when
        the result is used.
        """
        layers = [PAIR if one.kind == "video" else 1 for one in media]
        pixels = np.cumsum(np.multiply(layers, [self.measure(one)[1] for one in media])) * self.unit**2
        for one in media[: int((3 * pixels <= LOOK_AHEAD).sum())]:
            in_background(self.cache(one).get, one)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.chat.decode(ids)

    @property
    def size_unit(self) -> int | None:
        """Sides of a resized image are multiples of this; None: images are tiled and have no single size."""
        return self.unit if self.spec.whole else None

    def tower_of(self, parameter: str) -> str:
        """The tower of a parameter or a module, by its name."""
        return next((name for name, given in self.spec.towers.items() if f"{parameter}.".startswith(given)), "llm")


def load_family(
    path: str, *, name: str | None = None, chat_template: str | None = None, trust_remote_code: bool = False
) -> Family:
    """Reads the folder's config, tokenizer and processor settings; no weights."""
    config = model_json(Path(path))
    if not config:
        raise EnvironmentProblem(f"{path} is no model folder: it has no config.json")
    name = name or config.get("model_type", "")
    spec = FAMILIES.get(name) or generic_spec(name, config, path)
    config = config.get(spec.section, config)
    text_config = config.get("text_config", config)
    eos = model_json(Path(path), "generation_config.json").get("eos_token_id", [])
    chat = load_chat(
        path,
        placeholders={kind: config[k] for kind, k in spec.media_tokens.items() if k in config},
        # In older folders this file's template supports images, while the tokenizer's is text-only.
        template=chat_template or model_json(Path(path), "chat_template.json").get("chat_template"),
        begins=bool(spec.media_tokens),
        eos_ids=eos if isinstance(eos, list) else [eos],
        trust_remote_code=trust_remote_code,
    )
    vocabulary = int(text_config.get("vocab_size", config.get("vocab_size", len(chat.tokenizer))))
    try:
        bound = dict(spec.bind(config, _processor_settings(Path(path))))
    except KeyError as missing:
        raise EnvironmentProblem(f"{path}/config.json lacks {missing}, which {name} models have") from None
    measured = bound.pop("measure", _unused)

    def measure(media: Media) -> tuple[Grid, int]:
        if media.kind not in spec.media_tokens:
            taken, found = " and ".join(("text", *spec.media_tokens)), KINDS[media.kind].article
            raise ImageError(f"this model takes {taken}, but a row holds {found} ({media.path or media.hash[:12]})")
        return measured(media)

    family = Family(
        name=name,
        path=path,
        spec=spec,
        chat=chat,
        vocabulary=vocabulary,
        banned=_banned(chat, vocabulary, [config.get(key) for key in spec.placeholders]),
        max_positions=max_positions(text_config),
        measure=measure,
        **bound,
    )
    return spec.finish(family, trust_remote_code)


def max_positions(config: Mapping[str, Any]) -> int:
    """The longest row whose position embeddings do not depend on other rows of the batch. LongRoPE and dynamic RoPE
    change frequencies for a whole batch once its longest row exceeds the pretraining length, which is
    `original_max_position_embeddings` for LongRoPE and `max_position_embeddings` for dynamic RoPE.
    """
    longest = [int(config.get("max_position_embeddings", 1 << 30))]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in by_layer_type or [rope]:
        if "long_factor" in part:  # LongRoPE, under any name: Phi-3 files say longrope, su or yarn
            longest += [o for c in (config, part) if (o := c.get("original_max_position_embeddings"))]
    if config.get("attn_temperature_tuning"):  # tuning begins there, and transformers counts places across packed rows
        longest.append(config["floor_scale"] - 1)
    return min(longest)


def generic_spec(name: str, config: Mapping[str, Any], path: str) -> FamilySpec:
    """The spec of a model type without a row: text decoders use the generic text family, vision models that of a
    plugin, which verifies them. Others are refused, as their media would be lost.
    """
    modalities = [key for key in config if key.endswith("_config") and key != "text_config"]
    if any(key.startswith(("vision", "vq", "image")) for key in modalities) or name in SEEING:
        return HOOKS["any_family"]
    if "thinker_config" in modalities:  # a model that also outputs speech
        return replace(HOOKS["any_family"], section="thinker_config")
    if not name or any(key.startswith(("audio", "speech")) for key in modalities):
        other = f"use one of {', '.join(FAMILIES)}"
        raise EnvironmentProblem(f"{path}: model_type {name!r} is multimodal and not supported; {other}")
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if "num_attention_heads" not in config or kinds:
        what = f"layers of type {', '.join(sorted(kinds))}" if kinds else "no attention heads"
        why = "packed rows stay apart in attention layers only: use a decoder such as qwen3 or llama"
        raise EnvironmentProblem(f"{path}: model_type {name!r} has {what} in its config; {why}")
    return _TEXT


def _processor_settings(folder: Path) -> dict[str, Any]:
    """Settings for images and audio: a file or, in newer folders, sections of processor_config.json."""
    settings, whole = (model_json(folder, f"{name}_config.json") for name in ("preprocessor", "processor"))
    return settings | (whole.get("feature_extractor") or {}) | (whole.get("image_processor") or {})


def _banned(chat: Chat, vocabulary: int, ids: Sequence[int | None]) -> np.ndarray:
    banned = np.zeros(vocabulary, dtype=bool)
    banned[len(chat.tokenizer) :] = True
    names = [chat.tokenizer.convert_tokens_to_ids(t) for t in PLACEHOLDER_TOKENS if t in chat.reserved]
    banned[[token for token in (*ids, *names) if token is not None and token < vocabulary]] = True
    return banned
