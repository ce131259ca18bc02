"""What visual_search.py measured, over seeds: accuracy by arm and limit of turns, as numbers, as a
table and as a picture. Knows results, nothing of models.

    >>> interval([0.4, 0.5, 0.6])
    (0.5, 0.2517..., 0.7482...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LIMITS = (1, 2, 4, 6, 8, 12, 16, 32)
ARMS = {
    "cold": "cold start",
    "masked": "RL with tools, over-turn masking",
    "unmasked": "RL with tools, no masking",
    "direct": "RL without tools",
}

# 97.5 % quantiles of Student's t by degrees of freedom; from ten on 2.2 is close enough.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval around the mean over seeds; a single seed has none."""
    n = len(values)
    factor = STUDENT[n - 2] if n - 2 < len(STUDENT) else 2.2
    return factor * float(np.std(values, ddof=1)) / n**0.5 if n > 1 else 0.0


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean share over seeds with its 95 % interval."""
    mean, half = float(np.mean(values)), half_width(values)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def summary(jobs: Mapping[str, Mapping[str, Any]], size: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """Accuracy by arm and limit over the seeds, gains that are paired by seed, seconds."""
    found = {arm: [jobs[f"{arm}-{seed}"] for seed in seeds] for arm in ARMS}
    at = {
        arm: {limit: [job["evaluation"]["accuracy"][str(limit)] for job in found[arm]] for limit in LIMITS}
        for arm in ARMS
    }
    gains = {  # (arm, limit) minus (arm, limit)
        "RL with tools over cold start": (("masked", 32), ("cold", 32)),
        "RL with tools over RL without": (("masked", 32), ("direct", 32)),
        "32 turns over 6, masked": (("masked", 32), ("masked", size["turns"])),
        "32 turns over 6, unmasked": (("unmasked", 32), ("unmasked", size["turns"])),
    }
    return {
        "size": dict(size),
        "parameters": jobs["base"]["parameters"],
        "accuracy": {arm: {limit: interval(values) for limit, values in limits.items()} for arm, limits in at.items()},
        "gains": {name: np.subtract(at[a][m], at[b][n]).tolist() for name, ((a, m), (b, n)) in gains.items()},
        "seconds": {name: job["seconds"] for name, job in jobs.items()},
        "curves": {arm: [job["curve"] for job in found[arm]] for arm in ARMS},
        "evaluations": {arm: [job["evaluation"] for job in found[arm]] for arm in ARMS},
    }


def table(found: Mapping[str, Any]) -> str:
    lines = ["turns    " + "".join(f"{limit:>16}" for limit in LIMITS)]
    for arm, limits in found["accuracy"].items():
        cells = (f"{100 * m:6.1f} [{100 * lo:3.0f},{100 * hi:4.0f}]" for m, lo, hi in limits.values())
        lines.append(f"{arm:<9}" + "".join(f"{cell:>16}" for cell in cells))
    lines += [f"{name}: {np.round(values, 3)}" for name, values in found["gains"].items()]
    lines.append(", ".join(f"{job} {took:.0f} s" for job, took in found["seconds"].items()))
    return "\n".join(lines)


COLOURS = {"masked": "#1b6ca8", "unmasked": "#d1495b", "cold": "#7a7a7a", "direct": "#e0a030"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 380, 56, 24, 16, 96


def picture(found: Mapping[str, Any]) -> str:
    """Accuracy over the limit of turns, a band for the interval over seeds."""

    def x(limit: int) -> float:
        return LEFT + np.log2(limit) / np.log2(max(LIMITS)) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (1 - value) * (HEIGHT - TOP - BOTTOM)

    def path(points: Sequence[tuple[int, float]]) -> str:
        return "M" + "L".join(f"{x(limit):.1f},{y(value):.1f}" for limit, value in points)

    size = found["size"]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in (0, 0.25, 0.5, 0.75, 1):
        body.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#ddd"/><text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">'
            f"{100 * value:g} %</text>"
        )
    for limit in LIMITS:
        body.append(f'<text x="{x(limit):.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{limit}</text>')
    body.append(
        f'<line x1="{x(size["turns"]):.1f}" x2="{x(size["turns"]):.1f}" y1="{y(1)}" y2="{y(0)}" '
        f'stroke="#999" stroke-dasharray="4 3"/><text x="{x(size["turns"]) + 4:.1f}" '
        f'y="{y(1) + 12:.1f}" fill="#666">limit in training</text>'
    )
    for row, (arm, label) in enumerate(ARMS.items()):
        limits = {int(limit): values for limit, values in found["accuracy"][arm].items()}
        upper = [(limit, high) for limit, (_, _, high) in limits.items()]
        lower = [(limit, low) for limit, (_, low, _) in reversed(limits.items())]
        means = [(limit, mean) for limit, (mean, _, _) in limits.items()]
        colour = COLOURS[arm]
        body.append(f'<path d="{path(upper + lower)}Z" fill="{colour}" opacity="0.15"/>')
        body.append(f'<path d="{path(means)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        left, top = LEFT + 290 * (row % 2), y(0) + 54 + 18 * (row // 2)
        body.append(
            f'<line x1="{left}" x2="{left + 22}" y1="{top - 4:.1f}" y2="{top - 4:.1f}" '
            f'stroke="{colour}" stroke-width="2"/>'
            f'<text x="{left + 28}" y="{top:.1f}">{label}</text>'
        )
    body.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{y(0) + 36:.1f}" text-anchor="middle">'
        "turns allowed at test time</text></svg>"
    )
    return "\n".join(body) + "\n"
