r"""Extracts the answer from a response.

Reads only the response, by default what follows the last `</think>`; never the prompt. Extractors
are tried in the order that the caller gives, and the first match wins.

    >>> extract(r"<think>\boxed{3}</think> so \boxed{4}", ["answer_tag", "boxed"])
    '4'
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal

from saccade.plugins.verifiers.choice import letters_in
from saccade.plugins.verifiers.conclusion import concluded
from saccade.plugins.verifiers.wording import DENIES_NEXT, STRUCK_OUT, TAKEN_BACK
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

Scope = Literal["after_think", "all"]

NUMBER = re.compile(
    r"(?<![a-zA-Z0-9_.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
    r"|(?<![a-zA-Z0-9_.])[-+\u2212]?\.\d+"
)
ANSWER_LINE = re.compile(  # at the beginning of a line or of a sentence
    r"(?:^[ \t_>-]*(\*+)?[ \t_]*|(?<=[.!?\u3002])\s+)(?:(?:the\s+)?(?:final\s+)?answer|答案)"
    r"\s*\**\s*(?:[:\uff1a]|(?<=案)[是为])\s*(?(1)\**)\s*",
    re.IGNORECASE | re.MULTILINE,
)
ANSWER_LINE_WINDOW = 300  # characters at the end of a text in which an answer line may begin
NEAR = 80  # characters before an answer in which it may be denied
CALL = re.compile(r"<(grounding|tool_call)>.*?(?:</\1>|(?=<answer>)|\Z)", re.DOTALL)


def extract(
    response: str,
    order: Sequence[str],
    *,
    scope: Scope = "after_think",
    think_prefilled: bool = False,
    choices: Sequence[str] = (),
) -> str | None:
    """The answer, or None. An answer that is present but empty is the empty string."""
    if scope not in ("after_think", "all"):
        raise ValueError(f"scope is 'after_think' or 'all', not {scope!r}")
    text = answer_scope(response, think_prefilled) if scope == "after_think" else response
    text = STRUCK_OUT.sub("", text)
    for name in order:
        if name not in EXTRACTORS:
            raise ValueError(f"order: expected some of {', '.join(EXTRACTORS)}, not {name!r}")
        before, found, behind = EXTRACTORS[name](text, choices)
        if found is None:
            continue
        if not (DENIES_NEXT.search(before[-NEAR:]) or TAKEN_BACK.search(behind)):
            return found.strip()
        text = before + behind  # denied or retracted: no other extractor may find it
    return None


def answer_of(sample: RewardSample, order: Sequence[str], scope: Scope, *, blank: bool = False) -> str | None:
    """The answer in the last turn of an episode, or None. An empty one is None, unless `blank`. Tool calls
    are ignored, as an episode may end before its calls are answered.
    """
    text = CALL.sub("", sample.turns[-1] if len(sample.turns) > 1 else sample.response)
    found = extract(text, order, scope=scope, think_prefilled=sample.think_prefilled, choices=sample.choices)
    return found if blank else found or None


def with_result_of(make: Callable[..., Any]) -> Callable[[Callable[..., Score]], Callable[..., Score]]:
    """Decorator: turns f(sample, made, *, …) into a verifier f(sample, *, …) that also takes the options of
    make(sample, *, …) and passes its result as `made`.
    """
    _, *options = inspect.signature(make).parameters.values()

    def decorate(function: Callable[..., Score]) -> Callable[..., Score]:
        @wraps(function)
        def verify(sample: RewardSample, *more: Any, **args: Any) -> Score:
            taken = {option.name: args.pop(option.name) for option in options if option.name in args}
            return function(sample, make(sample, **taken), *more, **args)

        sample, _, *own = inspect.signature(function).parameters.values()
        verify.__signature__ = inspect.Signature([sample, *own, *options])  # type: ignore[attr-defined]
        return verify

    return decorate


def answering(*places: str, blank: bool = False) -> Callable[[Callable[..., Score]], Callable[..., Score]]:
    """Decorator: turns f(sample, found, *, …) into a verifier that extracts `found`, by default from these places."""

    def find(sample: RewardSample, *, order: Sequence[str] = places, scope: Scope = "after_think") -> str | None:
        return answer_of(sample, order, scope, blank=blank)

    return with_result_of(find)


def score_of(found: str | None, right: float, why: str = "wrong") -> Score:
    """The score `right` of an extracted answer, with the reason `why` if it is 0; 0 if there is no answer."""
    if found is None:
        return Score(kind="value", value=0.0, reason="no_answer")
    return Score(kind="value", value=float(right), reason="" if right else why, extracted=found)


def answer_scope(response: str, think_prefilled: bool = False) -> str:
    """The text after the last `</think>`; empty if a thought is still open."""
    opened, closed = response.rfind("<think>"), response.rfind("</think>")
    if closed < 0:
        return "" if think_prefilled or opened >= 0 else response
    return "" if opened > closed else response[closed + len("</think>") :]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces, or None."""
    return _box(text, ())[1]


