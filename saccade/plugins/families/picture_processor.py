"""A folder's own processor, listened to: the text that it writes for a picture, a video or a sound, how many tokens
that has, and the tensors that the model reads of it. Its tokenizer is exchanged for one that notes the text which it is
given, so nothing here knows how tiles, rows, frames, brackets or breaks are written.

Token counts are those of a medium of the same size without content, kept by size. What stands between its first and its
last placeholder is inserted as ids; the text around it is encoded with that of the prompt. Several threads may ask at
once. Knows nothing of models.

    reader = PictureReader(path, media_ids=[151655], patch=14)
    grid, tokens = reader.measure(media)
"""

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from saccade.errors import ConfigError, DataError, EnvironmentProblem, SaccadeError
from saccade.media.images import ImageError
from saccade.media.kinds import KINDS
from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.models.families.qwen_vl import CACHE_BYTES, resized
from saccade.plugins.families.image_calls import ImageCalls, arrays
from saccade.plugins.families.picture_rows import SMALL, PictureRow, narrowed
from saccade.plugins.families.pixel_options import Options, call_options, options_of
from saccade.plugins.media.videos import metadata
from saccade.types import Media, MediaSpan


class Sense(NamedTuple):
    """How processors take a kind of media, and sizes whose text is searched, as `blank_row` takes them."""

    argument: str  # of their call
    token: str  # attribute of a processor: what a template writes for one
    parts: tuple[str, ...]  # one of these reads it
    sizes: tuple[tuple[Any, ...], ...]


SENSES = {
    "image": Sense("images", "image_token", ("image_processor",), ((60, 50), (400, 300), (50, 400))),
    "video": Sense("videos", "video_token", ("video_processor",), ((60, 50, "video", (0, 1, 2, 3), 2.0, 2.0),)),
    "audio": Sense("audio", "audio_token", ("feature_extractor", "audio_processor"), ((8_000, 1, "audio"),)),
}


class Shown(NamedTuple):
    """A medium as a processor is given it."""

    kind: str
    value: Any
    told: Mapping[str, Any] = MappingProxyType({})  # when the frames of a video are seen
    options: Options = MappingProxyType({})  # of the image processor, from the picture's pixel budget


# Texts around a medium, to compare what a processor writes between them.
AROUND = (("", ""), ("a", "b"), ("a ", " b"), ("\n", "\n"))
SIZES_KEPT = 16_384
SHAPES, ENLARGED = ((56, 42), (56, 28)), 20  # of pictures below any tile, and by how much more a large one has of it
BESIDE = "beside an image"  # behind a kind of media: in one row
ALWAYS = ("input_ids", "attention_mask")  # what processors say of tokens; what else they say is said to the model, too


class _Listening:
    """In the place of a tokenizer: notes what this thread gives it. Two threads at once would be an error of its."""

    def __init__(self, own: Any) -> None:
        self._own, self._lock, self.heard = own, threading.Lock(), threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.heard.text = text if isinstance(text, str) else text[0]
        with self._lock:
            return self._own(text, **options)


@contextmanager
def _failing_at(media: Media) -> Iterator[None]:
    """Whatever a processor raises makes the row of this medium a bad one."""
    try:
        yield
    except (SaccadeError, MemoryError):
        raise
    except Exception as error:
        what = f"the model's processor fails at it ({type(error).__name__}: {error})"
        raise ImageError(f"{media.path or media.hash[:12]}: {what}; leave it out") from error


