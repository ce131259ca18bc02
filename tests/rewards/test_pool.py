import os
import time
from pathlib import Path
from typing import Any

import pytest

from saccade.plugins.reward_workers.pool import WorkerPool
from saccade.rewards.reward_sample import RewardSample, to_json
from saccade.system.process import Child
from saccade.types import Score

BAD = """
import asyncio, math, os, sys, time

def misbehave(response):
    if response == "raise": raise ValueError("boom")
    if response == "sleep": time.sleep(60)
    if response == "none": return None
    if response == "nan": return math.nan
    if response == "exit": os._exit(3)
    if response == "leave": sys.exit("enough")
    if response == "interrupt": raise KeyboardInterrupt
    if response == "noise": print("not a reply"); sys.stdout.flush()
    return 1.0

def single(sample): return misbehave(sample.response)
def batch(samples): return [misbehave(s.response) for s in samples]
def counted(samples):
    with open(__file__ + ".calls", "a") as file: print(len(samples), file=file)
    return [1.0]
def short(samples): return [1.0 for s in samples if s.response != "drop"]
async def waiting(sample):
    if sample.response == "sleep": await asyncio.sleep(60)
    if sample.response == "block": time.sleep(60)
    return misbehave(sample.response)
async def waiting_batch(samples):
    await asyncio.sleep(0.01)
    return [s.length for s in samples]
def child(sample): return os.getppid()
def once(sample):
    mark = sample.extra["folder"] + "/" + sample.id
    if sample.response == "killed" and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9)
    return float(sample.id)
def once_together(samples): return [once(s) for s in samples]
def dies_later(sample):
    import threading
    threading.Timer(0.2, os._exit, [7]).start()
    return 1.0
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(BAD)
    return str(path)


def scores(pool: WorkerPool, verifier: str, responses: list[str]) -> dict[str, Score]:
    samples = [RewardSample(id=str(index), response=response, length=index) for index, response in enumerate(responses)]
    futures = [pool.submit(verifier, sample) for sample in samples]
    return {s.response: f.result(timeout=60) for s, f in zip(samples, futures, strict=True)}


GOOD = [f"good {index}" for index in range(40)]


def test_bad_samples_cost_only_themselves(functions):
    bad = ["raise", "sleep", "none", "nan", "exit", "noise"]
    with WorkerPool(workers=2, deadline=1.0) as pool:
        assert pool.check(f"{functions}:single") is None
        start = time.monotonic()
        found = scores(pool, f"{functions}:single", GOOD[:20] + bad + GOOD[20:])
        seconds = time.monotonic() - start
    assert all(found[name].value == 1 and found[name].kind == "value" for name in [*GOOD, "noise"])
    kinds = {name: found[name].reason.partition(":")[0] for name in bad[:5]}
    assert kinds == {"raise": "raised", "sleep": "timeout", "none": "none", "nan": "nan", "exit": "crashed"}
    assert "boom" in found["raise"].reason and "bad.py" in found["raise"].reason
    assert 1.0 <= seconds < 50  # one deadline and two new processes, not sixty seconds


def test_batch_and_async_functions_lose_only_the_culprits(functions):
    with WorkerPool(workers=2, deadline=1.0) as pool:
        for name, bad in {"batch": {"raise", "sleep", "exit"}, "waiting": {"raise", "sleep", "block"}}.items():
            found = scores(pool, f"{functions}:{name}", [*GOOD[:9], *bad, *GOOD[9:12]])
            assert {key for key, score in found.items() if score.kind == "error"} == bad
            assert found["sleep"].reason.startswith("timeout")


def test_an_exit_or_an_interrupt_is_an_exception_with_its_line(functions):
    with WorkerPool(workers=1, deadline=30) as pool:
        for name in ("single", "batch", "waiting"):
            found = scores(pool, f"{functions}:{name}", [*GOOD[:3], "leave", "interrupt"])
            assert all(found[name].value == 1 for name in GOOD[:3])
            assert found["leave"].reason == "raised: SystemExit: enough (bad.py:10)"
            assert found["interrupt"].reason == "raised: KeyboardInterrupt (bad.py:11)"
        assert pool.replaced == 0


def test_a_list_function_that_can_only_score_one_is_told_of_once(functions, caplog):
    with WorkerPool(workers=1, deadline=5) as pool:
        for _ in range(2):
            found = scores(pool, f"{functions}:counted", GOOD[:16])
            assert all(score.value == 1 for score in found.values())
    sizes = [int(line) for line in Path(f"{functions}.calls").read_text().split()]
    assert sum(size > 1 for size in sizes) == 1 and sizes.count(1) == 32
    (said,) = [record.getMessage() for record in caplog.records]
    several = next(size for size in sizes if size > 1)
    assert f"{functions}:counted cannot score several" in said
    assert f"(bad_length: 1 results for {several} samples)" in said


def test_lists_are_short_or_awaited_and_a_process_that_dies_idle_is_replaced(functions):
    with WorkerPool(workers=1, deadline=5) as pool:
        found = scores(pool, f"{functions}:short", [*GOOD[:5], "drop"])
        assert found["drop"].reason.startswith("bad_length")
        assert all(found[name].value == 1 for name in GOOD[:5])
        awaited = scores(pool, f"{functions}:waiting_batch", GOOD[:4])
        assert [awaited[name].value for name in GOOD[:4]] == [0, 1, 2, 3]
        assert scores(pool, f"{functions}:dies_later", ["a"])["a"].value == 1
        time.sleep(0.4)
        assert scores(pool, f"{functions}:single", ["b"])["b"].value == 1


def test_check_tells_what_is_wrong(functions, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(2)\n")
    with WorkerPool(workers=1, deadline=5) as pool:
        assert pool.check(f"{tmp_path}/exits.py:f") == "load: SystemExit: 2 (exits.py:2)"
        assert "single, batch" in (pool.check(f"{functions}:sinlge") or "")
        bonus = pool.check(f"{functions}:single", {"bonus": 1}) or ""
        assert "unexpected" in bonus and bonus.endswith("(here: none)")
        missing = pool.check(f"{tmp_path}/broken.py:f") or ""
        assert "no_such_module" in missing and missing.endswith("(broken.py:1)")
        (tmp_path / "typo.py").write_text("x = 1\ndef f(sample) return 1\n")
        assert pool.check(f"{tmp_path}/typo.py:f") == "load: SyntaxError: expected ':' (typo.py:2)"
        (tmp_path / "none.py").write_text("def f(): return 1\n")
        assert "f(sample), f(samples)" in (pool.check(f"{tmp_path}/none.py:f") or "")


def test_a_late_reply_is_never_taken_for_one_to_another_request(functions):
    def request(*samples: RewardSample) -> dict[str, Any]:
        call = {"verifier": f"{functions}:single", "args": "{}", "deadline": 9, "apart": False}
        return call | {"samples": list(map(to_json, samples))}

    some = [RewardSample(id=str(n), response="none") for n in range(20)]
    child = Child("saccade.plugins.reward_workers.worker")
    assert "together" in child.ask(request(*some), seconds=60).row
    reply = child.ask(request(RewardSample(id="a", response="good")), seconds=60)
    assert "together" in reply.row and reply.row["id"] == 2  # while twenty are still out
    assert child.answer(60).row["score"]["value"] == 1
    child.close()


def test_closing_ends_the_processes_and_answers_what_is_left(functions):
    pool = WorkerPool(workers=1, deadline=30)
    pid = int(pool.submit(f"{functions}:child", RewardSample(id="a", response="")).result().value)
    assert pid == os.getpid()
    stuck = [pool.submit(f"{functions}:single", RewardSample(id=str(i), response="sleep")) for i in range(3)]
    workers = [child.popen for child in pool._children]
    pool.close()
    assert all(process.poll() is not None for process in workers)
    assert {future.result(timeout=5).kind for future in stuck} == {"error"}
    late = pool.submit("count", RewardSample(id="b", response="7", answer="7"))
    assert late.result(timeout=5).reason.startswith("closed")


def test_only_math_pays_for_its_libraries(tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text("import sys\ndef f(sample): return float(sample.response in sys.modules)\n")
    loaded = [RewardSample(id=name, response=name) for name in ("sympy", "torch")]
    formula = RewardSample(id="a", response=r"\boxed{2\sqrt{3}}", answer=r"\sqrt{12}")
    tower = RewardSample(id="a", response=r"\boxed{9^{9^{9^9}}}", answer="1")
    with WorkerPool(workers=1, deadline=10) as pool:
        pool.submit("count", RewardSample(id="a", response="7", answer="7")).result()
        assert [pool.submit(f"{probe}:f", s).result().value for s in loaded] == [0, 0]
        assert pool.submit("math", formula).result().value == 1
        assert pool.submit("math", tower).result().reason == "too_large"
        assert [pool.submit(f"{probe}:f", s).result().value for s in loaded] == [1, 0]


def test_a_worker_that_is_killed_from_outside_costs_nothing(functions, tmp_path):
    """The sample at work is scored by the next process, and every other one is scored, too."""
    with WorkerPool(workers=2, deadline=20) as pool:
        for replaced, name in ((2, "once"), (4, "once_together")):
            (tmp_path / name).mkdir()
            samples = [
                RewardSample(
                    id=str(n), response="killed" if n in (5, 21) else "", extra={"folder": f"{tmp_path}/{name}"}
                )
                for n in range(40)
            ]
            futures = [pool.submit(f"{functions}:{name}", sample) for sample in samples]
            assert [future.result(timeout=60).value for future in futures] == [float(n) for n in range(40)]
            assert pool.replaced == replaced and pool.alive() <= 2
