"""report.html: what a run did, on one page that needs no network and runs no script.

Curves from metric rows, tables with intervals, rollouts with their pictures. Text of models and
data is escaped, and the page forbids scripts besides. Refuses to score anything: it shows numbers
that others made.

    from_run(Path("runs/quickstart"))
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import yaml

from saccade.errors import ConfigError
from saccade.statistics import Interval, independent_difference
from saccade.tracking import charts, sections
from saccade.tracking.cards import rollout_cards
from saccade.tracking.episodes import write_episodes
from saccade.tracking.folder import CONFIG, MANIFEST, TRAJECTORIES
from saccade.tracking.loggers import read_metrics
from saccade.tracking.markup import escape
from saccade.tracking.sections import Cell, Estimate, Rows, Table
from saccade.tracking.trajectories import read_trajectories, stored_steps

TEMPLATE = Path(__file__).with_name("report.html")
SAMPLES, GROUPS, MEMBERS = 8, 4, 4  # of validation, of training, of each of these
BESIDE_ACCURACY = {
    "parse_rate": ("answer found", True),
    "think_rate": ("think block", True),
    "format": ("format", True),
    "truncated_frac": ("cut responses", True),
    "response_mean": ("response tokens", False),
}


def write_report(
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    facts: Mapping[str, str] | None = None,
    curves: Rows = (),
    tables: Sequence[Table] = (),
    rollouts: Iterable[Mapping[str, Any]] = (),
    pictures: Path | None = None,
    notes: Sequence[str] = (),
    appendix: Mapping[str, str] | None = None,
    links: Mapping[str, Path | None] | None = None,
) -> Path:
    """Write the page and return its path.

    `curves`: rows of metrics. `rollouts`: records of `trajectories`, those of one sample in a row
    share a card. `pictures`: the folder that the files of these records are relative to. `facts`:
    tiles at the top. `appendix`: long texts, folded away. `links`: other pages beside this one.
    """
    body = [
        f"<header><h1>{escape(title)}</h1><p class='dim'>{escape(subtitle)}</p></header>",
        *(
            f'<p><a href="{page.name}">{escape(n)}</a></p>'
            for n, page in (links or {}).items()
            if page
        ),
        sections.tiles(facts or {}),
        sections.remarks(notes),
        *(sections.tabulated(table) for table in tables),
        *sections.curve_sections(curves),
        sections.section("Sample rollouts", rollout_cards(rollouts, pictures)),
        *(sections.folded(name, text) for name, text in (appendix or {}).items()),
    ]
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), body="\n".join(part for part in body if part)
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def from_run(folder: Path) -> Path:
    """The report of any run folder, from what it holds."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise ConfigError(
            f"{folder} is no run folder: it has no {CONFIG}; name one such as runs/run"
        )
    rows = read_metrics(folder)
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    began = manifest["starts"][0]["time"] if manifest.get("starts") else ""
    return write_report(
        folder / "report.html",
        title=folder.resolve().name,
        subtitle=f"saccade {manifest.get('command', '')} · {began.replace('T', ' ')[:16]} UTC",
        facts=run_facts(rows, config),
        curves=rows,
        tables=before_after(rows),
        rollouts=sample_rollouts(folder),
        pictures=folder / TRAJECTORIES,
        links={"Episodes turn by turn": episodes_of(folder)},
        appendix={
            "Configuration": (folder / CONFIG).read_text(encoding="utf-8"),
            "Manifest": json.dumps(manifest, indent=2, ensure_ascii=False),
        },
    )


# -- what a run has to say -------------------------------------------------------------------------


