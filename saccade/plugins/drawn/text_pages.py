"""Pictures of text: the questions of a text set, or words to read.

The default font is Pillow's own, which is the same on every machine. A text that does not fit its page, or has a
character that the font lacks, raises `Unfit` with the reason. Formulas are typeset by `formulas.py`.

    page("How many?", Style(), width=448).size
    draw_words_row(Random(0), 0, kinds=("read",), side=224).answer
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from saccade.data.formats import LETTERS
from saccade.errors import ConfigError
from saccade.plugins.drawn.drawn_sets import Drawing, Unfit
from saccade.plugins.drawn.formulas import Formula, typeset
from saccade.plugins.suites.suite_rows import IN_PICTURE
from saccade.types import Sample

Font = ImageFont.FreeTypeFont
LEADING = 1.3  # height of a line, as a multiple of the font size
BORDER = 10  # pixels around a text
MAX_ASPECT = 4  # most height of a page, as a multiple of its width
MISSING = "\uffff"  # a character that no font has
PAPERS = ((255, 255, 255), (250, 246, 232), (232, 238, 246), (240, 240, 240))
INKS = ((0, 0, 0), (30, 30, 90), (90, 20, 20), (20, 70, 30))
_WORDS = """
apple bread chair cloud dance eagle field glass horse house island jacket kettle ladder lemon market mirror money
mountain music night ocean orange paper pencil piano planet pocket potato queen rabbit river rocket salad school
silver snow spring square stone street summer table tiger tower train tree truck umbrella valley village violin
wagon water wheel window winter yellow zebra above begin carry early fresh green heavy inside jump kind large
morning never open quick red small thin under visit warm young
"""
VOCABULARY = _WORDS.split()
EMPTY: Mapping[str, Formula] = {}
AS_SOURCE = "tex_as_source"
ORDINALS = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True)
class Style:
    font: str = ""  # file; empty: Pillow's own
    size: int = 20
    ink: tuple[int, int, int] = INKS[0]
    paper: tuple[int, int, int] = PAPERS[0]


@cache
def font_of(path: str, size: int) -> Font:
    if not path:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow's wheels have FreeType"
        return font
    try:
        return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ConfigError(f"--font {path}: cannot be read as a font: {error}; name a .ttf or .otf file") from None


def font_files(paths: Sequence[Path] | None) -> tuple[str, ...]:
    """The paths as strings; raises ConfigError if one cannot be read as a font."""
    for path in map(str, paths or ()):
        font_of(path, 16)
    return tuple(map(str, paths or ()))


def size_range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isdigit() and (most or least).isdigit() and 6 <= int(least) <= int(most or least) <= 400):
        raise ConfigError(f"--font-size {text}: expected a number of pixels from 6 to 400, or two; try 16-28")
    return int(least), int(most or least)


def draw_style(rng: Random, fonts: Sequence[str], sizes: tuple[int, int]) -> Style:
    return Style(rng.choice(fonts or ("",)), rng.randint(*sizes), rng.choice(INKS), rng.choice(PAPERS))


def page(text: str, style: Style, width: int, most: int = 0, formulas: Mapping[str, Formula] = EMPTY) -> Image.Image:
    """The wrapped text on a page as high as it needs; `formulas`: what characters of it stand for.

    Raises `Unfit` if a character is missing or it exceeds `most`.
    """
    font, room, spot = font_of(style.font, style.size), width - 2 * BORDER, BORDER
    if lacking := sorted({s for s in {*text} - formulas.keys() if not s.isspace() and _lacks(style.font, s)}):
        raise Unfit(f"the font has no {' '.join(lacking[:5])}")
    lines = wrapped(text, lambda line: sum(long for _, long in _parts(line, font, formulas)), room)
    ascent, baselines = font.getmetrics()[0], []
    for line in lines:
        high = [(one.mask.height - one.depth + 2, one.depth + 2) for one in map(formulas.get, line) if one]
        above, below = map(max, zip((ascent, round(LEADING * style.size) - ascent), *high, strict=True))
        baselines.append(spot + above)
        spot += above + below
    if most and spot + BORDER > most:
        raise Unfit(f"takes {spot + BORDER} pixels of at most {most}")
    picture = Image.new("RGB", (width, spot + BORDER), style.paper)
    pen = ImageDraw.Draw(picture)
    for y, line in zip(baselines, lines, strict=True):
        x = float(BORDER)
        for part, long in _parts(line, font, formulas):
            if one := formulas.get(part):
                pen.bitmap((round(x), y - one.mask.height + one.depth), one.mask, style.ink)
            else:
                pen.text((x, y), part, style.ink, font, anchor="ls")
            x += long
    return picture


def _parts(line: str, font: Font, formulas: Mapping[str, Formula]) -> Iterator[tuple[str, float]]:
    """What is drawn of a line, from left to right: formulas and the text between them, with their widths."""
    for one, signs in groupby(line, lambda sign: formulas.get(sign) and sign):
        text = one or "".join(signs)
        yield text, formulas[text].mask.width if one else font.getlength(text)


def wrapped(text: str, length: Callable[[str], float], width: float) -> list[str]:
    """The lines of a text, broken at spaces; a word is broken only if it is longer than a line."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            if length(f"{line} {word}".strip()) <= width:
                line = f"{line} {word}".strip()
                continue
            lines += [line] if line else []
            line = word
            while length(line) > width:
                end = next((n for n in range(2, len(line)) if length(line[:n]) > width), 2) - 1
                lines, line = [*lines, line[:end]], line[end:]
        lines.append(line)
    return lines


