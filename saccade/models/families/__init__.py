"""What differs between model families, as small bundles of functions in one table.

A `Family` is bound to one model folder: it renders messages, measures and processes media, gives
positions, and says which ids may never be sampled. The rest of the system asks it and never looks
at a model type.

    family = load_family("path/to/Qwen2.5-VL-3B-Instruct")
    family.render(messages).ids
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import SeriesConfig
from saccade.errors import EnvironmentProblem
from saccade.media.pixel_cache import ImageCache, in_background
from saccade.models.chat import Chat, Grid, load_chat
from saccade.models.families import qwen_vl, text
from saccade.registry import Table
from saccade.types import Media, MediaSpan, Message, Rendered

# Special tokens of other modalities that some text tokenizers carry too.
PLACEHOLDER_TOKENS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|audio_pad|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<image>",
    "<video>",
)


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One row of the table: what a family is, before a model folder is known."""

    auto_class: str  # of transformers
    towers: Mapping[str, tuple[str, ...]]  # name → prefixes of its parameters
    bind: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
    placeholders: tuple[str, ...] = ()  # config keys of ids that are never sampled
    media_tokens: Mapping[str, str] = field(default_factory=dict)  # kind of media → config key of
    # the id that is expanded
    brackets: tuple[str, str] | None = None  # tokens around an image that no template writes
    whole: bool = True  # an image is seen in one piece at a multiple of the unit; False: in squares
    prepare: Callable[[Any], None] = lambda model: None
    section: str = ""  # of config.json: what is loaded of a folder with more than one model
    beside: tuple[str, ...] = ()  # prefixes of the tensors of the others

    @property
    def image_token(self) -> str | None:
        return self.media_tokens.get("image")


