"""Small real records: a picture of squares, groups of answers about it, an open run folder."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from saccade.config import load
from saccade.plugins.evaluation.results import add_rows, write_numbers
from saccade.plugins.reports.trajectories import TrajectoryWriter
from saccade.run.training_run import open_folder as start
from saccade.types import Group, Media, MediaSpan, Message, Sample, Source, Trajectory
from tests.browser import Browser

PROMPT, POLICY = int(Source.PROMPT), int(Source.POLICY)
WORDS = ["<pad>", "<image>", "how", "many", "?", "<think>", "</think>", "<answer>", "</answer>"]
WORDS += [str(number) for number in range(10)] + ["<script>alert(1)</script>"]


def decode(ids):
    return " ".join(WORDS[index] for index in ids)


def evaluation(folder, rows, results):
    folder.mkdir(exist_ok=True)
    add_rows(folder, rows)
    write_numbers(folder, results)
    return folder


def media(name="aa11", **changes):
    fields = {"hash": name, "width": 56, "height": 56, "data": b"file"}
    return Media(**fields | changes)


def pixels(one):
    """Squares whose place follows from the name."""
    noise = np.random.default_rng(sum(one.hash.encode()))
    canvas = np.full((one.height, one.width, 3), 128, np.uint8)
    for colour in ((220, 40, 40), (40, 90, 220), (40, 180, 80)):
        x, y = noise.integers(4, max(5, one.width - 14)), noise.integers(4, max(5, one.height - 14))
        canvas[y : y + 10, x : x + 10] = colour
    return canvas


def trajectory(repeat=0, reward=1.0, *, response=(5, 6, 7, 12, 8), pictures=(), **changes):
    """Pictures of 4 tokens each, `how many ?`, then the response."""
    spans = tuple(MediaSpan(media=one, start=4 * index, length=4, grid=(1, 4, 4)) for index, one in enumerate(pictures))
    prompt = [1] * 4 * len(pictures) + [2, 3, 4]
    sources = [PROMPT] * len(prompt) + [POLICY] * len(response)
    policy = np.array(sources) == POLICY
    fields = {
        "sample_id": "s", "repeat": repeat, "ids": np.array([*prompt, *response], np.int64),
        "sources": np.array(sources, np.int8), "logprobs": np.where(policy, -0.5, np.nan).astype(np.float32),
        "versions": np.where(policy, 3, -1).astype(np.int32), "media": spans, "reward": reward, "outcome": reward,
        "extracted": WORDS[response[-2]] if len(response) > 1 else None,
    }  # fmt: skip
    return Trajectory(**fields | changes)


def group(*members, source="count", answer="3", uid="s"):
    pictures = tuple(span.media for span in members[0].media) if members else ()
    question = Message(role="user", parts=(*pictures, "How many objects?"))
    sample = Sample(id=uid, messages=(question,), answer=answer, data_source=source)
    return Group(sample=sample, trajectories=members, uid=uid)


def store(folder, *groups, steps=(1,), image=pixels, **how):
    """Write the groups at each of the steps."""
    family = SimpleNamespace(decode=decode, size_unit=None)
    with closing(TrajectoryWriter(getattr(folder, "path", folder), image)) as writer:
        for step in steps:
            writer.write(step, groups, family, **{"version": step} | how)


@pytest.fixture
def build():
    """The makers above, for tests."""
    return SimpleNamespace(media=media, pixels=pixels, trajectory=trajectory, group=group, store=store)


@pytest.fixture
def config(tmp_path):
    return load({"run": {"out": str(tmp_path / "runs"), "name": "first"}})


@pytest.fixture
def open_folder(config):
    def open_(*overrides, **manifest):
        loaded = load(config, overrides)
        return start(loaded, "rl", manifest, loaded.algorithm)

    return open_


@pytest.fixture
def folder(open_folder):
    with open_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def browser():
    with closing(Browser()) as opened:
        yield opened
