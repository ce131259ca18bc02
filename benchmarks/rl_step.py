"""Whole GRPO steps of saccade on one GPU, split into phases.

    python benchmarks/rl_step.py --work W1 --steps 3
    python benchmarks/rl_step.py --work W1,samples=64,new=128 model.checkpointing=on
    python benchmarks/rl_step.py --work W1 --exact rollout.engine=vllm rollout.memory_share=0.4

Workloads are those of works.py; the model has the shape of Qwen2.5-VL-3B unless --model names a
folder. No checkpoint is written. "Used" is the device memory in use by all processes when a phase
ends: an engine that sleeps has freed its part, which torch's peak still includes. With --exact the
first step also prints how far the log-probs of engine and trainer are from those in float32, so
that rounding can be told from an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import SHAPES, SIZES, build
from works import WORKS, Work, parse, sequences, write_result, write_rows

import saccade
from saccade.forest.batch import Batch
from saccade.models.load import load_model
from saccade.run.checkpointer import Checkpointer
from saccade.run.loggers import read_metrics
from saccade.run.training_run import Run
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer

__all__ = ["WORKS"]  # other benchmarks read it here
REWARD = "def score(sample):\n    return float(sum(sample.token_ids) % 7)\n"


def config(folder: Path, model: str, data: Path, work: Work, steps: int) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD)
    return {
        "run.name": "run",
        "run.out": str(folder / "runs"),
        "run.max_steps": steps,
        "model.path": model,
        "data.train": str(data),
        "data.order": "sequential",
        "data.max_prompt_tokens": work["prompt"] + 64,
        "env.max_total_tokens": max(32_768, work["prompt"] + work["new"] + 64),
        "prompt.format": "none",
        "rollout.max_tokens": work["new"],
        "rollout.ignore_eos": True,
        "rollout.max_sequences": max(512, sequences(work)),
        "reward.terms": [f"{folder / 'reward.py'}:score"],
        "reward.self_test": "off",
        "algorithm.preset": "grpo",
        "algorithm.kl.coef": 0.0,
        "train.prompts_per_step": work["prompts"],
        "train.samples_per_prompt": work["samples"],
        "val.every": 0,
        "save.every": 0,
        "track.trajectories_every": 0,
        "track.tensorboard": False,
    }


def run(settings: dict[str, Any], overrides: Sequence[str], *, exact: bool = False) -> list[dict[str, Any]]:
    """Run the steps; returns their metrics, with counts of trained tokens and images and the used memory."""
    trained: list[dict[str, Any]] = []
    used: dict[str, float] = {}
    train_step, phase = LocalTrainer.train_step, Run.phase

    def counted(backend: LocalTrainer, batches: Any, *rest: Any, **more: Any) -> Any:
        images = {span.media.key for batch in batches for span in batch.media}
        tokens = sum(int(np.count_nonzero(batch.per_target("scales"))) for batch in batches)
        if exact and not trained:
            print(json.dumps(gaps(backend, batches[0])), flush=True)
        trained.append({"trained": tokens, "images": len(images), "used": used})
        return train_step(backend, batches, *rest, **more)

    @contextmanager
    def measured(run: Run, name: str) -> Iterator[None]:
        nonlocal used
        with phase(run, name):
            yield
        if name == "rollout":
            used = {}  # a new dict per step: `counted` stores it, and later phases add to it
        used[name] = gib_used()

    LocalTrainer.train_step = counted  # type: ignore[method-assign]
    Run.phase = measured  # type: ignore[method-assign, assignment]
    Checkpointer.due = lambda self, step: False  # type: ignore[method-assign]  # 50 GB that nothing reads
    Run.save = lambda run, *, last=False: None  # type: ignore[method-assign]
    saccade.rl(settings, *overrides)
    rows = [r for r in read_metrics(Path(settings["run.out"]) / "run") if "time/update" in r]
    return [row | counts for row, counts in zip(rows, trained, strict=True)]


def gaps(trainer: LocalTrainer, batch: Batch) -> dict[str, float]:
    """Mean |difference| of log-probs between engine, trainer and float32, before any update."""
    scoring, family = Scoring(temperature=1.0), trainer.family
    model = load_model(family, dtype=torch.float32, device=trainer.device)
    (whole, _), (own, _) = (backend.logprobs([batch], scoring)[0] for backend in (LocalTrainer(model, family), trainer))
    engine = batch.rollout_logprobs
    assert engine is not None
    pairs = {"engine_trainer": (engine, own), "engine_exact": (engine, whole), "trainer_exact": (own, whole)}
    return {name: float(np.abs(a - b).mean()) for name, (a, b) in pairs.items()}


def gib_used() -> float:
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a step under the names that all systems share."""
    return {
        "whole": row["time/step"],
        "rollout": row["time/rollout"],
        "update": row["time/update"],
        "hand_over": row["time/hand_over"],
        "sequences": int(row["count/samples"]),
        "images": row["images"],
        "prompt_tokens": row["length/prompt_mean"],
        "generated": int(row["count/rollout_tokens"]),
        "trained": row["trained"],
        "peak_gib": row.get("mem/gpu_peak_gb"),
        "rollout_gib": row["used"]["rollout"],
        "update_gib": row["used"]["update"],
        "mfu_update": row.get("perf/mfu_update"),
        "tflop_update": row.get("flops/update"),
        "tflop_recomputed": row.get("flops/recomputed"),  # in addition, to save memory
        "bandwidth_rollout": row.get("perf/bandwidth_rollout"),
        "gap_mean": row.get("mismatch/logp_gap_mean"),
        "gap_max": row.get("mismatch/logp_gap_max"),
        "host_gib": row.get("mem/host_rss_gb"),
    }


def table(steps: Sequence[dict[str, Any]]) -> str:
    lines = [
        "step   whole  rollout  update  hand-over  other   tok/s rollout   peak GiB"
        "   used GiB rollout / update   gap mean / max"
    ]
    for index, step in enumerate(steps):
        other = step["whole"] - step["rollout"] - step["update"] - step["hand_over"]
        lines.append(
            f"{index + 1:4d} {step['whole']:7.2f} {step['rollout']:8.2f} {step['update']:7.2f}"
            f" {step['hand_over']:10.3f} {other:6.2f} {step['generated'] / step['rollout']:15.0f}"
            f" {step['peak_gib'] or 0:10.1f}"
            f" {step['rollout_gib']:18.1f} / {step['update_gib']:6.1f}"
            f" {step['gap_mean'] or 0:10.5f} / {step['gap_max'] or 0:.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=parse, default="W1")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", type=Path, help="model folder; built when it is not there")
    parser.add_argument("--size", default="3b", choices=["tiny", *SIZES, *SHAPES], help="of a model that is built")
    parser.add_argument("--data", type=Path, help="rows that works.py wrote, instead of new ones")
    parser.add_argument("--out", type=Path, help="file for the metrics of all steps")
    parser.add_argument("--result", type=Path, help="file for the result")
    parser.add_argument("--exact", action="store_true", help="compare with float32, too")
    parser.add_argument("overrides", nargs="*", help="options such as train.micro_tokens=32768")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = args.model or folder / "model"
        if not model.exists():
            began = time.time()
            build(model, args.size)
            print(f"built {model} in {time.time() - began:.1f} s", flush=True)
        data = args.data or write_rows(folder / "data", str(model), args.work, args.steps)
        settings = config(folder, str(model), data, args.work, args.steps)
        rows = run(settings, args.overrides, exact=args.exact)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [summary(row) for row in rows]
    write_result(args.result, steps)
    print(table(steps))


if __name__ == "__main__":
    main()
