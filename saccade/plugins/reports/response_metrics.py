"""Metrics of the text of responses, independent of reward: repetition, and phrases that announce a second look.

>>> repeated(np.array([5, 6, 7, 8, 5, 6, 7, 8]))
0.2
"""

import re
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from saccade.types import Trajectory

RUN = 4  # tokens that count as repeated if they occurred in the same order before
MIX = np.array([1, 1_000_003, 998_244_353, 6_700_417_000_081])  # hashes a run into one number
AGAIN = "re-?(?:calculate|check|consider|count|do|evaluate|examine|read|think|verify|view|visit)"  # not "reason"
LOOKS_AGAIN = re.compile(
    rf"\b(?:wait|hmm|re-?check|double[- ]check|re-?evaluate|on second thought|let me (?:check|verify|{AGAIN}))\b", re.I
)


def response_metrics(everyone: Sequence[Trajectory]) -> dict[str, float]:
    said = (" ".join(m.text for m in t.messages[t.context :] if m.role == "assistant") for t in everyone)
    return {
        "length/repeat_score": fmean(repeated(t.response_ids) for t in everyone),
        "length/reflection_rate": fmean(LOOKS_AGAIN.search(text) is not None for text in said),
    }


def repeated(ids: np.ndarray) -> float:
    """Share of the runs of RUN tokens that occurred before in the response."""
    if len(ids) < RUN:
        return 0.0
    runs = sum(mix * ids[at : at + len(ids) - RUN + 1] for at, mix in enumerate(MIX))
    runs.sort()  # np.unique is slow on short arrays
    return int(np.count_nonzero(runs[1:] == runs[:-1])) / len(runs)
