"""`saccade compare A B`: two evaluations of the same items, item by item.

The interval is that of the paired differences, which is narrower than those of the two accuracies; `p` is McNemar's
exact test on the items that changed sides.

    >>> mcnemar(gained=9, lost=1)
    0.021484375
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from saccade.data.dataset import ROTATION_OF
from saccade.errors import ConfigError
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.reports.comparison import paired_difference
from saccade.plugins.reports.episodes import MOST_BYTES, shortened, thumbnail
from saccade.plugins.reports.eval_report import read_facts, read_results, unfinished, what_answered
from saccade.plugins.reports.report_page import Cell, Estimate, Report, Table, write_report
from saccade.plugins.reports.trajectories import IMAGES
from saccade.run.folder import CHOSEN, RESULTS, TRAJECTORIES
from saccade.run.metrics import RIGHT, WRONG
from saccade.run.statistics import mean_interval
from saccade.system.disk import require_writable
from saccade.types import ALWAYS_EXCLUDED

Row = Mapping[str, Any]
SIDE = 384  # of a picture on the page, in pixels
MOST_CHANGED = 500  # questions on the page
COLUMNS = ("set", "items", "A", "B", "B - A", "gained", "lost", "p")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question in both evaluations, with the rows and the mean score of each."""

    set: str
    id: str
    rows: tuple[Sequence[Row], Sequence[Row]]
    scores: tuple[float, float]

    @property
    def change(self) -> str:
        """gained (wrong to right), lost (right to wrong), better, worse, or empty if the scores are equal."""
        a, b = self.scores
        if a <= WRONG and b >= RIGHT:
            return "gained"
        if a >= RIGHT and b <= WRONG:
            return "lost"
        return "" if abs(a - b) <= WRONG else "better" if b > a else "worse"

    @property
    def category(self) -> str:
        return str((self.rows[0][0].get("extra") or {}).get("category") or "")


def compare(first: Path, second: Path, out: Path | None = None) -> tuple[list[Table], list[str], Path]:
    """Tables and notes for the terminal, and the page with the questions that changed, both answers side by side."""
    page = out or second / "compare.html"
    require_writable(page, "--out", file=True)
    items, notes = _paired(first, second)
    tables = [_table(f"B against A, over {len(items)} items", "set", _by_set(items))]
    for name, own in _by_set(items).items():
        kinds = sorted({item.category for item in own} - {""})
        if len(kinds) > 1:
            groups = {kind: [item for item in own if item.category == kind] for kind in kinds}
            tables.append(_table(f"{name}: B against A by category", "category", groups))
    report = Report(
        title=f"{first.name} and {second.name}",
        subtitle="saccade compare: A and B answer the same questions",
        facts={"A": str(first), "B": str(second)},
        notes=notes,
        tables=tables,
        episodes=_changed(items, (first, second)),
    )
    return tables, notes, write_report(page, report)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value: the probability of so uneven a split of the changed items if both are equally good."""
    n = gained + lost
    return min(1.0, 2.0 * sum(comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n)


# -- items ------------------------------------------------------------------------------------------


def _paired(first: Path, second: Path) -> tuple[list[Item], list[str]]:
    found = [evaluated(first), evaluated(second)]
    shared = [key for key in found[0] if key in found[1]]
    if not shared:
        sets = [", ".join(sorted({name for name, _ in rows})) for rows in found]
        has = " and ".join(f"{folder} has {names}" for folder, names in zip((first, second), sets, strict=True))
        if {name for name, _ in found[0]} & {name for name, _ in found[1]}:
            has += ", whose rows have other ids"
        raise ConfigError(f"no scored item is in both evaluations: {has}; evaluate the same sets")
    notes, how = list[str](), list[Mapping[str, str]]()
    for folder, rows in zip((first, second), found, strict=True):
        how.append(what_answered(facts := read_facts(folder, notes.append)))
        notes += [f"{folder}: {line}" for line in unfinished(read_results(folder, notes.append), facts)]
        if rest := len(rows) - len(shared):
            notes.append(f"{rest} scored items are in {folder} only and do not count.")
    both = {name for name, _ in shared}
    for name in dict.fromkeys(name for side in how for name in side if name != "model"):
        own = name.removeprefix("sampling of ")  # of a set, where it is not that of all
        a, b = (side.get(name, side.get("sampling") if own in both else None) for side in how)
        if a and b and a != b and own in (name, *both):
            notes.append(f"The {name} differs: {a} in A, {b} in B.")
    if changed := sum(_asked(found[0][key][0][0]) != _asked(found[1][key][0][0]) for key in shared):
        notes.append(f"{changed} questions have other words, pictures or golds in A and B.")
    pairs = ((key, found[0][key], found[1][key]) for key in shared)
    return [Item(set=s, id=i, rows=(r, t), scores=(x, y)) for (s, i), (r, x), (t, y) in pairs], notes


def _asked(row: Row) -> tuple[Any, ...]:
    return row.get("prompt"), row.get("gold"), *(medium.get("hash") for medium in row.get("media") or ())


def evaluated(folder: Path) -> dict[tuple[str, str], tuple[list[Row], float]]:
    """(set, id) → the item's rows and their mean score. All orders of a question's options are one item."""
    path = folder / "samples.jsonl"
    if absent := [name for name in (path.name, RESULTS) if not (folder / name).is_file()]:
        inside = min(folder.glob(f"*/{RESULTS}"), default=folder / RESULTS).parent
        wanted = f"give one such as {inside}" if inside != folder else "name folders that `saccade eval` wrote"
        if saved := max(folder.glob("checkpoints/step-*"), key=lambda path: path.stat().st_mtime, default=None):
            wanted = f"evaluate the run: saccade eval {quote(str(folder / CHOSEN))} {quote(f'model.path={saved}')}"
        raise ConfigError(f"{folder} is no evaluation: it has no {absent[0]}; {wanted}")
    rows: dict[tuple[str, str], list[Row]] = {}
    for number, row in enumerate(read_lines(path), 1):
        if missing := ", ".join(sorted({"set", "id"} - row.keys())):
            raise ConfigError(f"{path} row {number} has no {missing}; name folders that `saccade eval` wrote")
        rows.setdefault((row["set"], item_of(row)), []).append(row)
    scores = {key: [score for row in own if (score := _score(row)) is not None] for key, own in rows.items()}
    if not any(scores.values()):
        raise ConfigError(f"{folder}: no answer has a score; look at `status` and `reason` in {path}")
    return {key: (own, float(np.mean(scores[key]))) for key, own in rows.items() if scores[key]}


def item_of(row: Row) -> str:
    """The id of the row's question, the same for every order of its options."""
    return str((row.get("extra") or {}).get(ROTATION_OF) or row["id"])


