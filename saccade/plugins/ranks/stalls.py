"""Whether a call that all ranks were given will ever end: from what each does, asked every second, and not from a
clock alone.

A rank says which collectives it has begun (torch's flight recorder notes those of gloo and nccl, ours and FSDP's) and
whether it computes. Certain, and found at once: a rank has answered and another waits for it in a collective, or two
are in different ones. Else one that the others wait for may take its time as long as it does something; one that
makes no progress has seconds.

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
# Seconds that all others wait, beside a multiple of those they needed themselves: for one that makes no progress,
# for one that does something, and for that in the first call of a kind, in which it may compile kernels.
STILL, STILL_FACTOR = 8.0, 2.0
LATE, LATE_FIRST, LATE_FACTOR = 30.0, 600.0, 10.0
MOVES = 0.03  # of a core, on average: more than threads need that only report
RECORDED, KEPT = 64, 8  # collectives that torch notes, and those of a group that are compared
FRAMES = 8
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo, and of nccl where torch has it


# -- in a rank ---------------------------------------------------------------------------------------


def note_collectives() -> None:
    """Before the first of them."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def whereabouts() -> dict[str, Any]:
    """What this process does, seen from a thread beside the main one."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    cpu = time.process_time() - time.thread_time()  # without this thread, which only looks
    marks = [(one.f_code.co_name, one.f_lasti) for one, _ in traceback.walk_stack(frame)]
    where = {
        "stack": "".join(traceback.format_stack(frame)[-FRAMES:]),
        "mark": zlib.crc32(repr(marks).encode()),
        "cpu": cpu,
        "disk": [],
        "groups": {},
    }
    with suppress(Exception):  # another torch, or a machine that shows less of itself; then a clock decides
        where |= {"cpu": cpu + sum(os.times()[2:4]) + children_cpu("self"), "disk": disk_use()}
        where["groups"] = _collectives()
    return where


def _collectives() -> dict[str, Any]:
    """By group: its ranks, and its last collectives, each the fields of `Collective`."""
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
            sizes = "" if "to_all" in name else str(entry["input_sizes"])  # what others must have, too
            row = [entry["collective_seq_id"], name, sizes, entry["retired"], now - entry["time_created_ns"] / 1e9]
            kind = name.partition(":")[0]
            found.setdefault(f"{kind} {group}", {"ranks": members[group], "last": []})["last"].append(row)
    return {name: group | {"last": group["last"][-KEPT:]} for name, group in found.items()}


# -- in the controller -------------------------------------------------------------------------------


class Collective(NamedTuple):
    """One that a rank has begun."""

    number: int
    name: str
    sizes: str
    over: bool
    since: float  # seconds

    def __str__(self) -> str:
        return f"{self.name} {self.sizes}"


class Seen(NamedTuple):
    """A rank at the last look. Times are seconds after the call began."""

    where: Mapping[str, Any]
    at: float
    moved: float  # when it last did something
    answered: float | None = None


class Watch:
    """Ranks with the answers that they will give to a call, made just now. `known`: seconds that such a call may take;
    None: it is the first of its kind.
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
        """Asks all ranks, and judges by what they have said to earlier looks; none is waited for."""
        for number, (answer, rank) in enumerate(self.asked.items()):
            if number in self._looks:
                said, at, answered = self._looks[number]
                if not said.done():
                    continue
                if not said.exception():
                    self.seen[number] = _moved(self.seen.get(number), said.result().row["result"], at, answered)
            with suppress(Died):  # the call itself says so
                answered = self.answered.get(answer)  # before it is asked: then what it says is its last word
                self._looks[number] = rank.begin("where", {}), self.now, answered
        return verdict(self.seen, len(self.asked), self.now, self.known)

    def table(self) -> str:
        """What each does."""
        return "\n".join(
            f"-- {rank.settings.who} {_doing(self.seen.get(n))}" for n, rank in enumerate(self.asked.values())
        )


def _moved(before: Seen | None, where: Mapping[str, Any], at: float, answered: float | None) -> Seen:
    last = before.where if before else {}
    still = before is not None and all(last[name] == where[name] for name in ("mark", "disk"))
    if before is None or not still or where["cpu"] - last["cpu"] > MOVES * (at - before.moved):
        return Seen(where, at, at, answered)
    return Seen({**where, "cpu": last["cpu"]}, at, before.moved, answered)  # since it moved: a little adds up


def _last(seen: Seen | None, group: str) -> list[Collective]:
    """The last ones of a group, the newest at the end; none if the rank knows nothing of it."""
    return [Collective(*row) for row in seen.where["groups"].get(group, {"last": ()})["last"]] if seen else []


def _apart(seen: Mapping[int, Seen]) -> str | None:
    """Why ranks will never meet: two are in different collectives."""
    first: dict[tuple[Any, ...], tuple[int, str]] = {}  # who was seen first in a collective, and what it is there
    for rank, one in seen.items():
        for name, group in one.where["groups"].items():
            for each in _last(one, name):
                other, theirs = first.setdefault((name, *group["ranks"], each.number), (rank, str(each)))
                if theirs != str(each):
                    return f"rank {other} is in {theirs}, rank {rank} in {each}, both number {each.number}"
    return None


def verdict(seen: Mapping[int, Seen], size: int, now: float, known: float | None) -> str | None:
    """Why the call will not end; None where it may."""
    if why := _apart(seen):
        return why
    waiting = {rank: one.answered for rank, one in seen.items() if one.answered is not None}  # since when
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
        still = min(waited, seen[rank].at - seen[rank].moved)  # as it said: this process may have been halted
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
