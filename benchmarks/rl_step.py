"""Whole GRPO steps of the 3B-shaped vision-language model on one GPU, split into phases.

    python benchmarks/rl_step.py --work W1 --steps 3

W1: 16 prompts x 8 rollouts, one 448 x 448 image each (256 image tokens), a prompt of 368 tokens,
512 new tokens. W2: 16 x 8, one 1,000 x 1,000 image each (about 1,250 image tokens), 256 new tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from model import build_3b
from PIL import Image

import saccade
from saccade.tracking.loggers import read_metrics

WORKS = {
    "W1": {"side": 448, "prompt": 368, "new": 512},
    "W2": {"side": 1000, "prompt": 1360, "new": 256},
}
REWARD = "def score(sample):\n    return float(sum(sample.token_ids) % 7)\n"


def write_rows(folder: Path, side: int, prompt: int, rows: int) -> Path:
    rng = np.random.default_rng(0)
    units = round(side / 28)
    text = "How many objects are in the picture? " * 100
    text = text[: prompt - units * units - 15]  # one token per character, 15 of the template
    lines = []
    for index in range(rows):
        name = f"{index}.png"
        Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(folder / name)
        lines.append(json.dumps({"problem": f"<image>{text}", "answer": "1", "images": [name]}))
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, default="W1")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", type=Path, help="folder to keep the model in")
    parser.add_argument("--out", type=Path, help="folder for metrics.jsonl and the summary")
    parser.add_argument("overrides", nargs="*", help="options such as train.micro_tokens=32768")
    args = parser.parse_args()
    work = WORKS[args.work]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = args.model or folder / "model"
        if not (model / "model.safetensors.index.json").exists() and not list(
            model.glob("*.safetensors")
        ):
            began = time.time()
            build_3b(model)
            print(f"built {model} in {time.time() - began:.1f} s", flush=True)
        (folder / "reward.py").write_text(REWARD)
        data = write_rows(folder, work["side"], work["prompt"], 16 * args.steps)
        saccade.rl(
            {
                "run.name": args.work,
                "run.out": str(folder / "runs"),
                "run.max_steps": args.steps,
                "model.path": str(model),
                "data.train": str(data),
                "data.placeholder": "prepend",
                "prompt.format": "none",
                "rollout.max_tokens": work["new"],
                "rollout.ignore_eos": True,
                "reward.terms": [f"{folder / 'reward.py'}:score"],
                "reward.self_test": "off",
                "algorithm.preset": "grpo",
                "algorithm.kl.coef": 0.0,
                "train.prompts_per_step": 16,
                "train.samples_per_prompt": 8,
                "val.every": 0,
                "save.every": 0,
                "track.trajectories_every": 0,
                "track.tensorboard": False,
            },
            *args.overrides,
        )
        rows = read_metrics(folder / "runs" / args.work)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{args.work}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
    print(
        "\nstep   whole  rollout  update   pack  other   tok/s rollout"
        "   peak GiB rollout / update   gap mean / max"
    )
    for row in rows:
        if row.get("time/step") is None:
            continue
        whole, rollout, update, pack = (
            row.get(f"time/{k}", 0.0) for k in ("step", "rollout", "update", "pack")
        )
        print(
            f"{row['step']:4d} {whole:7.2f} {rollout:8.2f} {update:7.2f} {pack:6.2f}"
            f" {whole - rollout - update - pack:6.2f}"
            f" {row.get('perf/rollout_tokens_per_s', 0):15.0f}"
            f" {row.get('mem/gpu_peak_gb/rollout', 0):12.1f}"
            f" / {row.get('mem/gpu_peak_gb/update', 0):.1f}"
            f" {row.get('mismatch/logp_gap_mean', 0):15.5f}"
            f" / {row.get('mismatch/logp_gap_max', 0):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
