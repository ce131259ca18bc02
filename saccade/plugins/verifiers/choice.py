"""Finds which options of a multiple-choice question a text names, without false substring matches.

A letter counts if it is the whole text, in parentheses, before the words of its option (`B. cat`,
`B (cat)`) or after "answer is". The word "A" in running text is an article. Lower case counts only
alone or with a mark (`b) cat`). No letter counts if a sentence that names one expresses doubt or
continues with the words of another option, or if an answer is refused or retracted.

    >>> letters_in("The answer is (B).", ["cat", "dog"])
    {'B'}
"""

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from string import ascii_uppercase

from saccade.plugins.verifiers.math_text import CJK, NARROW, TEXT
from saccade.plugins.verifiers.wording import ASIDE, REASON, TAKEN_BACK, peel, unsettled

LONGEST = 100_000  # characters; a longer text names no option
UNLISTED = "ABCDEFGHIJ"  # option letters for a row that does not list its options

ALONE = re.compile(r"\(?([A-Za-z])\s*[.):]?")
LETTERED = re.compile(r"\(?([A-Za-z])(?:(\s*[.):,;]\)?|\s+[-\u2013\u2014]|(?=\s*\())\s*|\s+)(.+)", re.DOTALL)
CHOSEN = re.compile(
    r"(?:i\s+(?:choose|chose|pick|select)\s+)?(?:(?:the\s+)?(?:option|choice)\b\s*:?\s*)?(.+?)"
    r"(?:\s+is\s+(?:the\s+)?(?:correct|right|answer)(?:\s+(?:answer|option|choice|one))?)?",
    re.IGNORECASE | re.DOTALL,
)
ARTICLE = re.compile(r"\b(?i:it|this|that)(?:\s+is|['\u2019]s)\s+a\W*\Z")  # "It is a", without a noun
BRACKETED = re.compile(r"(?:\((?=[^()]+\)\Z)|\[(?=[^][]+\]\Z)|\{(?=[^{}]+\}\Z))(.+).", re.DOTALL)
# Another option after a named one, that `NAMED` does not match: (B), then option c; (B), then C
FURTHER = re.compile(r"\b(?:option|choice|answer)\s+[a-z]\b|(?<![\w.])[b-hj][.):](?=\s|\Z)|\s[A-Z][.!]?\Z")
REFUSED = re.compile(
    r"\b(?:can['\u2019]?t|cannot|(?:unable|impossible)\s+to)\s+(?:help|assist|answer|determine|tell|say)\b"
    r"|\bsorry,?\s+(?:but\s+)?(?:i\s+)?(?:do\s+not|don['\u2019]t|no)\b"
    r"|\A\W*(?:neither|none)(?:\s+of\s+(?:them|these|those|the\s+\w+))?\W*\Z",
    re.IGNORECASE,
)
SEVERAL = re.compile(r"\(?[A-Z]\)?(?:[\s,;&和]+(?:and\s+)?\(?[A-Z]\)?)+|[A-Z]{2,}")
NAMED = re.compile(
    r"(?<![A-Za-z0-9])\(([A-Za-z])\)"  # (B), not f(B)
    r"|(?<![\w(])([A-Z])[.):](?=\s|$)"  # B. cat
    r"|\b(?i:answer|option|choice)s?(?:\s+(?:is|are))?\s*:?\s+"  # the answer is B
    r"([A-Z](?:(?:\s*[,;&]\s*|\s+and\s+)[A-Z])*)\b"
    r"(?!['\u2019]|\s*[/,;&]\s*\(?[A-Z]\b|\s+(?!because|since|as\b|rather\b)[a-z])"  # not: is A cat
    r"|\A([A-Z])\s*\Z"  # B because …, its reason cut off
    # The same in Chinese: answer, option, choose; not followed by another letter.
    r"|(?:答案|选项|选择|选)[是为]?\s*:?\s*([A-Z])(?![A-Za-z]|\s*[和与,/])"
)
# Text that may precede `B.` in a sentence; "hepatitis B." names no option.
LEADING = re.compile(
    r"(?:\A|[^\w\s,;.)/&\]}]|['\u2019]s"
    r"|\b(?i:is|are|be|so|thus|hence|therefore|choose|chose|pick|select|say|think|with),?)\s*\Z"
)
# A denied option: not B, (B) is wrong.
DENIED = re.compile(
    r"(?:\b(?:not|nor|neither|except|cannot|without|than|instead\s+of)|n['\u2019]t)\s+"
    r"(?:(?:be|the|answer|option|choice)\s+)*(?:\(?[A-Z]\b\)?|\([a-z]\))"
    r"|(?:\b(?i:answer|option|choice)\s+)?\(?\b[A-Z][.)]?\s+is\s+(?:not\s+\w+|wrong|incorrect|false)\b"
    r"|\b(?i:answer|option|choice)s\s+[A-Z](?:,?\s+(?:(?:and|or)\s+)?[A-Z]){1,9}"
    r"\s+are\s+(?:all\s+|both\s+)?(?:not\s+\w+|wrong|incorrect|false)\b"
    r"|(?:不是|不选|排除|除了)\s*\(?[A-Z]\)?"
)
# Sentence boundaries: not after the period of `B. cat`, and not before a word of retraction.
SENTENCE = re.compile(rf"(?<=[.;!?])(?<!\b[A-Z]\.)(?:\s+(?!(?i:or|no|not|but|wait)\b)|(?=[{CJK}]))|\n")
CORRECTING = re.compile(r"(?:no|actually|sorry|rather|wait)\b", re.IGNORECASE)
# Position of an option's words: anywhere, right after a letter, right before one.
ANYWHERE = r"(?<!\w)%s(?!\w)"
BEHIND = r"\A[\s.:,()$]*(?:[-\u2013]\s+)?(?:(?:an?|the)\s+)?%s(?!\w)"
BEFORE = r"(?<!\w)%s[\s,:]*\Z"


