"""Rollouts reach the disk whole and hold up no step; an episode turn by turn, and a page that shows it."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from saccade.config import EnvConfig
from saccade.environments import EnvContext, build
from saccade.media.images import decode, open_media
from saccade.plugins.reports import episodes
from saccade.plugins.reports.episodes import stored_episodes
from saccade.plugins.reports.report_page import Report, write_report
from saccade.plugins.reports.trajectories import TrajectoryWriter, read_trajectories, stored_steps
from saccade.plugins.verifiers.extract import extract
from saccade.types import Group, MediaSpan, Message, Sample, Source, Trajectory
from tests.browser import needs_browser, page_data

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def call(box, source):
    return f"<grounding>{json.dumps({'bbox_2d': box, 'source': source})}</grounding>"


TURNS = [
    f"{EVIL} \0look closer" + call([0.5, 0, 1, 0.5], "original_image"), call([0, 0, 1, 1], "observation_9"),
    call([0.5, 0.5, 1, 1], "observation_1"), call([0, 0.5, 0.5, 1], "original_image"), "<answer>7</answer>",
]  # fmt: skip


def episode(id, turns, **env):
    """The environment is real: four tokens for a picture, one for a turn. No answer at the end: a limit has struck."""
    pixels = np.random.default_rng(len(id)).integers(0, 255, (400, 800, 3), dtype=np.uint8)
    picture = open_media(pixels, min_pixels=3136, max_pixels=50_176)
    question = Message(role="user", parts=(picture, f"Which number? {EVIL}"))
    sample = Sample(id=id, messages=(question,), answer="7")
    context = EnvContext(answer=lambda text: extract(text, ("answer_tag",)))
    world = build(EnvConfig(name="crop", min_pixels=3136, max_pixels=50_176, **env), context)
    messages = list(world.reset(sample, 0))
    for number, text in enumerate(turns, 1):
        reply = Message(role="assistant", parts=(text,))
        step = world.step(reply)
        messages += [reply, *(step.messages if number < len(turns) else ())]
    sources, spans = [], []
    for message in messages:
        said = Source.POLICY if message.role == "assistant" else Source.OBSERVATION
        for media in message.media:
            spans.append(MediaSpan(media=media, start=len(sources), length=4, grid=(1, 4, 4)))
            sources += [Source.OBSERVATION] * 4
        sources.append(said)
    count, answered = len(sources), step.done
    trajectory = Trajectory(
        sample_id=id, repeat=0, ids=np.ones(count, np.int64), sources=np.array(sources, np.int8),
        logprobs=np.zeros(count, np.float32), versions=np.zeros(count, np.int32), media=tuple(spans),
        messages=tuple(messages), context=1, end_reason="answered" if answered else "max_turns",
        status="ok" if answered else "overturn", turns=len(turns), outcome=float(answered),
        extracted="7" if answered else None, info=step.info,
    )  # fmt: skip
    return Group(sample=sample, trajectories=(trajectory,), uid=id)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    groups = [episode("first", TURNS), episode("cut", TURNS[:1]), episode("second", TURNS[:3])]
    with closing(TrajectoryWriter(folder, decode)) as writer:
        writer.write(3, groups, SimpleNamespace(decode=str, size_unit=28), version=3)
    return folder


def test_records_know_every_picture_and_where_it_came_from(run):
    first = next(read_trajectories(run, "train", 3))
    images = {image["view"]: image for image in first["images"]}
    assert list(images) == ["original_image", "observation_1", "observation_2", "observation_3"]
    assert [image["source"] for image in images.values()] == [None, "original_image", "observation_1", "original_image"]
    nested = images["observation_2"]
    assert nested["lineage"] == ["original_image", "observation_1"]
    assert nested["place"] == [0.5, 0.5, 1, 1] and nested["box"] == [600, 100, 800, 200]
    assert nested["size"] == [200, 100] and images["original_image"]["size"] == [800, 400]
    # The original as a small copy and as the model saw it; a crop is shown enlarged or shrunk.
    for name, small, seen in (
        ("original_image", (512, 256), (308, 140)),
        ("observation_1", (400, 200), (308, 140)),
        ("observation_2", (200, 100), (196, 112)),
    ):
        image = images[name]
        assert tuple(image["seen"]) == seen
        for file, size in ((image["file"], small), (image["seen_file"], seen)):
            assert Image.open(run / "trajectories" / file).size == size, name


@pytest.fixture(scope="module")
def page(run):
    return write_report(run / "e.html", Report(title="crops", episodes=stored_episodes(run)))


def test_episodes_as_data(page):
    found = page_data(page)["episodes"]
    first, cut, second = found["items"]
    assert [len(one["turns"]) for one in (first, cut, second)] == [5, 1, 3]
    assert first["question"] == f"Which number? {EVIL}" and first["asked"] == 1
    assert [view["name"] for view in first["views"]][1:] == [f"observation_{n}" for n in (1, 2, 3)]
    calls = [call for turn in first["turns"] for call in turn["calls"]]
    assert [call["ok"] for call in calls] == [True, False, True, True]
    assert calls[2]["pixels"] == [600, 100, 800, 200] and calls[1]["reason"] == "source"
    assert [part.get("view") for part in first["turns"][0]["said"]] == [None, 1, None]
    assert (cut["verdict"], cut["status"], cut["end"]) == ("wrong", "overturn", "max_turns")
    assert len(found["pictures"]) == 4 + 1 + 2  # each picture once, as the model saw it
    assert all(url.startswith("data:image/") for url in found["pictures"].values())


@pytest.mark.parametrize(("outcome", "is_score", "verdict"), [(1.0, False, "right"), (0.0, True, "")])
def test_a_score_is_neither_right_nor_wrong(tmp_path, build, outcome, is_score, verdict):
    group = build.group(build.trajectory(0, outcome))
    build.store(tmp_path, group, scores=["count"] if is_score else [])
    (one,) = stored_episodes(tmp_path)["items"]
    assert (one["verdict"], one["outcome"]) == (verdict, outcome)


def test_a_page_has_limits(tmp_path, build, monkeypatch):
    advantages = np.array([0.1, -3.0, 0.2, 0.0, 0.0] * 100, np.float32)
    long = {"response": (5, 6, 7, 12, 8) * 100, "advantages": advantages}
    members = [build.trajectory(n, pictures=[build.media(f"p{n}")], **long) for n in range(4)]
    build.store(tmp_path, *(build.group(one, uid=f"s{n}") for n, one in enumerate(members)))
    monkeypatch.setattr(episodes, "LONGEST", 6)
    monkeypatch.setattr(episodes, "MOST", 3)
    found = stored_episodes(tmp_path)
    assert len(found["items"]) == 3 and found["note"].startswith("The page holds the first 3 episodes")
    assert found["items"][0]["question"] == "How ma … (11 more characters)"
    strip = found["items"][0]["advantage"]
    assert isinstance(strip, list) and len(strip) <= 200 and min(strip) == -3.0
    monkeypatch.setattr(episodes, "MOST_BYTES", 50)  # of texts with 33 characters
    found = stored_episodes(tmp_path)
    assert len(found["items"]) == 2 and len(found["pictures"]) == 1
    assert "first 2 episodes" in found["note"] and "images are left out" in found["note"]


@needs_browser
def test_episodes_in_a_browser(page, browser):
    browser.visit(page.as_uri())
    assert browser.troubles == [] and browser.run("document.title") == "crops"
    browser.until("[...document.querySelectorAll('img')].every(i => i.naturalWidth > 0)")
    turns = "[...document.querySelectorAll('.episode')[0].querySelectorAll('.turn')]"
    assert browser.run(f"{turns}.map(t => t.querySelectorAll('figure').length).join()") == "2,0,3,2,0"
    # Boxes lie where the calls said; in a crop of a crop also in the original; earlier ones dashed.
    boxes = browser.run(
        f"{turns}.map(t => [...t.querySelectorAll('.box')].map(b => {{"
        " const r = b.getBoundingClientRect(), o = b.parentNode.getBoundingClientRect();"
        " return b.className.slice(4) + [(r.x - o.x) / o.width, (r.y - o.y) / o.height,"
        " r.width / o.width, r.height / o.height].map(v => v.toFixed(2)) }).join(' ')).join('|')"
    )
    assert boxes == (
        "0.50,0.00,0.50,0.50||0.75,0.25,0.25,0.25 0.50,0.50,0.50,0.50|earlier0.50,0.00,0.50,0.50 0.00,0.50,0.50,0.50|"
    )
    text = browser.run("document.body.innerText")
    assert "observation_2 ← observation_1 ← original_image: 200x100, seen at 196x112" in text
    assert "failed: source" in text and "before this was shown" in text
    top = "document.querySelectorAll('.episode')[{}].getBoundingClientRect().top"
    browser.press("n", "n")
    assert browser.run(top.format(1)) == pytest.approx(52, abs=3)
    browser.press("p", "ArrowRight", "ArrowRight")
    assert browser.run(f"{turns}[1].getBoundingClientRect().top") == pytest.approx(52, abs=3)
    browser.press("/")
    browser.write("max_turns")
    assert browser.run("document.getElementById('count').textContent") == "2 of 3 episodes"
    browser.press("n")  # a letter of the search, not a key
    assert len(browser.page.screenshot()) > 10_000


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