def _score(row: Row) -> float | None:
    """The score of a row; for a pair of a reward model, 1 if its first head scores the chosen side higher, else 0."""
    if "chosen" in row and "score" not in row:
        head = next(iter(row["chosen"]))
        return float(row["chosen"][head] > row["rejected"][head])
    return None if row.get("status") in ALWAYS_EXCLUDED else row.get("score")


# -- tables -----------------------------------------------------------------------------------------


def _by_set(items: Sequence[Item]) -> dict[str, list[Item]]:
    return {name: [item for item in items if item.set == name] for name in dict.fromkeys(item.set for item in items)}


def _table(title: str, first: str, groups: Mapping[str, Sequence[Item]]) -> Table:
    rows = tuple((name, *_cells(own)) for name, own in groups.items())
    note = "Brackets hold 95 % intervals: of A and B alone, and of the paired difference. p is McNemar's exact test."
    return Table(title=title, columns=(first, *COLUMNS[1:]), rows=rows, note=note)


def _cells(items: Sequence[Item]) -> Iterator[Cell]:
    sides = np.array([item.scores for item in items]).T
    shares = bool(sides.min() >= 0 and sides.max() <= 1)
    yield Estimate(value=len(items), percent=False)
    for side in sides:
        low, high = mean_interval(side)
        yield Estimate(value=float(side.mean()), low=low, high=high, percent=shares)
    mean, low, high = paired_difference(sides[0], sides[1])
    yield Estimate(value=mean, low=low, high=high, percent=shares, change=True)
    gained, lost = (sum(item.change == kind for item in items) for kind in ("gained", "lost"))
    yield from (Estimate(value=value, percent=False) for value in (gained, lost))
    p = mcnemar(gained, lost)
    yield "< 0.001" if p < 0.001 else Estimate(value=p, percent=False)


# -- the page ---------------------------------------------------------------------------------------


def _changed(items: Sequence[Item], folders: tuple[Path, Path]) -> dict[str, Any]:
    """Both answers to the questions whose score changed, lost questions first."""
    order = ["lost", "gained", "worse", "better"]
    changed = sorted((item for item in items if item.change), key=lambda item: order.index(item.change))
    album: dict[str, str] = {}
    episodes = [
        episode
        for item in changed[:MOST_CHANGED]
        for name, folder, rows in zip("AB", folders, item.rows, strict=True)
        for episode in (_episode(item, name, row, folder, album) for row in rows)
    ]
    rest = len(changed) - MOST_CHANGED
    note = f"{len(changed)} of {len(items)} questions changed." + (f" {rest} are left out." if rest > 0 else "")
    return {"items": episodes, "pictures": album, "note": note}


def _episode(item: Item, name: str, row: Row, folder: Path, album: dict[str, str]) -> dict[str, Any]:
    score, media = _score(row), row.get("media") or ()
    words = row["response"] if "response" in row else json.dumps({side: row[side] for side in ("chosen", "rejected")})
    views = [_view(record, folder, album) for record in media]
    verdict = "" if score is None else "right" if RIGHT <= score <= 1 else "wrong" if 0 <= score <= WRONG else ""
    gold = row.get("gold")
    return {
        **{"set": f"{item.set} · {item.change}", "id": shortened(item.id), "step": 0, "by": name},
        **{"question": shortened(row.get("prompt") or ""), "sample": row.get("repeat", 0)},
        **{"gold": shortened(" or ".join(gold) if isinstance(gold, list) else str(gold or "")), "outcome": score},
        **{"extracted": row.get("extracted"), "verdict": verdict, "reward": row.get("reward"), "advantage": None},
        **{"parts": row.get("parts") or {}, "turn_rewards": [], "status": row.get("status", "ok")},
        **{"reason": row.get("reason", ""), "end": row.get("end_reason", "answered"), "views": views},
        **{"asked": len(views), "tokens": {"response": row.get("tokens")}},
        "turns": [{"said": [{"source": "policy", "text": shortened(words)}], "calls": []}],
    }


def _view(record: Row, folder: Path, album: dict[str, str]) -> dict[str, Any]:
    """A picture, read from the evaluation's copy, or from its own file if that still exists."""
    name = str(record["hash"])
    stored = sorted((folder / TRAJECTORIES / IMAGES).glob(f"{name}.*"))
    path = stored[0] if stored else Path(record.get("path") or "")
    there = name not in album and path.is_file() and sum(map(len, album.values())) < MOST_BYTES
    if there and (small := thumbnail(path, SIDE)):  # not for a sound, or a picture inside another file
        album[name] = small
    about = {"name": name[:12], "kind": record.get("kind", "image"), "size": record["size"], "seen": None}
    return {**about, "lineage": (), "picture": name if name in album else None}
