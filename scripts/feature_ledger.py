"""Write docs/features.md from docs/features.yaml, or check that it is current.

python scripts/feature_ledger.py [--check]
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "features.md"
STATES = ("works", "partial", "missing")
HEAD = """# Features

Every capability that was set out to be built, with what shows it. *Works*: tests or commands show all of it.
*Partial*: the last column says what was *not built*, or what it *needs* to be tried: GPUs, machines, programs or
public sets that were not at hand. `make docs` writes this page from `docs/features.yaml`.

{counts}.

| | what | state | shown by | not there |
|---|---|---|---|---|
"""


def rows() -> dict[str, tuple[str, str, list[str], str]]:
    """By id: state, feature, tests or commands that show it, what is missing."""
    table = yaml.safe_load((ROOT / "docs" / "features.yaml").read_text(encoding="utf-8"))
    return {
        name: (state, what, list(filter(None, shown.split("; "))), missing)
        for name, (state, what, shown, missing) in table.items()
    }


def text() -> str:
    table = rows()
    counts = Counter(state for state, *_ in table.values())
    head = HEAD.format(counts=", ".join(f"{counts[state]} {state}" for state in STATES) + f" of {len(table)}")
    return head + "".join(lines(table))


def lines(table: dict[str, tuple[str, str, list[str], str]]) -> Iterator[str]:
    for name, (state, what, shown, missing) in table.items():
        by = ", ".join(f"`{one}`" for one in shown)
        yield f"| {name} | {what} | {state} | {by} | {missing} |\n"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    elif PAGE.read_text(encoding="utf-8") != text():
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date; run: make docs")
