r"""The answer itself, without what stands around it and changes nothing.

Wrappings (Markdown, quotes, brackets, commands of LaTeX), the words that lead to an answer and a
mark behind it; for numbers also "about", digits of other scripts and number words. The first step
of every verifier that compares an answer with a gold, on both of them.

    >>> peel(r"The answer is **\(x^2\)**."), peel_number("about seven (7)")
    ('x^2', '7')
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

LONGEST = 2000  # characters; what is longer is no short answer in a wrapping
DEEPEST = 12

INSIDE = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
WRAPPINGS = re.compile(
    r"""(\*{1,3}|_{1,2}|`{1,3}|\${1,2}|["'])(?P<same>(?:(?!\1).)+)\1"""
    r"|\u201c(?P<double>[^\u201c\u201d]+)\u201d|\u2018(?P<single>[^\u2018\u2019]+)\u2019"
    r"|\u00ab(?P<angle>[^\u00ab\u00bb]+)\u00bb|\u300c(?P<corner>[^\u300c\u300d]+)\u300d"
    # A comma in brackets makes a tuple, an interval or a set of them.
    r"|\((?P<round>(?:[^(),;]|\([^()]*\))+)\)|\[(?P<square>(?:[^][,;()]|\([^()]*\))+)\]"
    rf"|\{{(?P<brace>(?:(?![,;]){INSIDE})+)\}}"
    r"|\\\((?P<inline>(?:(?!\\[()]).)+)\\\)|\\\[(?P<display>(?:(?!\\[][]).)+)\\\]"
    r"|\\(?:boxed|fbox|underline|emph|text|mbox|text(?:rm|bf|it|tt)|math(?:rm|bf|it|tt)|bm|bold"
    rf"symbol)\s*\{{(?P<command>{INSIDE}+)\}}"
    r"|\\(?:text)?color\s*\{[^{}]*\}\s*(?P<colour>.+)",
    re.DOTALL,
)
CHECKED = "[\u2705\u2713\u2714\u2611]\ufe0f?"  # marks that only say: this one
LEADING = re.compile(
    r"(?:(?:therefore|thus|hence)\b,?|\\therefore|\u2234|so(?:,|(?=\s+(?:the|my|it|this|that)\b)))\s*"
    r"|(?:(?:the|my|our)\s+)?(?:(?:final|correct|right)\s+)*answer\b\s*"
    r"(?::|=|(?:is|would\s+be|should\s+be)\b:?)\s*"
    r"|(?:it|this|that)(?:\s+is|['\u2019]s)\s+|=\s*"
    rf"|(?:{CHECKED}|\u2192|\u21d2)\s*|答案\s*(?:[:\uff1a]|[是为][:\uff1a]?)\s*",
    re.IGNORECASE,
)
LABEL = re.compile(r"\*{2}((?:final )?answer:)\*{2}", re.IGNORECASE)  # **Answer:** 7
BEHIND = re.compile(
    r"(?<=[^\s.])(?:\s*[.,;\u3002\uff0c\uff1b]|\s*(?<=[^\W\d_]{2})[!\uff01]"
    rf"|\s*{CHECKED})\s*\Z"
)

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
HAN = "零一二三四五六七八九"
NUMERALS = {word: n for n, word in enumerate(ONES)} | {sign: n for n, sign in enumerate(HAN)}
NUMERALS |= {f"{word} {ONES[n]}" if n else word: 10 * ten + n for ten, word in enumerate(TENS, 2) for n in range(10)}
NUMERALS |= {
    f"{HAN[ten] if ten > 1 else ''}十{HAN[n] if n else ''}": 10 * ten + n for ten in range(1, 10) for n in range(10)
}
# For the inside of a pattern. A Chinese numeral among other signs may be a part of a word.
NUMERAL = (
    rf"(?<![a-zA-Z0-9_])(?:(?:{'|'.join(TENS)})(?:[-\s](?:{'|'.join(ONES[1:10])}))?"
    rf"|{'|'.join(ONES[::-1])})(?![a-zA-Z0-9_])"
    rf"|(?<!\w)(?:[{HAN[1:]}]?十[{HAN[1:]}]?|[{HAN}])(?!\w)"
)
FIGURE = r"[-+\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
ABOUT = re.compile(
    r"(?:(?:about|approximately|approx\.?|roughly|around|circa|ca\.)\s+|\u2248\s*|\\approx(?![a-z])\s*"
    rf"|~(?!~)\s*)(?=[^\w\s]|[\d_]|{NUMERAL})",
    re.IGNORECASE,
)
GLOSS = re.compile(
    rf"(?:(?<![\d.,])({FIGURE})\s*\(\s*({NUMERAL})\s*\)|({NUMERAL})\s*\(\s*({FIGURE})\s*\))(?![\w(])", re.IGNORECASE
)
MINUS = re.compile(r"(?:minus|negative)\s+", re.IGNORECASE)
SPACED = re.compile(r"[-+\u2212]?\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?:\.\d+)?")
SCALED = re.compile(rf"({FIGURE})\s*(thousand|million|billion|trillion)", re.IGNORECASE)
POWERS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def peel(text: str) -> str:
    """Without wrappings, leading words and a mark behind."""
    return text if text.isalnum() else _peeled(text, False)


def peel_number(text: str) -> str:
    """As `peel`; a number also without "about", and in digits where it is in words."""
    return text if text.isdecimal() and text.isascii() else _peeled(text, True)


@lru_cache(maxsize=4096)  # the members of a group often answer alike
def _peeled(text: str, number: bool) -> str:
    if len(text) > LONGEST:
        return text
    for _ in range(DEEPEST):
        text = text.strip()
        wrapped = WRAPPINGS.fullmatch(text)
        inner = wrapped[wrapped.lastgroup or 0] if wrapped else text
        inner = LABEL.sub(r"\1", BEHIND.sub("", inner))
        for leading in (LEADING, ABOUT) if number else (LEADING,):
            found = leading.match(inner)
            inner = inner[found.end() :] if found else inner
        if inner == text or not inner.strip():
            break
        text = inner
    return in_digits(text) if number else text


def in_digits(text: str) -> str:
    """Digits of any script as 0 to 9, and number words, glosses, spaced thousands and millions as
    plain numbers where they are the whole text; `7 (seven)` is 7, `7 (eight)` stays.
    """
    if not text.isascii():
        text = "".join(str(int(sign)) if sign.isdecimal() else sign for sign in text)
    if "(" in text:
        text = GLOSS.sub(_agreed, text)
    if minus := MINUS.match(text):
        rest = in_digits(text[minus.end() :])
        return f"-{rest}" if rest[:1].isdecimal() else text
    value = numeral(text)
    if value is not None:
        return str(value)
    if SPACED.fullmatch(text):
        return re.sub(r"\s", "", text)
    if scaled := SCALED.fullmatch(text):
        number = Fraction(scaled[1].replace(",", "").replace("\u2212", "-"))
        return str(number * POWERS[scaled[2].lower()])
    return text


def numeral(text: str) -> int | None:
    """The value of a number word, such as twenty-one."""
    return NUMERALS.get(re.sub(r"[-\s]+", " ", text.lower()))


def _agreed(gloss: re.Match[str]) -> str:
    figure, word = gloss[1] or gloss[4], gloss[2] or gloss[3]
    same = Fraction(figure.replace(",", "").replace("\u2212", "-")) == numeral(word)
    return figure if same else gloss[0]
