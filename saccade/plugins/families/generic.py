"""Any image-text-to-text model of transformers whose decoder attends to its own tokens alone, without code of its own:
its processor is listened to (`picture_processor.py`), its forward is stopped at its decoder's door (`door.py`), its
positions come from its own function. Images, and videos and sounds where its processor and its template take them.

Nothing here is believed: what a config tells is looked at before weights are read (`gate`), and with weights
`proof.py` compares rows with transformers and refuses what differs.

    load_family("path/to/SmolVLM2-2.2B-Instruct")
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import EnvironmentProblem
from saccade.forest.device_ops import to_device
from saccade.forest.interface import decoder_of
from saccade.models.families import FAMILIES, Family, FamilySpec, max_positions
from saccade.models.files import model_json
from saccade.plugins.families.door import cast, decoder_inputs, picture_features
from saccade.plugins.families.picture_processor import ALWAYS, SIZES_KEPT, PictureReader
from saccade.plugins.families.picture_text import expand, special
from saccade.plugins.families.proof import prove
from saccade.types import Media, MediaSpan, Message

# Ids that stand for media under these names of a config, in it or in one of its parts; lists hold several.
MEDIA_TOKENS = {
    "image": ("image_token_id", "image_token_index", "visual_indicator_token_ids"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
# What functions of positions call otherwise than processors: the name, and what is made of it.
RENAMED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "second_per_grids": ("video_second_per_grid", lambda row: row["video_second_per_grid"]),
    "audio_seqlens": ("feature_attention_mask", lambda row: row["feature_attention_mask"].sum(-1)),
}
BEHIND = 16  # tokens behind the last medium that positions may depend on, as on a bracket or a line break
LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
CROSS = ("cross_attention_layers", "cross_layer_interval")
# Parameters between a tower and the decoder are named so.
BRIDGE = re.compile(
    r"(^|[._])(projector|connector|aligner|merger|adapter|resampler|embed_vision|vision_projection|(modality|img)_project"
    r"|visual_embeddings_table)|newline"
)
DRAWING = re.compile(r"\bgeneration_|\bvqmodel")  # of models that make pictures, too: kept and saved, never run here
# Where the tokens of a picture see each other both ways, as configs of these types say it.
BOTH_WAYS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("gemma3", "shieldgemma2"), lambda text: "all"),
    "gemma4": lambda text: "windows" if text.use_bidirectional_attention == "vision" else "",
    "gemma4_unified": lambda text: "all" if text.use_bidirectional_attention == "vision" else "",
}
SELECTED = ("llava", "llava_next", "llava_next_video")  # types that read one layer of their tower, and none behind it
ONE_BY_ONE = ("minicpmv4_6", "minicpmv4_7")  # types that read the tensors of one prompt alone
ASKED: Mapping[str, Mapping[str, bool]] = {  # what processors make only if they are told to, although it is needed
    "cosmos3_edge": {"return_mm_token_type_ids": True, "return_metadata": True},
    "muse_glimmer": {"return_metadata": True},
}
SIMILAR = "one whose decoder attends to its own tokens alone, such as qwen2_5_vl, smolvlm or llava_next"


def gate(path: str, *, trust_remote_code: bool = False) -> Any:
    """The model without weights; refused where its config tells that rows cannot be packed."""
    from transformers import AutoConfig, GenerationMixin

    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # of a type that it does not know, or of fields that it checks
        _require_libraries(path, error)
        why = f"model_type {model_json(Path(path)).get('model_type', '')!r}: {(str(error).splitlines() or [''])[0]}"
        other = f"use its conversion, whose name ends in -hf, if it has one, or {SIMILAR}"
        if "trust_remote_code" in str(error):
            other = "model.trust_remote_code=true runs the Python code in that folder, if you trust it"
        raise EnvironmentProblem(f"{path}: transformers does not read its config ({why}); {other}") from error
    settings = getattr(settings, "thinker_config", settings)
    text = settings.get_text_config()
    kinds, walked = set(getattr(text, "layer_types", None) or ()) - LAYERS, walks(text)
    why = ""
    if getattr(settings, "is_encoder_decoder", False):
        why = "has an encoder for text, and a decoder that looks at it"
    elif any(hasattr(text, name) for name in CROSS):
        why = "looks at pictures from inside its decoder (cross-attention)"
    elif kinds and not walked:
        why = f"has layers of type {', '.join(sorted(kinds))}, in which packed rows run into each other"
    else:
        try:
            auto = auto_class(settings)
            with torch.device("meta"):
                model = auto.from_config(settings, trust_remote_code=trust_remote_code)
            decoder, asked = decoder_of(model), inspect.signature(model.forward).parameters
        except Exception as error:
            _require_libraries(path, error)
            raise _refused(path, settings, f"cannot be built ({type(error).__name__}: {error})") from error
        if not walked and not any(getattr(part, "_supports_attention_backend", False) for part in (model, decoder)):
            why = "computes its own attention, through which packed rows would leak into each other"
        elif GenerationMixin not in type(model).__mro__ or model.get_output_embeddings() is None:
            why = "does not generate text token by token"
        elif "pixel_values" in asked and asked["pixel_values"].default is inspect.Parameter.empty:
            why = "reads no text without a picture"
        elif not _tokens_of(model.config, ["image"]):
            why = "names no token that stands for a picture"
    if why:
        raise _refused(path, settings, why)
    return model


def walks(text: Any) -> bool:
    """Whether a decoder has recurrent layers, in which the family of its text model keeps rows apart."""
    others = set(getattr(text, "layer_types", None) or ()) - LAYERS
    return others in ({"linear_attention"}, {"conv"}) and text.model_type in FAMILIES


def _require_libraries(path: str, error: Exception) -> None:
    """Some towers are those of timm."""
    if isinstance(error, ImportError):
        how = "run: pip install -c constraints.txt -e '.[vision]'"
        raise EnvironmentProblem(f"{path}: {str(error).splitlines()[0]}; {how}") from error


def _refused(path: str, settings: Any, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"{path}: a model of type {settings.model_type!r} {why}; use {SIMILAR}")


def auto_class(settings: Any) -> Any:
    """Some that see are listed among the text models alone."""
    import transformers

    seeing = transformers.AutoModelForImageTextToText
    known = type(settings) in seeing._model_mapping or seeing.__name__ in (getattr(settings, "auto_map", None) or ())
    return seeing if known else transformers.AutoModelForCausalLM


def _tokens_of(settings: Any, kinds: Iterable[str] = MEDIA_TOKENS) -> list[Any]:
    parts = [settings, *(getattr(settings, f"{tower}_config", None) for tower in ("vision", "audio"))]
    found = (getattr(part, name, None) for kind in kinds for name in MEDIA_TOKENS[kind] for part in parts)
    return [one for one in found if one is not None]


def any_family(family: Family, trust_remote_code: bool) -> Family:
    """The family of a folder, from its processor and a model without weights."""
    model = gate(family.path, trust_remote_code=trust_remote_code)
    settings = model.config
    ids = [i for one in _tokens_of(settings) for i in (one if isinstance(one, Sequence) else [one])]
    cut = (module.kernel_size for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    tower = getattr(settings, "vision_config", None)
    patch = getattr(tower, "patch_size", None) or next(cut, 1)  # configs of timm do not tell it
    blocks = BOTH_WAYS.get(settings.model_type, lambda text: "")(settings.get_text_config())
    side = patch if isinstance(patch, int) else patch[0]
    reader = PictureReader(family.path, ids, side, trust_remote_code=trust_remote_code)
    reader.one_by_one, reader.options = settings.model_type in ONE_BY_ONE, ASKED.get(settings.model_type, {})
    plain = replace(family.chat, reserved=tuple(dict.fromkeys((*family.chat.reserved, *reader.markers.values()))))

    def text_of(kind: str, before: str, after: str) -> str:
        blank = Media(kind=kind, hash="", width=1, height=1, path="", frames=(0, 0), fps=1.0)
        return plain.text_of([Message(role="user", parts=(before, blank, after))], False)

    try:
        reader.frame(text_of)
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        why = f"has a processor that fails at a picture in a chat ({type(error).__name__}: {error})"
        raise _refused(family.path, settings, why) from error
    text = settings.get_text_config()
    banned = np.zeros(text.vocab_size, dtype=bool)
    known = min(len(banned), len(family.banned))
    banned[:known], banned[known:] = family.banned[:known], True
    banned[[i for i in special(reader) - plain.eos_ids if i < len(banned)]] = True
    positions = text_or_model_positions(model, reader)
    media_ids = torch.from_numpy(reader.media_ids)

    def embed(model: Any, ids: Tensor, places: Tensor, features: Tensor) -> dict[str, Any]:
        kinds = {}
        for name, table in reader.kinds.items():
            kinds[name] = torch.zeros_like(ids)
            for token, value in table:
                kinds[name] = kinds[name].masked_fill(ids == token, value)
        return decoder_inputs(model, ids, places, features, to_device(media_ids, ids.device), kinds)

    return replace(
        family,
        spec=replace(
            family.spec,
            # Of a folder with more than one model only the class itself finds its part.
            auto_class=(type(model) if family.spec.section else auto_class(settings)).__name__,
            towers=towers_of(model),
            media_tokens={kind: MEDIA_TOKENS[kind][0] for kind in reader.frames},
            prepare=FAMILIES[text.model_type].prepare if walks(text) else family.spec.prepare,
        ),
        chat=replace(plain, expand=partial(expand, reader), ids_of=reader.ids_of, placeholders=reader.placeholders),
        vocabulary=len(banned),
        banned=banned,
        max_positions=max_positions(text.to_dict()),
        axes=len(positions(np.zeros(1, np.int64), ())),
        measure=reader.measure,
        positions=positions,
        picture=reader.picture,
        cache=lambda media: reader.kept,
        media=reader.host_media,
        features=picture_features,
        embed=embed,
        vision=lambda spans, device, dtype: cast(reader.arguments(spans), device, dtype),
        unit=reader.unit,
        budget=reader.budget or family.budget,
        blocks=blocks,
        reader=reader,
    )


def towers_of(model: Any) -> dict[str, tuple[str, ...]]:
    """Prefixes of parameters by the tower that they belong to: the decoder and the head are `llm`; of the rest, what is
    named like a bridge is `projector`, what hears is `audio`, and what makes pictures is `drawing`.
    """
    decoder = decoder_of(model)
    inside = decoder is model.base_model  # its towers are inside it
    own = {id(p) for n, p in decoder.named_parameters() if not inside or n.startswith(("layers.", "norm."))}
    own |= {id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    senses = [("projector", BRIDGE), ("audio", re.compile("audio")), ("vision", re.compile(""))]
    if hasattr(model.base_model, "generation_head"):
        senses.insert(0, ("drawing", DRAWING))
    tower = {
        name: "llm" if id(p) in own else next(sense for sense, known in senses if known.search(name))
        for name, p in model.named_parameters()
    }
    found: dict[str, list[str]] = {sense: [] for sense in ("drawing", "projector", "audio", "vision", "llm")}
    waiting = [(f"{name}.", part) for name, part in model.named_children()]
    while waiting:  # the largest parts that belong to one tower
        prefix, part = waiting.pop(0)
        held = {sense for name, sense in tower.items() if name.startswith(prefix)}
        if len(held) == 1:
            found[held.pop()].append(prefix)
            continue
        waiting += [(f"{prefix}{name}.", inner) for name, inner in part.named_children()]
        direct = [prefix + name for name, _ in part.named_parameters(recurse=False)]
        for name in filter(tower.__contains__, direct):
            found[tower[name]].append(name)
    return {sense: tuple(prefixes) for sense, prefixes in found.items() if prefixes}


def leave_drawing(model: Any) -> None:
    """Nothing reads these weights here, and decay would move them."""
    drawing = towers_of(model).get("drawing", ())
    for name, parameter in model.named_parameters():
        if name.startswith(drawing):
            parameter.requires_grad_(False)


def skip_unread_layers(model: Any) -> None:
    """Layers behind those that the config reads features from are not run, nor is a pooling head. Their weights are
    kept and saved.
    """
    tower: Any = getattr(model.base_model, "vision_tower", None)
    chosen = getattr(model.config, "vision_feature_layer", -1)
    layers = list(getattr(getattr(tower, "encoder", None), "layers", ()))
    if model.config.model_type not in SELECTED or not layers:
        return
    # Of the hidden states that are chosen from, the first are no layer's.
    states = [chosen] if isinstance(chosen, int) else chosen
    read = max(index if index >= 0 else len(layers) + 1 + index for index in states)
    for part in (*layers[read:], *([tower.head] if hasattr(tower, "head") else [])):
        part.forward, part.unread = _as_given, True


def _as_given(hidden_states: Any, *arguments: Any, **options: Any) -> Any:
    return hidden_states


def _prepare(model: Any) -> None:
    leave_drawing(model)
    skip_unread_layers(model)
    seeing = model.base_model
    if "num_frames_per_video" in inspect.signature(getattr(seeing, "get_video_features", _prepare)).parameters:
        seeing.get_video_features = partial(_video_features, seeing)


def _video_features(seeing: Any, pixels: Tensor, *places: Any, **options: Any) -> Any:
    """Gemma 4's own forward does not say how many frames each video has before transformers 5.23; the features of all
    frames stand one after the other anyway.
    """
    frames = options.pop("num_frames_per_video", None)
    frames = torch.tensor([len(pixels)]) if frames is None else frames
    return type(seeing).get_video_features(seeing, pixels, *places, num_frames_per_video=frames, **options)


def text_or_model_positions(model: Any, reader: PictureReader) -> Any:
    """(ids, spans) → [axes, length], by the model's own function where it has one."""
    skeleton = next((part for part in (model, model.base_model) if hasattr(part, "get_rope_index")), None)
    if skeleton is None:

        def counted(ids: np.ndarray, spans: tuple[MediaSpan, ...]) -> np.ndarray:
            reader.require_compatible(spans)
            return np.arange(len(ids))[None]

        return counted
    parameters = inspect.signature(skeleton.get_rope_index).parameters

    @lru_cache(SIZES_KEPT)
    def until_last(shown: bytes, places: tuple[tuple[int, int], ...], inside: tuple[Media, ...]) -> np.ndarray:
        """Up to a little behind the last medium; from there they count on."""
        ids = np.frombuffer(shown, dtype=np.int64)[None]
        kinds = np.zeros_like(ids)
        told: dict[str, list[Tensor]] = {}  # of each medium
        for (start, length), media in zip(places, inside, strict=True):
            row = reader.blank_row(*reader.size(media))
            kinds[0, start : start + length] = row.told.get("mm_token_type_ids", 1)
            renamed = {new: make(row) for new, (old, make) in RENAMED.items() if old in row}
            for name, value in (row | renamed).items():
                if name in parameters and name not in row.told and name not in ALWAYS:
                    told.setdefault(name, []).append(torch.from_numpy(value))
        options = {
            "mm_token_type_ids": torch.from_numpy(kinds),
            "attention_mask": torch.ones(ids.shape, dtype=torch.int64),
            **{name: torch.cat(values) for name, values in told.items()},
        }
        given = {name: value for name, value in options.items() if name in parameters}
        found, _ = skeleton.get_rope_index(torch.tensor(ids), **given)
        return found[:, 0].long().numpy()

    def positions(ids: np.ndarray, spans: tuple[MediaSpan, ...]) -> np.ndarray:
        reader.require_compatible(spans)
        shown = ids[: spans[-1].end + BEHIND].astype(np.int64) if spans else np.zeros(1, np.int64)
        places = tuple((span.start, span.length) for span in spans)
        found = until_last(shown.tobytes(), places, tuple(span.media for span in spans))
        after = np.arange(len(ids) - len(shown)) + 1 + found.max(initial=-1)
        return np.concatenate([found, np.tile(after, (len(found), 1))], axis=1)

    return positions


GENERIC = FamilySpec(
    auto_class="AutoModelForImageTextToText",
    towers={"llm": ()},
    placeholders=(),
    media_tokens={"image": MEDIA_TOKENS["image"][0]},
    whole=False,
    beside=("talker.", "code2wav."),
    prepare=_prepare,
    finish=any_family,
    prove=prove,
)
