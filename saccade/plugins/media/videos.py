"""Videos as references: which frames of which file are shown, at how many per second.

A video is a film file, an animation, a folder or list of images, or a uint8 array of frames.
Animations (GIF, WebP, PNG) and images need only Pillow; a film file needs OpenCV, which only this
file imports. Opening a video reads headers; `decode` returns pixels.

    >>> sampled(300, rate=30.0, fps=2.0, least=4, most=768)[:3]    # ten seconds: 20 frames
    (0, 15, 30)
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.config import DataConfig
from saccade.errors import EnvironmentProblem
from saccade.media import image_files, images
from saccade.media.blob_file import encoded, require_unchanged, shown_hash
from saccade.media.images import ImageError
from saccade.media.kinds import PAIR, PIXELS, MediaKind
from saccade.media.media_files import DEFAULT_LIMITS, SCHEMES, make_media, read, resolve_path
from saccade.types import Media

DEFAULT_DURATION = 100  # milliseconds of a frame without a duration
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class Film(NamedTuple):
    """Contents of a file's header."""

    frames: int
    rate: float  # frames per second
    width: int
    height: int


def open_video(source: Any, *, base: Path | None = None, limits: DataConfig = DEFAULT_LIMITS, **options: Any) -> Media:
    """A reference to the video in `source`. From a file, `fps` frames per second are sampled, unless
    `frames` lists their indices. A list of images counts as sampled already, with `fps` per second.
    `options` override those of the data section: fps, min_frames, max_frames, min_pixels, max_pixels.
    """
    most = max(limits.max_frame_pixels, limits.min_pixels)
    shown = limits.model_copy(update={"max_pixels": most, **options})
    budget: dict[str, Any] = {"min_pixels": shown.min_pixels, "max_pixels": shown.max_pixels}
    listed = _pictures(source, base, limits)
    if listed is not None:
        return replace(_from_pictures(listed, shown.fps, shown.max_frames, limits, base), **budget)
    file = read(source, base, limits)
    film = _probe_animation(file.data, file.name) if _is_animation(file.data) else _probe_film(*file)
    if film.width * film.height > limits.max_megapixels * 1e6:
        size = f"frames of {film.width}x{film.height}"
        raise ImageError(f"{file.name}: {size}, data.max_megapixels is {limits.max_megapixels:g}")
    spread: dict[str, Any] = {"fps": shown.fps, "least": shown.min_frames, "most": shown.max_frames}
    chosen = tuple(options.get("frames") or sampled(film.frames, rate=film.rate, **spread))
    if max(chosen) >= film.frames or len(chosen) % PAIR:
        raise ImageError(f"{file.name}: frames must be an even number of indices below {film.frames}, not {chosen}")
    pace = len(chosen) / film.frames * film.rate
    shape = {"width": film.width, "height": film.height}
    return make_media(file, "video", **shape, frames=chosen, fps=pace, rate=film.rate, **budget)


