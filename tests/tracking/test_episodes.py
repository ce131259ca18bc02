"""An episode turn by turn: which picture a crop came from, where, and a page that shows it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.config import EnvConfig
from saccade.environments import Setting, build
from saccade.media.images import decode, open_media
from saccade.rewards.extract import extract
from saccade.tracking.episodes import write_episodes
from saccade.tracking.trajectories import TrajectoryWriter, read_trajectories
from saccade.types import Group, MediaSpan, Message, Sample, Source, Trajectory
from tests.browser import CHROMIUM, Browser

UNIT = 28
EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def call(box: list[float], source: str) -> str:
    return f"<grounding>{json.dumps({'bbox_2d': box, 'source': source})}</grounding>"


TURNS = [
    f"{EVIL} \0look closer" + call([0.5, 0, 1, 0.5], "original_image"),
    call([0, 0, 1, 1], "observation_9"),
    call([0.5, 0.5, 1, 1], "observation_1"),
    call([0, 0.5, 0.5, 1], "original_image"),
    "<answer>7</answer>",
]


def episode(id: str, turns: list[str], **env: Any) -> Group:
    """The environment is real; tokens are stand-ins, four for each picture and one for each turn.
    Without an answer at the end a limit has struck, and the last observation is not shown.
    """
    pixels = np.random.default_rng(len(id)).integers(0, 255, (400, 800, 3), dtype=np.uint8)
    picture = open_media(pixels, min_pixels=3136, max_pixels=50_176)
    question = Message(role="user", parts=(picture, f"Which number? {EVIL}"))
    sample = Sample(id=id, messages=(question,), answer="7")
    setting = Setting(answer=lambda text: extract(text, ("answer_tag",)))
    world = build(EnvConfig(name="crop", min_pixels=3136, max_pixels=50_176, **env), setting)
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
        sample_id=id,
        repeat=0,
        ids=np.ones(count, np.int64),
        sources=np.array(sources, np.int8),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        media=tuple(spans),
        messages=tuple(messages),
        context=1,
        end_reason="answered" if answered else "max_turns",
        status="ok" if answered else "overturn",
        turns=len(turns),
        outcome=float(answered),
        extracted="7" if answered else None,
        info=step.info,
    )
    return Group(sample=sample, trajectories=(trajectory,), uid=id)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    groups = [episode("first", TURNS), episode("cut", TURNS[:1]), episode("second", TURNS[:3])]
    with TrajectoryWriter(folder) as writer:
        writer.write(
            3,
            groups,
            decode_text=lambda ids: "x" * len(ids),
            image_bytes=decode,
            version=3,
            unit=UNIT,
        )
    return folder


def test_records_know_every_picture_and_where_it_came_from(run: Path) -> None:
    first = next(read_trajectories(run, "train", 3))
    images = {image["view"]: image for image in first["images"]}
    assert list(images) == ["original_image", "observation_1", "observation_2", "observation_3"]
    assert [image["source"] for image in images.values()] == [
        None,
        "original_image",
        "observation_1",
        "original_image",
    ]
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


def test_the_page_without_a_browser(run: Path) -> None:
    page = write_episodes(run / "e.html", read_trajectories(run, "train", 3), run / "trajectories")
    assert page is not None
    text = page.read_text()
    assert text.count('<article class="episode">') == 2  # the one with a single turn is not there
    assert text.count('<section class="turn">') == 8 and "<script>document" not in text
    assert "\0" not in text and "␀look" in text
    boxes = [line.split(" ", 1)[1] for line in text.split("<rect class=")[1:] if "box" in line[:5]]
    assert boxes[0].startswith('x="400.00" y="0.00" width="400.00" height="200.00"')
    assert boxes[1].startswith('x="600.00" y="100.00" width="200.00" height="100.00"')  # the root
    assert boxes[2].startswith('x="200.00" y="100.00" width="200.00" height="100.00"')
    assert "observation_2 ← observation_1 ← original_image" in text
    assert "failed: source" in text and "before this was shown" in text
    assert text.count("data:image/") == text.count("<image ") == 4 + 2  # each picture once
    alone = [record for record in read_trajectories(run, "train", 3) if record["turns"] == 1]
    assert write_episodes(run / "none.html", alone, run / "trajectories") is None
    assert not (run / "none.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    records = read_trajectories(run, "train", 3)
    page = write_episodes(tmp_path / "episodes.html", records, run / "trajectories")
    assert page is not None
    with closing(Browser(tmp_path / "profile")) as browser:
        browser.visit(page.as_uri())
        where = "document.getElementById('where')?.textContent"
        browser.until(f"{where} === 'episode 1 of 2, turn 1 of 5'")
        shown = "[...document.querySelectorAll('.turn h3')].filter(e => e.checkVisibility())"
        assert browser.run(f"{shown}.map(e => e.textContent).join()") == "Turn 1"
        pictures = "[...document.querySelectorAll('figure svg')].filter(e => e.checkVisibility())"
        assert browser.run(f"{pictures}.length") == 2
        # The box lies where the call said: the upper right quarter of the picture on the screen.
        box = browser.run(
            f"(() => {{ const svg = {pictures}[0], r = svg.querySelector('.box');"
            " const p = svg.getScreenCTM(), b = r.getBBox(), o = svg.getBoundingClientRect();"
            " return [(b.x * p.a + p.e - o.x) / o.width, (b.y * p.d + p.f - o.y) / o.height,"
            " b.width * p.a / o.width, b.height * p.d / o.height]"
            ".map(v => v.toFixed(2)).join() })()"
        )
        assert box == "0.50,0.00,0.50,0.50"
        drawn = "document.querySelector('defs image')"
        assert browser.run(f"{drawn}.href.baseVal.startsWith('data:image/')")
        for keys, said in (
            (["ArrowRight"] * 2, "episode 1 of 2, turn 3 of 5"),
            (["ArrowLeft"], "episode 1 of 2, turn 2 of 5"),
            (["n"], "episode 2 of 2, turn 1 of 3"),
            (["ArrowLeft"], "episode 1 of 2, turn 5 of 5"),
            (["ArrowRight", "ArrowRight"], "episode 2 of 2, turn 2 of 3"),
            (["p", "p"], "episode 1 of 2, turn 1 of 5"),
            (["a"], "episode 1 of 2, all 5 turns"),
        ):
            for key in keys:
                for kind in ("keyDown", "keyUp"):
                    browser.call("Input.dispatchKeyEvent", type=kind, key=key)
            assert browser.run(where) == said, keys
        assert browser.run(f"{shown}.length") == 5
        assert browser.run("document.title") == "Episodes turn by turn"  # nothing foreign ran
        browser.run("document.getElementById('after').click()")
        assert browser.run(where) == "episode 2 of 2, all 3 turns"
        shot = browser.call("Page.captureScreenshot")["data"]
        assert len(shot) > 10_000
