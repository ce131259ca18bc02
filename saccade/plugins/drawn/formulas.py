r"""Formulas of TeX inside a text as masks to paint, typeset by matplotlib's mathtext, an optional library.

What mathtext cannot typeset (matrices, cases, tables) stays as source, with a reason. Amounts of money are no formulas.

    text, formulas, kept = typeset(r"What is $\frac{1}{2}$ of \$5?", size=20, room=400)
"""

import logging
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from PIL import Image

WITHOUT = "pip install -c constraints.txt -e '.[tex]' typesets it"
PROSE = r"[^$\\]*[a-z]{2} [a-z]{2}[^$\\]*\$"  # words between two amounts of dollars
MATHS = r"(?=[^$]*?[\\^_]|(?:[^$]*[=+][^$]*|\S[^$]*(?<!\s))\$(?!\d))"  # a sign of TeX, or what money has not
DOLLARS = rf"(?<![\\$])\$(?!{PROSE}){MATHS}(?P<dollars>(?:[^$\\\n]|\\.|\n(?!\s*\n))+?)\$(?!\$)"
TEX = re.compile(
    r"\[asy\].*?\[/asy\]"  # a drawing, with formulas inside its code
    r"|\s*(?:\$\$(?P<two>.+?)\$\$|\\\[(?P<square>.+?)\\\]"
    r"|(?P<rows>\\begin\{(?P<name>\w+\*?)\}.*?\\end\{(?P=name)\}))(?P<after>[.,;:?!]?)\s*"
    rf"|\\\((?P<round>.+?)\\\)|{DOLLARS}|\\(?P<sign>[$%])",
    re.DOTALL,
)
ALIGNED = re.compile(r"\\(begin|end)\{(align|aligned|gather|gathered|equation|split)\*?\}|(?<!\\)&")
LACKING = yaml.safe_load((Path(__file__).parent / "formulas.yaml").read_text("utf-8"))
CUTS = re.compile(r"(?<=[\w)}\]|])\s*(?=[=+<>-]|\\(?:leq|geq|cdot|times|q?quad)(?![a-z]))|,\s*")  # where lines may end
FINER = 4  # times as large is a formula drawn and then reduced: smooth strokes, at fractions of a pixel
LARGER = 1.15  # than the text: letters of Computer Modern are small for their size
LEAST = 0.6  # of its size, to which a formula that is wider than a line is made smaller
FIRST = 0xF0000  # characters for private use stand for formulas in a text


class Formula(NamedTuple):
    mask: Image.Image
    depth: int  # pixels below the baseline


def typeset(text: str, size: int, room: int) -> tuple[str, dict[str, Formula], list[str]]:
    """The text with one character for each formula, what these stand for, and why formulas stayed as source."""
    formulas, kept = dict[str, Formula](), list[str]()
    if not find_spec("matplotlib"):
        return text, formulas, [WITHOUT] * bool(TEX.search(text))

    def sign_of(formula: Formula) -> str:
        formulas[sign := chr(FIRST + len(formulas))] = formula
        return sign

    def signs(found: re.Match[str]) -> str:
        if found["sign"]:
            return found["sign"]
        inline = found["round"] or found["dollars"]
        body = inline or found["two"] or found["square"] or found["rows"] or r"\begin{asy}"
        lines = [inline] if inline else re.split(r"\\\\(?:\[[^]]*\])?", ALIGNED.sub("", body))
        try:
            drawn = [_drawn(line, size, room, not inline) for line in lines if line.strip()]
        except ValueError as error:
            kept.append(re.sub(r"^\w+: |, found .*|  \(at char .*", "", str(error).splitlines()[-1]))
            return found[0]
        rows = "\n".join(" ".join(map(sign_of, row)) for row in drawn)
        return rows if inline else f"\n{rows}{found['after']}\n"

    return TEX.sub(signs, text).strip("\n"), formulas, kept


def _drawn(body: str, size: int, room: int, alone: bool) -> list[Formula]:
    """The formula, or its parts if it is wider than a line. Raises ValueError if it cannot be typeset."""
    if table := re.search(r"\\begin\{\w+", body):
        raise ValueError(f"there is no {table[0]}}}")
    for pattern, instead in LACKING["patterns"].items():
        body = re.sub(pattern, instead, body)
    body = re.sub(r"\\([a-zA-Z]+)", lambda found: LACKING["names"].get(found[1], found[0]), body)
    if alone:  # fractions as large as other letters, but for those within others
        body = re.sub(r"\\frac", lambda found: r"\dfrac" if _is_outside(body[: found.start()]) else r"\frac", body)
    if (fits := (room - 2) / _formula(body, size).mask.width) >= LEAST:
        return [_formula(body, size * min(1, fits), room * alone)]
    cuts = [found.end() for found in CUTS.finditer(body) if _is_outside(body[: found.end()])]
    parts = [_formula("{}" + body[start:end], size) for start, end in pairwise([0, *cuts, len(body)])]
    if max(part.mask.width for part in parts) > room:
        raise ValueError("a formula is too wide for the page")
    return parts


def _is_outside(before: str) -> bool:
    return all(before.count(start) == before.count(end) for start, end in ("{}", "()", "[]", (r"\left", r"\right")))


def _formula(body: str, size: float, room: int = 0) -> Formula:
    """With a margin that centres it, if `room` is wider."""
    from matplotlib import rc_context, rcdefaults
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    font = FontProperties(size=size * LARGER, math_fontfamily="cm")
    logger = logging.getLogger("matplotlib.mathtext")
    logger.addFilter(_refuse)
    try:
        with rc_context():
            rcdefaults()  # whatever a matplotlibrc says
            found = MathTextParser("agg").parse(f"${body}$", 72 * FINER, font, antialiased=True)
    except RecursionError:
        raise ValueError("a formula has too many others inside it") from None
    finally:
        logger.removeFilter(_refuse)
    pixels = np.asarray(found.image)
    high, wide = pixels.shape
    below = high - round(found.height - found.depth)
    margins = (FINER * max(0, (room - wide // FINER) // 2), -wide % FINER + FINER * round(size / 12))
    pixels = np.pad(pixels, (((below - high) % FINER, -below % FINER), margins))
    return Formula(Image.fromarray(pixels).reduce(FINER), -(-below // FINER))


def _refuse(record: logging.LogRecord) -> bool:
    """Where its fonts lack a character, mathtext draws another one, with a warning."""
    if record.levelno >= logging.WARNING:
        raise ValueError(record.getMessage())
    return False
