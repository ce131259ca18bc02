"""Words around an answer that take it back, leave it open, or make another number of it.

One table for all verifiers that read an answer out of a sentence. It is meant to be strict: who
answers "maybe 7" or "7 hundred" is not paid for 7, and neither is who denies something else in the
same breath. "About 7" is an answer; "nearly 7" and "7 if any" are none.

    >>> unsettled("7 or 8"), unsettled("There are 7 items")
    (True, False)
"""

from __future__ import annotations

import re

STRUCK = r"~~|\u00ac|\\(?:neg|lnot|[bx]?cancel|sout)(?![a-zA-Z])|<(?:s|del|strike)>"  # out
UNSETTLED = re.compile(
    # It is not so,
    r"\b(?:not|no|nor|neither|never|cannot|wrong|worst|incorrect|false|untrue|doubt|unlikely|unless"
    r"|except|exclu\w+|(?:all|anything|everything) but)\b|n['\u2019]t\b|[不非错]|没有|排除|除了"
    # or it may be so and something else may, too.
    r"|\b(?:maybe|perhaps|possibly|probably|might|could|guess|unsure|uncertain|unknown|or|either"
    rf"|between|vs|versus)\b|[?\uff1f或吗]|还是|可能|也许|{STRUCK}",
    re.IGNORECASE,
)
# What was said is no longer so.
TAKEN_BACK = re.compile(
    r"\b(?:wait|mistake|mistaken|scratch\s+that|correction|actually|sorry|i\s+meant?|wrong"
    r"|incorrect|second\s+thoughts?)\b|(?:^|[.!?]\s*)no\b",
    re.IGNORECASE,
)
# What stands beside a number and makes another one of it; this and the next two are for the inside
# of a pattern.
SCALE = (
    r"(?:half|halves|thirds?|quarters?|tens|hundreds?|thousands?|[a-z]+illions?|bn|dozens?|pairs?"
    r"|couples?|lakhs?|crores?|myriads?|squared|cubed|factorial|plus|minus|negative"
    r"|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]*(?:teen|tie|hundred|sand|illion))ths?"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)"
)
# What makes a bound, or nothing at all, of the number right behind it, or right before it.
BOUND = (
    r"(?:at\s+(?:least|most)|(?:more|less|fewer|greater|other|rather)\s+than|instead\s+of|over|under"
    r"|above|below|beyond|up\s+to|half\s+of|twice|double|triple|nearly|almost|barely|hardly"
    r"|scarcely|far\s+from|close\s+to|as\s+(?:many|few|much)\s+as|without|none\s+(?:out\s+)?of(?:\s+the)?"
    r"|max\.?(?:\s+of)?|min\.|(?:max|min)imum(?:\s+of)?)"
)
BOUND_BEHIND = r"(?:at\s+(?:the\s+)?(?:least|most)|max|(?:max|min)imum|tops|if\s+any|nearly|almost)"
REASON = re.compile(r"\b(?:because|since)\b.*|因为.*", re.IGNORECASE | re.DOTALL)


def unsettled(text: str) -> bool:
    """Whether a text denies, doubts or asks, or gives an alternative."""
    return UNSETTLED.search(text) is not None
