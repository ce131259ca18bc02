"""One rank of N alone on one GPU: memory, kernels and CUDA graphs are those of a rank; collectives only copy locally.

    python benchmarks/one_rank.py 7b 8 train.layout=whole
    python benchmarks/one_rank.py 32b 16 train.layout=sharded --rounds 2
    python benchmarks/one_rank.py 14b 16 train.layout=hybrid                # two machines with 8 GPUs each
    python benchmarks/one_rank.py 7b 8 train.sequence_parallel=4 --new 32000 --prompts 1 --no-rollout

By default the rank samples and trains on W1: 16 prompts with an image x 8 responses of 512 tokens. Its own shard stands
for that of every other rank, so losses and samples mean nothing; the time of collectives is not measured
(`saccade estimate` computes it).
Prints a JSON object: seconds of each round, and GiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decode import requests
from model import SIZES, enlarge
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp
from update import forests, groups_of
from works import WORKS

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, load
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.forest import interface
from saccade.models.families import load_family
from saccade.plugins.families import tiny
from saccade.plugins.gpu.fused import fuse
from saccade.plugins.ranks import divided, machines, sequence, sharded
from saccade.plugins.ranks.layouts import NODE
from saccade.recipes import model_setup
from saccade.trainer import Scoring
from saccade.trainer.losses import PolicyLoss

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
WORK = WORKS["W1"] if CUDA else WORKS["W1"] | {"side": 56, "prompt": 40, "new": 8}


def be_alone(gpus: int) -> None:
    """Join a fake process group of `gpus` ranks, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def scatter(out: Any, given: Any, *rest: Any, **more: Any) -> None:
        out.copy_(given.view(-1, out.numel())[0].view_as(out))

    def gather(out: Any, given: Any, *rest: Any, **more: Any) -> None:
        out.view(-1, given.numel()).copy_(given.reshape(1, -1).expand(out.numel() // given.numel(), -1))

    def gather_list(out: Any, given: Any, *rest: Any, **more: Any) -> None:
        for one in out:
            one.copy_(given)

    def whole(part: Any) -> Any:
        part = part.detach()
        if not isinstance(part, divided.DTensor):
            return part
        local = part.to_local()
        return local.repeat(part.device_mesh.size(), *[1] * (local.ndim - 1))[: len(part)]

    def all_to_all(rows: Any, sent: Any, received: Any, group: Any) -> Any:
        times = -(-sum(received) // max(1, len(rows)))
        return torch.cat([rows] * times)[: sum(received)] if len(rows) else rows.new_zeros(sum(received))

    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    machines._hosts = lambda: [float(rank // NODE) for rank in range(gpus)]
    dist.all_gather = gather_list
    divided._reduce_scatter = scatter
    # With layout=whole, `out` is the weights, and those of other ranks stay unchanged. With hybrid, `out` is empty.
    divided.all_gather = lambda out, given, group=None: gather(out, given) if group else None
    sharded.gathered = whole
    sequence.all_to_all = all_to_all
    fsdp.DefaultAllGather.__call__ = lambda self, output_tensor, input_tensor, *a, **b: gather(  # type: ignore
        output_tensor, input_tensor
    )
    fsdp.DefaultReduceScatter.__call__ = lambda self, output_tensor, input_tensor, *a, **b: scatter(  # type: ignore
        output_tensor, input_tensor
    )


def random_model(folder: Path, family: Any) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device(DEVICE):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    interface.use_in(model, segments=family.spec.segments)
    family.spec.prepare(model)
    if CUDA:
        fuse(model)
    return model


def clocked(call: Any) -> tuple[float, float]:
    """Seconds of a call, and peak GiB of the GPU."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    call()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=["tiny", *SIZES])
    parser.add_argument("gpus", type=int)
    parser.add_argument("overrides", nargs="*", help="options of the config")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=WORK["new"], help="tokens of a response")
    parser.add_argument("--prompts", type=int, default=16, help="at most 16")
    parser.add_argument("--no-rollout", action="store_true", help="train alone, as with engines on other GPUs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        tiny.build("qwen2_5_vl", folder)
        if args.size != "tiny":
            enlarge(folder, SIZES[args.size])
        config = load({"model.path": str(folder), "run.gpus": args.gpus, "train.layout": "whole"}, args.overrides, "rl")
        family = load_family(str(folder))
        if args.gpus > 1:
            be_alone(args.gpus)
        model = random_model(folder, family)
        backend = model_setup.learner(config, model, family)
        gc.collect()
        divides = isinstance(backend, sharded.ShardedTrainer)
        copy = random_model(folder, family) if divides and not args.no_rollout else model
    engine = None if args.no_rollout else EmbeddedEngine(copy, family, max_sequences=512)
    asked = requests(family, WORK, args.prompts, args.new)
    groups = groups_of(family, WORK | {"new": args.new, "prompts": args.prompts})
    batches = forests(family, groups, config.train.micro_tokens)
    loss = PolicyLoss(resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0}), max_tokens=512), Scoring())
    assert backend.optimizer is not None
    state = [t for t in backend.optimizer.state().values() if t.device.type == DEVICE.type]
    found: dict[str, Any] = {
        "size": args.size,
        "gpus": args.gpus,
        "options": args.overrides,
        "rollout": [],
        "update": [],
    }
    found["weights_gib"] = sum(t.nbytes for _, t in backend.local_weights()) / 2**30
    found["state_gib"] = sum(t.nbytes for t in state) / 2**30
    found["forests"] = len(batches)
    given_back: list[tuple[Any, Any]] = []  # freed weights of the copy, as a rank frees them between rollouts
    for turn in range(args.rounds):
        if engine is not None:
            if divides:
                for weight, shape in given_back:
                    weight.data = weight.new_empty(shape)
                found["fill"], _ = clocked(lambda: backend.fill(copy))  # type: ignore[attr-defined]
            engine.update_weights(backend, version=turn + 1)
            found["rollout"].append(clocked(lambda: generate(engine, asked)))
            engine.sleep()
            given_back = [(weight, weight.shape) for weight in copy.parameters() if divides and config.train.offload]
            for weight, _ in given_back:
                weight.data = weight.new_empty(0)
        found["update"].append(clocked(lambda: backend.train_step(batches, loss, lr=1e-6)))
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30 if CUDA else 0.0
        found["keeping"] = getattr(backend.recompute, "keeping", None)
    print(json.dumps(found, default=str), flush=True)


if __name__ == "__main__":
    main()
