"""Compares DeepSpeed ZeRO and saccade's layouts: the same forests on two CPU processes, against one with all of them.

    PYTHONPATH=. DS_ACCELERATOR=cpu python benchmarks/zero.py
    PYTHONPATH=. DS_ACCELERATOR=cpu python benchmarks/zero.py --text-only    # one rank has no image

Needs `pip install deepspeed` and a compiler, and its `deepspeed_shm_comm` extension, which two ranks must not build at
once. Prints for each: the largest difference of a weight after three updates, and megabytes of weights and optimizer
state per rank, in float32. One that fails or hangs for 300 s is reported as such.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from update import forests, groups_of
from works import WORKS

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, TrainConfig
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.families import tiny
from saccade.plugins.ranks.divided import DividedOptimizer
from saccade.plugins.ranks.sharded import ShardedTrainer, _empty, _Root
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss

WAYS = ("one process", "whole", "sharded", "ZeRO 1", "ZeRO 2", "ZeRO 3")
TRAIN, LR, LIMIT = TrainConfig(), 1e-3, 300.0


class Zero(LocalTrainer):
    """Forward and loss of LocalTrainer; DeepSpeed holds the weights, and reduces, clips and applies gradients."""

    def __init__(self, model: Any, family: Any, stage: int) -> None:
        import deepspeed

        super().__init__(model, family)
        model.requires_grad_(True)
        self.recompute = type("Nothing", (), {"spare": 0.0})()  # type: ignore[assignment]
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": TRAIN.weight_decay}, {"params": others, "weight_decay": 0.0}]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": TRAIN.grad_norm,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        adam = torch.optim.AdamW(groups, lr=LR, betas=TRAIN.betas, eps=TRAIN.eps)
        self.deepspeed, *_ = deepspeed.initialize(model=_Root(model), optimizer=adam, config=config)

    def train_step(self, batches: Any, loss: Any, *, lr: float, **more: Any) -> Any:
        self.model.train()
        most = torch.tensor(len(batches))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        filled = [*batches, *[_empty()] * (int(most) - len(batches))]
        for place, batch in enumerate(filled):
            self.deepspeed.set_gradient_accumulation_boundary(place == len(filled) - 1)
            real = place < len(batches)
            value = self.deepspeed(lambda b=batch, r=real: loss.forward(self, b)()[0] if r else self.nothing(b))
            self.deepspeed.backward(value * dist.get_world_size())  # DeepSpeed divides by the number of ranks
            self.deepspeed.step()

    def nothing(self, batch: Any) -> Any:
        return 0.0 * self.score(batch, Scoring())[0].sum()

    def held(self) -> int:
        state = self.deepspeed.optimizer.optimizer.state.values()
        parts = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in self.model.parameters()]
        groups = getattr(self.deepspeed.optimizer, "fp32_partitioned_groups_flat", None)
        masters = groups or getattr(self.deepspeed.optimizer, "single_partition_of_fp32_groups", [])
        moments = [t for one in state for t in one.values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in (*parts, *masters, *moments))

    def whole_weights(self) -> dict[str, np.ndarray]:
        import deepspeed

        found = {}
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().float().numpy().copy()
        return found


def work(way: str, rank: int, folder: Path, text_only: bool) -> None:
    torch.set_num_threads(1)
    ranks = 1 if way == "one process" else 2
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_RANK": f"{rank}", "MASTER_ADDR": "127.0.0.1"}
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    family = load_family(str(folder / "model"))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    groups = groups_of(family, WORKS["T2"] | {"prompts": 6, "samples": 8})
    pictures, others = forests(family, groups[:4], 1)[:4], forests(family, without_pictures(groups[4:]), 1)[:2]
    # Loss scales are set before forests are dealt to ranks, so they are the same for every way.
    dealt = [pictures, others] if text_only else [[*pictures[:2], others[0]], [*pictures[2:], others[1]]]
    mine = [*pictures, *others] if ranks == 1 else dealt[rank]
    loss = PolicyLoss(resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0}), max_tokens=64), Scoring())
    if way.startswith("ZeRO"):
        backend: Any = Zero(model, family, int(way[-1]))
    elif ranks == 1:
        backend = LocalTrainer(model, family, TRAIN)
    else:
        kind = ShardedTrainer if way == "sharded" else LocalTrainer
        backend = kind(model, family, TRAIN, optimizer=DividedOptimizer)
    for _ in range(3):
        backend.train_step(mine, loss, lr=LR)
    if way.startswith("ZeRO"):
        weights, held = backend.whole_weights(), backend.held()
    else:
        parts = dict(model.named_parameters())
        weights = {n: getattr(p, "full_tensor", lambda p=p: p)().detach().numpy() for n, p in parts.items()}
        held = sum(t.nbytes for _, t in backend.local_weights())
        held += sum(t.nbytes for t in backend.optimizer.state().values())
    if rank == 0:
        np.savez(folder / f"{way}.npz", **weights)
        (folder / f"{way}.txt").write_text(f"{held / 1e6:.2f}")


def without_pictures(groups: list[Any]) -> list[Any]:
    from dataclasses import replace

    def cut(trajectory: Any) -> Any:
        ids = trajectory.ids.copy()
        (span,) = trajectory.media
        ids[span.start : span.start + span.length] = 7
        return replace(trajectory, ids=ids, media=())

    return [replace(group, trajectories=tuple(map(cut, group.trajectories))) for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-only", action="store_true", help="one rank has no image")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        way, rank, folder = args.rank
        return work(way, int(rank), Path(folder), args.text_only)
    print("| | largest difference of a weight | MB of a rank |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tiny.build("qwen2_5_vl", folder / "model")
        for way in WAYS:
            (folder / "store").unlink(missing_ok=True)
            more = ["--text-only"] if args.text_only else []
            command = [sys.executable, __file__, *more, "--rank", way]
            ranks = range(1 if way == "one process" else 2)
            started = [
                subprocess.Popen([*command, f"{r}", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                for r in ranks
            ]
            try:
                codes = [process.wait(LIMIT) for process in started]
            except subprocess.TimeoutExpired:
                codes = ["hangs"]
            for process in started:
                process.kill()
            if any(codes):
                print(f"| {way} | fails: {', '.join(map(str, codes))} | |", flush=True)
                continue
            one, here = (np.load(folder / f"{name}.npz") for name in ("one process", way))
            error = max(float(np.abs(one[name] - here[name]).max()) for name in one.files)
            print(f"| {way} | {error:.1e} | {(folder / f'{way}.txt').read_text()} |", flush=True)


if __name__ == "__main__":
    main()
