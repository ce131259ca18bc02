"""Do rollouts that run ahead hurt learning? The quickstart's GRPO stage with 0, 1 and 4 updates ahead, with and without
importance weights (algorithm.correct); all arms of a seed have the same cold start and the same number of steps.

    python benchmarks/ahead_learning.py runs/ahead --seeds 0 1 2 3 4
    python benchmarks/ahead_learning.py runs/ahead                     # the table of existing results

Writes SEED-ARM.json into the folder: accuracy on held-out scenes every few steps and at the end, and the age of tokens
in updates. The table has means over seeds with 95 % intervals, and the difference to 0 updates ahead, paired by seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the source tree is enough, no install needed

from experiments.pages import gain, mean_of
from saccade.plugins.export.export import checkpoint_of
from saccade.plugins.families import tiny_kinds
from saccade.plugins.quickstart import quickstart
from saccade.recipes import model_setup, rl, sft
from saccade.run.loggers import read_metrics

ARMS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"rollout.ahead": 1},
    "1 unweighed": {"rollout.ahead": 1, "algorithm.correct": []},
    "4": {"rollout.ahead": 4},
    "4 unweighed": {"rollout.ahead": 4, "algorithm.correct": []},
}


def run(out: Path, seed: int, arms: Sequence[str]) -> None:
    folder, size = out / str(seed), quickstart.SIZES["full"]
    data = quickstart.draw_data(folder / "data", size, seed)
    if not (folder / "sft").exists():
        model = tiny_kinds.build("qwen2_5_vl", folder / "model", words=quickstart.WORDS, seed=seed)
        sft.run(quickstart.sft_config(folder, data, model, size, seed))
    start = str(checkpoint_of(folder / "sft"))
    for arm in arms:
        file = out / f"{seed}-{arm.replace(' ', '-')}.json"
        if file.exists():
            continue
        config = quickstart.rl_config(folder, data, start, size, seed)
        config["run"] |= {"name": arm, "resume": "none"}
        rl.run({**config, **ARMS[arm]})
        rows = read_metrics(folder / arm)
        curve = [(row["step"], row["val/val/accuracy"]) for row in rows if "val/val/accuracy" in row]
        steps = [row for row in rows if "data/staleness_mean" in row]
        result = {
            "curve": curve,
            "staleness_mean": float(np.mean([row["data/staleness_mean"] for row in steps])),
            "staleness_max": max(row["data/staleness_max"] for row in steps),
            "ess_min": min(row["mismatch/ess"] for row in steps),
            "seconds": sum(row["time/step"] for row in steps),
        }
        file.write_text(json.dumps(result) + "\n")


def table(out: Path) -> str:
    found = {arm: {f.name.split("-")[0]: json.loads(f.read_text())
                   for f in sorted(out.glob(f"*-{arm.replace(' ', '-')}.json"))} for arm in ARMS}  # fmt: skip
    head = "| updates ahead | seeds | accuracy at the end | difference to 0 | mean age | least ESS |"
    lines = [head, "|---" * 6 + "|"]
    for arm, seeds in found.items():
        if not seeds:
            continue
        ends = {seed: result["curve"][-1][1] for seed, result in seeds.items()}
        ages = float(np.mean([result["staleness_mean"] for result in seeds.values()]))
        least = min(result["ess_min"] for result in seeds.values())
        first = {seed: result["curve"][-1][1] for seed, result in found["0"].items()}
        cells = [arm, str(len(ends)), f"{mean_of(ends)} %", gain(ends, first), f"{ages:.2f}", f"{least:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--arms", nargs="*", default=[*ARMS], choices=ARMS)
    args = parser.parse_args()
    model_setup.quiet_libraries()
    for seed in args.seeds:
        run(args.out, seed, args.arms)
    print(table(args.out))


if __name__ == "__main__":
    main()
