"""How fast `saccade view` opens many rollouts, in a real browser (chromium and playwright must be installed).

    python benchmarks/view_rollouts.py --rollouts 10000

Stores groups of eight, with pictures of 512 pixels and responses of about 300 tokens, as a run does, starts the viewer
as a command, and measures seconds: until it serves, until the page shows the first rows with thumbnails, until all
files are read, until a second visit shows rows, a search, a filter. Then frame times for three seconds of scrolling as
with a wheel (4,000 pixels a second), and of dragging the list from its beginning to its end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from saccade.config import load
from saccade.plugins.reports.trajectories import TrajectoryWriter
from saccade.run.training_run import open_folder
from saccade.types import Group, Media, MediaSpan, Message, Sample, Source, Trajectory
from tests.browser import Browser

MEMBERS, GROUPS, IMAGE, PROMPT = 8, 8, 324, 60  # rollouts per group, groups per stored step; tokens
WORDS = ["the", " number", " of", " red", " squares", " is", " not", " that", ".", "\n", " so", " we", " count"]
SCROLL = """((speed) => new Promise((done) => {
  const list = document.querySelector('.list'), gaps = [], start = performance.now(); let before = start;
  const frame = (now) => {
    gaps.push(now - before); before = now;
    list.scrollTop = (now - start) * (speed || list.scrollHeight / 3000);
    if (now - start < 3000) requestAnimationFrame(frame); else done(gaps.slice(1).sort((a, b) => a - b));
  };
  requestAnimationFrame(frame);
}))"""


class Words:
    """The part of a family that storing a rollout uses."""

    size_unit = 28

    def decode(self, ids: Any) -> str:
        return "".join(WORDS[int(one) % len(WORDS)] for one in ids)


def group(name: str, noise: np.random.Generator) -> Group:
    media = Media(hash=name, width=512, height=384, data=b"")
    span = MediaSpan(media=media, start=4, length=IMAGE, grid=(1, 36, 36))
    question = Message(role="user", parts=(media, f"How many squares are red in picture {name}?"))
    members = []
    for repeat in range(MEMBERS):
        said = int(np.clip(noise.lognormal(5.6, 0.5), 20, 2000))
        sources = np.array([Source.PROMPT] * (IMAGE + PROMPT) + [Source.POLICY] * said, np.int8)
        sampled, right = sources == Source.POLICY, float(noise.random() < 0.5)
        members.append(
            Trajectory(
                sample_id=name,
                repeat=repeat,
                ids=noise.integers(0, 150_000, len(sources)),
                sources=sources,
                logprobs=np.where(sampled, -noise.exponential(0.4, len(sources)), np.nan).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                media=(span,),
                messages=(question,),
                reward=right,
                outcome=right,
                parts={"count": right},
                extracted="3",
                reason="" if right else "3 is not 4",
                advantages=np.full(said, right - 0.5, np.float32),
            )
        )
    return Group(sample=Sample(id=name, messages=(question,), answer="4"), trajectories=tuple(members), uid=name)


def pixels(media: Media) -> np.ndarray:
    noise = np.random.default_rng(abs(hash(media.hash)))
    coarse = noise.integers(0, 255, (12, 16, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((32, 32, 1), np.uint8)) + noise.integers(0, 20, (384, 512, 3), dtype=np.uint8)


def store(root: Path, rollouts: int) -> None:
    noise = np.random.default_rng(0)
    config = load({"run": {"out": str(root), "name": "run"}})
    with open_folder(config, "rl", {}, config.algorithm) as folder:
        with closing(TrajectoryWriter(folder.path, pixels)) as writer:
            for step in range(1, rollouts // (GROUPS * MEMBERS) + 1):
                groups = [group(f"{step}-{number}", noise) for number in range(GROUPS)]
                writer.write(step, groups, Words(), version=step)  # type: ignore[arg-type]
        rows = [{"step": step, "reward/mean": float(noise.random())} for step in range(1, 400)]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def until(browser: Browser, code: str) -> float:
    start = time.monotonic()
    while not browser.run(code):
        time.sleep(0.01)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="keep them here, and use what is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = given.folder or Path(folder)
        if not (root / "run").exists():
            store(root, given.rollouts)
        files = list((root / "run").rglob("step-*.jsonl"))
        found: dict[str, Any] = {"megabytes": round(sum(file.stat().st_size for file in files) / 1e6)}
        seen = "[...document.querySelectorAll('.row img')].filter(i => i.naturalWidth).length >= 10"
        with closing(Browser()) as browser:
            browser.visit("about:blank#")
            start = time.monotonic()
            command = [sys.executable, "-m", "saccade", "view", str(root), "--port", "0", "--no-token"]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split()[-1]
                found["server_s"] = time.monotonic() - start
                count = "document.getElementById('count').textContent"
                for name in ("first_open_s", "open_s"):
                    begun = time.monotonic()
                    browser.visit(f"{url}#view=rollouts&run=run")
                    until(browser, seen)
                    found[name] = time.monotonic() - begun
                    until(browser, f"!{count}.includes('reading')")
                    found.setdefault("all_read_s", time.monotonic() - begun)
                found["rollouts"] = browser.run(count)
                before = json.dumps(found["rollouts"])
                for name, label, value in (
                    ("search_s", "search", "picture 77-"),
                    ("filter_s", "reward \\u2265", "0.5"),
                ):
                    field = f"document.querySelector('[aria-label=\"{label}\"]')"
                    browser.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('input'))")
                    found[name] = until(browser, f"{count} !== {before}")
                    browser.run(f"{field}.value = ''; {field}.dispatchEvent(new Event('input'))")
                    until(browser, f"{count} === {before}")
                for name, speed in (("wheel", 4), ("drag", 0)):
                    gaps = browser.run(f"{SCROLL}({speed})")
                    found |= {f"{name}_frame_ms_p50": gaps[len(gaps) // 2], f"{name}_frame_ms_max": gaps[-1]}
                    found[f"{name}_thumbnails_s"] = until(browser, seen)
            finally:
                server.terminate()
                server.wait()
    print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in found.items()}))


if __name__ == "__main__":
    main()
