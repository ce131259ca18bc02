"""Families that hear.

Qwen2-Audio: half a minute of sound as 3,000 mel frames, one placeholder token per four of them. A
sound becomes mel frames once per content; the tower always sees half a minute, silence at its end
masked.

The thinker of Qwen2.5-Omni, which reads: images and videos as Qwen2.5-VL does, sounds in windows of
two seconds, three position axes. A place in time is 40 milliseconds, of a sound (one token each) and
of a video alike. The sound inside a video is not heard: give it as a separate sound.

Legend: N sounds, B mel bins, F mel frames of half a minute, or of all sounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.models.families import FamilySpec, qwen_vl
from saccade.types import Media, MediaSpan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HOP = 160  # samples between two mel frames
CACHE_BYTES = 1 << 30  # about 700 sounds


def bind_audio(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = mel_cache(processor, padded=True)

    def host_media(spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """Mel frames, what the tower may attend to, and which rows of its output are tokens."""
        import torch

        mels = np.stack(kept.get_all([span.media for span in spans]))
        half = _convolved(mels.shape[-1])
        heard = np.array([_convolved(span.grid[2]) for span in spans])
        rows = [np.arange(span.length) + number * (half // 2) for number, span in enumerate(spans)]
        return {
            "mels": torch.from_numpy(mels),
            "mask": torch.from_numpy(np.arange(half) < heard[:, None])[:, None, None],  # [N, 1, 1, F/2]
            "rows": torch.from_numpy(np.concatenate(rows)),
        }

    def features(model: Any, media: Mapping[str, Any]) -> Tensor:
        """[media tokens, hidden size] of what `host_media` made, once it is on the model's device."""
        inner = model.base_model
        heard = inner.audio_tower(media["mels"], attention_mask=media["mask"]).last_hidden_state
        return inner.multi_modal_projector(heard.flatten(0, 1)[media["rows"]])

    return {
        "measure": measure_sound,
        "cache": lambda media: kept,
        "media": host_media,
        "features": features,
        "vision": partial(audio_arguments, cache=kept),
    }


def mel_cache(settings: Mapping[str, Any], *, padded: bool) -> ImageCache:
    """A cache of mel frames [B, F] float32. `padded`: F is that of the longest sound that the model hears."""

    def make(media: Media) -> np.ndarray:
        from transformers import WhisperFeatureExtractor

        extractor: Any = WhisperFeatureExtractor.from_dict(dict(settings))
        samples, options = DECODED.get(media), {"sampling_rate": extractor.sampling_rate}
        if padded:
            return np.array(extractor(samples, **options)["input_features"][0], np.float32)
        # The last frames look past the end, where padding would have put silence.
        made = extractor(np.pad(samples, (0, extractor.n_fft)), padding=False, **options)
        return np.array(made["input_features"][0][:, : measure_sound(media)[0][2]], np.float32)

    return ImageCache(CACHE_BYTES, make=make)


