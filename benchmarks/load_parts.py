"""Peak memory while ranks load a sharded model: each reads only its rows, or the whole model first, as before.

    python benchmarks/load_parts.py 400m 2 --dtype float32    # two processes over gloo on the CPU
    python benchmarks/load_parts.py 14b 8 --alone             # one rank of 8 on a GPU; collectives do nothing

Weights are random, in a temporary folder (14b: 28 GB). Prints a JSON object for each rank and way: seconds, peak GiB of
the GPU, and peak GiB of anonymous main memory: until the weights are loaded, until a backend is ready to train, and for
a whole copy for generation after that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import SIZES, build
from one_rank import be_alone

from saccade.config import load
from saccade.models.families import load_family
from saccade.plugins.families import tiny_kinds
from saccade.plugins.ranks.by_rows import make_whole
from saccade.recipes import model_setup

CUDA = torch.cuda.is_available()
SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}


def small(folder: Path) -> None:
    """A decoder of 0.2 billion weights whose layers are larger than its embedding."""
    import transformers

    tiny_kinds.build("qwen3", folder)
    settings = transformers.AutoConfig.from_pretrained(folder, **SMALL, num_key_value_heads=8, head_dim=64)
    settings.layer_types = ["full_attention"] * SMALL["num_hidden_layers"]
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def anonymous() -> float:
    """GiB of anonymous main memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20


def measured(folder: Path, gpus: int, dtype: str, parts: bool) -> dict[str, Any]:
    options = {"model.path": str(folder), "run.gpus": gpus, "train.layout": "sharded", "model.dtype": dtype}
    config, family = load(options, [], "rl"), load_family(str(folder))
    model_setup.quiet_libraries()
    before, seen, ended = anonymous(), [anonymous()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            seen.append(anonymous())

    threading.Thread(target=watch, daemon=True).start()
    began = time.perf_counter()
    model = model_setup.load_policy(config, family, divided=parts)
    loaded = max(seen) - before, torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    backend = model_setup.learner(config, model, family)
    ready = anonymous(), max(seen)
    seen[:] = [ready[0]]
    copy = model_setup.load_policy(config, family, divided=parts)
    make_whole(copy.parameters())
    ended.set()
    weights = sum(t.nbytes for _, t in backend.local_weights()) / 2**30
    state = sum(t.nbytes for t in backend.optimizer.state().values()) / 2**30  # type: ignore[union-attr]
    return {
        "read": "rows" if parts else "whole",
        "seconds": round(time.perf_counter() - began, 1),
        "gpu_gib": [loaded[1], torch.cuda.max_memory_allocated() / 2**30] if CUDA else None,
        "host_gib": [round(loaded[0], 3), round(ready[1] - before, 3), round(max(seen) - ready[0], 3)],
        "weights_gib": round(weights, 3),
        "copy_gib": round(sum(p.nbytes for p in copy.parameters()) / 2**30, 3),
        "state_gib": round(state, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=["400m", *SIZES])
    parser.add_argument("gpus", type=int)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights in memory; files have bfloat16")
    parser.add_argument("--alone", action="store_true", help="one rank, in torch's fake process group")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        folder, way, rank = args.rank.split(":")
        if args.alone:
            be_alone(args.gpus)
        else:
            store = f"file://{folder}/store-{way}"
            dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=args.gpus)
        found = measured(Path(folder) / "model", args.gpus, args.dtype, way == "rows")
        print(json.dumps({"size": args.size, "gpus": args.gpus, "rank": int(rank)} | found), flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        small(folder) if args.size == "400m" else build(folder, args.size)
        command = [sys.executable, __file__, args.size, str(args.gpus), "--dtype", args.dtype]
        command += [*["--alone"] * args.alone, "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536"}  # free() unmaps
        for way in ("whole", "rows"):
            ranks = range(1 if args.alone else args.gpus)
            started = [subprocess.Popen([*command, f"{scratch}:{way}:{n}"], env=environment) for n in ranks]
            for process in started:
                if process.wait():
                    raise SystemExit(process.returncode)


if __name__ == "__main__":
    main()