def run_facts(rows: Rows, config: Mapping[str, Any]) -> dict[str, str]:
    """Tiles: how good, how long, with what."""
    facts = {}
    for name, leaf in sections.validation_measures(rows):
        first, last = _first_and_last(rows, f"val/{name}/{leaf}")
        percent = leaf == "accuracy"
        before = f"{100 * first:.1f}" if percent else charts.number(first, False)
        change = f"{before} → " if first != last else ""
        facts[f"{leaf} on {name}"] = f"{change}{charts.number(last, percent)}"
    steps = [row["step"] for row in rows]
    seconds = sum(row.get("time/step") or 0.0 for row in rows)
    facts["steps"] = str(max(steps, default=0))
    if seconds:
        facts["training time"] = duration(seconds)
    facts["model"] = str(config["model"]["path"] or "—").rstrip("/").rsplit("/", 1)[-1]
    if any("reward/mean" in row for row in rows):
        facts["algorithm"] = str(config["algorithm"]["preset"])
    return facts


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def before_after(rows: Rows) -> list[Table]:
    """Each validation set the first and the last time it was measured; no table without any."""
    lines: list[tuple[Cell, ...]] = []
    steps = set()
    for name, leaves in groupby(sections.validation_measures(rows), key=lambda pair: pair[0]):
        found = [leaf for _, leaf in leaves]
        measured = [r for r in rows if any(r.get(f"val/{name}/{n}") is not None for n in found)]
        if measured:
            steps.add((measured[0]["step"], measured[-1]["step"]))
            lines += _compared(name, found, measured[0], measured[-1])
    if not lines:
        return []
    first, last = steps.pop() if len(steps) == 1 else ("first", "last")
    columns: tuple[str, ...] = ("set", "measure", f"step {last}")
    if first != last:
        columns = (*columns[:2], f"before (step {first})", f"after (step {last})", "change")
    shown = tuple(line[: len(columns)] for line in lines)
    note = "Brackets hold 95 % intervals over the items of a set."
    return [Table(title="Validation", columns=columns, rows=shown, note=note)]


def _compared(
    name: str, leaves: Sequence[str], first: Mapping[str, Any], last: Mapping[str, Any]
) -> Iterator[tuple[Cell, ...]]:
    prefix = f"val/{name}/"
    for leaf in leaves:
        before, after = (_estimate(row, prefix, leaf) for row in (first, last))
        change = None if before is None or after is None else _change(before, after)
        yield name, leaf, before, after, change
    for metric, (label, percent) in BESIDE_ACCURACY.items():
        a, b = first.get(prefix + metric), last.get(prefix + metric)
        if a is not None and b is not None:
            pair = (Estimate(value=value, percent=percent) for value in (a, b))
            change = Estimate(value=b - a, percent=percent, change=True, tone=False)
            yield None, label, *pair, change


def _estimate(row: Mapping[str, Any], prefix: str, leaf: str) -> Estimate | None:
    if row.get(prefix + leaf) is None:
        return None
    low, high = (row.get(prefix + end) for end in sections.interval_of(leaf))
    return Estimate(value=row[prefix + leaf], low=low, high=high, percent=leaf == "accuracy")


def _change(before: Estimate, after: Estimate) -> Estimate:
    if before.low is None or before.high is None or after.low is None or after.high is None:
        value = after.value - before.value
        return Estimate(value=value, percent=after.percent, change=True)
    intervals = Interval(before.low, before.high), Interval(after.low, after.high)
    change = independent_difference(before.value, intervals[0], after.value, intervals[1])
    return Estimate(
        value=change.mean, low=change.low, high=change.high, percent=after.percent, change=True
    )


def sample_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Records to show, in stored order so that nothing is picked by its score.

    Of the first validation set the first and the last answer to the same questions, then groups of
    the last training step that was stored.
    """
    chosen: list[dict[str, Any]] = []
    stored = stored_steps(folder)
    sets = [kind for kind in stored if kind != "train"]
    if sets:
        steps = sorted({stored[sets[0]][0], stored[sets[0]][-1]})
        by_step = [{r["id"]: r for r in read_trajectories(folder, sets[0], step)} for step in steps]
        shared = [key for key in by_step[-1] if all(key in records for records in by_step)]
        chosen += [records[key] for key in shared[:SAMPLES] for records in by_step]
    if "train" in stored:
        records = read_trajectories(folder, "train", stored["train"][-1])
        groups = [list(group) for _, group in groupby(records, key=lambda record: record["group"])]
        chosen += [record for group in groups[:GROUPS] for record in group[:MEMBERS]]
    return chosen


def episodes_of(folder: Path) -> Path | None:
    """The page of the stored episodes, those of each set and of training at their last step."""
    stored = stored_steps(folder)
    records = (r for kind in stored for r in read_trajectories(folder, kind, stored[kind][-1]))
    return write_episodes(folder / "episodes.html", records, folder / TRAJECTORIES)


def _first_and_last(rows: Rows, name: str) -> tuple[float, float]:
    values = [row[name] for row in rows if row.get(name) is not None] or [math.nan]
    return values[0], values[-1]