def fenced(text: str) -> str | None:
    """The content of the last complete block between triple backticks, without its language tag, or None."""
    blocks = re.findall("```(.*?)```", text, re.DOTALL)
    return re.sub(r"\A[a-zA-Z]+(?=\s)", "", blocks[-1]).strip() if blocks else None


def unboxed(text: str) -> str:
    r"""The content of a `\boxed{…}` in the text, or the text if there is none."""
    inner = last_boxed(text)
    return text if inner is None else inner


# (text before, answer, text after). The texts are empty if an extractor's answers cannot be denied there.
Extraction = tuple[str, str | None, str]
NOT_FOUND: Extraction = ("", None, "")


def _tag(text: str, choices: Sequence[str]) -> Extraction:
    before, close, behind = text.rpartition("</answer>")
    before, opened, inside = before.rpartition("<answer>")
    return (before, unboxed(inside), behind) if close and opened else NOT_FOUND


def _box(text: str, choices: Sequence[str]) -> Extraction:
    best, end, outer = -1, -1, -1  # begin and end of the content, and begin of the outermost box's content
    open_braces: list[int] = []  # start of a box's content, -1 for other braces
    for token in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text if "\\boxed" in text else "", re.DOTALL):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start > best:
                best, end = start, token.start()
                outer = next((each for each in open_braces if each >= 0), start)
        elif token[0] == "{":
            open_braces.append(-1)
        elif token[0].startswith("\\boxed"):
            open_braces.append(token.end())
    return (text[: text.rfind("\\boxed", 0, outer)], text[best:end], text[end + 1 :]) if best >= 0 else NOT_FOUND


def _line(text: str, choices: Sequence[str]) -> Extraction:
    marks = list(ANSWER_LINE.finditer(text, max(0, len(text) - ANSWER_LINE_WINDOW)))
    if not marks:
        return NOT_FOUND
    line, _, behind = text[marks[-1].end() :].partition("\n")
    bare = line.rstrip().rstrip("*")
    return text[: marks[-1].start()], unboxed(line if "*" in bare else bare), behind


def _hash(text: str, choices: Sequence[str]) -> Extraction:
    _, mark, rest = text.rpartition("####")
    return "", unboxed(rest.lstrip(" \t").partition("\n")[0]) if mark else None, ""


def _letter(text: str, choices: Sequence[str]) -> Extraction:
    letters = letters_in(text, choices)
    return "", letters.pop() if len(letters) == 1 else None, ""


EXTRACTORS: dict[str, Callable[[str, Sequence[str]], Extraction]] = {
    "answer_tag": _tag,
    "boxed": _box,
    "answer_line": _line,
    "hash": _hash,
    "fenced": lambda text, choices: ("", fenced(text), ""),
    "letter": _letter,
    "conclusion": concluded,
    "last_number": lambda text, choices: ("", next(reversed(NUMBER.findall(text)), None), ""),
    "whole": lambda text, choices: ("", text if text.strip() else None, ""),
}
