"""The report of a run folder: results, times, options, curves and stored rollouts.

from_run(Path("runs/quickstart"))
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import yaml

from saccade.config import AlgorithmConfig
from saccade.config.notation import write
from saccade.config.schema.presets import cells_of
from saccade.errors import ConfigError
from saccade.plugins.reports.comparison import independent_difference
from saccade.plugins.reports.diagnosis import advise_ahead, diagnose
from saccade.plugins.reports.episodes import stored_episodes
from saccade.plugins.reports.report_page import Cell, Chart, Curve, Estimate, Point, Report, Table, write_report
from saccade.run.folder import CHOSEN, CONFIG, MANIFEST, METRICS, leaves
from saccade.run.loggers import read_metrics
from saccade.run.metrics import MEASURE, QUARTERS, interval_of, validation_measures
from saccade.run.statistics import Interval

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Rows = Sequence[Row]

BINS = 150  # of a long curve; the lowest and the highest point of each are drawn
SMOOTH_FROM = 30  # fewest points of a curve over which a running mean is drawn
# Title -> metrics and their labels. A title with % is drawn in per cent.
CHARTS: Mapping[str, Mapping[str, str]] = {
    "Accuracy of training rollouts, %": {"reward/accuracy": "accuracy"},
    "Reward": {"reward/mean": "mean"},
    "Reward parts": {},  # filled in with the reward terms of the run
    "Groups without signal, %": {f"group/{n}_frac": n.replace("_", " ") for n in ("dead", "all_right", "all_wrong")},
    "Groups by share of right answers, %": {f"group/solved_{least}": f"from {least} %" for least in QUARTERS},
    "SFT loss": {"sft/loss": "loss"},
    "Preference loss": {"dpo/loss": "loss"},
    "Pairs in the right order": {"dpo/accuracy": "accuracy"},
    "Rewards of preferences": {"dpo/reward_chosen": "chosen", "dpo/reward_rejected": "rejected"},
    "Reward model: loss": {"rm/loss": "loss"},
    "Reward model: judged right, %": {"rm/accuracy": "accuracy"},
    "Reward model: scores": {"rm/chosen_mean": "chosen", "rm/rejected_mean": "rejected"},
    "Response tokens": {"length/response_mean": "mean", "length/response_p95": "95th percentile"},
    "Cut responses, %": {"length/truncated_frac": "truncated"},
    "Repeated text, %": {"length/repeat_score": "repeated runs of tokens"},
    "Gradient norm": {"policy/grad_norm": "gradient norm"},
    "Learning rate": {"policy/lr": "learning rate"},
    "Entropy": {"policy/entropy": "entropy"},
    "KL to the reference": {"policy/kl_ref": "KL"},
    "Clipped ratios, %": {"policy/clip_frac_low": "low", "policy/clip_frac_high": "high"},
    "Engine against trainer (log-prob gap)": {"mismatch/logp_gap_mean": "mean", "mismatch/logp_gap_max": "largest"},
    "Turns": {"turns/mean": "mean", "turns/max": "most"},
    "Seconds per step": {"time/step": "step", "time/rollout": "rollout", "time/update": "update"},
    "Memory (GiB)": {"mem/host_rss_gb": "host", "mem/gpu_peak_gb": "GPU peak", "mem/gpu_used_gb": "GPU, all processes"},
}
DULL = {"Cut responses, %": 0.0, "Repeated text, %": 0.0, "Turns": 1.0}  # folded away if it is this value throughout
NOT_PARTS = {"mean", "std", "min", "max", "accuracy", "abstain_rate", "error_rate", "clip_frac"}
INTERVALS = "Brackets hold 95 % intervals over the items of a set."
BESIDE_ACCURACY = {  # metric -> label, whether it is a share
    "parse_rate": ("answer found", True),
    "think_rate": ("think block", True),
    "format": ("format", True),
    "truncated_frac": ("cut responses", True),
    "response_mean": ("response tokens", False),
}


def from_run(folder: Path) -> Path:
    """Write report.html of any run folder and return its path. Its notes are logged, too."""
    report = run_report(folder)
    for note in report.notes:
        log.info(note)
    return write_with_episodes(folder, report)


def write_with_episodes(folder: Path, report: Report) -> Path:
    """Write report.html with the folder's episodes. What cannot be read is left out, with a note in log and page."""
    said: list[str] = []
    episodes = stored_episodes(folder, said.append)
    for note in (*report.left_out, *said):
        log.warning(note)
    return write_report(folder / "report.html", replace(report, episodes=episodes, left_out=(*report.left_out, *said)))


