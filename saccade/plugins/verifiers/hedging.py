"""Words around an answer that take it back, leave it open, or make another number of it.

One table for all verifiers that read an answer out of a sentence. It is meant to be strict: who
answers "maybe 7" or "7 hundred" is not paid for 7, and neither is who denies something else in the
same breath. "About 7" is an answer; "nearly 7" and "7 if any" are none.

    >>> unsettled("7 or 8"), unsettled("There are 7 items")
    (True, False)
"""

from __future__ import annotations

import re

from saccade.plugins.verifiers.peel import NUMERAL

STRUCK = r"~~|\u00ac|\\(?:neg|lnot|[bx]?cancel|sout)(?![a-zA-Z])|<(?:s|del|strike)>"  # out
UNSETTLED = re.compile(
    # It is not so,
    r"\b(?:not|no|nor|neither|never|cannot|wrong|worst|incorrect|false|untrue|doubt|unlikely|unless"
    r"|except|exclu\w+|(?:all|anything|everything) but|ruled\s+out|rejected|eliminated)\b"
    r"|n['\u2019]t\b|[不非错\u274c\u2717\u2718]|没有|排除|除了"
    # or it may be so and something else may, too.
    r"|\b(?:maybe|perhaps|possibly|probably|might|could|guess|unsure|uncertain|unknown|or|either"
    rf"|between|vs|versus)\b|[?\uff1f或吗]|还是|可能|也许|{STRUCK}",
    re.IGNORECASE,
)
# The answer that is marked behind these words is denied: it cannot be, the wrong one is.
DENIES_NEXT = re.compile(
    r"(?:(?:\b(?:not|never|cannot|neither|nor|except|without|(?:other|rather)\s+than|instead\s+of"
    r"|(?:all|anything|everything)\s+but)|n['\u2019]t)(?:\s+(?:be|is|it|it['\u2019]s|the|an?|that|to|for"
    r"|equal|answer|option|choice|value|say|think|choose|pick))*"
    r"|\b(?:wrong|incorrect|false)\s+(?:answer|option|choice|value|result|one)s?"
    r"(?:\s+(?:is|are|was|would\s+be))?|\u2260|\u00ac|\\(?:neq?|neg|lnot)|不是|不选|除了)"
    r"[\s:\uff1a$*_(\[{\"'`]{0,20}\Z",
    re.IGNORECASE,
)
STRUCK_OUT = re.compile(  # with what was struck out
    r"~~(?=\S)[^~\n]{0,200}[^~\s]~~|<(s|del|strike)>[^<>\n]{0,200}</\1>|\\sout\{[^{}]{0,200}\}"
)
# What was said is no longer so. These speak of the answer; "the others are wrong" does not, nor
# does "sorry for the long text".
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
# What is said of all the rest, behind an answer: no other one is visible, the others are wrong.
ASIDE = re.compile(
    r"(?i:(?<=[.;!\n])\s{0,9}(?:(?:there\s+(?:is|are)\s+)?(?:no|none\s+of\s+the)\s+(?:others?|more"
    r"|further)\b|nothing\s+else\b|(?:all\s+)?(?:the\s+)?(?:others?|rest|remaining)\b"
    r"(?=[^.;!?\n]*\b(?:wrong|incorrect|false|not)\b|[^.;!?\n]*n['\u2019]t\b)))"
    r"(?:(?!\b(?:than|[A-Z])\b)[^.;!?\n\d])*(?:[.;!]|(?=\n)|\Z)"
    r"|\s{0,9}\(?\bno\s+more,?\s+(?:and\s+)?no\s+less\b\)?"
    r"|\s{0,9}\((?:not\s+(?:counting|including)|excluding)\b[^()\d]{0,80}\)"
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
    r"|max\.?(?:\s+of)?|min\.|(?:max|min)imum(?:\s+of)?|upwards?\s+of|in\s+excess\s+of)"
)
BOUND_BEHIND = (
    r"(?:at\s+(?:the\s+)?(?:least|most)|max|(?:max|min)imum|tops|if\s+any|nearly|almost|each|apiece"
    r"|per)"
)
REASON = re.compile(r"\b(?:because|since)\b.*|因为.*", re.IGNORECASE | re.DOTALL)


def unsettled(text: str) -> bool:
    """Whether a text denies, doubts or asks, or gives an alternative."""
    return UNSETTLED.search(text) is not None
