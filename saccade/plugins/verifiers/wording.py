r"""Patterns for the words around an answer.

`peel` removes what does not change an answer: wrappings (Markdown, quotes, brackets, LaTeX commands), leading words
and a final mark. For numbers `peel_number` also removes "about" and converts digits of other scripts and number words.
Other words retract an answer, leave it open or change a number. These patterns are strict: "maybe 7" and "7 hundred"
are not rewarded for 7. "About 7" is an answer; "nearly 7" and "7 if any" are not.

    >>> peel(r"The answer is **\(x^2\)**."), peel_number("about seven (7)")
    ('x^2', '7')
    >>> unsettled("7 or 8"), unsettled("There are 7 items")
    (True, False)
"""

import re
from fractions import Fraction
from functools import lru_cache

LONGEST = 2000  # characters; longer texts are not peeled
DEEPEST = 12  # nested wrappings

INSIDE = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
WRAPPINGS = re.compile(
    r"""(\*{1,3}|_{1,2}|`{1,3}|\${1,2}|["'])(?P<same>(?:(?!\1).)+)\1"""
    r"|\u201c(?P<double>[^\u201c\u201d]+)\u201d|\u2018(?P<single>[^\u2018\u2019]+)\u2019"
    r"|\u00ab(?P<angle>[^\u00ab\u00bb]+)\u00bb|\u300c(?P<corner>[^\u300c\u300d]+)\u300d"
    # Without commas: brackets with a comma are a tuple, an interval or a set.
    r"|\((?P<round>(?:[^(),;]|\([^()]*\))+)\)|\[(?P<square>(?:[^][,;()]|\([^()]*\))+)\]"
    rf"|\{{(?P<brace>(?:(?![,;]){INSIDE})+)\}}"
    r"|\\\((?P<inline>(?:(?!\\[()]).)+)\\\)|\\\[(?P<display>(?:(?!\\[][]).)+)\\\]"
    r"|\\(?:boxed|fbox|underline|emph|text|mbox|text(?:rm|bf|it|tt)|math(?:rm|bf|it|tt)|bm|bold"
    rf"symbol)\s*\{{(?P<command>{INSIDE}+)\}}"
    r"|\\(?:text)?color\s*\{[^{}]*\}\s*(?P<colour>.+)",
    re.DOTALL,
)
CHECKED = "[\u2705\u2713\u2714\u2611]\ufe0f?"  # check marks
LEADING = re.compile(
    r"(?:(?:therefore|thus|hence)\b,?|\\therefore|\u2234|so(?:,|(?=\s+(?:the|my|it|this|that)\b)))\s*"
    r"|(?:(?:the|my|our)\s+)?(?:(?:final|correct|right)\s+)*answer\b\s*(?::|=|(?:is|would\s+be|should\s+be)\b:?)\s*"
    r"|(?:it|this|that)(?:\s+is|['\u2019]s)\s+|=\s*"
    rf"|(?:{CHECKED}|\u2192|\u21d2)\s*|答案\s*(?:[:\uff1a]|[是为][:\uff1a]?)\s*",
    re.IGNORECASE,
)
LABEL = re.compile(r"\*{2}((?:final )?answer:)\*{2}", re.IGNORECASE)  # **Answer:** 7
BEHIND = re.compile(rf"(?<=[^\s.])(?:\s*[.,;\u3002\uff0c\uff1b]|\s*(?<=[^\W\d_]{{2}})[!\uff01]|\s*{CHECKED})\s*\Z")


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
# To be used within a pattern. A Chinese numeral next to other characters may be part of a word, so it is excluded.
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
    """Remove wrappings, leading words and a final mark."""
    return text if text.isalnum() else _peeled(text, False)


def peel_number(text: str) -> str:
    """As `peel`; also removes "about" before a number, and converts number words to digits."""
    return text if text.isdecimal() and text.isascii() else _peeled(text, True)


