"""Rollouts of several turns, with and without reuse of the KV cache of earlier turns.

    python benchmarks/multi_turn.py --out runs/multi                     # a 3B shape on one GPU
    python benchmarks/multi_turn.py --size 7b --work W1,new=64 --turns 6 12
    python benchmarks/multi_turn.py --tiny --out runs/multi              # on a CPU

In each turn the policy writes about `new` tokens (up to a stop string that a random model samples
by chance) and sees another crop of its picture, for a fixed number of turns, so the amount of work
does not depend on the weights. Both ways sample from the same noise, so without rounding they play
the same episodes. Without reuse every turn prefills its whole episode again; prompts that several
episodes share are computed once either way. Writes OUT/multi_turn.json: seconds, episodes per
second, their ratio, prefilled tokens, and occupancy: the sequences in the engine over
`min(max_sequences, episodes)`, averaged over time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from parts import ensure_model
from works import Work, gpu_peak_gib, machine, parse, sequences, write_rows

from saccade.config import load
from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import Step
from saccade.environments.texts import render_parts
from saccade.media.images import crop
from saccade.recipes import model_setup, questions
from saccade.rollout.collect import collect
from saccade.rollout.episode import EpisodeSetup, Limits
from saccade.types import Completion, Group, Message, Request, Sample, Sampling

TOKENS_OF_A_STOP = 140  # one in so many random words of the vocabulary begins with a given "w60"


class Looking:
    """An environment that shows a new crop of the picture, whatever the policy writes."""

    def __init__(self, turns: int) -> None:
        self.turns, self.turn = turns, 0

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        self.picture, self.rng = sample.media[0], np.random.default_rng(seed)
        return sample.messages

    def step(self, message: Message) -> Step:
        self.turn += 1
        if self.turn == self.turns:
            return Step((), None, True, {"end_reason": "answered"})
        width, height = self.picture.width, self.picture.height
        x, y = self.rng.integers(0, width // 2), self.rng.integers(0, height // 2)
        piece = crop(self.picture, (int(x), int(y), int(x) + width // 2, int(y) + height // 2))
        area = width * height  # crops are scaled to the size of the whole
        media = replace(piece, min_pixels=area, max_pixels=area)
        text = render_parts("observation", k=self.turn, name=f"observation_{self.turn}", image=media)
        return Step((Message(role="user", parts=text),), None, False, {})

    def close(self) -> None:
        pass


@dataclass
class Watched:
    """Wraps the engine and measures its work; without `reuse`, requests do not name their episode."""

    engine: EmbeddedEngine
    reuse: bool
    room: int
    prefilled: int = 0
    filled: float = 0.0  # seconds x share of the engine in use
    looked: float = 0.0  # seconds of all polls

    def submit(self, request: Request) -> None:
        self.engine.submit(request if self.reuse else replace(request, episode=None))

    def poll(self) -> list[Completion]:
        began = time.perf_counter()
        done = self.engine.poll()
        seconds = time.perf_counter() - began
        inside = min(self.room, len(self.engine.scheduler.running) + len(done))
        self.filled += seconds * inside / self.room
        self.looked += seconds
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def measure(
    engine: EmbeddedEngine, family: Any, samples: Sequence[Sample], work: Work, turns: int, *,
    reuse: bool, seed: str,
) -> tuple[dict[str, float], list[Group]]:  # fmt: skip
    room = min(engine.max_sequences, len(samples) * work["samples"])
    watched = Watched(engine=engine, reuse=reuse, room=room)
    begin = engine.scheduler._begin

    def counted(sequence: Any) -> int:
        tokens = begin(sequence)
        watched.prefilled += tokens
        return tokens

    engine.scheduler._begin = counted  # type: ignore[method-assign]
    stops = tuple(f"w{60 + n}" for n in range(max(1, round(TOKENS_OF_A_STOP / work["new"]))))
    began = time.perf_counter()
    groups = collect(
        watched,  # type: ignore[arg-type]
        samples,
        EpisodeSetup(
            environment=lambda: Looking(turns),
            family=family,
            sampling=Sampling(max_tokens=16 * work["new"], stop=stops),
            limits=Limits(max_turns=turns, max_total_tokens=family.max_positions),
            seed=seed,
        ),
        repeats=work["samples"],
    )
    seconds = time.perf_counter() - began
    engine.scheduler._begin = begin  # type: ignore[method-assign]
    engine.sleep()
    members = [t for group in groups for t in group.trajectories]
    return {
        "seconds": seconds,
        "episodes": len(members),
        "episodes_per_s": len(members) / seconds,
        "turns": sum(t.turns for t in members),
        "generated": sum(t.response_length for t in members),
        "generated_per_s": sum(t.response_length for t in members) / seconds,
        "prefilled": watched.prefilled,
        "images": sum(len(t.media) for t in members),
        "occupancy": watched.filled / watched.looked,
        "longest": max(len(t.ids) for t in members),
    }, groups


def compare(
    engine: EmbeddedEngine, family: Any, samples: Sequence[Sample], work: Work, turns: int, repeats: int
) -> dict[str, Any]:
    """Measure both ways alternately, after a warm-up of each."""
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    same = 0.0
    for repeat in range(-1, repeats):
        played = {}
        for reuse in (True, False):
            numbers, played[reuse] = measure(
                engine, family, samples, work, turns, reuse=reuse, seed=f"benchmark/{repeat}"
            )
            if repeat >= 0:
                found[reuse].append(numbers)
        pairs = [
            (a, b)
            for one, other in zip(played[True], played[False], strict=True)
            for a, b in zip(one.trajectories, other.trajectories, strict=True)
        ]
        same = float(np.mean([np.array_equal(a.ids, b.ids) for a, b in pairs]))
    on, off = ({k: median(n[k] for n in found[r]) for k in found[r][0]} for r in (True, False))
    return {
        "turns": turns,
        "reuse": on,
        "no_reuse": off,
        "ratio": on["episodes_per_s"] / off["episodes_per_s"],
        "prefill_ratio": off["prefilled"] / on["prefilled"],
        "same_episodes": same,
        "peak_gib": gpu_peak_gib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/multi"))
    parser.add_argument("--size", default="3b")
    parser.add_argument("--work", default="W1,new=64", help="`new`: tokens of a turn, about")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-sequences", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="all of it small, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.size, args.work, args.turns, args.repeats = "tiny", "T2,new=16", [2, 4], 1
    args.out.mkdir(parents=True, exist_ok=True)
    work = parse(args.work)
    model = str(ensure_model(args.out / f"model-{args.size}", args.size))
    data = write_rows(args.out / "data", model, work, steps=1)
    options = {"model.path": model, "data.train": str(data), "prompt.format": "none"}
    config = load(options | {"run.out": str(args.out / "runs")})
    model_setup.quiet_libraries()
    family = model_setup.family_of(config, model)
    samples = questions.load_prompts(config, config.data.train, family).samples
    policy = model_setup.load_policy(config, family, train="full")
    engine = EmbeddedEngine(policy, family, max_sequences=args.max_sequences)
    result = {
        "work": work,
        "episodes": sequences(work),
        "size": args.size,
        "max_sequences": args.max_sequences,
        "machine": machine(),
        "results": [],
    }
    print("turns   reuse episodes/s  occupancy   no reuse episodes/s  occupancy   ratio  prefill")
    for turns in args.turns:
        one = compare(engine, family, samples, work, turns, args.repeats)
        result["results"].append(one)
        on, off = one["reuse"], one["no_reuse"]
        print(
            f"{turns:5d}   {on['episodes_per_s']:16.2f}  {on['occupancy']:9.2f}   "
            f"{off['episodes_per_s']:19.2f}  {off['occupancy']:9.2f}   {one['ratio']:5.2f}  "
            f"{one['prefill_ratio']:7.2f}",
            flush=True,
        )
        (args.out / "multi_turn.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