def sampled(total: int, *, rate: float, fps: float, least: int, most: int) -> tuple[int, ...]:
    """Indices of evenly spread frames, an even number: `fps` per second, at least `least`, at most `most`."""
    wanted = min(max(total / rate * fps, least), most, total)
    count = max(PAIR, int(wanted) // PAIR * PAIR)
    return tuple(int(index * total / count) for index in range(count))


def metadata(frames: Sequence[int], fps: float, rate: float) -> dict[str, Any]:
    """The time of each frame, in the format of processors and engines."""
    rate = rate or fps
    total = round(len(frames) * rate / fps)
    return {"fps": rate, "frames_indices": [*frames], "total_num_frames": total, "duration": total / rate}


# -- images --------------------------------------------------------------------------------------


def _pictures(source: Any, base: Path | None, limits: DataConfig) -> list[Any] | None:
    """The frames of a source that is an array, a list or a folder; None for a file."""
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise ImageError(f"array {list(source.shape)}: a video is [frames, height, width, 3]")
    if isinstance(source, list | tuple | np.ndarray):
        return list(source)
    if isinstance(source, str | Path) and len(str(source)) < 1024 and not str(source).startswith(tuple(SCHEMES)):
        folder = resolve_path(source, base, limits)
        if os.path.isdir(folder):
            return sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    return None


def _from_pictures(listed: Sequence[Any], fps: float, most: int, limits: DataConfig, base: Path | None) -> Media:
    if not listed:
        raise ImageError("a video without a frame")
    count = min(len(listed), max(PAIR, most // PAIR * PAIR))
    kept = [listed[int(index * len(listed) / count)] for index in range(count)]
    opened = tuple(images.open_media(one, base=base, limits=limits) for one in kept)
    sizes = {(one.width, one.height) for one in opened}
    if len(sizes) > 1:
        raise ImageError(f"frames of one video differ in size: {sorted(sizes)[:3]}")
    frames = tuple(range(count)) + ((count - 1,) if count % PAIR else ())
    content, shown = " ".join(one.hash for one in opened), fps * count / len(listed)
    size = sizes.pop()
    media = Media(kind="video", hash=content, width=size[0], height=size[1], pictures=opened, frames=frames, fps=shown)
    return replace(media, hash=shown_hash(media, content))


# -- files -----------------------------------------------------------------------------------------


def decode(media: Media, shrink: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
    """The frames of a video, uint8 [frames, height, width, 3]. Each is shrunk as soon as it is read,
    since hundreds of large frames would not fit into memory.
    """
    frames = {index: shrink(frame) if shrink else frame for index, frame in _frames(media)}
    return np.stack([frames[index] for index in media.frames])


def _frames(media: Media) -> Iterator[tuple[int, np.ndarray]]:
    """(index, frame) of each frame of the video, without repetitions."""
    missing = set(media.frames)
    if media.pictures:
        yield from ((index, images.decode(media.pictures[index])) for index in sorted(missing))
        return
    name, data = media.path or f"video {media.hash[:12]}", b""
    if media.path is None or _is_animation(_start(media.path)):
        data = encoded(media)
    else:  # OpenCV reads a film from its path, without loading the whole file
        require_unchanged(media)
    wanted = sorted(missing)
    animated = _is_animation(data)
    read = _animation_frames(name, data, wanted) if animated else _film_frames(name, data, media.path, wanted)
    for index, frame in read:
        if frame.shape != (media.height, media.width, 3):
            seen = f"{frame.shape[1]}x{frame.shape[0]}"
            raise ImageError(f"{name}: frame {index} is {seen}, its header says {media.width}x{media.height}")
        yield index, frame
        missing.discard(index)
    if missing:
        raise ImageError(f"{name}: frame {min(missing)} cannot be decoded")


def _start(path: str) -> bytes:
    """The first bytes of a file, which identify its format."""
    with open(path, "rb") as file:
        return file.read(12)


def _is_animation(data: bytes) -> bool:
    return data[:4] in (b"GIF8", b"\x89PNG") or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _probe_animation(data: bytes, name: str) -> Film:
    with image_files.open_image(data, name) as image:
        try:
            image.load()  # needed for the duration of a WebP frame
            frames = getattr(image, "n_frames", 1)
        except Exception as error:  # broken files make Pillow raise almost anything
            raise ImageError(f"{name}: cannot be decoded: {error}") from None
        return Film(frames, 1000 / (image.info.get("duration") or DEFAULT_DURATION), *image.size)


def _animation_frames(name: str, data: bytes, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    with image_files.open_image(data, name) as image:
        for index in wanted:
            try:
                image.seek(index)
                yield index, np.array(image_files.as_rgb(image))
            except Exception as error:
                raise ImageError(f"{name}: frame {index} cannot be decoded: {error}") from None


def _probe_film(name: str, data: bytes, path: str | None) -> Film:
    with _captured(name, data, path) as (cv2, capture):
        keys = ("FRAME_COUNT", "FPS", "FRAME_WIDTH", "FRAME_HEIGHT")
        frames, rate, width, height = (capture.get(getattr(cv2, f"CAP_PROP_{key}")) for key in keys)
    if frames < 1 or not rate > 0 or width < 1:
        raise ImageError(f"{name}: not a readable video file")
    return Film(int(frames), float(rate), int(width), int(height))


def _film_frames(name: str, data: bytes, path: str | None, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    with _captured(name, data, path) as (_, capture):
        for index in range(wanted[-1] + 1):
            good = capture.grab()
            if good and index in wanted:
                good, frame = capture.retrieve()
                if good:
                    yield index, np.ascontiguousarray(frame[:, :, ::-1])
            if not good:
                return


@contextmanager
def _captured(name: str, data: bytes, path: str | None) -> Iterator[tuple[Any, Any]]:
    """(cv2, opened capture). OpenCV reads only files, so data without a path is written to a temporary one."""
    if importlib.util.find_spec("cv2") is None:
        raise EnvironmentProblem(
            f"{name}: a film file needs OpenCV: pip install opencv-python-headless; animated GIF "
            "and WebP, folders and lists of pictures are read without it"
        )
    import cv2

    with tempfile.NamedTemporaryFile(suffix=".mp4") as copy:
        if path is None:
            copy.write(data)
            copy.flush()
        capture = cv2.VideoCapture(path or copy.name)
        try:
            yield cv2, capture
        finally:
            capture.release()


KIND = MediaKind(
    article="a video",
    open=open_video,
    decode=decode,
    columns=("videos", "video"),
    keys=("video", "video_url"),
    options=(*PIXELS, "fps", "min_frames", "max_frames", "frames"),
)
