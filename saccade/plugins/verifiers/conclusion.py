r"""The place `conclusion`: what the last sentence that states a result names, for answers without a mark.

It is the last one that begins with a word such as "therefore" or speaks of the answer, else the last one at all, that
names an option (by letter or words) or a number. Of several numbers it is the one behind the last "=", "is", "costs" ….
In doubt the answer is empty, or the whole sentence, which verifiers refuse; earlier sentences are not read instead.

    >>> concluded("3 m + 4.2 m = 7.2 m. So the length of the 2 ropes is 7.2 m in total. I hope this helps!", ())[1]
    '7.2 m'
    >>> concluded("The wettest month is May.", ["June", "May"])[1], concluded("It is May or June.", ["June", "May"])[1]
    ('B', '')
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase

from saccade.plugins.verifiers.choice import NAMED, REFUSED, SENTENCE, letters_in
from saccade.plugins.verifiers.wording import BOUND_BEHIND, DOUBT, FIGURE, NUMERAL, REASON, TAKEN_BACK, unsettled

RESULT = re.compile(
    r"(?i)\A\W*(?:so|thus|hence|therefore|finally|overall|in\s+(?:conclusion|total))\b|[\u2234答]|\\therefore"
    r"|\b(?:answer|(?:correct|right)\s+(?:option|choice))\b"
)
NUMBER = rf"[-\u2212]?[$\u20ac\u00a3]?\s?(?<![\w.]){FIGURE}(?![\w.]*\d)|{NUMERAL}"
STATED = re.compile(  # a verb, at most some words without meaning, a number
    r"(?is).*(?:[=\u2248]|\b(?:is|are|was|were|be|equals?|has|have|had|needs?|costs?|spends?|spent|makes?|made)\b)[\s:*_`$(]*"
    r"(?P<value>(?:(?:equal|to|a|the|total|sum|of|only|exactly|just|about|approximately|around|still|also|now)\s+)*"
    rf"[*_`(]*(?:{NUMBER}).*)"
)
BESIDE = re.compile(  # what follows a number and is no part of it; "3 to 4" stays a range, "3 at most" a bound
    rf"(?is)(?<=\w)[*_`%$)]{{0,9}}(?:,(?!\d)|\s?[;(]|\s(?!{BOUND_BEHIND}\b)(?:in|on|for|of|at|from|with|by|that|which|who"
    rf"|whose|when|if|where|as|than|because|since|so|after|left|to(?!\s+(?:{NUMBER})))\b).*"
)
# Where the words %s of an option are it: anywhere, but yes and no only alone or before a comma.
ANYWHERE, ALONE = r"(?<![\w.])(?:%s)(?:\.0+)?(?!\w|\.\d)", r"(?:\A|\bis\b|[:,(])\W*(?:%s)[^\w?]*(?:\Z|,.*)"


def concluded(text: str, choices: Sequence[str]) -> tuple[str, str | None, str]:
    """The result, None if there is none, between two empty texts; of a long text only the end is read."""
    sentences = SENTENCE.split(re.sub(r"(?<=[:=\u2248])\s*\n\s*", " ", text[-20_000:].strip()))
    found = [_stated(REASON.sub("", sentence), choices) for sentence in sentences]
    telling = [n for n, one in enumerate(found) if one is not None] or [0]
    last = next((n for n in reversed(telling) if RESULT.search(sentences[n])), telling[-1])
    rest = "\n".join(sentences[last:])
    doubted = any(re.search(pattern, rest) for pattern in (f"(?i){DOUBT}", REFUSED, TAKEN_BACK))
    return "", "" if doubted and found[last] else found[last], ""


def _stated(sentence: str, choices: Sequence[str]) -> str | None:
    """The number or the option's letter that a sentence states: empty in doubt, None if it speaks of none."""
    numbers, named, stated = re.findall(NUMBER, sentence, re.I), NAMED.search(sentence), STATED.fullmatch(sentence)
    clear = stated and len(numbers) > 1 and not unsettled(" ".join(sentence[: stated.start("value")].split()[-3:]))
    value = BESIDE.sub("", stated["value"]).strip() if stated and clear else sentence
    if not choices:
        return value if numbers or named else None
    held, letters = _held(sentence, choices), letters_in(sentence, choices)
    if not letters and not named:
        letters = held if len(held) == 1 else _held(value, choices)
    wrong = held or named or (numbers and all(re.search(FIGURE, choice) for choice in choices))
    return letters.pop() if len(letters) == 1 else "" if wrong else None


def _held(text: str, choices: Sequence[str]) -> set[str]:
    """The options whose words (or numbers, if they differ in nothing else) a text holds, not inside of another one's;
    all of them if it leaves open which.
    """
    found, rest = {}, text
    alike = len({re.sub(FIGURE, "", choice) for choice in choices}) == 1
    for letter, choice in zip(ascii_uppercase, choices, strict=False):
        words = [re.escape(choice.strip(" .")), *(re.findall(FIGURE, choice) if alike else ())]
        pattern = (ALONE if choice.casefold() in ("yes", "no") else ANYWHERE) % "|".join(words)
        if re.search(pattern, text, re.I | re.S):
            found[letter], rest = choice.casefold(), re.sub(pattern, " ", rest, flags=re.I | re.S)
    whole = {one for one, words in found.items() if not any(words in other != words for other in found.values())}
    return {*ascii_uppercase} if whole and unsettled(rest) else whole
