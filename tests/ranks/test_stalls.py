"""Two processes over gloo, of which one does not come to where the other waits."""

import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.config import load
from saccade.errors import RankLost, TrainingError
from saccade.plugins.ranks import stalls, starts, team
from saccade.plugins.ranks.machines import host_name

# What is said of a call, and after how many seconds at most with the limits below.
STALLS = {
    "sleeps": (r"rank 1 makes no progress for \d+ s.*rank 0 on {host} waits in gloo:all_reduce.*in sleeps\n", 6),
    "sleeps_alone": (r"rank 1 makes no progress .*rank 0 on {host} has answered after .*in sleeps_alone\n", 6),
    "skips_the_last": (r"rank 1 has answered without gloo:all_reduce \[\[1\]\], in which rank 0 waits", 3),
    "skips_one": (r"rank 0 is in gloo:all_reduce \[\[2\]\], rank 1 in gloo:all_reduce \[\[1\]\]", 3),
    "raises": (r"rank 1 on {host} failed in raises: .*ValueError: in one rank\n", 3),
    "loops": (r"rank 1 is late by \d+ s; the others needed 0 s.*in loops\n", 8),
}


@pytest.fixture
def two(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> Any:
    monkeypatch.setattr(team.Rank, "module", "tests.ranks.stalling_rank")
    for name, seconds in {"STILL": 1.5, "LATE": 4.0, "LATE_FIRST": 60.0}.items():
        monkeypatch.setattr(stalls, name, seconds)
    monkeypatch.setattr(team, "LOOK_EVERY", 0.25)
    config = load({"run.gpus": 2, "run.device": "cpu", "run.out": str(tmp_path)})
    with closing(starts.start_team(config, "doctor", model="", folder=None, logs=tmp_path)) as found:
        yield found


@pytest.mark.parametrize("fault", STALLS)
def test_a_rank_that_does_not_come_is_found_in_seconds(two: Any, fault: str) -> None:
    if fault == "loops":
        two._slowest[fault, "None", "None"] = 0.01  # a call that has been made before
    began, (said, limit) = time.monotonic(), STALLS[fault]
    with pytest.raises(RankLost, match="(?s)" + said.format(host=host_name())):
        two.ask_all(fault, [{}] * 2)
    assert time.monotonic() - began < limit


def test_a_rank_that_is_five_times_slower_is_waited_for(two: Any) -> None:
    for _ in range(2):
        assert [one.row["result"] for one in two.ask_all("is_slow", [{}] * 2)] == [2.0, 2.0]


def test_the_first_error_counts_also_where_its_time_is_not_noted_yet(two: Any) -> None:
    """A future wakes who waits for it before it calls back."""
    asked = {Future[Any](): rank for rank in two._alive()}
    watch = stalls.Watch(asked)  # type: ignore[arg-type]
    for number, future in reversed([*enumerate(asked)]):
        future.set_exception(TrainingError(f"error {number}"))
    del watch.answered[next(iter(asked))]
    with pytest.raises(TrainingError, match=r"rank 1 on .*: error 1"):
        two._end_all("call", asked, watch)


def test_a_look_that_fails_says_nothing_and_does_not_end_the_call() -> None:
    failed = Future[Any]()
    failed.set_exception(TrainingError("cannot say"))
    watch = stalls.Watch({Future[Any](): SimpleNamespace(begin=lambda *_: failed)})  # type: ignore[dict-item]
    assert [watch.look() for _ in range(3)] == [None] * 3 and not watch.seen


def test_compilers_that_have_ended_count_as_progress() -> None:
    before = stalls.whereabouts()["cpu"]
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert stalls.whereabouts()["cpu"] - before > 0.25


def rank_at(seconds: float, *, moved: float, answered: float | None = None, groups: Any = ()) -> stalls.Seen:
    return stalls.Seen(
        {"groups": {name: {"ranks": who, "last": [row]} for name, who, row in groups}}, seconds, moved, answered
    )


def test_what_a_rank_said_counts_and_not_how_long_nobody_asked() -> None:
    late = {0: rank_at(3.0, moved=0.0, answered=3.0), 1: rank_at(3.0, moved=3.0)}
    assert stalls.verdict(late, 2, now=18.0, known=None) is None  # the controller was halted
    late[1] = rank_at(18.0, moved=3.0)
    assert "rank 1 makes no progress for 15 s" in (stalls.verdict(late, 2, now=18.0, known=None) or "")


def test_a_rank_that_waits_for_another_is_not_the_one_without_progress() -> None:
    """2 waits for 3 in their first exchange, of which 3, which computes, knows nothing yet."""
    world, pair = [0, 1, 2, 3], [2, 3]
    waiting = [("gloo world", world, [5, "sum", "[1]", False, 18.0])]
    before = ("gloo world", world, [4, "sum", "[1]", True, 19.0])
    seen = {rank: rank_at(20.0, moved=2.0, groups=waiting) for rank in (0, 1)}
    seen[2] = rank_at(20.0, moved=2.0, groups=[before, ("gloo pair", pair, [1, "exchange", "", False, 18.0])])
    seen[3] = rank_at(20.0, moved=20.0, groups=[before])
    assert stalls.verdict(seen, 4, now=20.0, known=None) is None
    seen[3] = rank_at(20.0, moved=2.0, groups=[before])
    assert "rank 3 makes no progress" in (stalls.verdict(seen, 4, now=20.0, known=None) or "")