def run_report(folder: Path) -> Report:
    """The report of any run folder, without its episodes."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} is no run folder: it has no {CONFIG}; name one such as runs/run")
    said: list[str] = []
    rows, config = read_numbers(folder, said.append), read_options(folder, said.append)
    manifest = read_file(folder / MANIFEST, json.loads, said.append)
    phases = phase_seconds(rows)
    return Report(
        title=folder.resolve().name,
        subtitle=subtitle_of(manifest),
        facts=run_facts(folder, rows, config),
        notes=[*diagnose(rows).values(), *advise_ahead(rows, phases, config)],
        tables=before_after(rows),
        charts=charts_of(rows),
        phases=phases,
        texts=texts_of(folder, manifest),
        left_out=said,
    )


def subtitle_of(manifest: Mapping[str, Any], command: str = "") -> str:
    began = manifest["starts"][0].get("time", "") if manifest.get("starts") else ""
    when = f" · {began.replace('T', ' ')[:16]} UTC" if began or not command else ""
    return f"saccade {manifest.get('command', command)}{when}"


def texts_of(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    if not (folder / CONFIG).exists():
        return {}
    config = (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    return {"Configuration": config, "Manifest": json.dumps(manifest, indent=2, ensure_ascii=False)}


def read_numbers(folder: Path, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Rows of metrics without texts. `say` gets a message for each metric that is a text in some rows only."""
    rows = read_metrics(folder, say)
    texts = {name: row["step"] for row in reversed(rows) for name, value in row.items() if isinstance(value, str)}
    kept = [{name: value for name, value in row.items() if isinstance(value, float | int | None)} for row in rows]
    for name in sorted(texts.keys() & {name for row in kept for name in row}):
        say(f"{folder / METRICS}: {name} is no number in step {texts[name]} and is left out there")
    return kept


