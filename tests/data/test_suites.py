"""Public sets in the layout in which they are downloaded, at the smallest size."""

from pathlib import Path
from typing import Any

import pytest

from saccade.checks import check
from saccade.config import EvalConfig, RewardConfig, load
from saccade.data.chats import RowError
from saccade.data.dataset import ROTATION_OF
from saccade.data.datasets import Dataset
from saccade.data.datasets import load as read
from saccade.errors import ConfigError
from saccade.media.images import decode
from saccade.plugins.suites import suites
from tests.public_sets import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, image: Any) -> Path:
    return write_all(tmp_path_factory.mktemp("public"), image)


def loaded(name: str, folder: Path) -> Dataset:
    config = load(None).data
    source = suites.suite_source(name, EvalConfig(folder=str(folder)))
    return read([source], config, change=suites.SUITES[name].row)


def test_vstar_and_visual_probe(folder: Path) -> None:
    first, second = loaded("vstar", folder).samples
    assert first.messages[0].text == "What is the material of the glove?"
    assert first.choices == ("rubber", "cotton") and first.answer == "B"
    assert (first.id, first.data_source) == ("0", "vstar")
    assert [s.extra["category"] for s in (first, second)] == ["direct_attributes", "relative_position"]
    assert (first.media[0].width, first.media[0].height) == (200, 100)
    assert decode(second.media[0]).shape == (100, 200, 3)
    for level in ("easy", "medium", "hard"):
        (sample,) = loaded(f"visualprobe_{level}", folder).samples
        assert sample.answer == "42" and sample.data_source == f"visualprobe_{level}"
        assert sample.messages[0].text.strip() == "What number is on the bus?"
        assert sample.id == f"{level.capitalize()}-1" and sample.media[0].width == 150


def test_hr_bench(folder: Path) -> None:
    samples = loaded("hrbench8k", folder).samples
    assert len(samples) == 8 and {s.extra["category"] for s in samples} == {"single", "cross"}
    assert [s.answer for s in samples[:4]] == ["A", "D", "C", "B"]
    assert all(s.choices["ABCD".index(s.answer)] == "red" for s in samples)  # type: ignore[arg-type]
    same = [s.extra[ROTATION_OF] for s in samples]
    assert len(set(same[:4])) == len(set(same[4:])) == 1 and len(set(same)) == 2
    assert len({s.media[0].hash for s in samples}) == 2  # each picture is kept once


def test_broken_rows_are_set_aside(folder: Path) -> None:
    for name, row, said in (
        ("vstar", {"text": "What?\n(A) one", "label": "A"}, "lists no options"),
        ("vstar", {"label": "A"}, "no column 'text'"),
        ("hrbench4k", {"question": "?", "image": 3}, "neither base64 nor bytes"),
        ("visualprobe_easy", {"problem": "?"}, "no column 'images'"),
    ):
        with pytest.raises(RowError, match=said):
            suites.SUITES[name].row(row)


def test_what_is_missing_is_named_with_the_line_that_fetches_it(tmp_path: Path) -> None:
    own = ["model.path=tiny:qwen2_5_vl", f"eval.folder={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        check(load(None, [*own, "eval.suites=[vstar,hrbench8k,vstarr]"]), "eval")
    said = str(caught.value)
    assert f"vstar reads {tmp_path}/vstar_bench/test_questions.jsonl" in said
    fetch = "hf download DreamMr/HR-Bench --repo-type dataset --local-dir"
    assert f"`{fetch} {tmp_path}/HR-Bench`" in said and "eval.folder" in said
    assert "no suite 'vstarr'; expected one of vstar, visualprobe_easy" in said


def test_suites_are_scored_as_their_authors_do() -> None:
    config = EvalConfig(suites=("vstar", "visualprobe_hard"))
    plain = suites.with_rewards(RewardConfig(terms=("math",)), config)
    assert plain.by_source == {"vstar": "choice", "visualprobe_hard": "exact"}
    judge: Any = {"url": "http://127.0.0.1:1/v1"}
    judged = suites.with_rewards(RewardConfig(judge=judge, by_source={"vstar": "exact"}), config)
    assert judged.by_source == {"vstar": "exact", "visualprobe_hard": "hybrid"}
    assert suites.with_rewards(plain, EvalConfig()) is plain
