"""CPU time of the controller process of a run on several GPUs, between the phases in which the GPUs work.

    python benchmarks/controller.py
    python benchmarks/controller.py --gpus 8 --profile

A step has 16 prompts x 8 rollouts per GPU, a prompt of 368 tokens with an image of 256, 512 new tokens, and
corrections of the mismatch of engine and trainer, so that batches are sent to the ranks twice. Ranks are threads that
answer over a socket without computing; their CPU time is subtracted. Prints the CPU time of each stage, the minimum of
some repeats, and their sum as a share of a step of 5.5 s (3B on an H200); work that overlaps the update of the ranks is
not in the sum. The last row deals responses of lognormal length to the ranks: tokens of the fullest over the mean.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.algorithms import algorithm_state
from saccade.algorithms.annotate import add_advantages, add_corrections, with_scores
from saccade.checks.steps import algorithm_of
from saccade.config import load
from saccade.forest.packing import pack as pack_forests
from saccade.models.families import load_family
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.families import tiny
from saccade.plugins.ranks.connections import Arrival, Link
from saccade.plugins.ranks.rank_trainer import RankTrainer
from saccade.plugins.ranks.team import Rank, RankSettings, Team
from saccade.recipes.rl import pack_updates, select_members
from saccade.recipes.rl_rollout import Rollouts, Sampler, rollout_metrics
from saccade.registry import HOOKS
from saccade.system.codec import encode, pack, unpack
from saccade.system.process import SIZE, Channel
from saccade.trainer import Scoring
from saccade.trainer.losses import PolicyLoss
from saccade.types import Group, Media, MediaSpan, Message, Metrics, Sample, Source, Trajectory

WORK = {"prompts": 16, "samples": 8, "prompt": 368, "new": 512}  # of one GPU
SIDE, IMAGE = 448, 256  # pixels, tokens
STEP = 5.5  # seconds on a GPU
BESIDE = ("(trees and FLOPs, during the update)", "(metrics, during the update)")
UPDATE = {f"policy/{n}": [1.0, 1.0] for n in range(40)}  # metrics of a rank


def make_groups(count: int, work: Mapping[str, int], spread: float = 0.0) -> list[Group]:
    """`spread`: standard deviation of the logarithm of the response length."""
    rng = np.random.default_rng(0)
    prompt, lengths = work["prompt"], work["new"] * rng.lognormal(sigma=spread, size=(count, work["samples"]))
    policy = np.arange(prompt + int(lengths.max())) >= prompt
    sources = np.where(policy, int(Source.POLICY), int(Source.PROMPT)).astype(np.int8)
    logprobs = np.where(policy, -rng.random(len(policy)), np.nan).astype(np.float32)
    versions = np.where(policy, 0, -1).astype(np.int32)
    groups = []
    for index in range(count):
        asked = rng.integers(0, 200, prompt)
        media = Media(hash=f"{index:x}", width=SIDE, height=SIDE, path=f"/images/{index}.png")
        span = MediaSpan(media=media, start=4, length=IMAGE, grid=(1, SIDE // 14, SIDE // 14))
        members = tuple(
            Trajectory(
                sample_id=str(index),
                repeat=repeat,
                ids=np.concatenate([asked, rng.integers(0, 200, new)]),
                sources=sources[: prompt + new].copy(),
                logprobs=logprobs[: prompt + new].copy(),
                versions=versions[: prompt + new].copy(),
                media=(span,),
                reward=float(rng.random() < 0.5),
                outcome=0.0,
            )
            for repeat, new in enumerate(lengths[index].astype(int).tolist())
        )
        sample = Sample(id=str(index), messages=(Message(role="user", parts=("How many?",)),))
        groups.append(Group(sample=sample, uid=sample.id, trajectories=members))
    return groups


# -- ranks that compute nothing ----------------------------------------------------------------------


class StandIn(threading.Thread):
    """Plays a rank at the other end of its link."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__(daemon=True)
        self.link, self.seconds = link, 0.0  # CPU time of this thread
        self.start()

    def run(self) -> None:
        for _ in ("what it is", "settings"):
            self.read()
        self.send({"ready": True}, {})
        while (found := self.read()) is not None:
            row, arrays = found
            self.send({"result": self.answer(row, arrays), "id": row["id"]}, self.out)
            self.seconds = time.thread_time()
            if row["call"] == "shutdown":
                self.link.close()
                return

    def answer(self, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
        self.out: dict[str, np.ndarray] = {}
        if row["call"] == "capabilities":
            return {}
        if row["call"] == "train_step":
            return {"sums": UPDATE, "maxima": {}, "skipped": False, "tokens": 1}
        if row["call"] != "logprobs":
            return 0.0
        reads = [arrays[f"{batch['forest']}/lengths"].sum() for batch in row["arguments"]["batches"]]
        columns = [np.full(count, -0.5, np.float32) for count in reads]
        return encode([(column, column) for column in columns], self.out)

    def send(self, row: Any, arrays: Mapping[str, np.ndarray]) -> None:
        block = b"".join(pack(row, arrays))
        self.link.sendall(SIZE.pack(len(block)) + block)

    def read(self) -> tuple[Any, Mapping[str, np.ndarray]] | None:
        start = self.link.recv(SIZE.size, socket.MSG_WAITALL)
        if len(start) < SIZE.size:
            return None
        room = bytearray(SIZE.unpack(start)[0])
        view = memoryview(room)
        while view:
            view = view[self.link.recv_into(view) :]
        return unpack(room)


def linked(channel: Channel, replica: Replica) -> Link:
    arrival = Arrival(channel=channel, host="here", local=0, pid=0, versions={}, machine="")
    return Link(arrival, replica.module, replica.log)


def start_team(gpus: int, folder: Path) -> tuple[Team, list[StandIn]]:
    settings = RankSettings(options={}, command="rl", folder=None, rank=0, size=gpus, port=0)
    pairs = [socket.socketpair() for _ in range(gpus)]
    others = [StandIn(theirs) for _, theirs in pairs]
    starters = [
        partial(Rank, settings, place=partial(linked, Channel(mine)), log=folder / f"rank-{n}.log")
        for n, (mine, _) in enumerate(pairs)
    ]
    return Team(starters, ExitStack()), others


# -- a step ------------------------------------------------------------------------------------------


def measure(gpus: int, work: Mapping[str, int], folder: Path) -> dict[str, float]:
    """CPU seconds of each stage of a step."""
    model = tiny.build("qwen2_5_vl", folder / "model") if not (folder / "model").exists() else str(folder / "model")
    options = {"model.path": model, "run.gpus": gpus, "train.samples_per_prompt": work["samples"]}
    options |= {"train.prompts_per_step": work["prompts"] * gpus, "algorithm.kl.coef": 0.0}
    config = load(options, ["algorithm.correct=[tis.token]", "algorithm.old=recompute"], "rl")
    algorithm = algorithm_of(config)
    team, others = start_team(gpus, folder)
    policy = RankTrainer(config, team, load_family(model))
    absent: dict[str, Any] = dict.fromkeys(("ahead", "stream", "quarantine", "setup_of", "watch", "phase"))
    sampler = Sampler(
        engine=team,
        family=policy.family,
        scorer=None,
        env=config.env,
        reward=config.reward,
        algorithm=algorithm,
        prompts=config.train.prompts_per_step,
        work=partial(HOOKS["rollout_work"], config=config),
        **absent,
    )
    groups = make_groups(work["prompts"] * gpus, work)
    state = algorithm_state.restore(algorithm, None)
    seconds: dict[str, float] = {}

    def clocked(name: str, function: Callable[[], Any]) -> Any:
        before = time.process_time() - sum(one.seconds for one in others)
        found = function()
        time.sleep(0.05)  # until the ranks have stored their CPU time
        seconds[name] = time.process_time() - sum(one.seconds for one in others) - before
        return found

    rollouts = Rollouts(groups=groups, scored=groups, surplus=[], scores=(), metrics=Metrics())
    try:
        chosen, state, metrics = clocked("choose members", lambda: select_members(rollouts, algorithm, state, None))
        updates = clocked("pack", lambda: pack_updates(chosen, algorithm, policy, config.train.micro_tokens, (0, 1)))
        flat = [batch for part in updates for batch in part]
        scored = clocked("log-probs of ranks", lambda: policy.logprobs(flat, Scoring()))
        updates = with_scores(updates, ("old_logprobs",), scored)
        updates, more = clocked("advantages", lambda: add_advantages(updates, chosen, algorithm, state, version=0))
        updates, last = clocked("corrections", lambda: add_corrections(updates, algorithm))
        loss, batches = PolicyLoss(algorithm, Scoring()), [batch for part in updates for batch in part]
        update = clocked("update of ranks", lambda: policy.train_step(batches, loss, lr=1e-6))
        told = clocked(BESIDE[0], lambda: HOOKS["rl_work"](policy, None, updates, config.train, algorithm, 1))
        counted = clocked(BESIDE[1], lambda: [more(), last(), rollout_metrics(rollouts, sampler, policy, step=1)])
        metrics.merge(*counted, update.metrics)
        clocked("work that was repeated", told)
    finally:
        team.close()
    return seconds


def fullest(gpus: int, work: Mapping[str, int]) -> float:
    """Tokens of the rank with the most, over the mean of all ranks."""
    batches = pack_forests(make_groups(work["prompts"] * gpus, work, spread=0.5), micro_tokens=16_384, dp_size=gpus)
    tokens = np.bincount([batch.dp_rank or 0 for batch in batches], [batch.tokens for batch in batches])
    return float(tokens.max() / tokens.mean())


def table(results: Mapping[int, Mapping[str, float]], step: float) -> str:
    lines = ["| CPU milliseconds | " + " | ".join(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in results) + " |"]
    lines.append("|---|" + "---|" * len(results))
    for stage in next(iter(results.values())):
        lines.append(f"| {stage} | " + " | ".join(f"{1e3 * found[stage]:.0f}" for found in results.values()) + " |")
    sums = [sum(seconds for stage, seconds in found.items() if stage not in BESIDE) for found in results.values()]
    lines.append("| all | " + " | ".join(f"{1e3 * one:.0f}" for one in sums) + " |")
    lines.append(f"| of a step of {step:g} s | " + " | ".join(f"{one / step:.1%}" for one in sums) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="functions of the calling thread that take most")
    args = parser.parse_args()
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for gpus in args.gpus:
            measure(gpus, WORK | {"new": 8, "prompts": 1}, Path(scratch))  # warm-up: what is loaded only once
            with cProfile.Profile() if args.profile else ExitStack() as profile:
                found = [measure(gpus, WORK, Path(scratch)) for _ in range(args.repeats)]
            results[gpus] = {stage: min(one[stage] for one in found) for stage in found[0]}
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print(table(results, STEP))
    print("| fullest rank | " + " | ".join(f"{fullest(gpus, WORK):.3f}" for gpus in results) + " |")


if __name__ == "__main__":
    main()