@lru_cache(maxsize=4096)  # members of a group often give the same answer
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
    """Convert digits of any script to 0 to 9; and if they are the whole text, number words, spaced thousands
    and numbers with "million" to plain numbers. `7 (seven)` becomes 7, `7 (eight)` is unchanged.
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
    """The value of a number word such as twenty-one, or None."""
    return NUMERALS.get(re.sub(r"[-\s]+", " ", text.lower()))


def _agreed(gloss: re.Match[str]) -> str:
    figure, word = gloss[1] or gloss[4], gloss[2] or gloss[3]
    same = Fraction(figure.replace(",", "").replace("\u2212", "-")) == numeral(word)
    return figure if same else gloss[0]


STRUCK = r"~~|\u00ac|\\(?:neg|lnot|[bx]?cancel|sout)(?![a-zA-Z])|<(?:s|del|strike)>"  # struck out, or negated
DOUBT = r"\b(?:maybe|perhaps|possibly|probably|might|could|guess|unsure|uncertain|unknown)\b|可能|也许"
UNSETTLED = re.compile(
    # Denial,
    r"\b(?:not|no|nor|neither|never|cannot|wrong|worst|incorrect|false|untrue|doubt|unlikely|unless"
    r"|except|exclu\w+|(?:all|anything|everything) but|ruled\s+out|rejected|eliminated)\b"
    r"|n['\u2019]t\b|[不非错\u274c\u2717\u2718]|没有|排除|除了"
    # doubt, alternatives, questions.
    rf"|{DOUBT}|\b(?:or|either|between|vs|versus)\b|[?\uff1f或吗]|还是|{STRUCK}",
    re.IGNORECASE,
)
# Words that deny the answer that follows them: it cannot be, the wrong one is.
DENIES_NEXT = re.compile(
    r"(?:(?:\b(?:not|never|cannot|neither|nor|except|without|(?:other|rather)\s+than|instead\s+of"
    r"|(?:all|anything|everything)\s+but)|n['\u2019]t)(?:\s+(?:be|is|it|it['\u2019]s|the|an?|that|to|for"
    r"|equal|answer|option|choice|value|say|think|choose|pick))*"
    r"|\b(?:wrong|incorrect|false)\s+(?:answer|option|choice|value|result|one)s?"
    r"(?:\s+(?:is|are|was|would\s+be))?|\u2260|\u00ac|\\(?:neq?|neg|lnot)|不是|不选|除了)"
    r"[\s:\uff1a$*_(\[{\"'`]{0,20}\Z",
    re.IGNORECASE,
)
STRUCK_OUT = re.compile(  # including the text that is struck out
    r"~~(?=\S)[^~\n]{0,200}[^~\s]~~|<(s|del|strike)>[^<>\n]{0,200}</\1>|\\sout\{[^{}]{0,200}\}"
)
# Retractions of the answer. "The others are wrong" and "sorry for the long text" do not refer to the
# answer and do not match.
AT_START = r"(?:^|[.!?,;:)>]|\b(?:no|oh|hm+|but))[^\w(]{0,9}"
TAKEN_BACK = re.compile(
    r"\b(?:that|this|it|(?:my|the)(?:\s+(?:first|last|previous|above|final))?\s+(?:answer|count))"
    r"(?:(?:\s+(?:is|was)|['\u2019]s)(?:\s+actually)?\s+(?:wrong|incorrect|false|mistaken|a\s+mistake"
    r"|not\s+(?:right|correct|true|it))|\s+(?:is|was)n['\u2019]t\s+(?:right|correct|true|it))\b"
    r"|\bi(?:['\u2019]m|\s+am|\s+was|\s+got\s+(?:it|that))\s+(?:wrong|mistaken|incorrect)\b"
    r"|(?<!if i )\bmade\s+an?\s+(?:\w+\s+)?(?:mistake|error)\b|\bmy\s+(?:mistake|bad)\b"
    r"|\bi\s+(?:mis(?:counted|read|spoke|judged|took)|meant?)\b|\btake\s+(?:it|that)\s+back\b"
    r"|\b(?:scratch|ignore|disregard|forget)\s+(?:that|this|it|(?:the|my)\s+(?:above|last|previous|first"
    r"|answer))\b|\bshould\s+have\s+(?:been|got|said|written)\b|\b(?:correction\s*[:,]|edit\s*:)"
    rf"|\bon\s+second\s+thoughts?\b|{AT_START}(?:wait|hold\s+on)\b(?=\W|\Z)(?!\s+(?:times?|for|un"
    r"til)\b|\W+let\s+me\b[^\n]{0,200}\b(?:yes|confirmed|indeed|is\s+correct)\b)"
    # No, C. Actually, it is 7.
    rf"|{AT_START}(?:no|actually|sorry|rather)\b[^\w(]{{1,9}}(?:(?:it(?:['\u2019]s|\s+is|\s+should\s+be)"
    r"|(?:the\s+(?:correct\s+|right\s+)?answer|that)\s+(?:is|should\s+be)|make\s+(?:it|that))\s+)?"
    rf"[(*$]{{0,3}}(?:(?-i:[A-Z])|[-+]?\d[\d.,/]{{0,20}}|{NUMERAL})[)*$]{{0,3}}\s{{0,9}}(?:$|[.!?,;])",
    re.IGNORECASE | re.MULTILINE,
)
# Remarks after an answer about everything else: no other one is visible, the others are wrong.
ASIDE = re.compile(
    r"(?i:(?<=[.;!\n])\s{0,9}(?:(?:there\s+(?:is|are)\s+)?(?:no|none\s+of\s+the)\s+(?:others?|more"
    r"|further)\b|nothing\s+else\b|(?:all\s+)?(?:the\s+)?(?:others?|rest|remaining)\b"
    r"(?=[^.;!?\n]*\b(?:wrong|incorrect|false|not)\b|[^.;!?\n]*n['\u2019]t\b)))"
    r"(?:(?!\b(?:than|[A-Z])\b)[^.;!?\n\d])*(?:[.;!]|(?=\n)|\Z)"
    r"|\s{0,9}\(?\bno\s+more,?\s+(?:and\s+)?no\s+less\b\)?"
    r"|\s{0,9}\((?:not\s+(?:counting|including)|excluding)\b[^()\d]{0,80}\)"
)
# Words next to a number that change it; this and the next two are to be used within a pattern.
SCALE = (
    r"(?:half|halves|thirds?|quarters?|tens|hundreds?|thousands?|[a-z]+illions?|bn|dozens?|pairs?"
    r"|couples?|lakhs?|crores?|myriads?|squared|cubed|factorial|plus|minus|negative"
    r"|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]*(?:teen|tie|hundred|sand|illion))ths?"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)"
)
# Words that turn the number right after them (BOUND) or right before them (BOUND_BEHIND) into a bound or nothing.
BOUND = (
    r"(?:at\s+(?:least|most)|(?:more|less|fewer|greater|other|rather)\s+than|instead\s+of|over|under"
    r"|above|below|beyond|up\s+to|half\s+of|twice|double|triple|nearly|almost|barely|hardly"
    r"|scarcely|far\s+from|close\s+to|as\s+(?:many|few|much)\s+as|without|none\s+(?:out\s+)?of(?:\s+the)?"
    r"|max\.?(?:\s+of)?|min\.|(?:max|min)imum(?:\s+of)?|upwards?\s+of|in\s+excess\s+of)"
)
BOUND_BEHIND = r"(?:at\s+(?:the\s+)?(?:least|most)|max|(?:max|min)imum|tops|if\s+any|nearly|almost|each|apiece|per)"
REASON = re.compile(  # a clause with because or since; before the answer it ends with a comma
    r"\A\s*(?:because|since)\b[^,]*,|\b(?:because|since)\b.*|因为.*", re.IGNORECASE | re.DOTALL
)


def unsettled(text: str) -> bool:
    """Whether a text contains a denial, doubt, a question or an alternative."""
    return UNSETTLED.search(text) is not None
