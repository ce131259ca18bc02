"""Sets that a model makes of others, asked over HTTP: right answers to learn from, questions that a rule can check."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import DataConfig, DataSource
from saccade.data import datasets
from saccade.plugins.drawn.taught_sets import rewritten
from saccade.plugins.evaluation.results import read_lines
from tests.endpoints import Endpoint, Says, chat_answer, scripted


def data(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.stdout + result.stderr if result.exit_code == 0 else f"exit {result.exit_code}: {result.stderr}"


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    assert "wrote" in data("scenes", tmp_path / "s" / "train.jsonl", "--rows", 6, "--size", 64, "--kind", "count")
    return tmp_path / "s" / "train.jsonl"


def engine(endpoint: Endpoint) -> list[str]:
    return ["rollout.engine=http", f"rollout.http.url={endpoint.url}", "rollout.http.model=teacher"]


def test_a_teacher_that_reads_descriptions_teaches_about_pictures(tmp_path: Path, scenes: Path) -> None:
    golds = {row["description"]: row["answer"] for row in read_lines(scenes)}

    def teacher(body: dict) -> Says:
        (message,) = body["messages"]
        described = re.search(r"described as follows: (.*)\n", message["content"])
        gold = golds[described[1]]
        said = gold if gold != read_lines(scenes)[0]["answer"] else "77"  # wrong about some
        quoted = f"A picture is {described[0]}"
        return chat_answer(f"<think>{quoted}As described in the given description.</think><answer>{said}</answer>")

    with scripted(teacher) as endpoint:
        options = [*engine(endpoint), "reward.terms=[count]", "generate.n=2"]
        said = data("distill", scenes, tmp_path / "out", *options, "--describe", "description")
        asked = len(endpoint.asked)
        assert "exists" in data("distill", scenes, tmp_path / "out", *options, "--describe", "description")
        (tmp_path / "out" / "train.jsonl").unlink()  # as if it had been broken off
        assert "wrote" in data("distill", scenes, tmp_path / "out", *options, "--describe", "description")
        assert len(endpoint.asked) == asked == 12
        assert "no such text; it has" in data("distill", scenes, tmp_path / "b", *options, "--describe", "caption")
    right = [row for row in read_lines(scenes) if row["answer"] != read_lines(scenes)[0]["answer"]]
    assert f"{2 * len(right)} of 12 answers were right" in said
    taught = read_lines(tmp_path / "out" / "train.jsonl")
    assert len(taught) == 2 * len(right)
    human, gpt = taught[0]["conversations"]
    assert human["value"].startswith(f"<image>{right[0]['problem'].removeprefix('<image>')}")
    assert "described" not in human["value"] and gpt["value"].startswith("<think>As shown in the picture.</think>")
    samples = datasets.load([DataSource(path=str(tmp_path / "out" / "train.jsonl"))], DataConfig()).samples
    assert samples[0].media[0].width == 64 and samples[0].messages[-1].role == "assistant"
    card = (tmp_path / "out" / "train.md").read_text()
    assert f"| right | {2 * len(right)} |" in card and "inputs: none, as the rows are drawn (" in card
    assert f"saccade data distill {scenes} out --describe description rollout.engine=http" in card


def test_free_questions_become_ones_that_a_rule_can_check(tmp_path: Path, scenes: Path) -> None:
    tagged = [("How many dots?", "3"), ("", "4"), ("Are there 5 dots?", "5"), ("What?", "it is a very long story")]
    tagged += [("Is it red?", "yes")]
    renamed = [{"q" if name == "problem" else name: value for name, value in row.items()} for row in read_lines(scenes)]
    scenes.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    replies = iter(["Sorry.", *(f"<question>{q}</question> <answer>{a}</answer>" for q, a in tagged)])
    with scripted(lambda body: chat_answer(next(replies))) as endpoint:
        options = ["rollout.http.concurrency=1", "data.keys.prompt=q", "generate.n=3"]
        said = data("rewrite", scenes, tmp_path / "out", *engine(endpoint), *options)
        content = endpoint.asked[0]["body"]["messages"][0]["content"]
        assert "cannot be written" in data("rewrite", scenes, "/proc/out", *engine(endpoint), *options)
    assert [part["type"] for part in content] == ["image_url", "text"] and "How many" in content[1]["text"]
    assert "2 rows; left out: " in said
    assert all(f"1 {reason}" in said for reason in ("no_tags", "empty", "answer_in_question", "long_answer"))
    (first, second) = datasets.load([DataSource(path=str(tmp_path / "out" / "train.jsonl"))], DataConfig()).samples
    assert {(first.messages[0].text, first.answer), (second.messages[0].text, second.answer)} == {
        ("How many dots?", "3"), ("Is it red?", "yes")}  # fmt: skip
    assert first.extra["question_before"].startswith("How many") and len(first.media) == 1
    assert rewritten("<question>Is there no dog?</question><answer>no</answer>")[2] == ""
    assert rewritten("<question>Is it 50% or 60%?</question><answer>50%</answer>")[2] == "answer_in_question"
