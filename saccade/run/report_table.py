"""What the spine asks of the plugin that draws reports.

REPORTS["evaluation"].write(folder)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.registry import Table


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    lines: Callable[[str, Mapping[str, Any]], list[str]]  # tables of a set, for the terminal
    write: Callable[[Path], Path]  # the page of a folder


REPORTS: Table[EvaluationReport] = Table("reports", {})
