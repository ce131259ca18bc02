"""Detect a call to all ranks that will never end, from what each rank reports every second, not from a timeout alone.

A rank reports which collectives it has begun (torch's flight recorder notes those of gloo and nccl, ours and FSDP's)
and whether it makes progress. Two deadlocks are certain, and found at once: a rank has answered while another waits for
it in a collective, or two ranks are in different collectives. Otherwise a rank that the others wait for may be slow as
long as it makes progress; one without progress has a few seconds.

    watch = Watch({rank.call("train_step", given): rank for rank in ranks})
    watch.look()        # why the call will not end, if it will not
"""

import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d

from saccade.plugins.engines.replicas.replica import Died, Replica
from saccade.plugins.watchdog.signs_of_life import children_cpu, disk_use
from saccade.system.process import Block

LOOK_EVERY = 1.0  # seconds
# Seconds that the others wait, plus a multiple of the seconds they needed themselves: for a rank without progress,
# for one that makes progress, and for that in the first call of a kind, in which it may compile kernels.
STILL, STILL_FACTOR = 8.0, 2.0
LATE, LATE_FIRST, LATE_FACTOR = 30.0, 600.0, 10.0
MOVES = 0.03  # average share of a core that counts as progress: more than the reporting threads use
RECORDED, KEPT = 64, 8  # collectives that torch records, and the last ones of a group that are compared
FRAMES = 8
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo, and of nccl if torch has it


# -- in a rank ---------------------------------------------------------------------------------------


def note_collectives() -> None:
    """Switch on torch's flight recorder; call it before the first collective."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def whereabouts() -> dict[str, Any]:
    """What this process is doing, for a thread other than the main one: stack, CPU seconds, disk use, collectives."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    cpu = time.process_time() - time.thread_time()  # without this thread, which only reports
    marks = [(one.f_code.co_name, one.f_lasti) for one, _ in traceback.walk_stack(frame)]
    where = {
        "stack": "".join(traceback.format_stack(frame)[-FRAMES:]),
        "mark": zlib.crc32(repr(marks).encode()),
        "cpu": cpu,
        "disk": [],
        "groups": {},
    }
    with suppress(Exception):  # another torch, or a system without these counters: then only time limits apply
        where |= {"cpu": cpu + sum(os.times()[2:4]) + children_cpu("self"), "disk": disk_use()}
        where["groups"] = _collectives()
    return where


def _collectives() -> dict[str, Any]:
    """By process group: its ranks, and its last collectives, each as a list of the fields of `Collective`."""
    found: dict[str, Any] = {}
    members = {
        group.group_name: [*ranks]
        for group, ranks in list(dist.distributed_c10d._world.pg_group_ranks.items())
        if not isinstance(group, int)  # a group that this rank is not in
    }
    now = time.time()
    for dump in filter(None, (getattr(_distributed_c10d, name, None) for name in DUMPS)):
        for entry in json.loads(dump()).get("entries", ()):
            name, (group, *_) = entry["profiling_name"], entry["process_group"]
            if entry["is_p2p"] or group not in members:
                continue
            sizes = "" if "to_all" in name else str(entry["input_sizes"])  # must be equal on all ranks
            row = [entry["collective_seq_id"], name, sizes, entry["retired"], now - entry["time_created_ns"] / 1e9]
            kind = name.partition(":")[0]
            found.setdefault(f"{kind} {group}", {"ranks": members[group], "last": []})["last"].append(row)
    return {name: group | {"last": group["last"][-KEPT:]} for name, group in found.items()}


# -- in the controller -------------------------------------------------------------------------------


class Collective(NamedTuple):
    """A collective that a rank has begun."""

    number: int
    name: str
    sizes: str
    over: bool
    since: float  # seconds since it began

    def __str__(self) -> str:
        return f"{self.name} {self.sizes}"


class Seen(NamedTuple):
    """The last report of a rank. Times are seconds after the call began."""

    where: Mapping[str, Any]
    at: float
    moved: float  # when it last made progress
    answered: float | None = None