def measure_sound(media: Media) -> tuple[tuple[int, int, int], int]:
    """(1, 1, mel frames), and the tokens that convolution and pooling leave of them."""
    frames = -(-media.width // HOP)
    return (1, 1, frames), (_convolved(frames) - 2) // 2 + 1


def _convolved(frames: int) -> int:
    return (frames - 1) // 2 + 1


def audio_arguments(
    spans: Sequence[MediaSpan], device: torch.device, dtype: torch.dtype, *, cache: ImageCache
) -> Mapping[str, Any]:
    """input_features [N, B, F] and their mask of transformers' own forward; nothing for text."""
    import torch

    if not spans:
        return {}
    made = [torch.tensor(mels.T) for mels in cache.get_all([span.media for span in spans])]
    mels = torch.nn.utils.rnn.pad_sequence(made, batch_first=True)
    frames = torch.tensor([span.grid[2] for span in spans])
    mask = torch.arange(mels.shape[1]) < frames[:, None]
    return {"input_features": mels.mT.to(device, dtype), "feature_attention_mask": mask.long().to(device)}


AUDIO = FamilySpec(
    auto_class="Qwen2AudioForConditionalGeneration",
    towers={
        "projector": ("model.multi_modal_projector.",),
        "audio": ("model.audio_tower.",),
        "llm": ("model.language_model.",),
    },
    bind=bind_audio,
    placeholders=("audio_token_index",),
    media_tokens={"audio": "audio_token_index"},
)


# -- Qwen2.5-Omni ----------------------------------------------------------------------------------


def bind_omni(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = {"fullatt_block_indexes": (), **config["vision_config"]}  # the newer tower, always
    seeing = qwen_vl.bind({**config, "vision_config": vision}, processor)
    frames = int(vision.get("temporal_patch_size", 2))
    pace = config.get("position_id_per_seconds", 25)
    window = int(config.get("audio_config", {}).get("n_window", 100))
    mels = mel_cache(processor, padded=False)

    def clock(layers: np.ndarray, fps: float) -> np.ndarray:
        # Rounded as often as transformers does it.
        return layers.astype(np.float32) * np.float32(frames / fps) * np.float32(pace)

    def host_sounds(spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """Mel frames cut into windows, and what the tower would otherwise read back from the device
        to find them.
        """
        import torch
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as theirs

        sounds = torch.from_numpy(np.concatenate(mels.get_all([s.media for s in spans]), axis=1))
        lengths_of_all = torch.tensor([span.grid[2] for span in spans])
        windows, lengths = theirs.chunk_and_pad_features(sounds, lengths_of_all, window)  # of [B, F]
        segments = theirs.get_audio_cu_seqlens(lengths)
        return {
            "padded_feature": windows,
            "chunk_lengths": lengths,
            "valid_indices": theirs.get_valid_indices(lengths),
            "pool_indices": theirs.get_pool_indices(lengths_of_all),
            "cu_seqlens": segments,
            "max_seqlen": int(segments.diff().max()),
        }

    def arguments(spans: Sequence[MediaSpan], device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
        """What transformers' own forward takes: inputs of both towers, seconds under another name."""
        seen, heard = apart(spans, "audio")
        made = {**seeing["vision"](seen, device, dtype), **audio_arguments(heard, device, dtype, cache=mels)}
        if "second_per_grid_ts" in made:
            made["video_second_per_grid"] = made.pop("second_per_grid_ts")
        return made

    hearing = {
        "measure": measure_sound,
        "cache": lambda media: mels,
        "media": host_sounds,
        "features": lambda model, media: model.audio_tower(**media).last_hidden_state,
    }
    places = partial(qwen_vl.positions, merge=int(vision.get("spatial_merge_size", 2)), clock=clock)
    return {**seeing, **joined(seeing, "audio", hearing), "positions": places, "vision": arguments}


def apart(spans: Sequence[MediaSpan], kind: str) -> tuple[list[MediaSpan], list[MediaSpan]]:
    """Those of other kinds, and those of this one."""
    others = [span for span in spans if span.media.kind != kind]
    return others, [span for span in spans if span.media.kind == kind]


def joined(others: Mapping[str, Any], kind: str, tower: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a family whose media of one kind have a separate tower: `tower` are the fields for
    that kind, `others` for the rest.
    """
    import torch

    fields = {"others": others, "tower": tower}

    def host_media(spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """What each of them reads, and the order in which their rows are shown."""
        parts = zip(fields, apart(spans, kind), strict=True)
        made = {name: fields[name]["media"](part) for name, part in parts if part}
        if len(made) == 2:
            later = np.repeat([s.media.kind == kind for s in spans], [s.length for s in spans])
            made["rows"] = torch.from_numpy(np.argsort(np.argsort(later, kind="stable")))
        return made

    def features(model: Any, media: Mapping[str, Any]) -> Tensor:
        made = [each["features"](model, media[name]) for name, each in fields.items() if name in media]
        if "rows" not in media:
            return made[0]
        first, last = made
        if more := first.shape[1] - last.shape[1]:  # what later layers add to the others is nothing here
            last = torch.nn.functional.pad(last, (0, more))
        return torch.cat([first, last])[media["rows"]]

    return {
        "measure": lambda media: (tower if media.kind == kind else others)["measure"](media),
        "cache": lambda media: (tower if media.kind == kind else others)["cache"](media),
        "media": host_media,
        "features": features,
    }


OMNI_MEDIA = {kind: f"{kind}_token_index" for kind in ("image", "video", "audio")}
OMNI_BRACKETS = [f"{tower}_{end}_token_id" for tower in ("vision", "audio") for end in ("start", "end")]
# Of a whole checkpoint the thinker is loaded: what speaks (talker, token2wav) learns nothing here.
OMNI = FamilySpec(
    auto_class="Qwen2_5OmniThinkerForConditionalGeneration",
    towers={
        "projector": ("visual.merger.", "audio_tower.proj"),
        "vision": ("visual.",),
        "audio": ("audio_tower.",),
        "llm": ("model.",),
    },
    bind=bind_omni,
    placeholders=(*OMNI_MEDIA.values(), *OMNI_BRACKETS),
    media_tokens=OMNI_MEDIA,
    segments=True,
    prepare=qwen_vl.patch_embedding_as_matrix,
    section="thinker_config",
    beside=("talker.", "token2wav."),
)