def read_options(folder: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """The config of a run; sections that cannot be read are empty."""
    sections: dict[str, Any] = {name: {} for name in ("run", "model", "rollout", "algorithm", "save")}
    return sections | read_file(folder / CONFIG, lambda text: named_sections(yaml.safe_load(text)), say)


def named_sections(found: Any) -> dict[str, Any]:
    """The sections that are not null; raises ValueError if `found` is not a mapping of sections."""
    if not (isinstance(found, Mapping) and all(isinstance(section, Mapping | None) for section in found.values())):
        raise ValueError("expected sections with names and values")
    return {name: section for name, section in found.items() if section is not None}


def read_file(file: Path, parse: Callable[[str], Any], say: Callable[[str], object]) -> dict[str, Any]:
    try:
        return dict(parse(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        say(f"{file} cannot be read and is left out ({' '.join(str(error).split())})")
        return {}


def run_facts(folder: Path, rows: Rows, config: Mapping[str, Any]) -> dict[str, str]:
    """Tiles at the top of the page: results, steps, time, model, algorithm."""
    facts = {}
    names = dict.fromkeys(name for row in rows for name in row)
    for name, leaf in validation_measures(names):
        if values := [shown for row in rows if (shown := _shown(row, f"val/{name}/{leaf}"))]:
            facts[f"{leaf} on {name}"] = " → ".join(dict.fromkeys([values[0], values[-1]]))
    measures = [name for name in names if MEASURE.fullmatch(name)]
    measures.sort(key=lambda name: not name.endswith("/accuracy"))
    best = config["save"].get("best_metric") or next(iter(measures), "")
    if tried := [row for row in rows if row["step"] > 0 and row.get(best) is not None]:
        top = max(tried, key=lambda row: row[best])
        facts["best step"] = f"{top['step']} ({_shown(top, best)})"
    facts["steps"] = str(max((row["step"] for row in rows), default=0))
    if seconds := sum(row.get("time/step") or 0.0 for row in rows):
        facts["training time"] = duration(seconds)
    facts["model"] = str(config["model"].get("path") or "—").rstrip("/").rsplit("/", 1)[-1]
    if "reward/mean" in names:
        facts["algorithm"] = _algorithm(folder, config["algorithm"].get("preset") or ())
    return facts


def _algorithm(folder: Path, presets: str | Sequence[str]) -> str:
    """The preset with its add-ons, then the given options that differ from it."""
    names = [presets] if isinstance(presets, str) else [*presets]
    parse = lambda text: named_sections(yaml.safe_load(text)).get("algorithm", {})  # noqa: E731
    given = read_file(folder / CHOSEN, parse, lambda text: None)
    own = dict(leaves(AlgorithmConfig().model_dump(mode="json")))
    with suppress(ConfigError, ValueError):  # the preset of another version, or none
        own |= dict(leaves(cells_of({**given, "preset": names})["algorithm"]))
    changed = {name: value for name, value in leaves(given) if name != "preset" and own.get(name) != value}
    shown = {name: write(value, flow=True).splitlines()[0].rpartition("/")[2] for name, value in changed.items()}
    return ", ".join([" + ".join(names), *(f"{name}={value}" for name, value in shown.items())])


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def before_after(rows: Rows) -> list[Table]:
    """A table of each validation set at its first and last measurement; empty without any."""
    lines: list[tuple[Cell, ...]] = []
    steps = set()
    measures = validation_measures({name for row in rows for name in row})
    for name, pairs in groupby(measures, key=lambda pair: pair[0]):
        leaves = [leaf for _, leaf in pairs]
        if measured := [r for r in rows if any(r.get(f"val/{name}/{n}") is not None for n in leaves)]:
            steps.add((measured[0]["step"], measured[-1]["step"]))
            lines += _compared(name, leaves, measured[0] if len(measured) > 1 else {}, measured[-1])
    if not lines:
        return []
    first, last = steps.pop() if len(steps) == 1 else ("first", "last")
    steps_shown = (f"before (step {first})", f"after (step {last})", "change") if first != last else (f"step {last}",)
    shown = tuple(line if first != last else (*line[:2], line[3]) for line in lines)
    return [with_note(Table(title="Validation", columns=("set", "measure", *steps_shown), rows=shown))]


def with_note(table: Table) -> Table:
    """The table with a note about its intervals, if it has some."""
    known = any(isinstance(one, Estimate) and one.low is not None for row in table.rows for one in row)
    return replace(table, note=INTERVALS) if known else table


def estimate(row: Row, name: str, percent: bool, prefix: str = "") -> Estimate | None:
    """A metric as a cell, with its interval where the row has one."""
    if row.get(prefix + name) is None:
        return None
    low, high = (row.get(prefix + end) for end in interval_of(name))
    return Estimate(value=row[prefix + name], low=low, high=high, percent=percent, change=name == "sight_gain")


def _compared(name: str, leaves: Sequence[str], first: Row, last: Row) -> Iterator[tuple[Cell, ...]]:
    shares = {leaf: (leaf, leaf == "accuracy") for leaf in leaves} | BESIDE_ACCURACY
    for metric, (label, percent) in shares.items():
        a, b = (estimate(row, metric, percent, f"val/{name}/") for row in (first, last))
        if metric in leaves:
            yield name, label, a, b, _change(a, b, tone=True)
        elif b and (a or not first):
            yield None, label, a, b, _change(a, b, tone=False)


def _change(before: Estimate | None, after: Estimate | None, tone: bool) -> Estimate | None:
    if before is None or after is None:
        return None
    change = Estimate(value=after.value - before.value, percent=after.percent, change=True, tone=tone)
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return change
    a, b = Interval(before.low, before.high), Interval(after.low, after.high)
    _, low, high = independent_difference(before.value, a, after.value, b)
    return replace(change, low=low, high=high)


def _shown(row: Row, metric: str) -> str:
    value = row.get(metric)
    if value is None:
        return ""
    return f"{100 * value:.1f}\u00a0%" if metric.endswith("/accuracy") else f"{value:.4g}"


# -- charts -----------------------------------------------------------------------------------------


def charts_of(rows: Rows) -> list[Chart]:
    """Validation first, then CHARTS, then each other metric in a folded chart of its own."""
    points = _points(rows)
    charts, drawn = [], {"step", "time"}
    for kind in ("accuracy", "score"):
        curves = []
        for name, leaf in validation_measures(points):
            metric, *ends = (f"val/{name}/{one}" for one in (leaf, *interval_of(leaf)))
            if leaf.startswith(kind):
                low, high = (dict(points.get(end, ())) for end in ends)
                band = [(x, low[x], high[x]) for x in low if x in high]
                label = name + leaf.removeprefix(kind)
                curves.append(Curve(name=label, points=points[metric], band=band))
                drawn |= {metric, *ends}
        charts.append(Chart(title=f"Validation {kind}", curves=curves, percent=kind == "accuracy"))
    terms = {name: name.removeprefix("reward/") for name in points if re.fullmatch(r"reward/[^/]+", name)}
    parts = {name: label for name, label in terms.items() if label not in NOT_PARTS}
    for title, metrics in {**CHARTS, "Reward parts": parts}.items():
        found = {name: label for name, label in metrics.items() if name in points}
        if any(y != DULL.get(title) for name in found for _, y in points[name]):
            curves = [_curve(label, points[name]) for name, label in found.items()]
            charts.append(Chart(title=title.removesuffix(", %"), curves=curves, percent="%" in title))
            drawn |= found.keys()
    rest = sorted(points.keys() - drawn)
    charts += [Chart(title=n, curves=[_curve(n, points[n])], more=True) for n in rest]
    return [chart for chart in charts if chart.curves]


def phase_seconds(rows: Rows) -> dict[str, float]:
    """Seconds of each phase over the run, largest first, with `other` for time in no phase."""
    points = _points(rows)
    named = [name for name in points if re.fullmatch(r"time/[^/]+", name)]
    totals = {name.removeprefix("time/"): sum(y for _, y in points[name]) for name in named}
    whole = totals.pop("step", 0.0)
    rest = whole - sum(totals.values())
    totals |= {"other": rest} if totals and rest > 0.005 * whole else {}
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _points(rows: Rows) -> dict[str, list[Point]]:
    """Metric -> its finite values by step."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float | int) and math.isfinite(value):
                points.setdefault(name, {})[row["step"]] = value
    return {name: sorted(values.items()) for name, values in points.items()}


def _curve(name: str, points: Sequence[Point]) -> Curve:
    """A curve with few enough points to draw: the first, the last, and the lowest and highest of each chunk."""
    size = math.ceil(len(points) / BINS)
    places = range(0, len(points), size)
    thin, mean = points, list[Point]()
    if size > 2:
        chunks = [points[start : start + size] for start in places]
        peaks = [peak(chunk, key=lambda point: point[1]) for chunk in chunks for peak in (min, max)]
        thin = sorted({points[0], points[-1], *peaks})
    if len(points) >= SMOOTH_FROM:
        reach, sums = max(2, len(points) // 20), [0.0, *accumulate(y for _, y in points)]
        for place in (*places, len(points) - 1):
            low, high = max(0, place - reach), min(len(points), place + reach + 1)
            mean.append((points[place][0], (sums[high] - sums[low]) / (high - low)))
    return Curve(name=name, points=thin, mean=mean)