_TEXT = FamilySpec(auto_class="AutoModelForCausalLM", towers={"llm": ("model.",)}, bind=text.bind)
_MIXTURE = replace(_TEXT, prepare=text.refuse_noise)
_QWEN_VL = FamilySpec(
    auto_class="AutoModelForImageTextToText",
    towers={"projector": ("model.visual.merger.",), "vision": ("model.visual.",), "llm": ("model.language_model.",)},
    bind=qwen_vl.bind,
    placeholders=("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    media_tokens={"image": "image_token_id", "video": "video_token_id"},
    prepare=qwen_vl.patch_embedding_as_matrix,
)
# Its videos are told apart by times in the text, which no row is rendered with yet.
_QWEN3_VL = replace(
    _QWEN_VL,
    towers={
        "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        "vision": ("model.visual.",),
        "llm": ("model.language_model.",),
    },
    media_tokens={"image": "image_token_id"},
    prepare=qwen_vl.prepare_deepstack,
)
FAMILIES: Table[FamilySpec] = Table(
    "families",
    {
        "qwen2_vl": _QWEN_VL,
        "qwen2_5_vl": _QWEN_VL,
        "qwen3_vl": _QWEN3_VL,
        "qwen3_vl_moe": _QWEN3_VL,
        "qwen2": _TEXT,
        "qwen3": _TEXT,
        "llama": _TEXT,
        "mixtral": _MIXTURE,
        "qwen2_moe": _MIXTURE,
        "qwen3_moe": _MIXTURE,
    },
)

# Published in formats that need code of their own, and in that of transformers.
CONVERTED = {"internvl_chat": "use its conversion, whose name ends in -hf"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family bound to a model folder."""

    name: str
    path: str
    spec: FamilySpec
    chat: Chat
    axes: int  # of position ids
    vocabulary: int
    banned: np.ndarray  # [vocabulary] bool: never sampled, masked in the trainer's softmax
    max_positions: int
    measure: Callable[[Media], tuple[Grid, int]]
    positions: Callable[[int, tuple[MediaSpan, ...]], np.ndarray]
    picture: Callable[[Media], np.ndarray]  # [height, width, 3] bytes, as large as it is seen;
    # of a video [frames, height, width, 3]
    untouched: Callable[[int, int], Mapping[str, int]]  # (most tokens, most pixels) → `size` of
    # the model's own processor with which it leaves such pictures as they are
    cache: Callable[[Media], ImageCache]  # what makes and keeps that which the model reads of it
    media: Callable[[Sequence[MediaSpan]], Mapping[str, Any]]  # what `features` reads, on the host
    features: Callable[[Any, Mapping[str, Any]], Any]  # (model, media) → [media tokens, hidden], or
    # a multiple of hidden: what the first decoder layers add follows
    vision: Callable[..., Mapping[str, Any]]  # (spans, device, dtype) → arguments of the forward
    unit: int  # pixels of a side that are seen as one token
    budget: Callable[[int, int], Mapping[str, Any]] = lambda low, high: {}  # (min_pixels,
    # max_pixels) → settings of the model's own processor that show as much of a picture
    shown: Mapping[str, Any] = field(default_factory=dict)  # those of the run, for what it saves
    series: SeriesConfig | None = None  # of the encoder that was plugged in, if there is one

    def __post_init__(self) -> None:
        # A prompt is rendered once however often its sample comes round.
        cached = lru_cache(maxsize=16_384)(lambda m: self.chat.render(m, self.measure, generation=True))
        object.__setattr__(self, "_render", cached)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """The prompt of a generation."""
        return self._render(tuple(messages))  # type: ignore[attr-defined]

    def render_dialogue(self, messages: Sequence[Message]) -> Rendered:
        return self.chat.render_dialogue(messages, self.measure)

    def render_continuation(self, messages: Sequence[Message], *, last_id: int) -> Rendered:
        return self.chat.render_continuation(messages, self.measure, last_id=last_id)

    def prefetch(self, media: Iterable[Media]) -> None:
        """Begin to make what the model reads of them. What fails now fails again for who asks."""
        for one in media:
            in_background(self.cache(one).get, one)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.chat.decode(ids)

    @property
    def size_unit(self) -> int | None:
        """What the sides of an image are a multiple of as it is seen; None: it has no one size."""
        return self.unit if self.spec.whole else None

    def tower_of(self, parameter: str) -> str:
        return next((name for name, prefixes in self.spec.towers.items() if parameter.startswith(prefixes)), "llm")


def load_family(
    path: str, *, name: str | None = None, chat_template: str | None = None, trust_remote_code: bool = False
) -> Family:
    """Reads the folder's config, tokenizer and processor settings; no weights."""
    config = _read_json(path, "config.json")
    name = name or config.get("model_type", "")
    spec = FAMILIES.get(name)
    if spec is None:
        spec = _generic(name, config, path)
    config = config.get(spec.section, config)
    text_config = config.get("text_config", config)
    generation = _read_json(path, "generation_config.json", required=False)
    eos = generation.get("eos_token_id", [])
    chat = load_chat(
        path,
        placeholders={kind: config[k] for kind, k in spec.media_tokens.items() if k in config},
        template=chat_template or _processor_template(path),
        brackets=spec.brackets,
        begins=bool(spec.media_tokens),
        eos_ids=eos if isinstance(eos, list) else [eos],
        trust_remote_code=trust_remote_code,
    )
    vocabulary = int(text_config.get("vocab_size", config.get("vocab_size", len(chat.tokenizer))))
    try:
        bound = spec.bind(config, _processor_settings(path))
    except KeyError as missing:
        raise EnvironmentProblem(
            f"{path}/config.json: no {missing}, which {name} models have; is the file whole?"
        ) from None
    return Family(
        name=name,
        path=path,
        spec=spec,
        chat=chat,
        vocabulary=vocabulary,
        banned=_banned(chat, vocabulary, [config.get(key) for key in spec.placeholders]),
        max_positions=_max_positions(text_config),
        **bound,
    )


def _max_positions(config: Mapping[str, Any]) -> int:
    """The longest row whose positions do not depend on the rows beside it. LongRoPE and dynamic
    RoPE switch to other frequencies for a whole batch once its longest row exceeds the length of
    pretraining: LongRoPE names it, for dynamic RoPE it is `max_position_embeddings`.
    """
    longest = int(config.get("max_position_embeddings", 1 << 30))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in by_layer_type or [rope]:
        if "long_factor" in part:  # by whatever name: Phi-3 files say longrope, su or yarn
            named = (config, part)
            originals = [o for c in named if (o := c.get("original_max_position_embeddings"))]
            longest = min([longest, *originals])
    return longest


def _generic(name: str, config: Mapping[str, Any], path: str) -> FamilySpec:
    """Any text decoder runs through the generic text family; an unknown multimodal type would lose
    its media.
    """
    modalities = [key for key in config if key.endswith("_config") and key != "text_config"]
    if not name or any(key.startswith(("vision", "audio", "speech", "image")) for key in modalities):
        other = CONVERTED.get(name, f"known are {', '.join(FAMILIES)}")
        raise EnvironmentProblem(f"{path}: model_type {name!r} is multimodal and not known; {other}")
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if "num_attention_heads" not in config or kinds:
        what = f"has layers of type {', '.join(sorted(kinds))}" if kinds else "has no attention heads"
        raise EnvironmentProblem(
            f"{path}: model_type {name!r} {what} in its config; packed rows stay apart only where "
            "every layer is attention: use a decoder such as qwen3 or llama"
        )
    return _TEXT


def _processor_settings(path: str) -> dict[str, Any]:
    """Of what reads pictures and sounds: in a file of its own, in newer folders as parts of that of
    the whole processor.
    """
    settings = _read_json(path, "preprocessor_config.json", required=False)
    whole = _read_json(path, "processor_config.json", required=False)
    for part in ("feature_extractor", "image_processor"):
        settings |= whole.get(part) or {}
    return settings


def _processor_template(path: str) -> str | None:
    """Older folders keep the template that knows images in chat_template.json, beside a tokenizer
    whose own template knows text only.
    """
    return _read_json(path, "chat_template.json", required=False).get("chat_template")


def _banned(chat: Chat, vocabulary: int, ids: Sequence[int | None]) -> np.ndarray:
    banned = np.zeros(vocabulary, dtype=bool)
    banned[len(chat.tokenizer) :] = True
    names = [chat.tokenizer.convert_tokens_to_ids(t) for t in PLACEHOLDER_TOKENS if t in chat.reserved]
    for token in (*ids, *names):
        if token is not None and token < vocabulary:
            banned[token] = True
    return banned


def _read_json(path: str, name: str, *, required: bool = True) -> dict[str, Any]:
    file = Path(path) / name
    if not file.is_file():
        if required:
            raise EnvironmentProblem(f"{path} is no model folder: it has no {name}")
        return {}
    return json.loads(file.read_text(encoding="utf-8"))
