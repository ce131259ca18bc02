"""Every preset on the counting task of the quickstart, for the same number of rollouts.

    python benchmarks/algorithms.py --out runs/algorithms --jobs 2

One model is trained by SFT; then each preset continues from it on the same questions, --jobs
presets at a time. Writes OUT/results.json and OUT/algorithms.svg (curves side by side), prints a
table. A preset that was run before is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.config.schema.presets import PRESETS
from saccade.plugins.families import tiny
from saccade.plugins.quickstart import quickstart
from saccade.recipes import rl, sft
from saccade.run.loggers import read_metrics

ROLLOUTS = 512  # per step, for every preset
SIZE = {"demonstrations": 400, "prompts": 6000, "evaluation": 600, "sft": 100}
LR = 5e-4
# Presets have rates for large models; the tiny model and its critic need 500 times larger ones.
CRITIC_LR = 500 * 9e-6


def prepare(out: Path, seed: int) -> str:
    """Write data with a column `domain`, and train a model by SFT; returns its checkpoint."""
    data = quickstart.draw_data(out / "data", {**SIZE, "rl": 0}, seed)
    rows = [json.loads(line) for line in Path(data["train"]).read_text().splitlines()]
    for row in rows:
        row["domain"] = row["problem"].split()[-2]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(data["train"]).write_text(text)
    model = tiny.build("qwen2_5_vl", out / "model", words=quickstart.WORDS, seed=seed)
    sft.run(quickstart.sft_config(out, data, model, {**SIZE, "rl": 0}, seed))
    return str(out / "sft" / "checkpoints" / f"step-{SIZE['sft']}")


def train(preset: str, out: Path, steps: int, seed: int) -> None:
    data = {name: str(out / "data" / f"{name}.jsonl") for name in ("train", "val")}
    start = str(out / "sft" / "checkpoints" / f"step-{SIZE['sft']}")
    config = quickstart.rl_config(out, data, start, {**SIZE, "rl": steps}, seed)
    row = resolve(AlgorithmConfig(preset=preset), max_tokens=16)
    each_prompt = row.samples_per_prompt + row.estimator.greedy
    config["run"]["name"] = preset
    config["rollout"] = {"max_tokens": 16}
    config["algorithm"] = {"preset": preset}
    if row.needs_critic:
        config["algorithm"]["critic"] = {"lr": CRITIC_LR}
    if row.estimator.components:  # terms that are compared one by one cannot gate each other
        config["reward"] = {**quickstart.REWARD, "combine": "weighted_sum"}
    config["train"] |= {"prompts_per_step": ROLLOUTS // each_prompt, "lr": LR}
    del config["train"]["samples_per_prompt"]
    config["val"] = {"every": max(1, steps // 8)}
    config["track"] = {"tensorboard": False, "trajectories_every": 0}
    rl.run(config)


def result(out: Path, preset: str, budget: int) -> dict[str, Any]:
    """Accuracy over the number of sampled rollouts, dropped ones included, up to the budget."""
    rows = read_metrics(out / preset)
    before = next(row["val/val/accuracy"] for row in rows if "val/val/accuracy" in row)
    steps = [row for row in rows if "count/samples" in row]
    drawn = np.cumsum([row["count/samples"] for row in steps])
    inside = steps[: int(np.searchsorted(drawn, budget, side="right"))]
    return {
        "rollouts": drawn[: len(inside)].tolist(),
        "accuracy": [row["reward/accuracy"] for row in inside],
        "steps": len(inside),
        "before": before,
        "after": [row["val/val/accuracy"] for row in inside if "val/val/accuracy" in row][-1],
        # Share of prompts with a right answer among their samples, in the first and last 5 steps.
        "solved": [1 - _mean(part, "group/all_wrong_frac") for part in (inside[:5], inside[-5:])],
        "seconds": sum(row["time/step"] for row in inside),
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


# -- the picture -----------------------------------------------------------------------------------

WIDTH, HEIGHT, COLUMNS, MARGIN = 168, 104, 6, 26


def picture(results: Mapping[str, Mapping[str, Any]], budget: int) -> str:
    """Small multiples: each preset over the curve of grpo."""
    rows = -(-len(results) // COLUMNS)
    size = (COLUMNS * WIDTH + MARGIN, rows * HEIGHT + MARGIN)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
    ]
    for index, (name, found) in enumerate(results.items()):
        left, top = MARGIN + index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT + 18
        body += _panel(name, found, results["grpo"], left, top, budget)
    bottom = size[1] - 8
    body.append(
        f'<text x="{MARGIN}" y="{bottom}" fill="#555">share of rollouts that are right, over '
        f"0 to {budget:,} rollouts; grey: grpo; the number is greedy accuracy on held-out scenes "
        "at the end</text></svg>"
    )
    return "\n".join(body)


def _panel(
    name: str, found: Mapping[str, Any], other: Mapping[str, Any], left: int, top: int, budget: int
) -> list[str]:
    wide, high = WIDTH - 22, HEIGHT - 30
    lines = [
        f'<text x="{left}" y="{top - 5}" font-weight="bold" fill="#222">{name}</text>',
        f'<text x="{left + wide}" y="{top - 5}" text-anchor="end" fill="#222">{found["after"]:.0%}</text>',
        f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="#f7f7f7"/>',
    ]
    for share in (0, 0.5, 1):
        y = top + high * (1 - share)
        lines.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
            f'<text x="{left - 3}" y="{y + 3:g}" text-anchor="end" font-size="7" fill="#888">'
            f"{share:g}</text>"
        )
    for curve, colour, stroke in ((other, "#bbbbbb", 1.2), (found, "#1f6fb4", 1.6)):
        points = " ".join(
            f"{left + wide * x / budget:.1f},{top + high * (1 - y):.1f}"
            for x, y in zip(curve["rollouts"], _smooth(curve["accuracy"]), strict=True)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>')
    return lines


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [float(np.mean(values[max(0, i - width + 1) : i + 1])) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--one", help="train this preset only; used by the others")
    args = parser.parse_args()
    out = args.out.resolve()
    if args.one:
        train(args.one, out, args.steps, args.seed)
        return
    if not (out / "sft").exists():
        prepare(out, args.seed)

    def start(preset: str) -> None:
        if (out / preset / "checkpoints").exists():
            return
        command = [sys.executable, __file__, "--one", preset, "--out", str(out)]
        command += ["--steps", str(args.steps), "--seed", str(args.seed)]
        log = out / f"{preset}.log"
        with log.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
        print(f"{preset}: exit code {code}" if code else f"{preset} done", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(start, args.presets))
    budget = args.steps * ROLLOUTS
    done = [name for name in args.presets if (out / name / "checkpoints").exists()]
    results = {name: result(out, name, budget) for name in done}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "algorithms.svg").write_text(picture(results, budget))
    print("| preset | held-out, before | after | prompts solved, first | last | steps | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, found in results.items():
        shares = (found["before"], found["after"], *found["solved"])
        cells = " | ".join(f"{share:.1%}" for share in shares)
        print(f"| `{name}` | {cells} | {found['steps']} | {found['seconds']:.0f} |")


if __name__ == "__main__":
    main()
