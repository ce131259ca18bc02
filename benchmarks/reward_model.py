"""RLHF on a synthetic task with pictures: SFT on demonstrations, a reward model from pairs, PPO.

    python benchmarks/reward_model.py --out runs/rlhf --picture docs/images/reward-model.svg

A picture shows one coloured shape; an answer is a colour. The policy starts from demonstrations
that mostly guess. The reward model sees pairs of a right and a worse answer, never the task; PPO
with a critic sees the reward model, never the answer. Reported are the held-out accuracy of the
reward model and the true score of the policy's answers. About a minute a seed on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import saccade
from saccade.plugins.families import tiny
from saccade.plugins.quickstart import counting
from saccade.plugins.quickstart.quickstart import WORDS

COLOURS = counting.TRAINING_COLOURS
QUESTION = "how many objects ?"  # the words of the tiny model; the demonstrations say what it means
KNOWN = 0.25  # share of demonstrations that do not guess
BABBLING = 0.3  # share of pairs whose rejected side is the right answer and another colour
STEPS = {"sft": 60, "rm": 60, "ppo": 80}
CURVES = {
    "rm": ("val/pairs/accuracy", "Reward model: pairs in the right order"),
    "ppo": ("val/questions/accuracy", "PPO against it: answers that are right"),
}


def write_rows(folder: Path, seed: int) -> None:
    """Write three files per split. shown: demonstrations that mostly guess; pairs: right over wrong;
    questions: with the answer, which only validation uses.
    """
    rng = random.Random(seed)
    for split, count in {"train": 768, "held": 128}.items():
        scenes = counting.counting_split(count, seed=seed + count, colours=COLOURS, counts=(1, 1), radius=(14, 18))
        drawn = counting.write_jsonl(scenes, folder, name="drawn").read_text().splitlines()
        rows: dict[str, list[dict[str, Any]]] = {"shown": [], "pairs": [], "questions": []}
        for scene in map(json.loads, drawn):
            [right] = scene["colours"]
            wrong = rng.choice([colour for colour in COLOURS if colour != right])
            if rng.random() < BABBLING:
                wrong = f"{right} {rng.choice(COLOURS)}"
            guess = right if rng.random() < KNOWN else rng.choice(COLOURS)
            row = {"id": scene["id"], "images": scene["images"], "prompt": f"<image>{QUESTION}"}
            rows["questions"].append(row | {"answer": right})
            rows["pairs"].append(row | {"chosen": right, "rejected": wrong})
            rows["shown"].append(row | {"chosen": guess, "rejected": "none"})  # sft trains on `chosen`
        for kind, listed in rows.items():
            text = "".join(json.dumps(row) + "\n" for row in listed)
            (folder / f"{split}-{kind}.jsonl").write_text(text)


def run(folder: Path, seed: int, steps: Mapping[str, int] = STEPS) -> dict[str, Any]:
    """Run all three stages; returns the curves of the last two as (step, value)."""
    write_rows(folder / "rows", seed)
    start = tiny.build("qwen2_5_vl", folder / "model", words=WORDS, seed=seed)
    common = {
        "run.out": str(folder),
        "run.seed": seed,
        "run.device": "cpu",
        "prompt.format": "direct",
        "prompt.instruction": "",
        "save.every": 0,
        "track.tensorboard": False,
    }

    def rows(kind: str) -> dict[str, Any]:
        held = {"path": str(folder / "rows" / f"held-{kind}.jsonl"), "name": kind}
        return {"data.train": str(folder / "rows" / f"train-{kind}.jsonl"), "data.val": [held]}

    def end(stage: str) -> str:
        return str(folder / stage / "checkpoints" / f"step-{steps[stage]}")

    saccade.sft(
        common
        | rows("shown")
        | {"run.name": "sft", "run.max_steps": steps["sft"], "model.path": start, "val.every": 0}
        | {"train.prompts_per_step": 16, "train.lr": 3e-3}
    )
    saccade.reward_model(
        common
        | rows("pairs")
        | {"run.name": "rm", "run.max_steps": steps["rm"], "model.path": start, "val.every": 5}
        | {"train.prompts_per_step": 32, "train.lr": 3e-3}
    )
    learned = {"verifier": "model", "name": "rm", "args": {"path": end("rm"), "normalise": True}}
    saccade.rl(
        common
        | rows("questions")
        | {"run.name": "ppo", "run.max_steps": steps["ppo"], "model.path": end("sft")}
        | {
            "val.every": 10,
            "val.n": 4,  # sampled, as in training
            "rollout.max_tokens": 2,
            "reward.terms": [learned, {"verifier": "exact", "weight": 0.0}],
            "reward.accuracy_term": "exact",  # reported as accuracy; its weight in the reward is 0
            "algorithm.preset": "ppo",
            "algorithm.kl.coef": 0.1,  # keeps it near responses that the reward model has learned about
            "algorithm.critic.path": end("rm"),
            "algorithm.critic.lr": 2e-3,
            "algorithm.entropy_coef": 0.01,  # else a tiny model stops sampling a colour early
            "train.prompts_per_step": 32,
            "train.samples_per_prompt": 4,
            "train.lr": 1e-3,
            "train.schedule": "linear",
            "train.min_lr": 0.1,
        }
    )
    return {stage: curve(folder / stage, metric) for stage, (metric, _) in CURVES.items()}


def curve(run: Path, metric: str) -> list[tuple[int, float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[metric]) for row in rows if metric in row]


# -- the picture -----------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, GAP, BOTTOM = 760, 300, 52, 40, 56, 48
COLOUR = {"rm": "#1b6ca8", "ppo": "#d1495b"}
CHANCE = {"rm": 0.5, "ppo": 1 / len(COLOURS)}


def picture(results: Sequence[Mapping[str, Any]]) -> str:
    """One panel for each stage: a thin line per seed, their mean, and what guessing scores."""
    wide = (WIDTH - LEFT - 2 * GAP + 24) / 2
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def y(value: float) -> float:
        return TOP + (1 - value) * (HEIGHT - TOP - BOTTOM)

    for index, (stage, (_, title)) in enumerate(CURVES.items()):
        left, curves = LEFT + index * (wide + GAP), [result[stage] for result in results]
        last = curves[0][-1][0]

        def path(points: Sequence[tuple[int, float]], left: float = left, last: int = last) -> str:
            return "M" + "L".join(f"{left + s / last * wide:.1f},{y(v):.1f}" for s, v in points)

        body.append(f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{title}</text>')
        for value in (0, 0.25, 0.5, 0.75, 1):
            body.append(
                f'<line x1="{left}" x2="{left + wide:.1f}" y1="{y(value):.1f}" '
                f'y2="{y(value):.1f}" stroke="#ddd"/><text x="{left - 8}" y="{y(value) + 4:.1f}" '
                f'text-anchor="end">{100 * value:g} %</text>'
            )
        body.append(
            f'<path d="{path([(0, CHANCE[stage]), (last, CHANCE[stage])])}" stroke="#999" '
            f'stroke-dasharray="4 3"/><text x="{left + wide:.1f}" y="{y(CHANCE[stage]) - 5:.1f}" '
            'text-anchor="end" fill="#666">guessing</text>'
        )
        for points in curves:
            body.append(f'<path d="{path(points)}" fill="none" stroke="{COLOUR[stage]}" opacity="0.35"/>')
        mean = [(points[0][0], float(np.mean([v for _, v in points]))) for points in zip(*curves, strict=True)]
        body.append(f'<path d="{path(mean)}" fill="none" stroke="{COLOUR[stage]}" stroke-width="2.5"/>')
        for step in (0, last // 2, last):
            body.append(
                f'<text x="{left + step / last * wide:.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{step}</text>'
            )
        body.append(f'<text x="{left + wide / 2:.1f}" y="{y(0) + 36:.1f}" text-anchor="middle">steps</text>')
    return "\n".join([*body, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/reward-model"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="SVG file for the curves")
    args = parser.parse_args()
    results = []
    for seed in range(args.seeds):
        began = time.perf_counter()
        results.append(run(args.out / f"seed-{seed}", seed))
        ends = {stage: f"{points[0][1]:.3f} → {points[-1][1]:.3f}" for stage, points in results[-1].items()}
        print(f"seed {seed}: {ends}, {time.perf_counter() - began:.0f} s", flush=True)
    (args.out / "curves.json").write_text(json.dumps(results) + "\n")
    if args.picture is not None:
        args.picture.write_text(picture(results), encoding="utf-8")


if __name__ == "__main__":
    main()
