"""Text of models and data, made fit for a page: no sign of it is markup, and none is invisible.

>>> escape("a < b\\0")
'a &lt; b␀'
"""

from __future__ import annotations

import html

# Control characters, NUL above all, are not allowed in HTML; each has a picture of its own.
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n\r"}
PICTURES[0x7F] = 0x2421


def escape(text: str) -> str:
    return html.escape(text.translate(PICTURES))
