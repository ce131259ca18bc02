"""Which options of a multiple choice a text names, without substring traps.

A letter counts when it is the whole text, stands in parentheses, begins an option (`B. cat`) or
follows "answer is". The word "A" in running text is an article. Lower case counts only alone or
in parentheses.

    >>> letters_in("The answer is (B).", ["cat", "dog"])
    {'B'}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from saccade.rewards.spelling import NARROW, TEXT

UNLISTED = "ABCDEFGHIJ"  # options of a row that does not list them

ALONE = re.compile(r"\(?([A-Za-z])\s*[.):]?")
SEVERAL = re.compile(r"\(?[A-Z]\)?(?:[\s,;&和]+(?:and\s+)?\(?[A-Z]\)?)+|[A-Z]{2,}")
NAMED = re.compile(
    r"(?<!not )\(([A-Za-z])\)"  # (B)
    r"|(?<![\w(])([A-Z])[.):](?=\s|$)"  # B. cat
    r"|(?<!not )\b(?i:answer|option|choice)s?(?:\s+(?:is|are))?\s*:?\s+"  # the answer is B
    r"([A-Z](?:(?:\s*[,;&]\s*|\s+and\s+)[A-Z])*)\b"
    r"(?!['\u2019]|\s*[/,;&]\s*\(?[A-Z]\b|\s+(?!because|since|as\b)[a-z])"  # not: is A cat
    r"|\A([A-Z])(?=\s+(?:because|since)\b)"
    # The same in Chinese: answer, option, choose; neither "not" before nor "or" behind.
    r"|(?<!不)(?:答案|选项|选择|选)[是为]?\s*:?\s*([A-Z])"
    r"(?![A-Za-z]|\s*[或和与,/])"
)


def single_letter(text: str, choices: Sequence[str]) -> str | None:
    """The letter when the text is one option letter and nothing else."""
    match = ALONE.fullmatch(text.strip())
    letter = match[1].upper() if match else None
    return letter if letter is not None and letter in _letters(choices) else None


def letters_in(text: str, choices: Sequence[str]) -> set[str]:
    """The options that a text names: by letter, or by the exact words of one of them."""
    text = re.sub(r"\s+", " ", TEXT.sub(r"\1", text.translate(NARROW)))
    text = text.strip().strip("$*").strip()
    only = single_letter(text, choices) or _by_words(text, choices)
    if only:
        return {only}
    allowed = set(_letters(choices))
    if SEVERAL.fullmatch(text):
        listed = re.findall(r"[A-Z]", text)
        return set(listed) if set(listed) <= allowed and len({*listed}) == len(listed) else set()
    named = "".join("".join(groups) for groups in NAMED.findall(text))
    return set(named.replace("and", "").upper()) & allowed


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


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip().strip("$").rstrip(".").strip()).casefold()


def _without_letter(option: str, letter: str) -> str:
    return re.sub(rf"^\(?{letter}[.):]\s*", "", option.strip())
