"""Sounds as references, and decoded as all models here expect them: one channel at 16 kHz.

WAV files of integers are read by the standard library; other files (FLAC, OGG, MP3, WAV of floats)
by the package soundfile if it is installed; only this file imports it. Opening a sound reads its
header; `decode` returns samples. Knows nothing of models.

    >>> open_sound({"array": [0.0] * 8000, "sampling_rate": 8000}).width    # one second
    16000
"""

import importlib.util
import io
import struct
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import DataConfig
from saccade.errors import EnvironmentProblem
from saccade.media.blob_file import encoded
from saccade.media.image_files import ImageError
from saccade.media.kinds import MediaKind
from saccade.media.media_files import DEFAULT_LIMITS, Encoded, make_media, read
from saccade.types import Media

RATE = 16_000
LONGEST = 30 * RATE
SHORTEST = RATE // 20  # samples that give a model at least one token
# Sample width in bytes → dtype and full scale. 24-bit samples are shifted into 32 bits.
WIDTHS = {1: ("u1", 128.0), 2: ("<i2", 2.0**15), 3: ("<i4", 2.0**31), 4: ("<i4", 2.0**31)}


def open_sound(source: Any, *, base: Path | None = None, limits: DataConfig = DEFAULT_LIMITS) -> Media:
    """A reference to the sound in `source`; of a long one the first 30 seconds."""
    file = _encoded(source, base, limits)
    name = file.name
    samples, rate = _header(file.data, name)
    length = round(samples * RATE / rate)
    if length < SHORTEST:
        raise ImageError(f"{name}: {length / RATE:.3f} seconds of sound are too short")
    if length > LONGEST and limits.long_audio == "reject":
        raise ImageError(f"{name}: {length / RATE:.1f} seconds; data.long_audio=truncate keeps the first 30")
    return make_media(file, "audio", width=min(length, LONGEST), height=1)


def _encoded(source: Any, base: Path | None, limits: DataConfig) -> Encoded:
    if isinstance(source, Mapping) and source.get("array") is not None:
        try:
            return _as_wav(np.asarray(source["array"], np.float32), int(source.get("sampling_rate") or RATE))
        except (ValueError, TypeError, wave.Error, struct.error) as error:
            hint = f"a sound is a list of numbers, its sampling_rate a number such as {RATE}"
            raise ImageError(f"array: {error}; {hint}") from None
    if isinstance(source, np.ndarray):
        return _as_wav(source, RATE)
    return read(source, base, limits)


def _as_wav(samples: np.ndarray, rate: int) -> Encoded:
    name = f"array {list(samples.shape)}"
    if samples.ndim not in (1, 2) or not samples.size or samples.dtype.kind != "f":
        raise ImageError(f"{name}: a sound is float [samples] or [channels, samples] within -1..1")
    mono = samples if samples.ndim == 1 else samples.mean(0)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((np.clip(mono, -1, 1) * 32767).round().astype("<i2").tobytes())
    return Encoded(name, file.getvalue())


def _header(data: bytes, name: str) -> tuple[int, int]:
    """Returns the number of samples and the sampling rate."""
    if (found := _wave(data, name)) is None:
        with _soundfile(data, name) as file:
            return file.frames, file.samplerate
    form, raw = found
    return len(raw) // (form.sampwidth * form.nchannels), form.framerate


def decode(media: Media) -> np.ndarray:
    """float32 [samples] at 16 kHz within -1..1."""
    name = media.path or f"sound {media.hash[:12]}"
    samples, rate = _samples(encoded(media), name)
    # Cut before resampling, so that samples after the end have no influence.
    mono = resampled(samples.mean(1)[: -(-media.width * rate // RATE)], rate)
    if len(mono) < media.width:
        raise ImageError(f"{name}: shorter than its header says")
    return np.ascontiguousarray(mono[: media.width], dtype=np.float32)


def _samples(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """float32 [samples, channels] and their rate."""
    if (found := _wave(data, name)) is None:
        with _soundfile(data, name) as file:
            return file.read(dtype="float32", always_2d=True), file.samplerate
    (channels, width, rate, *_), raw = found
    raw = raw[: len(raw) // width * width]
    if width == 3:
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        raw = padded.tobytes()
    kind, scale = WIDTHS[width]
    values = np.frombuffer(raw, kind).astype(np.float32)
    values = (values - 128 if width == 1 else values) / scale
    return values[: len(values) // channels * channels].reshape(-1, channels), rate


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample to 16 kHz by truncating or padding the spectrum."""
    if rate == RATE:
        return samples
    length = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)
    kept = np.zeros(length // 2 + 1, spectrum.dtype)
    common = min(len(kept), len(spectrum))
    kept[:common] = spectrum[:common]
    return np.fft.irfft(kept, length) * (length / len(samples))


def _wave(data: bytes, name: str) -> tuple[Any, bytes] | None:
    """Parameters and raw samples (perhaps fewer than the header says) of a file that `wave` can read, else None."""
    try:
        with wave.open(io.BytesIO(data)) as reader:
            form, raw = reader.getparams(), reader.readframes(reader.getnframes())
        damaged = form.sampwidth not in WIDTHS or form.framerate < 1
    except (wave.Error, EOFError) as error:
        is_wav = data[:4] == b"RIFF" and b"WAVE".startswith(data[8:12])
        if not is_wav or "unknown format" in str(error):
            return None
        damaged = True
    if damaged:
        raise ImageError(f"{name}: a WAV file with a damaged header")
    return form, raw


def _soundfile(data: bytes, name: str) -> Any:
    if importlib.util.find_spec("soundfile") is None:
        what = "only WAV files of whole numbers are read without the package soundfile"
        raise EnvironmentProblem(f"{name}: {what}: pip install soundfile")
    import soundfile

    try:
        return soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise ImageError(f"{name}: not a readable sound file: {error}") from None


KIND = MediaKind(
    article="a sound",
    open=open_sound,
    decode=decode,
    columns=("audios", "audio"),
    keys=("audio", "audio_url", "input_audio"),
)
