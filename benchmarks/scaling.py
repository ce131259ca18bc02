"""How step time and memory of saccade grow with group size, prompt, response and model.

    python benchmarks/scaling.py                            # all points without a result
    python benchmarks/scaling.py --axis group prompt        # those of some axes
    python benchmarks/scaling.py --ends                     # the base and the ends of each axis
    python benchmarks/scaling.py --show --merge other.json  # only merge results
    python benchmarks/scaling.py --tiny --folder runs/dry   # all of it on a CPU in minutes

All points change one number of the same base: 4 prompts x 8 rollouts, one 224 x 224 image (64
image tokens), a prompt of 512 tokens, 512 new tokens, Qwen2.5-VL-3B shape, all weights trained. A
point is a process of two steps, of which the second counts. Writes FOLDER/results.json after each
point and FOLDER/scaling.svg at the end, and prints a table, also of points that do not fit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import LIMIT, Bench, Help, ensure_model, read, run, shown, warm, write
from works import parse


@dataclass(frozen=True, kw_only=True)
class Axis:
    title: str
    key: str  # a number of the workload, or "size"
    values: tuple[Any, ...]
    options: tuple[str, ...] = ()  # config overrides


Rows = list[tuple[Any, Mapping[str, Any]]]  # value on the axis, result
BASE = "W1,prompts=4,side=224,prompt=512,new=512"
AXES: Mapping[str, Axis] = {
    "group": Axis(title="rollouts per prompt", key="samples", values=(4, 8, 16, 32, 64)),
    "prompt": Axis(title="prompt tokens", key="prompt", values=(256, 512, 1024, 2048, 4096, 8192)),
    "response": Axis(title="response tokens", key="new", values=(128, 512, 2048, 8192)),
    "size": Axis(title="model, all weights", key="size", values=("0.5b", "3b", "7b")),
    "size-lora": Axis(title="model, LoRA", key="size", values=("0.5b", "3b", "7b"), options=("model.train=lora",)),
}
TINY_BASE = "T1"
TINY_AXES = {
    "group": Axis(title="rollouts per prompt", key="samples", values=(2, 4, 8)),
    "prompt": Axis(title="prompt tokens", key="prompt", values=(24, 96)),
    "response": Axis(title="response tokens", key="new", values=(4, 8)),
    "size": Axis(title="model, all weights", key="size", values=("tiny",)),
    "size-lora": Axis(title="model, LoRA", key="size", values=("tiny",), options=("model.train=lora",)),
}
SECONDS = {"whole": "#222222", "rollout": "#1f6fb4", "update": "#c8641e"}
MEMORY = {"peak": "#2f8f4e"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run. Axes share the run at the base, where they cross."""

    size: str
    work: str
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        return "_".join([self.size, *self.work.split(",")[1:], *self.options]).replace("=", "")


def points(axis: Axis, base: str, size: str) -> list[Point]:
    """One point for each value of the axis, in their order."""
    name, numbers = base.split(",")[0], parse(base)
    found = []
    for value in axis.values:
        work = numbers if axis.key == "size" else numbers | {axis.key: value}
        text = ",".join([name, *(f"{key}={number}" for key, number in work.items())])
        model = value if axis.key == "size" else size
        found.append(Point(size=model, work=text, options=axis.options))
    return found


