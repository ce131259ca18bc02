import json

import pytest

from saccade.config import load as load_config
from saccade.data.datasets import load
from saccade.errors import DataError
from saccade.plugins.check_data.canonical_rows import convert
from saccade.plugins.check_data.check_data import check_data, write_fixed


@pytest.fixture
def mixed(jsonl, noise, picture):
    """Six rows: one broken in its pixels only, one with a missing file, two with the same id."""
    damaged = noise("damaged.png")
    data = bytearray(damaged.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    damaged.write_bytes(data)
    picture()
    rows = [
        {"id": "ok", "images": ["a.png"], "problem": "<image>?", "answer": "1"},
        {"id": "damaged", "images": ["damaged.png"], "problem": "<image>?", "answer": "1"},
        {"id": "gone", "images": ["gone.png"], "problem": "<image>?", "answer": "1"},
        {"id": "twin", "images": [], "problem": "x" * 40, "answer": ""},
        {"id": "twin", "images": [], "problem": "y", "answer": "1"},
        {"id": "long", "images": [], "problem": "z" * 500, "answer": "1"},
    ]
    return load_config({"data": {"train": jsonl(rows), "max_prompt_tokens": 100}})


def length(sample):
    return sum(len(message.text) for message in sample.messages)


def test_a_report_lists_what_is_wrong(mixed):
    report = check_data(mixed, length=length, self_test=lambda samples: {"asked": len(samples)})
    assert (report.rows, report.good, report.acceptable) == (6, 3, False)
    assert [(row.id, row.row) for row in report.bad] == [("gone", 3), ("damaged", 2)]
    assert "damaged.png: cannot be decoded" in report.bad[1].reason
    assert [row.id for row in report.overlong] == ["long"]
    assert report.duplicate_ids == ("twin",) and report.formats == {"rows": "easyr1"}
    assert report.media_kinds == {"path": 3} and report.images == 2
    assert report.gold_rate == pytest.approx(2 / 3)
    assert report.lengths["max"] == 40 and report.lengths["min"] == 1
    assert report.histogram == ((1, 2), (64, 1))
    assert report.self_test == {"asked": 3}


def test_questions_without_words_are_good_rows_that_are_noted(jsonl, picture):
    picture()
    asked = ["<image>How many?", "<image>", "<image> \n"]
    rows = [{"id": n, "images": ["a.png"], "problem": q, "answer": "1"} for n, q in enumerate(asked)]
    report = check_data(load_config({"data": {"train": jsonl(rows)}}))
    assert report.good == 3 and not report.bad
    assert report.notes == ("2 good rows ask nothing in words, first 1: the question is empty or only <image>",)


def test_what_a_report_depends_on(mixed):
    report = check_data(load_config(mixed, ["data.max_bad_fraction=0.5"]), headers_only=True)
    assert [row.id for row in report.bad] == ["gone"] and report.acceptable  # below the limit
    assert not report.decoded and report.lengths == {}
    tree = json.loads(report.to_json())
    assert tree["bad"][0]["id"] == "gone" and tree["rows"] == 6 and "samples" not in tree
    with pytest.raises(DataError, match=r"set data.train or data.val"):
        check_data(load_config({}))


def test_a_fixed_copy_holds_the_good_rows(mixed, tmp_path):
    report = check_data(mixed, length=length)
    written = write_fixed(report, tmp_path / "out" / "clean.jsonl")
    assert written == [tmp_path / "out" / "clean.jsonl"]
    config = load_config({"data.train": str(written[0])})
    again = load(config.data.train, config.data)
    assert again.samples == report.samples["train"] and again.formats == {"clean": "messages"}
    both = load_config(config, [f"data.val={written[0]}"])
    written = write_fixed(check_data(both), tmp_path / "clean.jsonl")
    assert [path.name for path in written] == ["clean.train.jsonl", "clean.val.jsonl"]


def test_a_column_that_is_no_json_leaves_the_file_as_it_was(tmp_path, ask):
    (tmp_path / "clean.jsonl").write_text("before")
    with pytest.raises(DataError, match="row b: a column cannot be written as JSON"):
        convert([ask("?", id="a"), ask("?", id="b", extra={"x": b"1"})], tmp_path / "clean.jsonl")
    assert (tmp_path / "clean.jsonl").read_text() == "before"
