"""Rollouts reach the disk whole, once, and without holding up a step."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import numpy as np

from saccade.plugins.reports.trajectories import TrajectoryWriter, read_trajectories, stored_steps


def test_a_record_holds_what_happened(folder, build):
    member = build.trajectory(
        2, 1.2, outcome=1.0, pictures=[build.media("aa11")], parts={"count": 1.0, "format": 0.2},
        advantages=np.full(5, 0.7, np.float32),
        info={"boxes": np.array([[1, 2]]), "when": object, "score": float("nan")},
    )  # fmt: skip
    build.store(folder, build.group(member), steps=[10], version=9)
    (record,) = read_trajectories(folder.path, "train", 10)
    assert (record["run"], record["step"], record["version"]) == ("first", 10, 9)
    assert (record["id"], record["sample"], record["gold"]) == ("s", 2, "3")
    assert record["segments"][0] == {"source": "prompt", "image": "aa11", "id": 1, "tokens": 4}
    assert record["segments"][1] == {"source": "prompt", "text": "how many ?", "ids": [2, 3, 4]}
    policy = record["segments"][2]
    assert policy["source"] == "policy" and policy["logp"] == [-0.5] * 5
    assert policy["text"] == "<think> </think> <answer> 3 </answer>"
    assert (record["extracted"], record["reward"], record["outcome"]) == ("3", 1.2, 1.0)
    assert not record["outcome_is_score"]
    assert record["parts"] == {"count": 1.0, "format": 0.2} and record["advantage"] == 0.7
    assert record["tokens"] == {"prompt": 7, "response": 5, "vision": 4, "total": 12}
    assert record["info"]["boxes"] == [[1, 2]] and record["info"]["score"] is None
    image = record["images"][0]
    assert (image["kind"], image["size"], image["file"]) == ("image", [56, 56], "images/aa11.png")
    assert (folder.trajectories / image["file"]).exists()


def test_a_slow_disk_never_holds_up_a_step(folder, build):
    gate = threading.Event()

    def slow(media):
        gate.wait(10)
        return build.pixels(media)

    group = build.group(build.trajectory(pictures=[build.media()]))
    with closing(TrajectoryWriter(folder.path, slow)) as writer:
        writer.write(1, [group], SimpleNamespace(decode=str, size_unit=None), version=1)
        assert stored_steps(folder.path) == {}
        gate.set()
        writer.flush()
        assert stored_steps(folder.path) == {"train": [1]}


def test_failures_are_said_once_and_cost_only_themselves(folder, build, said):
    def broken(media):
        raise OSError("unreadable")

    groups = [build.group(build.trajectory(pictures=[build.media(name)]), uid=name) for name in "abc"]
    with closing(TrajectoryWriter(folder.path, broken)) as writer:
        for step, decoder in ((1, str), (2, None), (3, str)):
            writer.write(step, groups, SimpleNamespace(decode=decoder, size_unit=None), version=1)
    assert said == ["WARNING: image a could not be stored: OSError: unreadable"]
    assert stored_steps(folder.path) == {"train": [1, 3]}
    assert {r["images"][0]["file"] for r in read_trajectories(folder.path, "train", 1)} == {None}


def test_validation_has_its_own_files_wherever_its_name_points(folder, build):
    for kind in ("train", "val/../../../etc"):
        build.store(folder, build.group(build.trajectory()), steps=[5], kind=kind)
    assert set(stored_steps(folder.path)) == {"train", "val/__.._.._etc"}
    (record,) = read_trajectories(folder.path, "val/../../../etc", 5)
    assert record["kind"] == "val/../../../etc"


def test_resume_forgets_later_steps_and_replaces_equal_ones(folder, build):
    build.store(folder, build.group(build.trajectory()), steps=(10, 20, 30, 10))
    TrajectoryWriter(folder.path).truncate_after(20)
    assert stored_steps(folder.path) == {"train": [10, 20]}
    text = (folder.trajectories / "step-10.jsonl").read_text()
    assert len(text.splitlines()) == 1 and json.loads(text)["step"] == 10
