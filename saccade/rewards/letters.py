"""Which options of a multiple choice a text names, without substring traps.

A letter counts when it is the whole text, stands in parentheses, begins an option (`B. cat`) or
follows "answer is". The word "A" in running text is an article. Lower case counts only alone or
in parentheses. No letter counts where a sentence that names one is in doubt, or goes on with the
words of another option.

    >>> letters_in("The answer is (B).", ["cat", "dog"])
    {'B'}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from saccade.rewards.spelling import CJK, NARROW, TEXT
from saccade.rewards.wording import REASON, unsettled

UNLISTED = "ABCDEFGHIJ"  # options of a row that does not list them

ALONE = re.compile(r"\(?([A-Za-z])\s*[.):]?")
SEVERAL = re.compile(r"\(?[A-Z]\)?(?:[\s,;&和]+(?:and\s+)?\(?[A-Z]\)?)+|[A-Z]{2,}")
NAMED = re.compile(
    r"(?<![A-Za-z0-9])\(([A-Za-z])\)"  # (B), not f(B)
    r"|(?<![\w(])([A-Z])[.):](?=\s|$)"  # B. cat
    r"|\b(?i:answer|option|choice)s?(?:\s+(?:is|are))?\s*:?\s+"  # the answer is B
    r"([A-Z](?:(?:\s*[,;&]\s*|\s+and\s+)[A-Z])*)\b"
    r"(?!['\u2019]|\s*[/,;&]\s*\(?[A-Z]\b|\s+(?!because|since|as\b)[a-z])"  # not: is A cat
    r"|\A([A-Z])\s*\Z"  # B because …, its reason cut off
    # The same in Chinese: answer, option, choose; no further one behind.
    r"|(?:答案|选项|选择|选)[是为]?\s*:?\s*([A-Z])"
    r"(?![A-Za-z]|\s*[和与,/])"
)
# What may stand before `B.` in a sentence; hepatitis B. is no option.
LEADING = re.compile(
    r"(?:\A|[^\w\s,;.)/&\]}]|['\u2019]s"
    r"|\b(?i:is|are|be|so|thus|hence|therefore|choose|chose|pick|select|say|think|with),?)\s*\Z"
)
# One option that it is not: not B, (B) is wrong.
DENIED = re.compile(
    r"(?:\b(?:not|nor|neither|except|cannot)|n['\u2019]t)\s+"
    r"(?:(?:be|the|answer|option|choice)\s+)*\(?[A-Z]\b\)?"
    r"|(?:\b(?i:answer|option|choice)\s+)?\(?\b[A-Z][.)]?\s+is\s+(?:not\s+\w+|wrong|incorrect|false)\b"
    r"|(?:不是|不选|排除|除了)\s*\(?[A-Z]\)?"
)
# Not after the period of `B. cat`, and not before a word that takes back.
SENTENCE = re.compile(
    rf"(?<=[.;!?])(?<!\b[A-Z]\.)(?:\s+(?!(?i:or|no|not|but|wait)\b)|(?=[{CJK}]))|\n"
)
BETWEEN = r"[\s.:,()$]*(?:[-\u2013]\s+)?"  # a letter and the words of its option


def single_letter(text: str, choices: Sequence[str]) -> str | None:
    """The letter when the text is one option letter and nothing else."""
    match = ALONE.fullmatch(text.strip())
    letter = match[1].upper() if match else None
    return letter if letter is not None and letter in _letters(choices) else None


def letters_in(text: str, choices: Sequence[str]) -> set[str]:
    """The options that a text names: by letter, or by the exact words of one of them."""
    text = re.sub(r"[^\S\n]+", " ", TEXT.sub(r"\1", text.translate(NARROW)))
    text = text.strip().strip("$*").strip()
    only = single_letter(text, choices) or _by_words(text, choices)
    if only:
        return {only}
    allowed = set(_letters(choices))
    if SEVERAL.fullmatch(text):
        listed = re.findall(r"[A-Z]", text)
        return set(listed) if set(listed) <= allowed and len({*listed}) == len(listed) else set()
    named = [_named(sentence, choices) for sentence in SENTENCE.split(text)]
    if None in named:
        return set()
    return {letter for letters in named for letter in letters or ()} & allowed


def _named(sentence: str, choices: Sequence[str]) -> set[str] | None:
    """The options that one sentence names; None where it takes back what it says."""
    sentence = DENIED.sub("", REASON.sub("", sentence))
    found: set[str] = set()
    said, end = "", 0  # all but the words of the options that it names
    firm = False
    for match in NAMED.finditer(sentence):
        listed = "".join(filter(None, match.groups())).replace("and", "")
        letters = set(re.findall("[A-Z]", listed.upper()))
        ends = _options_behind(sentence[match.end() :], choices)
        longest = max(ends.values(), default=0)  # dog food is not dog
        gap = sentence[end : match.start()] if match[1] else ""
        before = _options_before(gap, choices) if gap else {}
        for named in (ends, before):
            if named and max(named.values()) not in [named.get(letter) for letter in letters]:
                return None
        found |= letters
        firm |= not match[2] or LEADING.search(sentence[end : match.start()]) is not None
        said += sentence[end : match.end()]
        end = match.end() + longest
    unlisted = not choices and re.match(r"[A-Z][.):]", sentence)  # B. and words that nobody knows
    said += "" if unlisted else sentence[end:]
    return None if found and (unsettled(said) or not firm) else found


def _letters(choices: Sequence[str]) -> str:
    return ascii_uppercase[: len(choices)] if choices else UNLISTED


def _by_words(text: str, choices: Sequence[str]) -> str | None:
    wanted = _words(text)
    hits = [
        letter
        for letter, option in zip(ascii_uppercase, choices, strict=False)
        if wanted in (_words(option), _words(_without_letter(option, letter)))
    ]
    return hits[0] if wanted and len(hits) == 1 else None


def _options_behind(text: str, choices: Sequence[str]) -> dict[str, int]:
    """The options whose words a text begins with, and where these end."""
    return _options(rf"\A{BETWEEN}(?:(?:an?|the)\s+)?%s(?!\w)", text, choices)


def _options_before(text: str, choices: Sequence[str]) -> dict[str, int]:
    """The options whose words a text ends with, and how long these are."""
    return _options(r"(?<!\w)%s[\s,:]*\Z", text, choices)


def _options(pattern: str, text: str, choices: Sequence[str]) -> dict[str, int]:
    found = {}
    for letter, option in zip(ascii_uppercase, choices, strict=False):
        words = re.escape(_words(_without_letter(option, letter))).replace(r"\ ", r"\s+")
        match = re.search(pattern.replace("%s", words), text, re.IGNORECASE)
        if words and match:
            found[letter] = len(match[0])
    return found


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().strip("$").rstrip(".").strip()).casefold()


def _without_letter(option: str, letter: str) -> str:
    return re.sub(rf"^\(?{letter}[.):]\s*", "", option.strip())
