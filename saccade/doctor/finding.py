"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AS_IT_SAYS = "fix what it says, then look again"  # of an error, whose text ends with what helps
Status = Literal["ok", "note", "warning", "failure"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`note`: worth knowing, nothing to mend before it is needed."""

    name: str
    status: Status
    text: str
    mend: str = ""  # what to do about it

    def __post_init__(self) -> None:
        assert self.mend or self.status in ("ok", "note"), f"{self.name}: no mend"


def ok(name: str, text: str) -> Finding:
    return Finding(name=name, status="ok", text=text)


def note(name: str, text: str, mend: str = "") -> Finding:
    return Finding(name=name, status="note", text=text, mend=mend)


def warning(name: str, text: str, mend: str) -> Finding:
    return Finding(name=name, status="warning", text=text, mend=mend)


def failure(name: str, text: str, mend: str) -> Finding:
    return Finding(name=name, status="failure", text=text, mend=mend)
