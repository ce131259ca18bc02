"""A folder's own processor, listened to: the text that it writes for a picture, how many tokens that has, and the
tensors that the model reads of it. Its tokenizer is exchanged for one that notes the text which it is given, so nothing
here knows how tiles, rows, brackets or breaks are written.

Token counts are those of a picture of the same size without pixels, kept by size. What stands between the first and
the last placeholder of a picture is inserted as ids; the text around it is encoded with that of the prompt. Several
threads may ask at once. Knows nothing of models.

    reader = PictureReader(path, media_ids=[151655], patch=14)
    reader.expand("Look at <image>.", [media])
"""

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.errors import ConfigError, DataError, EnvironmentProblem
from saccade.media.images import ImageError
from saccade.media.kinds import KINDS
from saccade.media.pixel_cache import DECODED, ImageCache
from saccade.models.families.qwen_vl import CACHE_BYTES, resized
from saccade.types import Media, MediaSpan

# Texts around a picture, to compare what a processor writes between them.
AROUND = (("", ""), ("a", "b"), ("a ", " b"), ("\n", "\n"))
SIZES_KEPT = 16_384
SMALL = 1 << 16  # bytes of an array that is kept of every size
TRIED = ((400, 300), (60, 50), (50, 400))  # sizes whose text is searched for special tokens


class PictureRow(dict[str, np.ndarray]):
    """What a processor makes of a prompt with one picture, in the place of an array in a cache. `ids` are those
    from its first to its last placeholder, `inside` their text, and `before` and `after` what is written around it.
    """

    ids: np.ndarray
    grid: tuple[int, int, int]  # patches that the tower sees of it: squares, rows, columns
    before = inside = after = ""

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values())

    @property
    def shapes(self) -> Any:
        return tuple((name, value.shape, value.dtype.str) for name, value in self.items())

    def setflags(self, *, write: bool) -> None:
        for value in self.values():
            value.setflags(write=write)


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


