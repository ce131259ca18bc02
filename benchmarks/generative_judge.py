"""A tiny model learns to judge two pictures and to write its verdict: supervised, then by RL.

    python benchmarks/generative_judge.py --out runs/judge

The redder of two plain pictures is better; rows have the layout of HPDv3. `sft` learns written
verdicts; `rl` continues from its checkpoint with the reward `verdict` alone. Reports the greedy
accuracy on held-out pairs of the untrained model, after `sft` and after `rl`. About a minute and a
half a seed on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

import saccade
from saccade.plugins.families import tiny
from saccade.plugins.preferences.preference_rows import ASKED, ENDING
from saccade.plugins.verifiers.short_answers import VERDICTS

SIDE = 28  # pixels: one token each
LEAD = 32  # the reds of a pair differ by more than this, of 255
ROWS = {"train": 512, "held": 128}
STEPS = {"sft": 20, "rl": 100}
SAID = VERDICTS["image"]
# Phrases of every prompt and answer, one token each, so that a tiny model learns them in seconds.
PHRASES = (
    ASKED.format(medium="image"),
    *(f"\n\nImage {number}:\n" for number in (1, 2)),
    ENDING.format(said=", ".join(SAID)),
    *SAID,
    "<answer>",
    "</answer>",
)


def write_rows(folder: Path, seed: int, rows: Mapping[str, int] = ROWS) -> None:
    """Write SPLIT.json for each split, in HPDv3's layout."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in rows.items():
        listed = []
        for number in range(count):
            reds = (0, 0)
            while abs(reds[0] - reds[1]) <= LEAD:
                reds = (rng.randrange(256), rng.randrange(256))
            names = [f"{split}-{number}-{place}.png" for place in ("better", "worse")]
            for name, red in zip(names, sorted(reds, reverse=True), strict=True):
                colour = (red, 255 - red, 30)
                Image.new("RGB", (SIDE, SIDE), colour).save(folder / name)
            listed.append({"prompt": "red", "path1": names[0], "path2": names[1], "confidence": 1.0})
        (folder / f"{split}.json").write_text(json.dumps(listed))


def run(folder: Path, seed: int, steps: Mapping[str, int] = STEPS, rows: Mapping[str, int] = ROWS) -> dict[str, float]:
    """Held-out accuracy before, after `sft` and after `rl`."""
    write_rows(folder / "rows", seed, rows)
    start = tiny.build("qwen2_vl", folder / "model", phrases=PHRASES, seed=seed)
    common: dict[str, Any] = {
        "run.out": str(folder),
        "run.seed": seed,
        "run.device": "cpu",
        "data.train": str(folder / "rows" / "train.json"),
        "data.val": [{"path": str(folder / "rows" / "held.json"), "name": "pairs"}],
        "data.mapping": "hpdv3",
        "data.pair_view": "verdict",
        "data.min_pixels": SIDE**2,
        "data.max_pixels": SIDE**2,
        "prompt.instruction": "",
        "reward.terms": ["verdict"],
        "rollout.max_tokens": 6,
        "train.prompts_per_step": 32,
        "save.every": 0,
        "track.tensorboard": False,
    }
    saccade.sft(
        common
        | {"run.name": "sft", "run.max_steps": steps["sft"], "model.path": start}
        | {"train.lr": 3e-3, "val.every": steps["sft"]}
    )
    learned = folder / "sft" / "checkpoints" / f"step-{steps['sft']}"
    saccade.rl(
        common
        | {"run.name": "rl", "run.max_steps": steps["rl"], "model.path": str(learned)}
        | {"train.lr": 5e-4, "train.samples_per_prompt": 8, "val.every": steps["rl"]}
        | {"algorithm.kl.coef": 0.0}
    )
    before, after = accuracies(folder / "sft")
    return {"before": before, "sft": after, "rl": accuracies(folder / "rl")[-1]}


def accuracies(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["val/pairs/accuracy"] for row in rows if "val/pairs/accuracy" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/generative-judge"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for seed in range(args.seeds):
        began = time.perf_counter()
        found = run(args.out / f"seed-{seed}", seed)
        shown = ", ".join(f"{stage} {value:.1%}" for stage, value in found.items())
        print(f"seed {seed}: {shown}; {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
