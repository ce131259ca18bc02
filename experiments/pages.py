"""Numbers, curves and tables from the JSONs of an experiment; and docs/results.md and the table of the README from all
experiments' pages.

    found = read(Path("experiments/language/results"))       # arm → seed → stored JSON of the run
    mean_of(ends(found["grpo"], "val/test/accuracy"))        # '12.3 ± 1.4'
    python experiments/pages.py [--check]                    # writes docs/results.md and the table of README.md
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
Found = Mapping[int, Mapping[str, Any]]  # seed → stored JSON of a run
# 97.5 % quantiles of Student's t by degrees of freedom; from ten on 2.2 is close enough.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)

# -- numbers ---------------------------------------------------------------------------------------


def read(results: Path) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(results.glob("*.json")):
        arm, _, seed = path.stem.rpartition("-")
        found.setdefault(arm, {})[int(seed)] = json.loads(path.read_text())
    return found


def ends(runs: Found, metric: str) -> dict[int, float]:
    """The last value of a metric for each seed."""
    return {seed: run["curves"][metric][-1][2] for seed, run in runs.items() if metric in run["curves"]}


def half_width(values: Sequence[float]) -> float:
    """Half width of the 95 % interval around the mean over seeds; 0 for a single seed."""
    n = len(values)
    factor = STUDENT[n - 2] if n - 2 < len(STUDENT) else 2.2
    return factor * float(np.std(values, ddof=1)) / n**0.5 if n > 1 else 0.0


def mean_of(values: Mapping[int, float], scale: float = 100, signed: bool = False, digits: int = 1) -> str:
    """Mean over seeds, with half of its 95 % interval (Student) if there are several."""
    scaled = [scale * value for value in values.values()]
    if not scaled:
        return "-"
    around = f" ± {half_width(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{np.mean(scaled):{'+' if signed else ''}.{digits}f}{around}"


def gain(after: Mapping[int, float], before: Mapping[int, float]) -> str:
    """Mean of the differences, paired by seed."""
    return mean_of({seed: after[seed] - before[seed] for seed in after if seed in before}, signed=True)


def chance(differences: Mapping[int, float]) -> float:
    """Two-sided p-value of Student's t-test that the differences over seeds have mean 0."""
    values = [*differences.values()]
    if len(values) < 2 or not any(values):
        return 1.0
    free = len(values) - 1
    angle = np.arctan2(abs(np.mean(values)) * len(values) ** 0.5, np.std(values, ddof=1) * free**0.5)
    terms = [1.0]  # terms of Student's distribution function in closed form
    for n in range(1 + free % 2, free - 2, 2):
        terms.append(terms[-1] * n / (n + 1) * np.cos(angle) ** 2)
    inside = np.sin(angle) * sum(terms)
    return float(1 - (inside if free % 2 == 0 else 2 / np.pi * (angle + (free > 1) * np.cos(angle) * inside)))


def corrected(chances: Mapping[str, float]) -> dict[str, float]:
    """The p-values, corrected for the number of comparisons (Holm 1979)."""
    found, least = dict[str, float](), 0.0
    for rank, name in enumerate(sorted(chances, key=lambda one: chances[one])):
        least = max(least, min(1.0, chances[name] * (len(chances) - rank)))
        found[name] = least
    return found


def by_rate(trials: Mapping[str, Found], value: Callable[[str, Any], float]) -> dict[str, dict[str, float]]:
    """Of trials ARM@RATE: arm → learning rate → mean of the `value` of (arm, run)."""
    found: dict[str, dict[str, float]] = {}
    for trial, runs in trials.items():
        arm, _, rate = trial.partition("@")
        found.setdefault(arm, {})[rate] = float(np.mean([value(arm, run) for run in runs.values()]))
    return found