def single_letter(text: str, choices: Sequence[str]) -> str | None:
    """The letter if the text is one option letter and nothing else, else None."""
    match = ALONE.fullmatch(text.strip())
    letter = match[1].upper() if match else None
    return letter if letter is not None and letter in _letters(choices) else None


def letters_in(text: str, choices: Sequence[str]) -> set[str]:
    """The options that a text names: by letter, or by the exact words of one of them."""
    return set(_letters_in(text, tuple(choices))) if len(text) <= LONGEST else set()


@lru_cache(maxsize=2048)  # members of a group often give the same answer
def _letters_in(text: str, choices: tuple[str, ...]) -> set[str]:
    text = re.sub(r"[^\S\n]+", " ", TEXT.sub(r"\1", text.translate(NARROW)))
    text = ASIDE.sub("", re.sub(r"\n\s+", "\n", text))
    if ARTICLE.search(text):
        return set()
    bare = text.strip().rstrip("!")
    for wrapping in (None, CHOSEN, CHOSEN, BRACKETED):  # try without peeling first: an option may begin with such words
        wrapped = wrapping.fullmatch(peel(bare)) if wrapping else None
        bare = peel(wrapped[1]) if wrapped else bare
        if only := single_letter(bare, choices) or _by_words(bare, choices):
            return {only}
    if only := _lettered(bare, choices):
        return {only}
    allowed = set(_letters(choices))
    if SEVERAL.fullmatch(bare):
        listed = re.findall(r"[A-Z]", bare)
        return set(listed) if set(listed) <= allowed and len({*listed}) == len(listed) else set()
    found: set[str] = set()
    for sentence in SENTENCE.split(text.strip().strip("$*").strip()):
        letters = _named(sentence, choices)
        refused = not letters and REFUSED.search(sentence)
        back = TAKEN_BACK.search(sentence) or (
            CORRECTING.match(sentence)
            and (FURTHER.search(sentence) or _options(ANYWHERE, sentence, choices).keys() - found)
        )
        if letters is None or refused or (found and back):
            return set()
        found |= letters
    return found & allowed


