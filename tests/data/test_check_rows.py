"""`saccade check-data`: what it counts, what it lists, what it refuses."""

import json

import pytest

from saccade.config import load as load_config
from saccade.data.datasets import load
from saccade.errors import DataError
from saccade.plugins.check_data.canonical_rows import convert
from saccade.plugins.check_data.check_data import check_data, write_fixed
from tests.test_cli import run


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
    report = check_data(mixed, length=length)
    assert (report.rows, report.good, report.acceptable) == (6, 3, False)
    assert [(row.id, row.row) for row in report.bad] == [("gone", 3), ("damaged", 2)]
    assert "damaged.png: cannot be decoded" in report.bad[1].reason
    assert [row.id for row in report.overlong] == ["long"]
    assert report.duplicate_ids == ("twin",) and report.formats == {"rows": "easyr1"}
    assert report.media_kinds == {"path": 3} and report.images == 2
    assert report.gold_rate == pytest.approx(2 / 3)
    assert report.lengths["max"] == 40 and report.lengths["min"] == 1
    assert report.histogram == ((1, 2), (64, 1))
    report = check_data(load_config(mixed, ["data.max_bad_fraction=0.5"]), headers_only=True)
    assert [row.id for row in report.bad] == ["gone"] and report.acceptable  # below the limit
    assert not report.decoded and report.lengths == {}
    tree = json.loads(report.to_json())
    assert tree["bad"][0]["id"] == "gone" and tree["rows"] == 6 and "samples" not in tree
    with pytest.raises(DataError, match=r"set data.train or data.val"):
        check_data(load_config({}))


def test_questions_without_words_are_good_rows_that_are_noted(jsonl, picture):
    picture()
    asked = ["<image>How many?", "<image>", "<image> \n"]
    rows = [{"id": n, "images": ["a.png"], "problem": q, "answer": "1"} for n, q in enumerate(asked)]
    report = check_data(load_config({"data": {"train": jsonl(rows)}}))
    assert report.good == 3 and not report.bad
    assert report.notes == ("2 good rows ask nothing in words, first 1: the question is empty or only <image>",)


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


def test_check_data_knows_what_a_command_refuses(counting, tmp_path, jsonl):
    picture = str(next(counting.parent.rglob("*.png")))
    shown = [{"role": "assistant", "content": [{"type": "image", "image": picture}]}]
    pair = {"prompt": "which?", "chosen": "this", "rejected": "that"}
    rows = [pair, pair | {"margin": -1}, pair | {"chosen": shown}]
    path, fixed = jsonl({"id": f"n{n}"} | row for n, row in enumerate(rows)), tmp_path / "fixed.jsonl"
    check = ["check-data", path, "data.max_bad_fraction=1", "data.allow_outside=true"]
    assert "3, 3 good" in run(*check).stdout
    check += [f"run.out={tmp_path}", "model.path=tiny:qwen2_5_vl"]
    for command, bad in {"dpo": "n2", "reward-model": "n1", "sft": "n2"}.items():
        result = run(*check, "--for", command)
        assert "3, 2 good, 1 bad" in result.stdout and f"  {bad} (row" in result.stdout
    assert run(*check, "--for", "dpo", "--fix", str(fixed)).exit_code == 0
    assert [json.loads(line)["id"] for line in fixed.open()] == ["n0", "n1"]
    for command, reason in {"kto": "expected one of rl, sft, dpo", "dpo": "model.path=tiny"}.items():
        result = run("check-data", path, "--for", command)
        assert result.exit_code == 2 and reason in result.stderr


def test_check_data_counts_what_a_command_leaves_out(tmp_path, jsonl):
    def written(name, rows):
        return jsonl(({"id": f"n{n}"} | r for n, r in enumerate(rows)), name)

    pair = {"prompt": "which?", "chosen": "this", "rejected": "that"}
    tie, long, bad = {"rejected": "this"}, {"chosen": "this " * 400}, {"chosen": ""}
    rows = written("rows.jsonl", [pair, pair | tie, pair | long, pair | bad])
    check = ["check-data", "model.path=tiny:qwen2", f"run.out={tmp_path}", "--for"]
    result = run(*check, "dpo", rows, "data.max_bad_fraction=0.3", "dpo.max_tokens=300")
    assert result.exit_code == 0 and "answers" not in result.stdout
    assert "4, 1 good, 1 bad, 1 overlong, 1 left out" in result.stdout
    assert "1 left out, first n1 (row 2 of rows): a tie prefers neither side" in result.stdout
    assert "tokens, dpo.max_tokens is 300" in result.stdout
    levels = written("levels.jsonl", [{"question": "solve it", "level": "#####\n#@$.#\n#####"}])
    result = run(*check, "rl", levels)
    assert "1, 1 good" in result.stdout and "answers" not in result.stdout
    # A reward model learns from ties, and has a limit of its own.
    own = "reward_model.max_tokens=3000"
    result = run(*check, "reward-model", rows, "data.max_bad_fraction=0.3", own)
    assert "4, 3 good, 1 bad" in result.stdout
    ties = written("ties.jsonl", [pair | tie] * 3)
    result = run(*check, "dpo", ties)
    assert result.exit_code == 2 and "data.train has no usable row" in result.stderr
    assert "3, 0 good, 0 bad, 3 left out" in result.stdout
    assert result.stdout.count("a tie prefers") == 1 and "3 left out, first n0" in result.stdout
    texts = written("texts.jsonl", [{"text": "Once upon a time."}])
    assert "1, 1 good" in run(*check, "sft", texts, "sft.mode=pretrain").stdout