class PictureReader:
    def __init__(self, path: str, media_ids: Sequence[int], patch: int, *, trust_remote_code: bool = False) -> None:
        """`patch`: the side of what the tower sees as one."""
        from transformers import AutoProcessor

        try:
            processor: Any = copy.copy(AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code))
            self.markers = {
                kind: getattr(processor, sense.token)
                for kind, sense in SENSES.items()
                if any(hasattr(processor, part) for part in sense.parts) and getattr(processor, sense.token, None)
            }
            self.markers["image"] = getattr(processor, "image_placeholder_token", processor.image_token)
        except (ImportError, OSError, ValueError, AttributeError) as error:
            how = "; run: pip install -c constraints.txt -e '.[vision]'" if "orchvision" in str(error) else ""
            raise EnvironmentProblem(f"{path}: its processor cannot be used here: {error}{how}") from error
        self.path, self.media_ids, self.patch = path, np.unique(media_ids), patch
        self.listening = processor.tokenizer = _Listening(processor.tokenizer)
        self.calls = processor.image_processor = ImageCalls(processor.image_processor)
        self.processor = processor
        self.placeholders = {"image": media_ids[0]}
        self.frames: dict[str, Sequence[tuple[str, str]]] = {"image": AROUND}
        self.refused: dict[str, str] = {}  # kinds that its processor has a word for, and why they are not taken
        self.pixels_read: set[str] = set()  # kinds of which they are, also where a size alone is asked for
        self.half: bool | None = None  # whether numbers are kept as bfloat16: all models that read them round them so
        self.one_by_one = False  # prompts are no batch whatever their shapes
        self.options: Mapping[str, bool] = {}  # of every call
        self.scales = True  # pictures are scaled down to their pixel budget before the processor sees them
        self.budget: Callable[[int, int], Options] | None = None  # options of the processor that keep to it instead
        self._budgets: dict[str, tuple[int, ...]] = {}
        self.blank_row = lru_cache(SIZES_KEPT)(self._blank_row)
        self.kept = ImageCache(CACHE_BYTES, make=self._row)

    def call(self, text: str, shown: Sequence[Shown], **options: Any) -> Mapping[str, Any]:
        given, options = {SENSES[one.kind].argument: list[Any]() for one in shown}, {**self.options, **options}
        cut = [one.options for one in shown if one.kind == "image"]
        if any(each != cut[0] for each in cut):
            why = f"its processor shows all pictures of a call alike, and here they have {cut[0]} and others"
            raise ConfigError(f"{self.path}: {why}; give them one pixel budget")
        options |= {"images_kwargs": dict(cut[0])} if cut and cut[0] else {}
        for one in shown:
            given[SENSES[one.kind].argument].append(one.value)
        if told := [dict(one.told) for one in shown if one.kind == "video"]:  # frames are chosen already
            options |= {"do_sample_frames": False, "video_metadata": told}
            given["videos"] = [given["videos"]]  # some want those of each text in a list
        made = self.processor(text=[text], **given, return_tensors="pt", **options)
        return {name: value for name, value in made.items() if hasattr(value, "is_floating_point")}

    # -- text --

    def frame(self, text_of: Callable[[str, str, str], str]) -> None:
        """Learn how a chat template shows media: some processors want them in their brackets. Kinds beside pictures
        that it does not show, or that the processor fails at, are not taken.
        """
        for kind, marker in self.markers.items():
            try:
                shown = [text_of(kind, *around).partition(marker) for around in AROUND]
                if all(found for _, found, _ in shown):
                    self.frames[kind] = [(before, after) for before, _, after in shown]
                elif kind != "image":
                    self.refuse(kind, "its chat template does not show one; try prompt.chat_template=FILE")
                if kind in self.frames and kind != "image":
                    self.placeholders[kind] = int(self.blank_row(*SENSES[kind].sizes[0]).ids[0])
            except Exception as error:
                if kind == "image":
                    raise
                self.refuse(kind, f"its processor fails at one ({type(error).__name__}: {error})")
        self._find_budget()

    def _find_budget(self) -> None:
        """Pictures are scaled down where that makes fewer tokens or patches, but for processors that cut a small one,
        too.
        """

        def row(size: tuple[int, int], *budget: int) -> PictureRow:
            return self.blank_row(*size, "image", *budget)

        def cost(size: tuple[int, int]) -> int:
            grid = row(size).grid
            return len(row(size).ids) + sum(math.prod(grid[n : n + 3]) for n in range(0, len(grid), 3))

        larger = {size: (size[0] * ENLARGED, size[1] * ENLARGED) for size in SHAPES}
        self.budget = options_of(self.calls.own)
        cut = self.budget and any(len(row(size, 1, 1).ids) < len(row(size).ids) for size in SHAPES)
        self.scales = not cut and any(cost(small) < cost(large) for small, large in larger.items())
        if self.scales:
            self.budget = None

    def refuse(self, kind: str, why: str) -> None:
        """A kind of media, or one beside pictures."""
        self.refused[kind] = why
        self.frames.pop(kind, None)

    @cached_property
    def apart(self) -> bool:
        """What is written for a medium does not depend on what stands around it."""
        for kind, frames in self.frames.items():
            size, once = SENSES[kind].sizes[0], frames[0]
            written = {self._written(self._heard(frame, *size), frame) for frame in frames}
            self.call(self.markers[kind].join(once) * 2, [self.blank(*size)] * 2)  # some number them
            if len(written) > 1 or (same := written.pop()) is None:
                return False
            if self.listening.heard.text != (once[0] + same + once[1]) * 2:
                return False
        return True

    def _heard(self, frame: tuple[str, str], *size: Any) -> str:
        shown = self.blank(*size)
        self.call(self.markers[shown.kind].join(frame), [shown])
        return self.listening.heard.text

    def _written(self, text: str, frame: tuple[str, str]) -> str | None:
        before, after = frame
        return text[len(before) : len(text) - len(after)] if text.startswith(before) and text.endswith(after) else None

    # -- media --

    def size(self, media: Media) -> tuple[Any, ...]:
        """What `blank_row` takes: width and height that the processor is given, and the pixel budget where it keeps to
        that itself, or more of a video or a sound.
        """
        if media.kind not in self.frames:
            taken = " and ".join(("text", *self.frames))
            what = f"{KINDS[media.kind].article} ({media.path or media.hash[:12]})"
            why = f": {self.refused[media.kind]}" if media.kind in self.refused else ""
            raise ImageError(f"this model takes {taken}, but a row holds {what}{why}")
        if media.kind == "audio":
            return media.width, 1, "audio"
        if media.kind == "image" and not self.scales:
            return media.width, media.height, "image", *self._same(media.min_pixels, media.max_pixels)
        scale = min(1.0, math.sqrt(media.max_pixels / (media.width * media.height)))
        size = max(1, int(media.width * scale)), max(1, int(media.height * scale))
        return (*size, "video", media.frames, media.fps, media.rate) if media.kind == "video" else size

    def picture(self, media: Media) -> np.ndarray:
        """[height, width, 3] bytes; of a video one for each frame, of a sound its samples."""
        if media.kind == "image" and not self.scales:
            return DECODED.get(media)
        resize = partial(resized, size=self.size(media)[:2])
        if media.kind == "video":
            return KINDS["video"].decode(media, resize)
        return KINDS["audio"].decode(media) if media.kind == "audio" else resize(DECODED.get(media))

    def shown(self, media: Media) -> Shown:
        found = self.picture(media)
        if media.kind == "video":
            told = metadata(media.frames, media.fps, media.rate)
            return Shown("video", torch.from_numpy(found).permute(0, 3, 1, 2), told)
        if media.kind == "audio":
            return Shown("audio", found)
        return Shown("image", Image.fromarray(found), options=self._within(media.min_pixels, media.max_pixels))

    def _within(self, *budget: int) -> Options:
        return call_options(self.budget(*budget)) if self.budget and budget else {}

    def _same(self, *budget: int) -> tuple[int, ...]:
        """The first budget that had these options: what is known of a size is kept once for all of them."""
        return self._budgets.setdefault(repr(self._within(*budget)), budget)

    def blank(self, width: int, height: int, kind: str = "image", *more: Any) -> Shown:
        """`more`: of a picture its pixel budget, of a video its frames and how many of them are seen in a second, as
        `metadata` takes them.
        """
        if kind == "audio":
            return Shown(kind, np.zeros(width, np.float32))
        if kind == "image":
            return Shown(kind, Image.new("RGB", (width, height)), options=self._within(*more))
        return Shown(kind, torch.zeros((len(more[0]), 3, height, width), dtype=torch.uint8), metadata(*more))

    def _blank_row(self, width: int, height: int, kind: str = "image", *more: Any) -> PictureRow:
        """What is known of every medium of a size, from one without pixels, or a black one where they are read: to
        resize and cut them takes ten times as long.
        """
        frame, tokenizer, whole = self.frames[kind][0], self.processor.tokenizer, None
        asked = self.markers[kind].join(frame)
        if kind != "audio" and kind not in self.pixels_read:
            frames = (len(more[0]),) if kind == "video" else ()
            nothing = torch.empty((*frames, 3, height, width), dtype=torch.uint8, device="meta")
            one = Shown(kind, nothing, metadata(*more)) if frames else Shown(kind, nothing, {}, self._within(*more))
            try:
                whole = self.call(asked, [one])
            except Exception:  # whatever it does with them; what else is wrong is wrong with a black one, too
                self.pixels_read.add(kind)
        if whole is None:
            whole = self.call(asked, [self.blank(width, height, kind, *more)])
        kept = {n: v for n, v in whole.items() if n == "input_ids" or (v.nbytes < SMALL and not v.is_meta)}
        row = PictureRow(arrays(kept))
        text = self._written(self.listening.heard.text, frame)
        text = self.listening.heard.text if text is None else text
        ids = row["input_ids"][0]
        places = np.flatnonzero(np.isin(ids, self.media_ids))
        if not len(places):
            raise EnvironmentProblem(f"{self.path}: its processor writes no placeholder for a picture")
        inside = slice(places[0], places[-1] + 1)
        row.ids, row.grid = ids[inside], self._grid(whole, len(places))
        row.told = {n: v[0, inside] for n, v in row.items() if v.shape == row["input_ids"].shape and n not in ALWAYS}
        first, last = tokenizer.convert_ids_to_tokens(row.ids[[0, -1]].tolist())
        start, end = text.index(first), text.rindex(last) + len(last)
        row.before, row.inside, row.after = text[:start], text[start:end], text[end:]
        return row

    def _grid(self, made: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
        for name, value in made.items():
            if name.endswith("grid_thw"):
                frames, rows, columns = value[0].tolist()
                return frames, rows, columns
            if name.endswith(("features_mask", "feature_attention_mask")):  # of a sound
                return 1, 1, int(value.sum())
            if name == "audio_input_features":
                return 1, 1, value.shape[1]
            if name.endswith("position_ids") and value.ndim == 3:  # places of patches
                return 1, 1, value.shape[1]
        if "target_sizes" in made:  # of slices, whose patches lie in one row
            patches = made["target_sizes"].prod(-1)
            return len(patches), 1, int(patches.sum()) // len(patches)
        seen = Counter[tuple[int, int]]()
        for name, value in made.items():
            if value.ndim > 3 and value.shape[-3] == 3 and "mask" not in name:
                seen[value.shape[-2:]] += math.prod(value.shape[:-3])
        sides = [(n, *(max(1, side // self.patch) for side in size)) for size, n in seen.items() if n]
        return tuple(number for each in sides for number in each) or (1, 1, tokens)

    def _made(self, shown: Shown) -> PictureRow:
        return PictureRow(arrays(self.call(self.markers[shown.kind].join(self.frames[shown.kind][0]), [shown])))

    def _row(self, media: Media) -> Any:
        shown, size, blank = self.shown(media), self.size(media), self.known(media)
        with _failing_at(media):
            row = self.calls.made(shown.value, shown.options, blank) if shown.kind == "image" else None
            if row is None:
                row = self._made(shown)
                if not np.array_equal(row["input_ids"], blank["input_ids"]):
                    what = "the processor writes other tokens for it than for a blank one of its size"
                    raise DataError(f"{media.path or media.hash[:12]}: {what}; leave it out")
                if shown.kind == "image":
                    self.calls.compare(shown.value, shown.options, size, row, blank)
        return narrowed(row, half=bool(self.half))

    def keep_for(self, dtype: torch.dtype) -> None:
        """A model of this precision reads the arrays, beside those before it."""
        half = dtype == torch.bfloat16 and self.half is not False
        if self.half and not half:
            self.kept = ImageCache(CACHE_BYTES, make=self._row)
        self.half = half

    def require_compatible(self, spans: Sequence[MediaSpan]) -> None:
        """Refuse media that may not stand in one row."""
        kinds = {span.media.kind for span in spans}
        for kind in kinds - {"image"} if "image" in kinds else ():
            if why := self.refused.get(f"{kind} {BESIDE}"):
                raise DataError(f"a row holds {KINDS[kind].article} {BESIDE}; {why}; leave one of them out")

    def ids_of(self, media: Media) -> np.ndarray:
        return self.known(media).ids

    def measure(self, media: Media) -> tuple[tuple[int, ...], int]:
        row = self.known(media)
        return row.grid, len(row.ids)

    def known(self, media: Media) -> PictureRow:
        with _failing_at(media):
            return self.blank_row(*self.size(media))

    @cached_property
    def unit(self) -> int:
        """The side of a square of bytes that a token costs."""
        size = SENSES["image"].sizes[1]
        whole = self._made(self.blank(*size))
        return math.isqrt(whole.nbytes // 3 // len(self.blank_row(*size).ids)) + 1

    # -- tensors --

    def host_media(self, spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """For `door.picture_features`: prompts whose tensors have equal shapes are a batch."""
        named = {span.media.key: span.media for span in spans}
        rows: dict[Any, Any] = dict(zip(named, self.kept.get_all(list(named.values())), strict=True))
        alike: dict[Any, list[Any]] = {}
        for key, row in rows.items():
            alike.setdefault(key if self.one_by_one else row.shapes, []).append(key)
        batches, places, first = {}, {}, 0
        for number, keys in enumerate(alike.values()):
            made = {name: np.concatenate([rows[key][name] for key in keys]) for name in rows[keys[0]]}
            stands = np.isin(made["input_ids"], self.media_ids)
            for start, key, row in zip(range(first, first + stands.size, stands.shape[1]), keys, stands, strict=True):
                inside = np.flatnonzero(row)
                places[key] = np.arange(start + inside[0], start + inside[-1] + 1)
            first += stands.size
            places_of_all = torch.from_numpy(np.flatnonzero(stands))
            batches[str(number)] = {**rows[keys[0]].tensors(made), "places": places_of_all}
        return {"batches": batches, "rows": torch.from_numpy(np.concatenate([places[s.media.key] for s in spans]))}

    @cached_property
    def kinds(self) -> dict[str, list[tuple[int, int]]]:
        """What it says of each token beside its id: numbers of some ids, others have 0. What depends on more than the
        id is not said.
        """
        found: dict[str, set[tuple[int, int]]] = {}
        for size in (size for kind in self.frames for size in SENSES[kind].sizes):
            row = self.blank_row(*size)
            ids = row["input_ids"]
            for name, value in row.items():
                if value.shape == ids.shape and name not in ALWAYS:
                    told = zip(ids[value != 0].tolist(), value[value != 0].tolist(), strict=True)
                    found.setdefault(name, set()).update(told)
        return {name: sorted(pairs) for name, pairs in found.items() if len(dict(pairs)) == len(pairs)}

    def arguments(self, spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """What transformers' own forward takes for one row with these media, beside its tokens."""
        if not spans:
            return {}
        kinds = [span.media.kind for span in spans]
        texts = [self.markers[kind].join(self.frames[kind][0]) for kind in kinds]
        made = self.call("".join(texts), [self.shown(span.media) for span in spans])
        return {name: value for name, value in made.items() if value.shape != made["input_ids"].shape}