def _named(sentence: str, choices: Sequence[str]) -> set[str] | None:
    """The options that one sentence names; None if it contradicts, doubts or retracts what it says."""
    sentence = DENIED.sub("", REASON.sub("", sentence))
    found: set[str] = set()
    said, end = "", 0  # the sentence without the words of named options
    first = 0  # end of the first named option in `said`
    firm = False
    for match in NAMED.finditer(sentence):
        listed = "".join(filter(None, match.groups())).replace("and", "")
        letters = set(re.findall("[A-Z]", listed.upper()))
        ends = _options(BEHIND, sentence[match.end() :], choices)
        longest = max(ends.values(), default=0)  # so "dog food" does not match the option "dog"
        before = _options(BEFORE, sentence[end : match.start()] if match[1] else "", choices)
        for named in (ends, before):
            if named and max(named.values()) not in [named.get(letter) for letter in letters]:
                return None
        found |= letters
        firm |= not match[2] or LEADING.search(sentence[end : match.start()]) is not None
        said += sentence[end : match.end()]
        first = first or len(said)
        end = match.end() + longest
    unlisted = not choices and re.match(r"[A-Z][.):]", sentence)  # `B. cat`, whose words are not known
    rest = "" if unlisted else sentence[end:]
    said += rest
    if not found or not firm:
        return None if found else found
    others = FURTHER.search(rest) or _options(ANYWHERE, rest, choices).keys() - found
    return None if others or unsettled(said) or TAKEN_BACK.search(said[first:]) else found


def _letters(choices: Sequence[str]) -> str:
    return ascii_uppercase[: len(choices)] if choices else UNLISTED


def _by_words(text: str, choices: Sequence[str]) -> str | None:
    wanted = _words(text)
    named = zip(ascii_uppercase, choices, strict=False)
    options = {letter: (_words(option), _words(_without_letter(option, letter))) for letter, option in named}
    for plain in (str, partial(re.sub, r"\A(?:an?|the)\s+", "")):  # articles left out
        hits = [letter for letter, spelled in options.items() if plain(wanted) in map(plain, spelled)]
        if wanted and len(hits) == 1:
            return hits[0]
    return None


def _lettered(text: str, choices: Sequence[str]) -> str | None:
    """The letter of a text like `B cat`, if cat is option B; a lower-case letter needs a mark (`b) cat`)."""
    match = LETTERED.fullmatch(text)
    if match is None or not (match[1].isupper() or match[2]):
        return None
    letter = match[1].upper()
    if not choices and (match[2] or "").strip(" -\u2013\u2014") == "" and match[2] is not None:
        other = unsettled(match[3]) or re.search(r"\b[A-Z]\b", match[3])  # the option's words are not known
        return None if other else letter
    return letter if _by_words(peel(match[3]), choices) == letter else None


def _options(pattern: str, text: str, choices: Sequence[str]) -> dict[str, int]:
    """The options whose words occur in a text at the position of `pattern`: letter → length of the match."""
    found = {}
    for letter, option in zip(ascii_uppercase, choices, strict=False):
        words = re.escape(_words(_without_letter(option, letter))).replace(r"\ ", r"\s+")
        match = re.search(pattern.replace("%s", words), text, re.IGNORECASE)
        if words and match:
            found[letter] = len(match[0])
    return found


def _words(text: str) -> str:
    text = re.sub(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})", "\u00b0", text)
    return re.sub(r"\s+", " ", peel(text).strip("$").rstrip(".").strip()).casefold()


def _without_letter(option: str, letter: str) -> str:
    return re.sub(rf"^\(?{letter}[.):]\s*", "", option.strip())