def by_axis(parts: Mapping[str, Any], axes: Mapping[str, Axis], base: str, size: str) -> dict[str, Rows]:
    """For each axis, value and result of every point that was run."""
    found = {
        name: [
            (value, parts[point.name])
            for value, point in zip(axis.values, points(axis, base, size), strict=True)
            if point.name in parts
        ]
        for name, axis in axes.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def numbers(part: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers shown of a point that ran."""
    found = {key: warm(part, key) for key in ("whole", "rollout", "update", "mfu_update")}
    tokens = warm(part, "generated")
    return found | {
        "speed": tokens / found["rollout"] if tokens and found["rollout"] else None,
        "peak": warm(part, "peak_gib") or warm(part, "host_gib"),
    }


def table(axes: Mapping[str, Rows], titles: Mapping[str, str]) -> str:
    lines = [
        "| | | whole step | rollout | update | rollout tok/s | MFU of the update | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for axis, rows in axes.items():
        for value, part in rows:
            cells = [titles[axis], f"{value:,}" if isinstance(value, int) else value]
            if part["status"] == "ok":
                n = numbers(part)
                cells += [shown(n[key], "{:.2f} s") for key in ("whole", "rollout", "update")]
                cells += [shown(n["speed"], "{:,.0f}"), shown(n["mfu_update"], "{:.1%}")]
                cells.append(shown(n["peak"], "{:.1f}"))
            else:
                cells += [f"failed: {part['reason'].split(', see')[0]}", *[""] * 5]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- the picture -----------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP = 190, 120, 46


def picture(axes: Mapping[str, Rows], titles: Mapping[str, str]) -> str:
    """A column for each axis: seconds above, memory below, both from zero; the axis is spaced by
    the number of its values.
    """
    size = (len(axes) * (WIDTH + GAP) + GAP, 2 * (HEIGHT + GAP) + 30)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
    ]
    for column, (axis, rows) in enumerate(axes.items()):
        left = GAP + column * (WIDTH + GAP)
        ran = [(value, numbers(part)) for value, part in rows if part["status"] == "ok"]
        for row, (unit, lines) in enumerate((("seconds", SECONDS), ("GiB", MEMORY))):
            top = 24 + row * (HEIGHT + GAP)
            title = f"{unit} over {titles[axis]}"
            body += _panel(title, ran, lines, left, top)
    x = GAP
    for name, colour in (SECONDS | MEMORY).items():
        body.append(f'<text x="{x}" y="{size[1] - 10}" fill="{colour}">{name}</text>')
        x += 60
    return "\n".join([*body, "</svg>"]) + "\n"


def _panel(
    title: str, rows: Sequence[tuple[Any, Mapping[str, float | None]]], lines: Mapping[str, str], left: int, top: int
) -> list[str]:
    body = [
        f'<text x="{left}" y="{top - 6}" font-weight="bold" fill="#222">{title}</text>',
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#f7f7f7"/>',
    ]
    known = [n[key] for _, n in rows for key in lines if n[key] is not None]
    if not known:
        return body
    highest = _round_up(max(known))
    across = [left + WIDTH * (i + 0.5) / len(rows) for i in range(len(rows))]
    for share in (0, 0.5, 1):
        y = top + HEIGHT * (1 - share)
        body.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
            f'<text x="{left - 4}" y="{y + 3:g}" text-anchor="end" fill="#888">'
            f"{share * highest:g}</text>"
        )
    for x, (value, _) in zip(across, rows, strict=True):
        body.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 13}" text-anchor="middle" fill="#555">{value}</text>')
    for key, colour in lines.items():
        pairs = [
            (x, top + HEIGHT * (1 - n[key] / highest))
            for x, (_, n) in zip(across, rows, strict=True)
            if n[key] is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in pairs]
    return body


def _round_up(value: float) -> float:
    """Round up to a number with one or two digits that is easy to halve."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= value)


def _plain(base: str) -> str:
    """The workload of the base, as `points` writes it."""
    return ",".join([base.split(",")[0], *(f"{k}={n}" for k, n in parse(base).items())])


# -- the command -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--folder", type=Path, default=Path("runs/scaling"), help="for all files")
    parser.add_argument("--axis", nargs="+", choices=list(AXES), default=list(AXES), help="vary these")
    parser.add_argument("--ends", action="store_true", help="of long axes only base and ends")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="results of other calls")
    parser.add_argument("--show", action="store_true", help="run nothing, print what is there")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little work")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of one point")
    parser.add_argument("--set", nargs="*", default=[], help="options of saccade: key=value")
    args = parser.parse_args()
    axes, base, size = (TINY_AXES, TINY_BASE, "tiny") if args.tiny else (AXES, BASE, "3b")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    parts = read([results, *args.merge])
    titles = {name: axis.title for name, axis in axes.items()}
    for name in [] if args.show else args.axis:
        chosen = points(axes[name], base, size)
        if args.ends:
            chosen = [p for p in chosen if p in (chosen[0], chosen[-1]) or p.work == _plain(base)]
        for point in chosen:
            if parts.get(point.name, {}).get("status") == "ok":
                continue
            model = ensure_model(folder / f"model-{point.size}", point.size)
            bench = Bench(folder=folder, model=model, limit=args.limit)
            more = [*point.options, *args.set]
            part = run(bench, point.name, ("rl_step.py",), point.work, steps=2, more=more)
            parts[point.name] = part
            print(f"{point.name}: {part['status']} in {part['took']:.0f} s", flush=True)
            write(results, parts)
    write(results, parts)
    found = by_axis(parts, axes, base, size)
    (folder / "scaling.svg").write_text(picture(found, titles))
    print(table(found, titles))


if __name__ == "__main__":
    main()
