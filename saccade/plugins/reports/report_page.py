"""A report as data, and the page that draws it: `report_page.html`, one file that loads nothing from a network.

The page draws one JSON block, which a server can supply as well. It puts data into text nodes only,
and its content security policy allows no other script.

    write_report(Path("report.html"), Report(title="first", notes=("nothing yet",)))
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("report_page.html")
START = "// -- start"
VERSION = 1  # of the JSON format that the page reads; increase it with each change

Point = tuple[float, float]  # step, value


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number in a table, with its 95 % interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    percent: bool = True
    change: bool = False  # a difference: shown with its sign
    tone: bool = True  # a difference: coloured, as a rise is good


Cell = str | Estimate | None  # None is an empty cell


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    points: Sequence[Point]
    mean: Sequence[Point] = ()  # running mean
    band: Sequence[tuple[float, float, float]] = ()  # step, low, high


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    curves: Sequence[Curve]
    percent: bool = False
    more: bool = False  # folded away


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    subtitle: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # tiles at the top
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()  # files and lines that could not be read
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    phases: Mapping[str, float] = field(default_factory=dict)  # name -> seconds
    # From `episodes.stored_episodes`.
    episodes: Mapping[str, Any] = field(default_factory=lambda: {"items": [], "pictures": {}, "note": ""})
    texts: Mapping[str, str] = field(default_factory=dict)  # title -> long text, folded away
    version: int = VERSION


def write_report(path: Path, report: Report) -> Path:
    """Write the page with the report inside and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_with(report), encoding="utf-8")
    return path


def page_with(data: Any, *, style: str = "", start: str = "", policy: str = "") -> str:
    """The page with its data. Other pages reuse its functions: with more `style`, with `start` in place of the script
    after START, and with more rules in the content security `policy`.
    """
    page = PAGE.read_text(encoding="utf-8").replace("</style>", f"{style}</style>", 1)
    page = page.replace("default-src 'none'", f"default-src 'none'{policy}", 1)
    head, mark, report_start = page.rpartition(START)
    if start:
        page = head + start + report_start[report_start.index("</script>") :]
    assert mark, "the script of the page says where it begins"
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # ASCII only and no "<": nothing in the data can end the block that holds it.
    block = json.dumps(plain(data), allow_nan=False).replace("<", "\\u003c")
    return page.replace("SCRIPT_HASH", f"sha256-{digest}", 1).replace("REPORT_JSON", block, 1)


def plain(data: Any) -> Any:
    """Records as JSON; a number that is not finite becomes null, which JSON can hold."""
    return json.loads(json.dumps(data, default=vars), parse_constant=lambda name: None)
