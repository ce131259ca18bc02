"""Rollouts by the embedded engine alone, with models of published shapes: tokens per second with log-probs.

    python benchmarks/decode.py                       # W1 with 16 and 64 prompts, 8 rollouts each
    python benchmarks/decode.py W2/16 --profile       # also: which kernels take the time
    python benchmarks/decode.py W1/16 --check         # also: log-probs against the trainer's
    python benchmarks/decode.py W1/16/top_k=50        # truncated sampling that returns the kept ids
    python benchmarks/decode.py W1/16 --size gemma4_e4b

A variant is a workload of works.py, a number of prompts, and sampling settings. Prints one JSON
object per variant; `step_ms` is the time of one decode step of the whole batch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import SHAPES, SIZES, build
from rl_step import WORKS

from saccade.engines.embedded import EmbeddedEngine
from saccade.forest.packing import pack
from saccade.media.images import open_media
from saccade.models.families import Family, load_family
from saccade.models.load import load_model
from saccade.plugins.engines.parity import trajectory
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.types import Completion, Group, Message, Request, Sample, Sampling

REPEATS = 8


def requests(family: Family, work: dict[str, int], prompts: int, new: int, **settings: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    asked = []
    for index in range(prompts):
        media = open_media(rng.integers(0, 255, (work["side"], work["side"], 3), dtype=np.uint8))
        shown = family.render([Message(role="user", parts=(media, "x"))])
        ids = np.concatenate([shown.ids, rng.integers(0, 200, work["prompt"] - len(shown.ids))])
        asked += [
            Request(
                key=f"{index}/{repeat}",
                ids=ids,
                media=shown.media,
                sampling=Sampling(max_tokens=new, ignore_eos=True, **settings),
                noise=index * REPEATS + repeat,
            )
            for repeat in range(REPEATS)
        ]
    return asked


def parse(variant: str) -> tuple[str, int, dict[str, Any]]:
    name, prompts, *changes = variant.split("/")
    settings = {key: float(value) for key, value in (change.split("=") for change in changes)}
    if "top_k" in settings:
        settings["top_k"] = int(settings["top_k"])
    return name, int(prompts), settings | ({"support": True} if changes else {})


def timed(engine: EmbeddedEngine, asked: list[Request]) -> tuple[dict[str, Any], dict[str, Completion]]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for request in asked:
        engine.submit(request)
    done: dict[str, Completion] = {}
    prefill, decode, looks = 0.0, 0.0, 0
    while engine.pending:
        before, waiting = time.perf_counter(), bool(engine.scheduler.waiting)
        done |= {completion.key: completion for completion in engine.poll()}
        spent = time.perf_counter() - before
        looks += 1
        prefill, decode = (prefill + spent, decode) if waiting else (prefill, decode + spent)
    whole = time.perf_counter() - began
    tokens = sum(len(completion.ids) for completion in done.values())
    result = {
        "sequences": len(asked),
        "tokens": tokens,
        "seconds": round(whole, 3),
        "tokens_per_s": round(tokens / whole),
        "prefill_s": round(prefill, 3),
        "step_ms": round(1e3 * decode / max(1, asked[0].sampling.max_tokens - 1), 3),
        "looks": looks,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    return result, done


def gap(model: Any, family: Family, asked: list[Request], done: dict[str, Completion]) -> dict[str, float]:
    """Differences between the engine's log-probs and the trainer's, over one group."""
    members = tuple(
        replace(trajectory(request, done[request.key]), sample_id="g", repeat=repeat)
        for repeat, request in enumerate(asked[:REPEATS])
    )
    group = Group(sample=Sample(id="g", messages=()), uid="g", trajectories=members)
    batches = pack([group], micro_tokens=1 << 20)
    scored = LocalTrainer(model, family).logprobs(batches, Scoring())
    apart = np.abs(
        np.concatenate([new - batch.rollout_logprobs for batch, (new, _) in zip(batches, scored, strict=True)])
    )
    return {"gap_mean": float(apart.mean()), "gap_max": float(apart.max())}


def profile(engine: EmbeddedEngine, asked: list[Request]) -> None:
    """Print the kernels of the first prefill and of one poll of decode steps, by their share of the time."""
    for request in asked:
        engine.submit(request)
    show("a prefill", engine, top=8)
    while engine.scheduler.waiting or engine.scheduler.jobs:
        engine.poll()
    engine.poll()
    show(f"a burst of {len(asked)} sequences", engine, top=20)
    while engine.pending:
        engine.poll()


def show(what: str, engine: EmbeddedEngine, top: int) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as trace:
        engine.poll()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time
            calls[event.name] += 1
    total = sum(spent.values())
    steps = max([1, *(calls[name] for name in calls if name.startswith("_advance"))])
    print(f"{what}: {total / steps / 1e3:.3f} ms of kernels a step")
    for name, micros in spent.most_common(top):
        each, often = micros / calls[name], calls[name] / steps
        print(f"  {micros / total:6.1%} {often:7.1f} a step {each:9.1f} us  {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=["W1/16", "W1/64"])
    parser.add_argument("--size", default="3b", choices=[*SIZES, *SHAPES])
    parser.add_argument("--model", type=Path, help="model folder; built when it is not there")
    parser.add_argument("--rounds", type=int, default=2, help="the last one is reported")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    variants = list(map(parse, args.variants))
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        family = load_family(str(folder) if folder.exists() else build(folder, args.size))
        model = load_model(family, dtype=torch.bfloat16, device=torch.device("cuda"))
        most = max(prompts for _, prompts, _ in variants) * REPEATS
        engine = EmbeddedEngine(model, family, max_sequences=most)
        for name, prompts, settings in variants:
            work = WORKS[name]
            began = time.perf_counter()
            timed(engine, requests(family, work, prompts, 24, **settings))
            first = time.perf_counter() - began  # kernels are compiled, graphs captured
            asked = requests(family, work, prompts, work["new"], **settings)
            for _ in range(args.rounds):
                engine.sleep()
                result, done = timed(engine, asked)
            result |= {"size": args.size, "work": name, "first_s": round(first, 1), **settings}
            print(json.dumps(result), flush=True)
            if args.check:
                print(json.dumps(gap(model, family, asked, done)), flush=True)
            if args.profile:
                profile(engine, requests(family, work, prompts, min(256, work["new"]), **settings))


if __name__ == "__main__":
    main()
