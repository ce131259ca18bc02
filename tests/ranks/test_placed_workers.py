"""Reward workers that another process starts, as on another machine."""

import os
from pathlib import Path
from typing import Any

from saccade.plugins.ranks import launchers, placed_workers
from saccade.plugins.ranks.connections import Link, Reception
from saccade.plugins.ranks.preflight import versions
from saccade.plugins.reward_workers.pool import WorkerPool
from saccade.rewards.reward_sample import RewardSample
from tests.ranks.processes import LIMIT, forked

REWARDS = """
import os, re, signal
def reward(sample):
    if sample.id == "3":
        re.match("(a+)+$", "a" * 40 + "b")  # for ever, and no other thread of its process gets a turn
    if sample.id == "5" and not os.path.exists("{folder}/killed"):
        open("{folder}/killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return dict(overall=float(sample.id), parent=float(os.getppid()))
"""


def test_a_worker_elsewhere_that_hangs_or_dies_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARDS.format(folder=tmp_path))
    started: list[Any] = []
    with Reception(0, "t", versions()) as reception, WorkerPool(workers=1, deadline=2.0) as pool:

        def placed() -> Link:
            started.append(forked(launchers.run_rank, f"127.0.0.1:{reception.port}", "t"))
            return Link(reception.arrivals("t", 1)[0], placed_workers.__name__, tmp_path / "rewards.log")

        def scores(*ids: int) -> list[Any]:
            asked = [RewardSample(id=str(number), response="") for number in ids]
            return [each.result(LIMIT) for each in [pool.submit(f"{tmp_path}/own.py:reward", one) for one in asked]]

        (here,) = scores(0)
        placed_workers.move_workers(pool, placed)
        first, second, third, late, fourth, killed, last = scores(0, 1, 2, 3, 4, 5, 6)
        assert late.kind == "error" and late.reason.startswith("timeout: no result after 2 s")
        found = [first, second, third, fourth, killed, last]
        assert [one.value for one in found] == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0] and pool.replaced == 2
        assert here.parts["parent"] == os.getpid()
        assert {one.parts["parent"] for one in found} <= {process.pid for process in started}
    for process in started:
        process.join(LIMIT)
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert (tmp_path / "rewards.log").read_text().count("process ") == 3