@pytest.mark.parametrize(("body", "ends"), [
    ("1 / 0", "the reward fails on known answers; see the rows above\n"),
    ("return 0.5", "the reward misjudges known answers; see the rows above\n"),
])  # fmt: skip
def test_check_data_says_how_a_reward_fails(body, ends, tmp_path, jsonl):
    (tmp_path / "mine.py").write_text(f"def score(sample):\n    {body}\n")
    rows = jsonl([{"question": "1+1?", "answer": "2"}])
    result = run("check-data", rows, f"reward.terms=[{tmp_path}/mine.py:score]")
    assert result.exit_code == 2 and result.stderr == ends


def test_check_data_counts_rows_that_repeat_or_lack_an_answer(jsonl):
    rows = [{"id": "a", "question": "1+1?", "answer": "2"}] * 3 + [{"question": "why?"}] * 2
    path = jsonl(rows)
    result = run("check-data", path, f"data.val={path}", "reward.terms=[exact]")
    assert "duplicate ids  4, and 6 rows got a suffix" in result.stdout
    assert "note           rows that repeat an earlier one exactly: 6\n" in result.stdout
    assert "2 different rows of data.val are in data.train" in result.stdout
    assert "4 of 10 rows have no answer, and exact abstains" in result.stdout
    result = run("check-data", jsonl([rows[0], rows[-1] | {"answer": []}]), "reward.terms=[exact]")
    assert "1 of 2 rows have no answer, and exact abstains" in result.stdout


def test_whole_numbers_beside_choices_count_from_0(jsonl, caplog):
    caplog.set_level("INFO")
    rows = [{"question": f"{n}?", "choices": ["red", "blue", "green"], "answer": n} for n in (1, 2, 2, 3)]
    result = run("check-data", jsonl(rows, "one.jsonl"), "reward.terms=[choice]")
    assert result.exit_code == 2
    assert "one.jsonl: its answers seem to count the options from 1: 1 times it" in result.stderr
    shifted = jsonl([row | {"answer": str(row["answer"] - 1)} for row in rows], "nil.jsonl")
    assert run("check-data", shifted, "reward.terms=[choice]").exit_code == 0
    assert "nil.jsonl: answers are indices into choices: 0 = A (1 row), 1 = B (2 rows), 2 = C (1 row)" in caplog.text
    caplog.clear()
    letters = run("check-data", jsonl([row | {"answer": "B"} for row in rows]), "reward.terms=[choice]")
    assert letters.exit_code == 0 and "indices" not in caplog.text
    mixed = run("check-data", jsonl([*rows, rows[0] | {"answer": 0}]), "reward.terms=[choice]")
    assert mixed.exit_code == 2 and "write the letter of one (A is the first), or its text" in mixed.stdout


def test_check_data_names_an_unknown_prompt_format_without_a_row(jsonl):
    rows = jsonl([{"question": "1+1?", "answer": "2"}])
    result = run("check-data", rows, "prompt.format=xml", "model.path=tiny:qwen2_5_vl")
    assert result.stderr.startswith("prompt.format=xml: unknown; choose one of think_") and "row" not in result.stderr


def test_check_data_lists_bad_rows_and_writes_the_good_ones(counting, tmp_path):
    with counting.open("a") as file:
        file.write('{"id": "lost", "problem": "<image>?", "answer": "1", "images": ["gone.png"]}\n')
    out, fixed = tmp_path / "report.json", tmp_path / "good.jsonl"
    result = run("check-data", str(counting), "--out", str(out), "--fix", str(fixed))
    assert result.exit_code == 2  # 1 of 25 is more than 1 %
    assert "lost (row 25" in result.stdout and str(fixed) in result.stderr
    assert result.stdout.endswith(f"\n24 of 25 rows can be used; wrote {fixed}, {out}\n")
    assert json.loads(out.read_text())["good"] == 24
    written = fixed.read_text()
    assert run("check-data", str(fixed)).exit_code == 0
    again = run("check-data", str(counting), "--fix", str(fixed))
    assert again.exit_code == 2 and "exists" in again.stderr and fixed.read_text() == written
    assert run("check-data", str(counting), "--fix", str(counting)).exit_code == 2