@cache
def _lacks(path: str, sign: str) -> bool:
    font = font_of(path, 16)
    return bytes(font.getmask(sign)) == bytes(font.getmask(MISSING))


# -- words to read ----------------------------------------------------------------------------------


def draw_words_row(rng: Random, index: int, *, kinds: Sequence[str], side: int, fonts: Sequence[str] = ()) -> Drawing:
    """A picture of a few words, a number or a sum, with a question about it."""
    kind = kinds[index % len(kinds)]
    words = rng.sample(VOCABULARY, rng.randint(1, 5) if kind == "read" else rng.randint(2, 5))
    text, question, answer = " ".join(words), "What does the picture say?", " ".join(words)
    if kind == "number":
        text = answer = str(rng.randrange(10 ** rng.randint(1, 6)))
        question = "Which number is in the picture?"
    elif kind == "word":
        place = rng.randrange(len(words))
        question, answer = f"What is the {ORDINALS[place]} word in the picture?", words[place]
    elif kind == "sum":
        a, b = rng.randrange(100), rng.randrange(100)
        a, b, sign = (max(a, b), min(a, b), "-") if rng.random() < 0.5 else (a, b, "+")
        text, answer = f"{a} {sign} {b} = ?", str(a - b if sign == "-" else a + b)
        question = "What is the result?"
    picture, style = on_page(rng, text, side, fonts)
    more: dict[str, Any] = {"text": text, "font": Path(style.font).stem or "default", "font_size": style.size}
    return Drawing(picture, question, answer, kind, more)


def on_page(rng: Random, text: str, side: int, fonts: Sequence[str] = ()) -> tuple[Image.Image, Style]:
    """Text at a random place of a square page; the random font size is lowered until it fits without broken words."""
    margin = side // 28
    style, room = draw_style(rng, fonts, (max(10, side // 14), max(12, side // 7))), side - 2 * margin
    while True:
        font, step = font_of(style.font, style.size), round(LEADING * style.size)
        lines = wrapped(text, font.getlength, room)
        if step * len(lines) <= room and max(map(font.getlength, text.split())) <= room:
            break
        style = replace(style, size=style.size - 1)
    wide = max(map(font.getlength, lines))
    x, y = (margin + rng.random() * (room - much) for much in (wide, step * len(lines)))
    picture = Image.new("RGB", (side, side), style.paper)
    for number, line in enumerate(lines):
        ImageDraw.Draw(picture).text((x, y + number * step), line, style.ink, font)
    return picture, style


WORD_KINDS = ("read", "number", "word", "sum")


# -- questions of a text set ------------------------------------------------------------------------


def draw_question_row(
    rng: Random, index: int, *, samples: Sequence[Sample], width: int, sizes: tuple[int, int], fonts: Sequence[str] = ()
) -> Drawing:
    """A page with the question and options of a row. An answer that is an option becomes its letter.

    The column AS_SOURCE says why a formula is not typeset, if one is not.
    """
    sample = samples[index]
    asked = [message for message in sample.messages if message.role == "user"]
    if sample.media or len(asked) != 1:
        raise Unfit(f"has {len(sample.media)} pictures or other media and {len(asked)} questions, not 0 and 1")
    if not isinstance(sample.answer, str):
        raise Unfit("has no answer, or several")
    options = [f"({letter}) {option}" for letter, option in zip(LETTERS, sample.choices, strict=False)]
    letters = dict(zip(sample.choices, LETTERS, strict=False))
    style = draw_style(rng, fonts, sizes)
    text, formulas, kept = typeset("\n".join([asked[0].text, *options]), style.size, width - 2 * BORDER)
    picture = page(text, style, width, most=MAX_ASPECT * width, formulas=formulas)
    more = {**sample.extra, "id": sample.id, "data_source": sample.data_source, "text": asked[0].text}
    more |= {AS_SOURCE: kept[0]} if kept else {}
    if system := "".join(message.text for message in sample.messages if message.role == "system"):
        more["system"] = system
    answer = letters.get(sample.answer, sample.answer)
    return Drawing(picture, IN_PICTURE, answer, str(sample.extra.get("category") or "text"), more)
