"""Words around an answer that take it back, leave it open, or make another number of it.

One table for all verifiers that read an answer out of a sentence. It is meant to be strict: who
answers "maybe 7" or "7 hundred" is not paid for 7, and neither is who denies something else in the
same breath. "About 7" is an answer.

    >>> unsettled("7 or 8"), unsettled("There are 7 items")
    (True, False)
"""

from __future__ import annotations

import re

UNSETTLED = re.compile(
    # It is not so,
    r"\b(?:not|no|nor|neither|never|cannot|wrong|worst|incorrect|false|untrue|doubt|unlikely|unless"
    r"|except|exclu\w+|(?:all|anything|everything) but)\b|n['\u2019]t\b|[不非错]|没有|排除|除了"
    # or it may be so and something else may, too.
    r"|\b(?:maybe|perhaps|possibly|probably|might|could|guess|unsure|uncertain|unknown|or|either"
    r"|between|vs|versus)\b|[?\uff1f或吗]|还是|可能|也许",
    re.IGNORECASE,
)
# What stands beside a number and makes another one of it; for the inside of a pattern.
SCALE = (
    r"(?:half|halves|thirds?|quarters?|tens|hundreds?|thousands?|[a-z]+illions?|bn|dozens?|pairs?"
    r"|couples?|lakhs?|crores?|myriads?|squared|cubed|factorial|plus|minus|negative"
    r"|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]*(?:teen|tie|hundred|sand|illion))ths?"
    r"|(?:thir|for|fif|six|seven|eigh|nine)ty)"
)
REASON = re.compile(r"\b(?:because|since)\b.*|因为.*", re.IGNORECASE | re.DOTALL)


def unsettled(text: str) -> bool:
    """Whether a text denies, doubts or asks, or gives an alternative."""
    return UNSETTLED.search(text) is not None