def best_rates(tried: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    return {arm: max(rates, key=lambda rate: rates[rate]) for arm, rates in tried.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cost(found: Mapping[str, Found]) -> str:
    """A sentence with the minutes in which at least one run was active, the device and the commits."""
    runs = [run for seeds in found.values() for run in seeds.values()]
    minutes, until = 0.0, 0.0
    for began, ended in sorted((run["began"], run["began"] + run["seconds"]) for run in runs):
        minutes += max(0.0, ended - max(began, until)) / 60
        until = max(until, ended)
    if not runs:
        return "none."
    devices, commits = (", ".join(sorted({run[name][:24] for run in runs})) for name in ("device", "commit"))
    most = max(run["at_once"] for run in runs)
    return f"{len(runs)} runs, up to {most} at once, in {minutes:.1f} minutes of one {devices}; commit {commits}."


# -- curves ----------------------------------------------------------------------------------------

COLOURS = ("#1b6ca8", "#d1495b", "#e0a030", "#3c8d5a", "#7a5195", "#7a7a7a")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 340, 56, 16, 16, 84
GRID = 40


Lines = Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # label → x, means, half widths of intervals


def picture(arms: Mapping[str, Found], metric: str, across: str, smooth: int = 5, share: bool = True) -> str:
    """An SVG of a metric over "steps" or "seconds": mean over seeds and its 95 % interval; each point is a mean over
    neighbours. A `share` is shown in percent.
    """
    column = ("steps", "seconds").index(across)
    drawn = {}
    for label, seeds in arms.items():
        points = [np.array(run["curves"][metric]) for run in seeds.values() if metric in run["curves"]]
        if points:
            x = np.linspace(max(p[0, column] for p in points), min(p[-1, column] for p in points), GRID)
            ys = np.array([np.interp(x, p[:, column], smoothed(p[:, 2], smooth)) for p in points])
            drawn[label] = (x, ys.mean(0), np.array([half_width(at) for at in ys.T]))
    longest = max((x[-1] for x, _, _ in drawn.values()), default=0.0) or 1.0
    return chart(drawn, across, {place: f"{place:.0f}" for place in np.linspace(0, longest, 5).tolist()}, share)


def by_size(arms: Mapping[str, Mapping[int, Mapping[int, float]]], across: str) -> str:
    """An SVG of arm → size → seed → value, with sizes on a logarithmic axis."""
    sizes = sorted({size for of_arm in arms.values() for size in of_arm})
    drawn = {}
    for label, of_arm in arms.items():
        if not (columns := {size: [*values.values()] for size, values in sorted(of_arm.items()) if values}):
            continue
        halves = [half_width(column) if len(column) > 1 else 0.0 for column in columns.values()]
        means = [np.mean(column) for column in columns.values()]
        drawn[label] = (np.log([*columns]) - np.log(sizes[0]), np.array(means), np.array(halves))
    return chart(drawn, across, {float(np.log(size / sizes[0])): f"{size:,}" for size in sizes})


def chart(lines: Lines, across: str, places: Mapping[float, str], share: bool = True) -> str:
    """An SVG of lines with intervals; `places`: x → label of the ticks on the x axis."""
    longest = max(places, default=0.0) or 1.0
    highest = max((float((mean + half).max()) for _, mean, half in lines.values()), default=0.0) or 1.0
    lowest = min([0.0, *(float((mean - half).min()) for _, mean, half in lines.values() if not share)])
    unit = next(n * 10.0**e for e in range(-3, 9) for n in (1, 2, 5) if highest - lowest <= 5 * n * 10.0**e)
    ticks = unit * np.arange(np.floor(lowest / unit), np.ceil(highest / unit) + 1)

    def path(x: np.ndarray, y: np.ndarray) -> str:
        across = LEFT + x / longest * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y.clip(ticks[0]) - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)
        return "L".join(f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True))

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for tick in ticks:
        line = path(np.array([0, longest]), np.array([tick, tick]))
        y = float(line.split(",")[-1])
        body.append(f'<path d="M{line}" stroke="#ddd"/><text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">'
                    f"{f'{100 * tick:.3g} %' if share else f'{tick:.3g}'}</text>")  # fmt: skip
    for row, (label, (x, mean, half)) in enumerate(lines.items()):
        colour, left, top = COLOURS[row % len(COLOURS)], LEFT + 190 * (row % 3), HEIGHT - 30 + 18 * (row // 3)
        band = f"{path(x, mean + half)}L{path(x[::-1], (mean - half)[::-1])}"
        body.append(f'<path d="M{band}Z" fill="{colour}" opacity="0.15"/>')
        body.append(f'<path d="M{path(x, mean)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(f'<path d="M{left},{top - 4}h20" stroke="{colour}" stroke-width="2"/>')
        body.append(f'<text x="{left + 26}" y="{top}">{label}</text>')
    for place, said in places.items():
        x = LEFT + place / longest * (WIDTH - LEFT - RIGHT)
        body.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{said}</text>')
    body.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - BOTTOM + 34}" text-anchor="middle">{across}</text></svg>')
    return "\n".join(body) + "\n"


def smoothed(values: np.ndarray, width: int) -> list[float]:
    """Running means, each over the last `width` values."""
    return [float(np.mean(values[max(0, i - width + 1) : i + 1])) for i in range(len(values))]


# -- pages -----------------------------------------------------------------------------------------

HEAD = """# Results

What saccade's methods do to small models, with intervals over seeds. Each part is the `RESULTS.md` of a folder of
[experiments](../experiments), whose one command repeats it; `make docs` brings them together here.
"""
NONE = "\nNone has been run on a GPU yet: there are no results.\n"
ABOUT = """## Does it learn?

[Experiments](docs/results.md) with small models, with intervals over seeds, each repeated by one command:

"""
MARKED = re.compile(r"(<!-- table: experiments -->\n).*?(<!-- end -->)", re.DOTALL)


def parts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yields folder, title and text of each page; the text begins with the findings, in one paragraph."""
    for path in sorted(root.glob("experiments/*/RESULTS.md")):
        title, _, rest = path.read_text(encoding="utf-8").removeprefix("# ").partition("\n\n")
        yield path.parent.name, title, rest


def written(root: Path = ROOT) -> dict[Path, str]:
    """The expected contents of docs/results.md and README.md, by path."""
    inside = [f"\n## {title}\n\n{re.sub('^#', '##', rest, flags=re.M)}" for _, title, rest in parts(root)]
    moved = "".join(inside).replace("](../../docs/", "](").replace("](../", "](../experiments/")
    rows = [
        [f"[{title}](experiments/{name}/RESULTS.md)", rest.partition("\n\n")[0].replace("\n", " ")]
        for name, title, rest in parts(root)
    ]
    readme = root / "README.md"
    lines = ABOUT + table(["experiment", "what was found"], rows) + "\n" if rows else ""
    page = MARKED.sub(lambda m: m[1] + lines + m[2], readme.read_text(encoding="utf-8"))
    return {root / "docs" / "results.md": HEAD + (moved or NONE), readme: page}


def main() -> None:
    for path, text in written().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date; run: make docs")


if __name__ == "__main__":
    main()
