"""One optimizer step of a model with random weights on forests with random responses, without an engine.

    python benchmarks/update.py W1/auto W1/on W2/auto
    python benchmarks/update.py W1/auto --profile W1/auto   # also: which kernels take the time
    python benchmarks/update.py --size 0.5b --lora 64 W1,prompts=4,side=224,prompt=512/auto@24

A variant is a workload of works.py and a value of model.checkpointing; append :TOKENS for another
micro_tokens and @GIB for a memory limit (run.gpu_memory_gib). Prints seconds of the whole step and
of its parts, MFU (FLOPs of the forests over the peak of the GPU), and memory.
"""

from __future__ import annotations

import argparse
import gc
import re
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import SIZES, enlarge
from works import Work, parse

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, LoraConfig, TrainConfig
from saccade.forest import interface
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.media.images import open_media
from saccade.models import lora
from saccade.models.families import Family, load_family
from saccade.plugins.estimate.work import meter
from saccade.plugins.families import tiny
from saccade.plugins.gpu.fused import fuse
from saccade.system import devices
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Group, MediaSpan, Message, Sample, Source, Trajectory

CLOCKED = {"hidden_at": "forward", "score": "forward + head", "sum_gradients": "gradients"}


def family_and_model(folder: Path, size: str, rank: int) -> tuple[Family, Any]:
    """Random weights in memory only: writing them would take longer than training on them."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tiny.build("qwen2_5_vl", folder)
    enlarge(folder, SIZES[size])
    family = load_family(str(folder))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    interface.use_in(model, segments=family.spec.segments)
    family.spec.prepare(model)
    fuse(model)
    if rank:
        lora.add(model, family, LoraConfig(rank=rank), seed=0)
    return family, model


def groups_of(family: Family, work: Work) -> list[Group]:
    rng = np.random.default_rng(0)
    made = []
    for index in range(work["prompts"]):
        side = work["side"]
        media = open_media(rng.integers(0, 255, (side, side, 3), dtype=np.uint8))
        grid, tokens = family.measure(media)
        text = rng.integers(0, 200, work["prompt"] - tokens)
        prompt = np.concatenate([text[:10], np.full(tokens, family.chat.placeholder), text[10:]])
        span = MediaSpan(media=media, start=10, length=tokens, grid=grid)
        made.append(
            Group(
                sample=Sample(id=f"{index}", messages=(Message(role="user", parts=("x",)),)),
                uid=f"{index}",
                trajectories=tuple(
                    trajectory(rng, f"{index}", repeat, prompt, span, work["new"]) for repeat in range(work["samples"])
                ),
            )
        )
    return made


def trajectory(
    rng: np.random.Generator, uid: str, repeat: int, prompt: np.ndarray, span: MediaSpan, new: int
) -> Trajectory:
    policy = np.arange(len(prompt) + new) >= len(prompt)
    return Trajectory(
        sample_id=uid,
        repeat=repeat,
        ids=np.concatenate([prompt, rng.integers(0, 200, new)]),
        sources=np.where(policy, Source.POLICY, Source.PROMPT).astype(np.int8),
        logprobs=np.where(policy, -12.0, np.nan).astype(np.float32),
        versions=np.where(policy, 0, -1).astype(np.int32),
        media=(span,),
        advantages=rng.standard_normal(new).astype(np.float32),
    )


def forests(family: Family, groups: list[Group], micro_tokens: int) -> list[Batch]:
    batches = pack(groups, micro_tokens=micro_tokens)
    reads = sum(len(batch.predictors) for batch in batches)
    return [replace(b, scales=np.full(len(b.predictors), 1 / reads, np.float32)) for b in batches]


class Clock:
    """Measures GPU time inside functions with CUDA events; synchronizes only at the end."""

    def __init__(self) -> None:
        self.events: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = inner(*args, **kwargs)
            end.record()
            self.events[name].append((start, end))
            return result

        setattr(owner, method, timed)

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        found = {n: sum(a.elapsed_time(b) for a, b in e) / 1e3 for n, e in self.events.items()}
        self.events.clear()
        return found


def measure(family: Family, model: Any, variant: str, args: Any) -> None:
    match = re.fullmatch(r"(.*)/(auto|on|off)(?::(\d+))?(?:@([\d.]+))?", variant)
    assert match, f"{variant}: write W1/auto, on or off, then :TOKENS, then @GIB"
    work, mode, tokens, limit = match.groups()
    groups = groups_of(family, parse(work))
    devices.limit_memory("cuda", float(limit or 1000))
    batches = forests(family, groups, int(tokens or 16_384))
    algorithm = resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0}), max_tokens=512)
    backend = LocalTrainer(model, family, TrainConfig(), checkpointing="auto" if mode == "auto" else mode == "on")
    clock = Clock()
    for method, name in CLOCKED.items():
        clock.wrap(backend, method, name)
    clock.wrap(backend.optimizer, "step", "optimizer")
    needed, _ = meter(backend, 0.0).train_step(batches)
    peak = devices.lookup(torch.cuda.get_device_name())
    print(f"\n{variant}: {sum(b.tokens for b in batches)} tokens in {len(batches)} forests, {needed / 1e12:.0f} TFLOP")
    for step in range(args.steps):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        update = backend.train_step(batches, PolicyLoss(algorithm, Scoring()), lr=1e-6)
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        parts = "  ".join(f"{name} {s:.3f}" for name, s in clock.seconds().items())
        share = f"{needed / whole / peak.tflops / 1e10:.1f} %" if peak and peak.tflops else "?"
        print(
            f"  step {step}: {whole:.3f} s, MFU {share}  [{parts}]  layers that keep "
            f"{backend.recompute.keeping}, "
            f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, "
            f"reserved {torch.cuda.memory_reserved() / 2**30:.1f}, loss "
            f"{update.metrics.means()['policy/loss']:.5f}, norm "
            f"{update.metrics.means()['policy/grad_norm']:.4f}, "
            f"splits {backend.oom_splits}",
            flush=True,
        )
    once = partial(backend.train_step, batches, PolicyLoss(algorithm, Scoring()), lr=1e-6)
    if args.waits:
        waits(once)
    if variant in args.profile:
        profile(once)
    for parameter in model.parameters():
        (parameter._post_accumulate_grad_hooks or {}).clear()
    model.gradient_checkpointing_disable()
    del backend, clock, once
    gc.collect()
    torch.cuda.empty_cache()


def waits(step: Callable[[], Any]) -> None:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    print(f"  the host waited {sum(places.values())} times")
    for place, count in places.most_common():
        print(f"  {count:5d}  {place}")


def profile(step: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 1e3, e.count) for e in found.key_averages()]
    rows.sort(key=lambda row: -row[1])
    print(f"  kernels: {sum(ms for _, ms, _ in rows):.0f} ms, {sum(count for *_, count in rows)} of them")
    for name, ms, count in rows[:45]:
        print(f"  {ms:9.1f} ms {count:7d}  {name[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=["W1/auto"], help="WORK/MODE:TOKENS@GIB")
    parser.add_argument("--size", choices=list(SIZES), default="3b")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters, which are all that is trained then")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", nargs="*", default=[], help="variants of which to list the kernels")
    parser.add_argument("--waits", action="store_true", help="where the host waits for the GPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        family, model = family_and_model(Path(scratch), args.size, args.lora)
        for variant in args.variants:
            measure(family, model, variant, args)


if __name__ == "__main__":
    main()