class PictureReader:
    def __init__(self, path: str, media_ids: Sequence[int], patch: int) -> None:
        """`patch`: the side of what the tower sees as one."""
        from transformers import AutoProcessor

        try:
            processor: Any = copy.copy(AutoProcessor.from_pretrained(path))
            self.marker = processor.image_token
        except (ImportError, OSError, ValueError, AttributeError) as error:
            how = "; run: pip install -c constraints.txt -e '.[vision]'" if "orchvision" in str(error) else ""
            raise EnvironmentProblem(f"{path}: its processor cannot be used here: {error}{how}") from error
        self.path, self.media_ids, self.patch = path, np.unique(media_ids), patch
        self.listening = processor.tokenizer = _Listening(processor.tokenizer)
        self.processor = processor
        self.placeholder = processor.tokenizer.convert_ids_to_tokens(media_ids[0])
        self.frames: list[tuple[str, str]] = list(AROUND)
        self.pixels_read = False  # also of a picture whose size alone is asked for
        self.blank_row = lru_cache(SIZES_KEPT)(self._blank_row)
        self.kept = ImageCache(CACHE_BYTES, make=self._row)

    def call(self, text: str, pictures: Sequence[Any], **options: Any) -> Mapping[str, Any]:
        made = self.processor(text=[text], images=list(pictures) or None, return_tensors="pt", **options)
        return {name: value for name, value in made.items() if hasattr(value, "is_floating_point")}

    # -- text --

    def frame(self, text_of: Callable[[str, str], str]) -> None:
        """Learn how a chat template shows a picture: some processors want it in its brackets."""
        shown = [text_of(*around).partition(self.marker) for around in AROUND]
        if all(found for _, found, _ in shown):
            self.frames = [(before, after) for before, _, after in shown]

    def expand(self, text: str, media: Sequence[Media]) -> str:
        """What the processor writes, with one placeholder in the place of those of each picture."""
        rows = [self.blank_row(*self.size(one)) for one in media]
        pieces = text.split(self.marker)
        if len(pieces) != len(media) + 1:
            hint = "this model or its template does not take them all: try prompt.chat_template=FILE"
            raise ConfigError(f"the chat template shows {len(pieces) - 1} of {len(media)} images; {hint}")
        if self.apart:
            shown = [row.before + self.placeholder + row.after for row in rows]
            return "".join(a + b for a, b in zip(pieces, (*shown, ""), strict=True))
        self.call(text, [self._blank(one) for one in media])
        written, rest = "", self.listening.heard.text
        for row in rows:
            before, found, rest = rest.partition(row.inside)
            if not found:
                raise EnvironmentProblem(f"{self.path}: its processor writes a picture in more than one way")
            written += before + self.placeholder
        return written + rest

    @cached_property
    def apart(self) -> bool:
        """What is written for a picture does not depend on what stands around it."""
        written = {self._written(self._heard(frame), frame) for frame in self.frames}
        return None not in written and len(written) == 1

    def _heard(self, frame: tuple[str, str], width: int = 60, height: int = 50) -> str:
        self.call(self.marker.join(frame), [Image.new("RGB", (width, height))])
        return self.listening.heard.text

    def _written(self, text: str, frame: tuple[str, str]) -> str | None:
        before, after = frame
        return text[len(before) : len(text) - len(after)] if text.startswith(before) and text.endswith(after) else None

    def special(self) -> set[int]:
        """Tokens that are written for pictures alone: nobody may sample them."""
        frame, tokenizer = self.frames[0], self.processor.tokenizer
        known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *self.media_ids.tolist()}
        texts = ["".join(frame), *(self._heard(frame, *size) for size in TRIED)]
        bare, *shown = (set(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return (set().union(*shown) & known) - bare | set(self.media_ids.tolist())

    # -- pictures --

    def size(self, media: Media) -> tuple[int, int]:
        """(width, height) that the processor is given: within the pixel budget."""
        if media.kind != "image":
            what = f"{KINDS[media.kind].article} ({media.path or media.hash[:12]})"
            raise ImageError(f"this model takes text and image, but a row holds {what}")
        scale = min(1.0, math.sqrt(media.max_pixels / (media.width * media.height)))
        return max(1, int(media.width * scale)), max(1, int(media.height * scale))

    def picture(self, media: Media) -> np.ndarray:
        return resized(DECODED.get(media), size=self.size(media))

    def _blank(self, media: Media) -> Any:
        return Image.new("RGB", self.size(media))

    def _blank_row(self, width: int, height: int) -> PictureRow:
        """What is known of every picture of a size, from one without pixels, or a black one where they are read: to
        resize and cut them takes ten times as long.
        """
        frame, tokenizer = self.frames[0], self.processor.tokenizer
        if not self.pixels_read:
            try:
                shape = torch.empty((3, height, width), dtype=torch.uint8, device="meta")
                whole = self.call(self.marker.join(frame), [shape])
            except Exception:  # whatever it does with them; what else is wrong is wrong with a black one, too
                self.pixels_read = True
        if self.pixels_read:
            whole = self.call(self.marker.join(frame), [Image.new("RGB", (width, height))])
        kept = {n: v for n, v in whole.items() if n == "input_ids" or (v.nbytes < SMALL and not v.is_meta)}
        row = self._as_row(kept)
        text = self._written(self.listening.heard.text, frame)
        text = self.listening.heard.text if text is None else text
        ids = row["input_ids"][0]
        places = np.flatnonzero(np.isin(ids, self.media_ids))
        if not len(places):
            raise EnvironmentProblem(f"{self.path}: its processor writes no placeholder for a picture")
        row.ids, row.grid = ids[places[0] : places[-1] + 1], self._grid(whole, len(places))
        first, last = tokenizer.convert_ids_to_tokens(row.ids[[0, -1]].tolist())
        start, end = text.index(first), text.rindex(last) + len(last)
        row.before, row.inside, row.after = text[:start], text[start:end], text[end:]
        return row

    def _grid(self, made: Mapping[str, Any], tokens: int) -> tuple[int, int, int]:
        for name, value in made.items():
            if name.endswith("grid_thw"):
                frames, rows, columns = value[0].tolist()
                return frames, rows, columns
            if name.endswith("position_ids") and value.ndim == 3:  # places of patches
                return 1, 1, value.shape[1]
        seen = [value.shape for value in made.values() if value.ndim > 3 and value.shape[-3] == 3]
        if not seen:
            return 1, 1, tokens
        *_, height, width = max(seen, key=math.prod)
        return sum(math.prod(shape[:-3]) for shape in seen), max(1, height // self.patch), max(1, width // self.patch)

    def _made(self, picture: Any) -> PictureRow:
        return self._as_row(self.call(self.marker.join(self.frames[0]), [picture]))

    def _as_row(self, made: Mapping[str, Any]) -> PictureRow:
        # There are no arrays of bfloat16; nothing is lost.
        return PictureRow({n: (v.float() if v.is_floating_point() else v).numpy() for n, v in made.items()})

    def _row(self, media: Media) -> Any:
        row, blank = self._made(Image.fromarray(self.picture(media))), self.blank_row(*self.size(media))
        if not np.array_equal(row["input_ids"], blank["input_ids"]):
            what = "the processor writes other tokens for it than for a blank picture of its size"
            raise DataError(f"{media.path or media.hash[:12]}: {what}; leave it out")
        return row

    def ids_of(self, media: Media) -> np.ndarray:
        return self.blank_row(*self.size(media)).ids

    def measure(self, media: Media) -> tuple[tuple[int, int, int], int]:
        row = self.blank_row(*self.size(media))
        return row.grid, len(row.ids)

    @cached_property
    def unit(self) -> int:
        """The side of a square of bytes that a token costs."""
        whole = self._made(Image.new("RGB", TRIED[0]))
        return math.isqrt(whole.nbytes // 3 // len(self.blank_row(*TRIED[0]).ids)) + 1

    # -- tensors --

    def host_media(self, spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """For `door.picture_features`: prompts whose tensors have equal shapes are a batch."""
        named = {span.media.key: span.media for span in spans}
        rows: dict[Any, Any] = dict(zip(named, self.kept.get_all(list(named.values())), strict=True))
        alike: dict[Any, list[Any]] = {}
        for key, row in rows.items():
            alike.setdefault(row.shapes, []).append(key)
        batches, places, first = {}, {}, 0
        for number, keys in enumerate(alike.values()):
            made = {name: np.concatenate([rows[key][name] for key in keys]) for name in rows[keys[0]]}
            stands = np.isin(made["input_ids"], self.media_ids)
            for start, key, row in zip(range(first, first + stands.size, stands.shape[1]), keys, stands, strict=True):
                inside = np.flatnonzero(row)
                places[key] = np.arange(start + inside[0], start + inside[-1] + 1)
            first += stands.size
            inputs = {name: torch.from_numpy(value) for name, value in made.items()}
            batches[str(number)] = {"inputs": inputs, "places": torch.from_numpy(np.flatnonzero(stands))}
        return {"batches": batches, "rows": torch.from_numpy(np.concatenate([places[s.media.key] for s in spans]))}

    @cached_property
    def kinds(self) -> dict[str, list[tuple[int, int]]]:
        """What it says of each token beside its id: numbers of some ids, others have 0."""
        row = self.blank_row(*TRIED[0])
        ids = row["input_ids"]
        return {
            name: sorted({*zip(ids[value != 0].tolist(), value[value != 0].tolist(), strict=True)})
            for name, value in row.items()
            if value.shape == ids.shape and name not in ("input_ids", "attention_mask")
        }

    def arguments(self, spans: Sequence[MediaSpan]) -> Mapping[str, Any]:
        """Of transformers' own forward over one row with these pictures, beside what is said of its tokens."""
        if not spans:
            return {}
        pictures = [Image.fromarray(self.picture(span.media)) for span in spans]
        made = self.call(self.marker.join(self.frames[0]) * len(spans), pictures)
        return {name: value for name, value in made.items() if value.shape != made["input_ids"].shape}
