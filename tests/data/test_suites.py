"""Public sets in the layout in which they are downloaded, at the smallest size."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.checks import check
from saccade.config import DataSource, EvalConfig, RewardConfig, load
from saccade.data.chats import RowError
from saccade.data.dataset import ROTATION_OF
from saccade.data.datasets import Dataset
from saccade.data.datasets import load as read
from saccade.errors import ConfigError, DataError
from saccade.media.images import decode
from saccade.plugins.dry_run.plan import plan
from saccade.plugins.evaluation import evaluate
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.suites import suites
from saccade.plugins.suites.rotations import rotations
from saccade.rewards.resolve import resolve_recipes
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS
from saccade.types import Message, Sample
from tests.browser import page_data
from tests.public_sets import ROWS, write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, image: Any) -> Path:
    return write_all(tmp_path_factory.mktemp("public"), image)


def loaded(name: str, folder: Path) -> Dataset:
    config = load(None).data
    sources = suites.suite_sources(name, EvalConfig(folder=str(folder)))
    return read(sources, config, change=suites.SUITES[name].row)


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


def test_rows_of_every_set(folder: Path) -> None:
    assert ROWS.keys() == set(suites.SUITES)
    found = {
        name: [(s.messages[0].text.strip(), s.choices, s.answer, len(s.media)) for s in loaded(name, folder).samples]
        for name, suite in suites.SUITES.items()
        if suite.mapping == "none"
    }
    assert found["clevr_count"] == [("How many items are there?", (), "5", 1)]
    assert found["geoqa"] == [("How many items?", (), "\\frac{1}{2}\\text{m}", 1)]
    decimals = "How long? (unit: cm) The answer is a number with one decimal."
    assert found["mathvista"] == [("Which is longer?", ("left", "right"), "right", 1), (decimals, (), "1.2", 1)]
    shown = "Answer the question that the picture shows."
    assert found["mathverse"] == [("Find the angle.", ("145°", "140°", "130°"), "B", 1), (shown, (), "12", 1)]
    assert [row[0] for row in found["mathvision"]] == ["Which of  and image 2?", "How many?"]
    assert found["wemath"][0][1:] == (("3", "4.5", "5", "No correct answer"), "B", 1)
    assert found["mmmu"] == [
        ("What does  show, as image 1 is?", ("a cat", "a dog"), "B", 1),
        ("Which fits ?\n(A) \n(B)", (), "A", 3),
        ("How many?", (), ("24.3", "24.30"), 1),
    ]
    assert [(row[0], row[2], len(row[1])) for row in found["mmmu_pro"]] == [("What does  show?", "J", 10)]
    assert found["mmmu_pro_vision"] == [(shown, (), "B", 1)]
    listed = ("The bag, on the book.", "The cat is on it.", "None", "Both")
    assert found["mmstar"] == [("Which holds?", listed, "B", 1)]
    assert [row[0] for row in found["mmbench"]] == ["Which is it?"] * 2 + ["Look.\nWhich is it?"]
    assert [row[1:3] for row in found["mmbench"]][:2] == [(("a cat", "a dog"), "B"), (("a dog", "a cat"), "A")]
    assert [s.extra[ROTATION_OF] for s in loaded("mmbench", folder).samples] == ["241", "241", "242"]
    named = ("What eats grass?", ("fox", "3", "hare", "2"), "C", 1)
    assert found["ai2d"] == [named, ("Which label shows the fox?", (), "D", 1)]
    assert [row[1:3] for row in found["realworldqa"]] == [(("Left", "Right"), "B"), ((), "Yes")]
    assert [s.id for s in loaded("pope", folder).samples] == ["random-1"]
    assert found["docvqa"] == [("What is the date?", (), ("1/8/93", "8 January"), 1)]
    assert found["dynamath"] == [("What is the ratio?", (), "0.643", 1), ("Is f even?", ("Yes", "No"), "B", 1)]
    assert [s.extra[ROTATION_OF] for s in loaded("dynamath", folder).samples] == ["7", "7"]
    assert found["puzzlevqa"] == [("What is the missing color?", ("orange", "red", "blue"), "red", 1)]
    assert found["logicvista"] == [("Which choices (A, B, C, or D) fit?", (), "A, C", 1)]
    assert found["nlvr"] == [("Is this true or false of the picture: There is a tower.", (), "true", 1)]
    assert found["tabmwp"][0] == ("What is the mean? (unit: $)", (), "1,084.5", 1)
    assert found["mme_realworld"] == [("Which colour?", ("red", "blue", "green", "white", "not shown"), "C", 1)]
    assert found["gsm8k"] == [("How many clips?", (), "1,072", 0)]
    ((_, options, letter, _),) = found["gpqa_diamond"]
    assert sorted(options) == ["kaon", "muon", "pion", "proton"] and options["ABCD".index(str(letter))] == "muon"
    assert found["mmar"] == [("Who speaks?", ("a child", "a man"), "a man", 1)]


def test_real_golds_are_right_and_those_of_other_rows_wrong(shared: Path) -> None:
    for name, file, most in (("gsm8k", "gsm8k.test.jsonl.gz", None), ("math500", "math500.jsonl.gz", 60)):
        verifier = VERIFIERS[suites.SUITES[name].verifier].function
        source = DataSource(path=str(shared / name / file), max_samples=most)
        golds = [str(s.answer) for s in read([source], load(None).data, change=suites.SUITES[name].row).samples]
        for gold, other in zip(golds, golds[1:] + golds[:1], strict=True):
            sample = RewardSample(id="a", response=f"<think>a</think><answer>{gold}</answer>", answer=gold)
            assert verifier(sample).value == 1, gold
            same = gold.removeprefix("x=") == other.removeprefix("x=")
            assert verifier(replace(sample, answer=other)).value == float(same), (gold, other)


def test_broken_rows_are_set_aside(folder: Path) -> None:
    for name, row, said in (
        ("vstar", {"text": "What?\n(A) one", "label": "A", "question_id": 1, "image": "a.jpg"}, "lists no options"),
        ("vstar", {"label": "A", "question_id": 1}, "no column 'text'"),
        ("chartqa", {"question": "?", "answer": "1", "image": 3}, "neither base64, bytes"),
        ("visualprobe_easy", {"problem": "?"}, "no column 'images'"),
        ("mmmu", ROWS["mmmu"][0] | {"options": "['a"}, "options .* cannot be read"),
    ):
        with pytest.raises(RowError, match=said):
            suites.SUITES[name].row(row)


def test_what_is_missing_is_named_with_the_line_that_fetches_it(tmp_path: Path) -> None:
    own = ["model.path=tiny:qwen2_5_vl", f"eval.folder={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        check(load(None, [*own, "eval.suites=[vstar,pope,vstarr]"]), "eval")
    said = str(caught.value)
    assert f"public set craigwu/vstar_bench and reads {tmp_path}/vstar_bench/test_questions.jsonl" in said
    fetch = "hf download lmms-lab-encoder/POPE --repo-type dataset --local-dir"
    assert f"`{fetch} {tmp_path}/POPE --include 'data/test-*.parquet'`" in said
    commands = {name: suite.command("a") for name, suite in suites.SUITES.items()}
    beside = {name for name, line in commands.items() if line.startswith("hf") and "--include" not in line}
    assert beside == {  # their pictures or sounds are other files
        "superclevr", "geoqa", "vstar", "visualprobe_easy", "visualprobe_medium", "visualprobe_hard", "mmar", "hpdv3",
        "omnireward_t2i", "omnireward_t2v", "omnireward_t2a", "videogen_rewardbench",
    }  # fmt: skip
    assert "eval.suites=vstarr: no such name; did you mean 'vstar'? Expected one of clevr_count, superclevr" in said


def test_what_makes_a_score_unlike_the_published_one_is_said() -> None:
    assert suites.unusual("gsm8k", 1, 1319) == suites.unusual("clevr_count", 1, 7) == []
    assert suites.unusual("gsm8k", 1, None) == []
    assert suites.unusual("aime24", 1, 29) == [
        (logging.INFO, "aime24: usually reported as avg@32; this is val.n=1"),
        (logging.WARNING, "aime24: 29 rows were read, HuggingFaceH4/aime_2024 has 30; see that its files are whole"),
    ]


def test_suites_alone(folder: Path) -> None:
    """A plan counts their rows; where the file names rows that are not here, it is said how to do without."""
    own = ["model.path=tiny:qwen2_5_vl", f"eval.folder={folder}", "eval.suites=[vstar,gpqa_diamond,mathvision,mmau]"]
    assert dict(plan(load(None, own), "eval"))["rows"] == "6"
    absent = [*own, "data.val=absent.jsonl"]
    with pytest.raises(
        ConfigError, match=r"absent\.jsonl does not exist; .*, or data\.val=\[\] to evaluate the suites alone"
    ):
        check(load(None, absent), "eval")
    check(load(None, [*absent, "data.val=[]"]), "eval")


def test_suites_are_scored_as_their_authors_do() -> None:
    config = EvalConfig(suites=("vstar", "visualprobe_hard"))
    run = RewardConfig(terms=("math", "format:boxed"), combine="gate(format)", accuracy_term="math")
    plain = suites.with_rewards(run, config)
    assert plain.by_source == {"vstar": {"terms": ["choice"]}, "visualprobe_hard": {"terms": ["exact"]}}
    recipes, others = resolve_recipes(plain, "none", 9, None)
    assert (recipes["vstar"].gate, recipes["vstar"].outcome, others and others.gate) == (None, 0, 1)
    judge: Any = {"url": "http://127.0.0.1:1/v1"}
    judged = suites.with_rewards(RewardConfig(judge=judge, by_source={"vstar": "exact"}), config)
    assert judged.by_source == {"vstar": "exact", "visualprobe_hard": {"terms": ["hybrid"]}}
    assert suites.with_rewards(plain, EvalConfig()) is plain
    several = RewardSample(id="a", response="<think>a</think><answer>C and A</answer>", answer="A, C")  # in any order
    assert VERIFIERS[suites.SUITES["logicvista"].verifier].function(several).value == 1


def test_options_are_turned_with_their_gold() -> None:
    asked = Message(role="user", parts=("Which?\n(A) a dog\n(B) a cat\n(C) a cow\nSay it.",))
    row = Sample(id="q", messages=(asked,), choices=("a dog", "a cat", "a cow"), answer=("B", "a cat"))
    assert [(one.choices[0], one.answer, one.extra[ROTATION_OF]) for one in rotations(row)] == [
        ("a dog", ("B", "a cat"), "q"),
        ("a cat", ("A", "a cat"), "q"),
        ("a cow", ("C", "a cat"), "q"),
    ]
    listed = [one.answer for one in rotations(replace(row, answer=("(B)", "b. a cat", "A, C", "4.5")))]
    assert listed[1] == ("(A)", "a cat", "B, C", "4.5")
    assert rotations(row)[2].messages[0].text == "Which?\n(A) a cow\n(B) a dog\n(C) a cat\nSay it."
    assert len(rotations(replace(row, choices=(), answer="4"))) == 1
    with pytest.raises(ConfigError, match="cannot be turned"):
        rotations(replace(row, messages=(Message(role="user", parts=("A: a dog",)),)))
    said = [*suites.problems(EvalConfig(suites=("hrbench4k:circular", "gsm8k:circular", "vstar:circle", "a,b")))]
    assert "rotations in its file; try hrbench4k" in said[0] and "has no options to turn; try gsm8k" in said[1]
    assert "did you mean 'vstar'" in said[2] and said[3].endswith("in brackets, eval.suites=[a,b]")


def test_too_many_bad_rows_of_a_suite_name_the_set(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vstar_bench").mkdir()
    (tmp_path / "vstar_bench" / "test_questions.jsonl").write_text('{"text": "What?", "label": "A"}\n')
    own = ["model.path=tiny:qwen2_5_vl", "eval.suites=[vstar]", f"eval.folder={tmp_path}"]
    with pytest.raises(DataError) as caught:
        evaluate.run(load(None, own), out=tmp_path / "eval")
    said = str(caught.value)
    assert "eval.suites: vstar: " in said and "read as those of craigwu/vstar_bench" in said
    assert "check-data" not in said


def test_all_suites_are_asked_and_scored(folder: Path, tmp_path: Path, rewards_here: None) -> None:
    """By a model that sees and hears; rewards are tested on the right answers before."""
    own = ["model.path=tiny:qwen2_5_omni", "prompt.format={vstar: boxed}", "val.max_tokens=4", "reward.workers=1"]
    own += ["reward.terms=[count, format:think_answer]", "reward.combine=gate(format)", "reward.accuracy_term=count"]
    own += [f"eval.suites=[{','.join(suites.SUITES)},vstar:circular]", f"eval.folder={folder}", "data.max_pixels=3136"]
    found = evaluate.run(load(None, own), out=tmp_path / "eval")
    turned = found.pop("vstar:circular")
    assert list(found) == list(suites.SUITES)
    assert turned["items"] == 4 and turned["all_rotations"] == turned["accuracy"] == 0  # two questions of two options
    rows = [row for row in read_lines(tmp_path / "eval" / "samples.jsonl") if row["set"] == "vstar:circular"]
    assert [(row["id"], row["gold"]) for row in rows[:2]] == [("0", "B"), ("0~1", "A")]
    assert "(A) rubber\n(B) cotton" in rows[0]["prompt"] and "(A) cotton\n(B) rubber" in rows[1]["prompt"]
    assert "\\boxed{" in rows[0]["prompt"]  # the prompt of the set, turned or not
    for name, result in found.items():
        assert result["left_out"] == 0 and result["error_rate"] == result["abstain_rate"] == 0, name
        assert result["accuracy"] == 0 and result["items"] == {"imagerewarddb": 1}.get(name, len(ROWS[name])), name
    assert found["wemath"]["strict"] == found["wemath"]["loose"] == found["rewardbench"]["section_mean"] == 0
    assert found["rewardbench"]["by_category"].keys() == {"Chat"}
    assert found["vl_rewardbench"]["by_category"].keys() == {"hallucination"}
    assert found["logicvista"]["by_category"].keys() == {"inductive"} and found["dynamath"]["all_rotations"] == 0
    assert found["mathvista"]["by_category"].keys() == {"figure question answering"}
    answers_that_are_right_now_are_scored_as_the_suites_say(tmp_path, {**found, "vstar:circular": turned})


def answers_that_are_right_now_are_scored_as_the_suites_say(folder: Path, found: dict[str, Any]) -> None:
    """By the rewards of the quickstart, which has none for suites: the same numbers and tables, and a report."""
    samples = folder / "eval" / "samples.jsonl"
    rows = read_lines(samples)
    for row in rows:
        gold = row["gold"][0] if isinstance(row["gold"], list) else row["gold"]
        row["response"] = f"<think>a</think><answer>{gold}</answer>" if row["id"] != "0~1" else "none"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["reward.terms=[count, format:think_answer]", "reward.combine=gate(format)", "eval.suites=[vstar,gsm8k]"]
    check(load(None, options), "rescore", ["reward.terms", "eval.suites"])
    again = evaluate.run(load(None, options), out=folder / "again", rescore=samples)
    assert {name: one.keys() for name, one in again.items()} == {
        name: one.keys() - {"think_rate", "left_out", "turns/mean", "turns/max"} for name, one in found.items()
    }
    right = {name: one["accuracy"] for name, one in again.items() if suites.suite_of(name).mapping == "none"}
    assert right.pop("vstar:circular") == 0.75 and set(right.values()) == {1} and len(right) == 40
    assert again["wemath"]["strict"] == again["hrbench4k"]["all_rotations"] == 1
    assert again["vstar:circular"]["by_category"]["direct_attributes"]["all_rotations"] == 0
    tables = page_data(folder / "again" / "report.html")["tables"]
    assert [row[0] for row in tables[0]["rows"]] == list(again) and "vstar: accuracy by category" in str(tables)
    with pytest.raises(ConfigError, match=r"eval\.suites: .* has no answers to gsm8k, only to vstar"):
        samples.write_text(json.dumps(next(row for row in rows if row["set"] == "vstar")))
        evaluate.run(load(None, options), out=folder / "none", rescore=samples)
