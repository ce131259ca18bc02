"""Terms that shape a reward without judging the answer: length limits, repetition, tool use.

>>> overlong(RewardSample(id="a", response="", length=1792, max_tokens=2048), buffer=512).value
-0.5
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from saccade.rewards.combine import TIMES_OUTCOME
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

# Scripts written without spaces: a character is a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def overlong(sample: RewardSample, *, buffer: int, factor: float = 1.0, limit: int | None = None) -> Score:
    """f·max(-1, min(0, (M - b - L)/b)): grows over the last `buffer` tokens before the limit M."""
    limit = limit or sample.max_tokens
    if not 0 < buffer < limit:
        raise ValueError(f"overlong needs 0 < buffer < {limit} (the token limit), got {buffer}")
    excess = (limit - buffer - sample.length) / buffer
    return Score(kind="value", value=factor * max(-1.0, min(0.0, excess)))


def repetition(sample: RewardSample, *, n: int = 4, max_penalty: float = 1.0) -> Score:
    """-max_penalty·(1 - distinct/all) over runs of n words."""
    if n < 1:
        raise ValueError(f"repetition needs n of at least 1, got {n}")
    words = WORD.findall(sample.response.lower())
    runs = list(zip(*(words[start:] for start in range(n)), strict=False))
    share = 1 - len(set(runs)) / len(runs) if runs else 0.0
    return Score(kind="value", value=-max_penalty * share)


def length(sample: RewardSample, *, target: int | None = None, band: Sequence[int] | None = None) -> Score:
    """min(1, tokens/target), or 1 inside the band [low, high] and 0 outside."""
    if (target is None) == (band is None):
        raise ValueError("length needs either target, such as 512, or band, such as [64, 512]")
    if band is not None:
        low, high = band
        return Score(kind="value", value=float(low <= sample.length <= high))
    assert target is not None
    return Score(kind="value", value=min(1.0, sample.length / target))


def tool_use(
    sample: RewardSample,
    *,
    penalty: float = 0.1,
    mode: Literal["once", "per_call"] = "once",
    bonus: float = 0.0,
    only_if_correct: bool = True,
) -> Score:
    """-penalty for calling tools at all, or for every call; +bonus where a call succeeded. With
    `only_if_correct` both are multiplied by the outcome.
    """
    if mode not in ("once", "per_call"):
        raise ValueError(f"mode is once or per_call, not {mode!r}")
    calls = len(sample.tool_calls)
    succeeded = any(call.get("ok", True) if isinstance(call, Mapping) else True for call in sample.tool_calls)
    value = bonus * succeeded - penalty * (min(calls, 1) if mode == "once" else calls)
    return Score(kind="value", value=value, info={TIMES_OUTCOME: True} if only_if_correct else {})


ROWS = {
    each.__name__: Verifier(function=each, kind="shaping", needs_answer=False)
    for each in (overlong, repetition, length, tool_use)
}
