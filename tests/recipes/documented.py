"""docs/runs.md names every metric that a run writes."""

import re
from itertools import product
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"
NO_METRICS = {"step", "time"}


def documented():
    """A name without a folder is in that of the first one, {a,b} is either, <name> is anything."""
    table = PAGE.read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", cell)
        parts = names[0].split("/")
        folders = {"", f"{parts[0]}/", "/".join(parts[:-1]) + "/"}
        for name, folder in product(names, folders):
            text = re.sub(r"<\w+>", "[^/]+", re.escape(folder + name))
            yield re.compile(re.sub(r"\\{(.+?)\\}", lambda m: f"(?:{m[1].replace(',', '|')})", text))


def unnamed(rows):
    known = list(documented())
    found = {name for row in rows for name in row} - NO_METRICS
    return sorted(n for n in found if not any(pattern.fullmatch(n) for pattern in known))
