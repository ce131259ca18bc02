"""Qwen2-Audio: half a minute of sound as 3,000 mel frames, one placeholder token per four of them.

A sound becomes mel frames once per content; the tower always sees half a minute, silence at its end
masked. Legend: N sounds, B mel bins, F mel frames of half a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from saccade.media.images import ImageError
from saccade.media.kinds import KINDS
from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.models.families import FamilySpec
from saccade.models.families.text import positions
from saccade.types import Media, MediaSpan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HOP = 160  # samples between two mel frames
CACHE_BYTES = 1 << 30  # about 700 sounds


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = mel_cache(processor, padded=True)
    return {
        "axes": 1,
        "measure": measure,
        "positions": positions,
        "picture": _no_picture,
        "untouched": lambda tokens, pixels: {},
        "cache": lambda media: kept,
        "media": partial(host_media, cache=kept),
        "features": features,
        "vision": partial(forward_arguments, cache=kept),
        "unit": 1,
    }


def mel_cache(settings: Mapping[str, Any], *, padded: bool) -> ImageCache:
    """`padded`: all are as long as the longest sound that the model hears."""
    make = partial(mel_frames, settings=settings, padded=padded)
    return ImageCache(CACHE_BYTES, make=make, key=lambda media: media.key)


def measure(media: Media) -> tuple[tuple[int, int, int], int]:
    """(1, 1, mel frames), and the tokens that convolution and pooling leave of them."""
    if media.kind != "audio":
        raise ImageError(
            f"this model hears and does not see, but a row holds {KINDS[media.kind].article} "
            f"({media.path or media.hash[:12]})"
        )
    frames = -(-media.width // HOP)
    return (1, 1, frames), (_convolved(frames) - 2) // 2 + 1


def _convolved(frames: int) -> int:
    return (frames - 1) // 2 + 1


def mel_frames(media: Media, *, settings: Mapping[str, Any], padded: bool) -> np.ndarray:
    """[B, F] float32; without padding F are those of the sound."""
    from transformers import WhisperFeatureExtractor

    extractor: Any = WhisperFeatureExtractor.from_dict(dict(settings))
    samples, options = DECODED.get(media), {"sampling_rate": extractor.sampling_rate}
    if padded:
        return np.array(extractor(samples, **options)["input_features"][0], np.float32)
    # The last frames look past the end, where padding would have put silence.
    made = extractor(np.pad(samples, (0, extractor.n_fft)), padding=False, **options)
    return np.array(made["input_features"][0][:, : measure(media)[0][2]], np.float32)


def _no_picture(media: Media) -> NoReturn:
    raise AssertionError("no picture is made of a sound")


# -- tensors ---------------------------------------------------------------------------------------


def host_media(spans: Sequence[MediaSpan], *, cache: ImageCache) -> Mapping[str, Any]:
    """Mel frames, what the tower may attend to, and which rows of its output are tokens."""
    import torch

    mels = np.stack(cache.get_all([span.media for span in spans]))
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


def forward_arguments(
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


SPEC = FamilySpec(
    auto_class="Qwen2AudioForConditionalGeneration",
    towers={
        "projector": ("model.multi_modal_projector.",),
        "audio": ("model.audio_tower.",),
        "llm": ("model.language_model.",),
    },
    bind=bind,
    placeholders=("audio_token_index",),
    media_tokens={"audio": "audio_token_index"},
)