class Watch:
    """Watches a call that was just sent. `asked`: the future answers, with their ranks; `known`: seconds that such a
    call may take, None for the first of its kind.
    """

    def __init__(self, asked: Mapping[Future[Block], Replica], known: float | None = None) -> None:
        self.known, self.began = known, time.monotonic()
        self.seen: dict[int, Seen] = {}
        self.answered: dict[Future[Block], float] = {}  # seconds after the call began
        self.asked = asked
        for answer in asked:
            answer.add_done_callback(lambda answer: self.answered.setdefault(answer, self.now))
        self._looks: dict[int, tuple[Future[Block], float, float | None]] = {}

    @property
    def now(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.began

    def look(self) -> str | None:
        """Ask all ranks for a report without waiting for it, and return the verdict on their earlier reports."""
        for number, (answer, rank) in enumerate(self.asked.items()):
            if number in self._looks:
                said, at, answered = self._looks[number]
                if not said.done():
                    continue
                if not said.exception():
                    self.seen[number] = _moved(self.seen.get(number), said.result().row["result"], at, answered)
            with suppress(Died):  # the call itself will raise it
                answered = self.answered.get(answer)  # read before asking: a later report shows it after its answer
                self._looks[number] = rank.begin("where", {}), self.now, answered
        return verdict(self.seen, len(self.asked), self.now, self.known)

    def table(self) -> str:
        """What each rank is doing, one line per rank."""
        return "\n".join(
            f"-- {rank.settings.who} {_doing(self.seen.get(n))}" for n, rank in enumerate(self.asked.values())
        )


def _moved(before: Seen | None, where: Mapping[str, Any], at: float, answered: float | None) -> Seen:
    last = before.where if before else {}
    still = before is not None and all(last[name] == where[name] for name in ("mark", "disk"))
    if before is None or not still or where["cpu"] - last["cpu"] > MOVES * (at - before.moved):
        return Seen(where, at, at, answered)
    return Seen({**where, "cpu": last["cpu"]}, at, before.moved, answered)  # at the last progress: small amounts add up


def _last(seen: Seen | None, group: str) -> list[Collective]:
    """The last collectives of a group, newest last; empty if the rank has reported none."""
    return [Collective(*row) for row in seen.where["groups"].get(group, {"last": ()})["last"]] if seen else []


def _apart(seen: Mapping[int, Seen]) -> str | None:
    """Why ranks are in a deadlock: two are in different collectives. None if they are not."""
    first: dict[tuple[Any, ...], tuple[int, str]] = {}  # the first rank seen in a collective, and what it runs there
    for rank, one in seen.items():
        for name, group in one.where["groups"].items():
            for each in _last(one, name):
                other, theirs = first.setdefault((name, *group["ranks"], each.number), (rank, str(each)))
                if theirs != str(each):
                    return f"rank {other} is in {theirs}, rank {rank} in {each}, both number {each.number}"
    return None


def verdict(seen: Mapping[int, Seen], size: int, now: float, known: float | None) -> str | None:
    """Why the call will not end; None if it may."""
    if why := _apart(seen):
        return why
    waiting = {rank: one.answered for rank, one in seen.items() if one.answered is not None}  # rank → since when
    for rank, one in seen.items():
        for name, group in one.where["groups"].items():
            mine = _last(one, name)[-1]
            for other in group["ranks"] if one.answered is None and not mine.over else ():
                theirs = _last(seen.get(other), name)
                if not theirs or theirs[-1].number >= mine.number:
                    continue
                if seen[other].answered is not None:
                    return f"rank {other} has answered without {mine}, in which rank {rank} waits"
                waiting[rank] = one.at - mine.since
    left = [rank for rank in range(size) if rank not in waiting] or [r for r in seen if seen[r].answered is None]
    if not waiting or any(rank not in seen for rank in left):
        return None
    needed = max(0.0, *waiting.values())
    waited = now - needed
    outside = [rank for rank in left if all(_last(seen[rank], name)[-1].over for name in seen[rank].where["groups"])]
    for rank in outside or left:
        still = min(waited, seen[rank].at - seen[rank].moved)  # by its own reports: this process may have been halted
        if still > STILL + STILL_FACTOR * needed:
            return f"rank {rank} makes no progress for {still:.0f} s, and others wait; they needed {needed:.0f} s"
    limit = LATE_FACTOR * needed + (LATE if known is not None else LATE_FIRST)
    if 2 * len(waiting) >= size and waited > max(limit, known or 0.0):
        names = ", ".join(f"rank {rank}" for rank in left)
        return f"{names} is late by {waited:.0f} s; the others needed {needed:.0f} s"
    return None


def _doing(seen: Seen | None) -> str:
    if seen is None:
        return "has not said what it does"
    if seen.answered is not None:
        return f"has answered after {seen.answered:.1f} s"
    last = sorted((_last(seen, name)[-1] for name in seen.where["groups"]), key=lambda each: each.since)
    return "; ".join(
        f"{'did' if each.over else 'waits in'} {each}, number {each.number}, since {each.since:.1f} s" for each in last
    )
