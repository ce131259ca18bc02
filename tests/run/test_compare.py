"""Two evaluations, item by item: tables, test, and the page with pictures of the questions that changed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saccade.cli import app
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.evaluation.compare import compare, mcnemar
from saccade.plugins.reports.comparison import paired_difference
from tests.browser import needs_browser, page_data
from tests.run.conftest import evaluation


def written(folder, scores, picture, **more):
    """An evaluation: a score, or several, for each question; None was not scored."""
    rows = []
    for id, own in scores.items():
        for repeat, score in enumerate(own if isinstance(own, list) else [own]):
            row = {"set": "geo", "id": id, "score": score, "response": f"<answer>{score}</answer>", "repeat": repeat}
            row |= {"prompt": "How long?", "gold": "7", "extracted": str(score), "status": "ok", "tokens": 3}
            row |= {"extra": {"category": "even" if int(id) % 2 == 0 else "odd"}, "parts": {}, "end_reason": "answered"}
            medium = {"hash": "a" * 64, "path": str(picture), "size": [56, 56]}
            rows.append(row | {"media": [medium]} | more)
    return evaluation(folder, rows, {})


@pytest.fixture
def folders(tmp_path, image):
    (tmp_path / "a.png").write_bytes(image().data)
    before = dict.fromkeys(map(str, range(40)), 0.0) | {"0": 1.0, "1": 1.0, "50": 1.0}
    after = {id: float(int(id) in (1, *range(10, 22))) for id in map(str, range(40))} | {"2": [0.0, 1.0], "3": None}
    return written(tmp_path / "base", before, tmp_path / "a.png"), written(
        tmp_path / "tuned", after, tmp_path / "a.png"
    )


def test_the_difference_is_that_of_the_items_in_both(folders):
    tables, notes, page = compare(*folders)
    (name, items, a, b, change, gained, lost, p) = tables[0].rows[0]
    assert (name, items.value, gained.value, lost.value) == ("geo", 39, 12, 1)  # 3 was not scored, 50 is in A only
    first = [float(id in (0, 1)) for id in range(40) if id != 3]
    second = [0.5 if id == 2 else float(id == 1 or 10 <= id < 22) for id in range(40) if id != 3]
    assert (a.value, b.value) == pytest.approx((2 / 39, 13.5 / 39))
    assert (change.value, change.low, change.high) == pytest.approx(paired_difference(first, second))
    assert change.high - change.low < (b.high - b.low) + (a.high - a.low)
    assert p.value == mcnemar(12, 1) == pytest.approx(2 * (1 + 13) / 2**13)
    assert [row[0] for row in tables[1].rows] == ["even", "odd"]
    data = page_data(page)
    shown = [(one["set"], one["id"], one["by"], one["verdict"]) for one in data["episodes"]["items"]]
    assert shown[:3] == [
        ("geo · lost", "0", "A", "right"),
        ("geo · lost", "0", "B", "wrong"),
        ("geo · gained", "10", "A", "wrong"),
    ]
    assert shown[-3:] == [
        ("geo · better", "2", who, verdict) for who, verdict in (("A", "wrong"), ("B", "wrong"), ("B", "right"))
    ]
    assert len(data["episodes"]["pictures"]) == 1 and data["episodes"]["note"] == "14 of 39 questions changed."
    assert data["notes"] == notes and notes[0].startswith("2 scored items are in")


def test_what_else_differs_is_said(tmp_path, folders):
    scores, other = dict.fromkeys("01", 1.0), {"hash": "b" * 64, "path": "", "size": [56, 56]}
    again = written(tmp_path / "again", scores, tmp_path / "a.png", media=[other], gold="8")
    for folder, sampling in zip((folders[0], again), ("greedy", "4 answers, temperature 1"), strict=True):
        (folder / "manifest.json").write_text(json.dumps({"answers": {"model": str(folder), "sampling": sampling}}))
    assert compare(folders[0], again)[1] == [
        f"39 scored items are in {folders[0]} only and do not count.",
        "The sampling differs: greedy in A, 4 answers, temperature 1 in B.",
        "2 questions have other words, pictures or golds in A and B.",
    ]
    own = {"sampling": "greedy", "sampling of geo": "4 answers", "sampling of other": "8 answers", "engine": "vllm"}
    for folder, answers in zip((folders[0], again), ({"sampling": "greedy"}, own), strict=True):
        (folder / "manifest.json").write_text(json.dumps({"answers": answers}))
    assert compare(folders[0], again)[1][1:-1] == ["The sampling of geo differs: greedy in A, 4 answers in B."]
    assert compare(again, folders[0])[1][1:-1] == ["The sampling of geo differs: 4 answers in A, greedy in B."]


def test_orders_of_the_options_are_one_question(tmp_path, image):
    (tmp_path / "a.png").write_bytes(image().data)
    more = {"extra": {"rotation_of": "one"}, "response": ""}
    sides = [
        written(tmp_path / name, {"0": 1.0, "1": score}, tmp_path / "a.png", **more)
        for name, score in (("a", 0.0), ("b", 1.0))
    ]
    tables, _, page = compare(*sides)
    (name, items, a, b, *_) = tables[0].rows[0]
    assert (name, items.value, a.value, b.value) == ("geo", 1, 0.5, 1)
    said = [one["turns"][0]["said"][0]["text"] for one in page_data(page)["episodes"]["items"]]
    assert said == [""] * 4  # nothing was said


def test_pairs_and_what_cannot_be_compared(tmp_path, folders):
    sides = [{"chosen": {"preference": good}, "rejected": {"preference": 0.5}} for good in (0.2, 0.9)]
    rows = [{"set": "pairs", "id": "1", **side} for side in sides]
    models = [evaluation(tmp_path / name, [row], {}) for name, row in zip(("weak", "strong"), rows, strict=True)]
    assert [cell.value for cell in compare(*models)[0][0].rows[0][1:5]] == [1, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"no scored item is in both evaluations: .*base has geo and .*weak has pair"):
        compare(folders[0], models[0])
    others = written(tmp_path / "others", {"100": 1.0}, tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"others has geo, whose rows have other ids; evaluate the same sets"):
        compare(folders[0], others)
    with pytest.raises(ConfigError, match=rf"no evaluation: it has no samples\.jsonl; give one such as {folders[0]}"):
        compare(folders[0], tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"saccade eval \S+/run/config\.yaml model\.path=\S+/checkpoints/step-2"):
        compare(tmp_path / "run", folders[0])
    (folders[0] / "manifest.json").write_text('{"sets": [{"name": "geo"}, {"name": "more"}]}')  # broken off before more
    assert compare(*folders)[1][0] == f"{folders[0]}: not finished: there are no results of geo, more yet."
    with pytest.raises(EnvironmentProblem, match="use --out FILE where"):
        compare(*folders, Path("/proc/a.html"))
    samples = models[0] / "samples.jsonl"
    for more, why in (({}, "row 1 has no id"), ({"id": "1", "score": None}, "no answer has a score")):
        samples.write_text(json.dumps({"set": "a"} | more))
        with pytest.raises(ConfigError, match=why):
            compare(*models)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1


@needs_browser
def test_the_page_shows_both_answers(folders, tmp_path, browser):
    done = CliRunner().invoke(app, ["compare", *map(str, folders), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and "+0.295 [" in done.output and f"wrote {tmp_path / 'page.html'}" in done.output
    browser.visit((tmp_path / "page.html").as_uri())
    assert browser.troubles == []
    card = "document.querySelector('.episode')"
    chips = f"[...{card}.querySelectorAll('.answer .chip:first-child')]"
    assert browser.run(f"{chips}.map(c => c.textContent).join()") == "A,B"
    browser.until(f"{card}.querySelector('img').naturalWidth === 56")
    sets = "[...document.querySelector('select').options].map(o => o.textContent).join()"
    assert browser.run(sets) == "all sets and steps,geo · lost,geo · gained,geo · better"
