"""A scalar reward model of the 3B shape learns 1,024 pairs with a picture each, then scores them.

    python benchmarks/reward_model_gpu.py                      # one GPU of 80 GB or more
    python benchmarks/reward_model_gpu.py --size tiny --pairs 32 --per-step 8   # seconds on a CPU

Weights are random, which does not change the speed. Prints seconds, pairs and tokens per second and
peak memory of training, of saving, and of scoring with weights that are offloaded to main memory
before and after; with --out also writes them as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import build

from saccade.config import Config, load
from saccade.plugins.quickstart import counting
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_losses import train_ratings
from saccade.plugins.reward_models.reward_rows import rows_of, with_prefix
from saccade.recipes import model_setup
from saccade.rewards.reward_sample import reward_sample
from saccade.run.checkpoint import copy_processor
from saccade.system.contents import write_files
from saccade.trainer.local import LocalTrainer
from saccade.types import Sample

COLOURS = tuple(counting.COLOURS)


def write_pairs(folder: Path, count: int, *, side: int, reply: int) -> Path:
    """Write pairs about a picture of one shape: `chosen` names its colour, `rejected` another colour."""
    shapes = counting.counting_split(
        count, seed=0, colours=COLOURS, counts=(1, 1), size=side, radius=(side // 4, side // 3)
    )
    drawn = counting.write_jsonl(shapes, folder, name="drawn").read_text().splitlines()
    rng, rows = np.random.default_rng(0), []
    for line in drawn:
        scene = json.loads(line)
        right = COLOURS.index(scene["colours"][0])
        wrong = (right + int(rng.integers(1, len(COLOURS)))) % len(COLOURS)
        sides = {"chosen": right, "rejected": wrong}
        rows.append(
            {"id": scene["id"], "images": scene["images"], "prompt": "<image>How many objects ?"}
            | {name: f"w{word} " + "count " * (reply - 1) for name, word in sides.items()}
        )
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def measured(found: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds and the peak GPU memory of a phase to `found`."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize()
        found[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    found[f"{name}_s"] = time.perf_counter() - began


def train(config: Config, folder: Path, per_step: int, found: dict[str, Any]) -> Sequence[Sample]:
    """Train for one pass over the rows and write the model to `folder`."""
    family = model_setup.family_of(config, config.model.path)
    task = rows_of(config, family)
    data = task.load(config.data.train)
    with measured(found, "load"):
        model = model_setup.load_policy(config, family)
        task.attach(model, card=task.card(None, data.samples), stored=None)
        backend = LocalTrainer(model, family, config.train, checkpointing="auto")
    found["parameters"] = sum(p.numel() for p in model.parameters())
    tokens, steps, shown = 0, [], dict[str, float]()
    with measured(found, "train"):
        for start in range(0, len(data.samples), per_step):
            began = time.perf_counter()
            batches, loss = task.prepare(data.samples[start : start + per_step])
            assert config.train.lr is not None
            update = train_ratings(backend, batches, loss, lr=config.train.lr)
            tokens += sum(batch.tokens for batch in batches)
            steps.append(time.perf_counter() - began)
            shown = with_prefix(update.metrics.means(), "rm")
    warm = float(np.median(steps[1:] or steps))
    found |= {"train_tokens": tokens, "step_s": warm, "pairs_per_s": per_step / warm}
    found |= {name: shown[f"rm/{name}"] for name in ("loss", "accuracy")}
    with measured(found, "save"):
        write_files(folder, backend.model_files())
        copy_processor(family, folder)
    return data.samples


def score(config: Config, folder: Path, samples: Sequence[Sample], found: dict[str, Any]) -> None:
    device = model_setup.device_of(config.run)
    model = LearnedReward.load(
        folder,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        micro_tokens=config.train.micro_tokens,
        offload=True,
    )
    if device.type == "cuda":
        found["resting_gib"] = torch.cuda.memory_allocated() / 2**30
    replies = [reward_sample(sample, side[-1].text) for sample in samples for side in sample.candidates]
    with measured(found, "score"):
        scores = np.array(model.score(replies)).reshape(-1, 2)
    assert np.isfinite(scores).all(), "a response has no score"
    found["scored_per_s"] = scores.size / found["score_s"]
    found["scored_right"] = float((scores[:, 0] > scores[:, 1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="3b", help="tiny, 0.5b, 3b or 7b")
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--per-step", type=int, default=64, help="pairs of one update")
    parser.add_argument("--side", type=int, default=448, help="pixels of a picture's side")
    parser.add_argument("--reply", type=int, default=64, help="tokens of a response")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("overrides", nargs="*", help="options such as train.micro_tokens=32768")
    args = parser.parse_args()
    found: dict[str, Any] = {"size": args.size, "pairs": args.pairs, "side": args.side}
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        rows = write_pairs(here / "rows", args.pairs, side=args.side, reply=args.reply)
        options = {
            "run.out": str(here / "runs"),
            "model.path": build(here / "model", args.size),
            "data.train": str(rows),
            "prompt.format": "none",
        }
        config = load(load(options), args.overrides, command="reward-model")
        model_setup.quiet_libraries()
        (here / "rm").mkdir()
        samples = train(config, here / "rm", args.per_step, found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        score(config, here / "rm", samples, found)
    text = json.dumps(found, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
