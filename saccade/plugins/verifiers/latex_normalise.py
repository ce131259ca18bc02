r"""One spelling for mathematical text that looks the same; only characters change here.

>>> normalise(r"$\dfrac12\text{ cm}^2$.")
'\\frac{1}{2} cm ^{2}'
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

LONGEST = 2000  # characters
BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
ROUND = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
END = r"(?![a-zA-Z])"
CJK = r"\u4e00-\u9fff"  # for the inside of a character class


class TooLarge(ValueError):
    """The expression is too long, too deep, or its value has too many digits."""


class Unparseable(ValueError):
    """The text is not mathematics that we read."""


# Marks without a width that do not change the order of what is seen.
INVISIBLE = dict.fromkeys([*range(0x200B, 0x2010), 0x202A, 0x202C, 0x2060, 0x2066, 0x2069, 0xFEFF])
# Full-width signs, letters and digits, and Chinese punctuation.
NARROW = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    {"\u3000": " ", "\u3001": ",", "\u3002": ".", "\uff1a": ": ", **INVISIBLE}
)
SIGNS = NARROW | str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00f7": "/", "\u00b7": r"\cdot ",
        "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u221e": r"\infty ",
        "\u03c0": r"\pi ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b1": r"\pm ",
        "\u00b0": r"^\circ ", "\u2032": "'", "\u00a0": " ", "\u2205": r"\emptyset ",
        "\u221a": r"\sqrt ", "\u03b8": r"\theta ", "\u2044": "/", "\u03a9": r"\Omega ",
        "\u2248": r"\approx ", "\u2026": "...",
    }
)  # fmt: skip
RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+")  # superscripts
LOWERED = re.compile("[\u2080-\u2089]+")
VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # one half as one character
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(\d)(?:,\\!|\{,\}|\\,)\s*(?=\d{3})", r"\1"),
        (r"\\\$|\$|(?<!\\)\\[()]", ""),
        (rf"\\(?:left|right|[bB]igg?[lr]?|displaystyle){END}\.?", ""),
        (rf"(?<!\\)\\[!,;:> ]|\\q?quad{END}|(?<!~)~(?!~)", " "),
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"\A\s*\{\s*\}\s*\Z", r"\\emptyset"),
        (r"(?<=[\d\s])\\Omega\s*$", " ohm"),
        (r"^\s*\{(?!\d{1,3}(?:,\d{3})+\})([^{}]*[,;][^{}]*)\}\s*$", r"\\{\1\\}"),  # a set
        (rf"\\[dtc](frac|binom){END}", r"\\\1"),
        (rf"\\leq?{END}|<=", r"\\le "),
        (rf"\\geq?{END}|>=", r"\\ge "),
        (rf"\\lt{END}", "<"),
        (rf"\\gt{END}", ">"),
        (rf"\\(?:[lr]?vert|mid){END}", "|"),
        (rf"\^\s*\{{\s*\\(?:circ|degree)\s*\}}|\^\s*\\circ{END}|\\degree{END}", r"^\\circ "),
        (rf"(?<![\\a-zA-Z])(sqrt|pi|(?:arc)?(?:sin|cos|tan)|cot|exp|ln|log){END}", r"\\\1 "),
        # Braces around the arguments of powers, indices, roots and fractions.
        (r"\\log\s*_\s*(\d)", r"\\log_{\1}"),
        (r"\^\s*([-+]?(?:\d+(?:\.\d+)?|[a-zA-Z]))", r"^{\1}"),
        (r"_\s*(\d+|[a-zA-Z])", r"_{\1}"),
        (rf"(\\sqrt|\^)\s*{ROUND}", r"\1{\2}"),
        (r"\\sqrt(\[[^\]]*\])?\s*([0-9a-zA-Z])", r"\\sqrt\1{\2}"),
        (r"\\(frac|binom)\s*(\\pi|[0-9a-zA-Z])", r"\\\1{\2}"),
        (rf"\\(frac|binom)\s*({BRACED})\s*(\\pi|[0-9a-zA-Z])", r"\\\1\2{\3}"),
    ]
]
REPEATING = re.compile(  # 0.1666... repeats its 6
    r"(?<![\d.])(\d{0,40}\.\d{0,40}?)(?:(\d)\2{2,40}|(\d{2,6}?)\3{1,20})(?:\.{3}|\\[lc]?dots)\s*\Z"
)
TEXT = re.compile(r"\\(?:text|mbox|textrm|textbf|textit|mathrm|mathbf|mathit|operatorname|rm)\s*\{([^{}]*)\}")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def normalise(text: str) -> str:
    return unwrap_text(tidy(text))


@lru_cache(maxsize=2048)  # the members of a group often answer alike
def tidy(text: str) -> str:
    r"""Everything but \text{}, which still says where words begin."""
    if len(text) > LONGEST:
        raise TooLarge(f"{len(text)} characters")
    text = RAISED.sub(lambda run: f"^{{{_plain(run[0])}}}", text)
    text = LOWERED.sub(lambda run: f"_{{{_plain(run[0])}}}", text)
    text = VULGAR.sub(lambda sign: f" {_plain(sign[0])}", text).translate(SIGNS)
    if "..." in text or "dots" in text:
        text = REPEATING.sub(r"\1\\overline{\2\3}", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    if not re.search(r"[(\[]|\\\{", text):  # inside brackets a comma separates items
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _trim(text)


def _plain(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs)


def unwrap_text(text: str) -> str:
    return _trim(TEXT.sub(r" \1 ", text))


def compact(text: str) -> str:
    """Without spaces, except between digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _trim(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return text if text.endswith("..") else text.rstrip(".").strip()
