"""A reward service under load on this machine, with one of its workers killed on the way.

Starts `saccade serve-reward` with the math reward, then sends many samples at once: each in its own
request and connection, as clients of OpenRLHF do, and through saccade's client, which batches them.
When half are scored, one worker process gets SIGKILL. Checks that every sample got its own correct
reward once, then prints latencies and throughput.

    python benchmarks/reward_service.py --samples 1000 --workers 2 --out reward_service.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config.schema import RemoteConfig, RewardConfig
from saccade.plugins.judges.remote import Remote
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer

TOKEN = "sesame"
KINDS = (  # gold and a right answer, for a number n
    (r"\frac{{{n}}}{{2}}", "{n}/2"),
    ("x^2-{n}x", "x(x-{n})"),
    ("{n} cm", "{n}0 mm"),
    (r"{n}\sqrt{{3}}", r"\sqrt{{3}}\cdot {n}"),
)


def sample(number: int) -> tuple[RewardSample, float]:
    """A sample and the reward that it must get; every third answer is wrong."""
    right = number % 3 != 0
    gold, answer = KINDS[number % len(KINDS)]
    said = answer.format(n=number + 2 if right else number + 3)
    response = f"<think>so</think><answer>{said}</answer>"
    gold = gold.format(n=number + 2)
    return RewardSample(id=str(number), response=response, answer=gold), float(right)


@dataclass(frozen=True, kw_only=True)
class Running:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def metrics(self) -> dict[str, float]:
        text = self.get("/metrics").decode()
        return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.M)}

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read()

    def workers(self) -> list[int]:
        """Process ids of the children of the service."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return sorted(found)


@contextmanager
def service(folder: Path, *options: str) -> Iterator[Running]:
    """Run `saccade serve-reward` in its own process until the end of the block."""
    log = folder / "scored.jsonl"
    command = [sys.executable, "-m", "saccade", "serve-reward", "--port", "0", *options]
    process = subprocess.Popen(
        [*command, f"reward.serve.log={log}"],
        env={**os.environ, "SACCADE_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()
        assert address, f"the service ended with code {process.wait()}"
        yield Running(url=address[-1].removesuffix("/get_reward"), process=process, log=log)
    finally:
        process.terminate()
        process.wait(timeout=60)


def alone(running: Running, number: int) -> float:
    """Score one sample in its own request, as clients of OpenRLHF do."""
    asked, _ = sample(number)
    body = {"query": [asked.response], "prompts": [""], "labels": [asked.answer]}
    request = urllib.request.Request(
        running.url + "/get_reward",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.loads(reply.read())["rewards"][0]


def load(running: Running, count: int, ask: Callable[[int], float], *, kill: bool) -> dict[str, Any]:
    """Send all samples at once, each from its own thread; with `kill`, kill a worker when half are scored."""
    rewards: list[float | None] = [None] * count
    seconds = [0.0] * count
    done, killed = threading.Semaphore(0), []
    start = threading.Event()

    def one(number: int) -> None:
        start.wait()
        began = time.perf_counter()
        rewards[number] = ask(number)
        seconds[number] = time.perf_counter() - began
        done.release()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    start.set()
    for _ in range(count // 2):
        done.acquire()
    if kill:
        killed = running.workers()[:1]
        os.kill(killed[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    whole = time.perf_counter() - began
    expected = [sample(number)[1] for number in range(count)]
    middle, slow = np.percentile(seconds, [50, 95])
    return {
        "samples": count,
        "right": sum(got == want for got, want in zip(rewards, expected, strict=True)),
        "lost": sum(reward is None for reward in rewards),
        "killed": len(killed),
        "seconds": round(whole, 3),
        "per_second": round(count / whole, 1),
        "latency_p50": round(float(middle), 4),
        "latency_p95": round(float(slow), 4),
    }


def at_home(count: int, workers: int) -> float:
    """Samples per second with the same number of workers but without the service, after a warm-up."""
    config = RewardConfig(terms=["math"], workers=workers)
    given = [sample(number)[0] for number in range(count)]
    with Scorer(config, prompt_format="think_answer", max_tokens=64) as scorer:
        scorer.score(given[: 8 * workers])
        began = time.perf_counter()
        scorer.score(given)
        return round(count / (time.perf_counter() - began), 1)


def measure(count: int, workers: int, *, kill: bool = True) -> dict[str, Any]:
    results: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count()}
    results |= {"workers": workers, "per_second_without_service": at_home(count, workers)}
    with tempfile.TemporaryDirectory() as folder:
        options = ("reward.terms=[math]", f"reward.workers={workers}")
        with service(Path(folder), *options) as running:
            few, scored = 8 * workers, 0  # `few` samples start the workers, and replace a killed one
            os.environ["REWARD_SERVICE_TOKEN"] = TOKEN
            settings = RemoteConfig(url=(running.url,), token="REWARD_SERVICE_TOKEN")
            client = Remote(settings)
            ways: dict[str, Callable[[int], float]] = {
                "one request per sample": lambda number: alone(running, number),
                "batching client": lambda number: client.submit(sample(number)[0]).result().value,
            }
            load(running, few, ways["one request per sample"], kill=False)
            for name, ask in ways.items():
                results[name] = load(running, count, ask, kill=kill)
                load(running, few, ways["one request per sample"], kill=False)
                scored += count + few
            client.close()
            lines = running.log.read_text().splitlines()
            metrics = running.metrics()
            results["scored"] = {"asked": scored + few, "logged": len(lines)}
            results["workers_replaced"] = metrics["saccade_reward_workers_replaced"]
            results["errors"] = metrics['saccade_reward_samples_total{status="error"}']
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options.samples, options.workers)
    text = json.dumps(results, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    ways = [value for value in results.values() if isinstance(value, dict) and "right" in value]
    assert all(way["right"] == way["samples"] for way in ways), "a sample was lost or misjudged"
    assert results["scored"]["asked"] == results["scored"]["logged"], "a sample was scored twice"


if __name__ == "__main__":
    main()
