"""An evaluation by groups of its rows and by label."""

import json

import pytest
from pytest import approx
from typer.testing import CliRunner

from saccade.cli import app
from saccade.errors import ConfigError
from saccade.plugins.evaluation.subgroups import group_of, label_counts, label_measures, subgroup_tables
from saccade.plugins.reports.comparison import independent_difference
from saccade.run.statistics import wilson
from tests.run.conftest import evaluation


@pytest.fixture
def folder(tmp_path):
    rows = []
    for number in range(40):
        sex, right = ("f", number % 4 == 0) if number < 20 else ("m", number % 4 != 0)
        gold, said = ["edema", "effusion"], "edema" if right else "edema; fracture"
        row = {"set": "xray", "id": str(number), "score": float(right), "status": "ok", "gold": gold, "extracted": said}
        rows.append(row | {"extra": {"sex": sex} if number else {"sex": None}})
    return evaluation(tmp_path, rows, {})


def test_the_gap_of_a_group_is_that_to_the_best(folder, caplog):
    (table,) = subgroup_tables(folder, ["sex"])
    (f, m, unknown) = table.rows
    assert [row[0] for row in table.rows] == ["f", "m", "unknown"]
    assert (f[1].value, f[2].value, m[2].value, unknown[1].value) == (19, approx(4 / 19), 0.75, 1)
    assert m[3] is None and unknown[2].value == 1  # who does not say is no group to compare with
    change, low, high = independent_difference(0.75, wilson(15, 20), 4 / 19, wilson(4, 19))
    assert (f[3].value, f[3].low, f[3].high) == approx((change, low, high)) and f[3].high < 0
    first, again, alone = subgroup_tables(folder, ["sex", "sex", "status"])
    assert (first, again.note) == (table, table.note.removeprefix(table.note.partition("Largest")[0]))
    assert len(alone.rows) == 1 and alone.note == ""  # no gap of one group
    with pytest.raises(ConfigError, match="--by age: no row of xray has it; rows have sex"):
        subgroup_tables(folder, ["age"])
    with (folder / "samples.jsonl").open("a") as file:  # a set that does not say
        file.write(json.dumps({"set": "maths", "id": "1", "score": 1.0, "status": "ok"}) + "\n")
    assert subgroup_tables(folder, ["sex"], within=["sex"])[0] == table
    assert caplog.messages == ["--by sex: no row of maths has it", "--within sex: no row of maths has it"]


def test_every_label_has_its_f1(folder):
    (table,) = subgroup_tables(folder, [], labels=True)
    assert table.columns == ("label", "golds", "precision", "recall", "specificity", "F1", "accuracy", "balanced")
    rows = {row[0]: [cell and cell.value for cell in row[1:]] for row in table.rows}
    assert rows["edema"] == [40, 1, 1, None, 1, 1, None]  # nobody is without
    assert rows["effusion"] == [40, 0, 0, None, 0, 0, None]
    assert rows["fracture"] == [0, 0, 0, 0.5, 0, 0.5, 0.25]
    assert rows["mean of labels"][1:] == approx([1 / 3, 1 / 3, 0.5, 1 / 3, 0.5, 0.25])
    assert label_counts([({"a"}, {"a", "b"}), ({"b"}, {"b"})]) == {"a": (1, 0, 0, 1), "b": (1, 0, 1, 0)}
    assert label_measures((6, 2, 3, 9)) == approx([6 / 8, 6 / 9, 9 / 11, 12 / 17, 15 / 20, (6 / 9 + 9 / 11) / 2])
    done = CliRunner().invoke(app, ["subgroups", str(folder), "--by", "sex", "--labels"])
    assert done.exit_code == 0 and "xray by sex" in done.output and "mean of labels" in done.output
    assert f"Largest gap {0.75 - 4 / 19:.3f}" in done.output


def test_answers_of_several_samples_rank_questions(tmp_path):
    said = {
        "edema": ["edema", "edema"],
        "none": ["none", "edema"],
        "edema; mass": ["none", "mass"],
        "mass": ["none", "none"],
    }
    row = {"set": "xray", "score": 1.0, "status": "ok"}
    rows = [row | {"id": gold, "gold": gold, "extracted": one} for gold, both in said.items() for one in both]
    (table,) = subgroup_tables(evaluation(tmp_path, rows, {}), [], labels=True)
    found = {cells[0]: cells[-1].value for cells in table.rows}  # edema: 1 and 0 against 0.5 and 0
    assert table.columns[-1] == "AUROC" and (found["edema"], found["mass"]) == (0.625, 0.75)


def test_ages_are_put_into_intervals_without_holes(folder):
    edges = (25.0, 50.0, 65.0)
    assert [group_of(age, edges) for age in (0, 24.9, 25, "50", 64, 65, 200)] == [
        *("under 25", "under 25", "25 to 50", "50 to 65", "50 to 65", "65 and over", "65 and over")
    ]
    assert {group_of(age, edges) for age in (None, "", "old", float("nan"))} == {"unknown"}
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    rows = [row | {"extra": row["extra"] | {"age": number * 2}} for number, row in enumerate(rows)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (table,) = subgroup_tables(folder, ["age:65,25,50"])
    assert [(row[0], row[1].value) for row in table.rows] == [
        *(("under 25", 13), ("25 to 50", 12), ("50 to 65", 8), ("65 and over", 7))
    ]
    for by, why in (("age:young", "edges are numbers"), ("sex:3", "has a number there, but None")):
        with pytest.raises(ConfigError, match=why):
            subgroup_tables(folder, [by])


def test_parts_of_parts_weigh_alike(tmp_path):
    parts = {("chest", "a"): [1, 1, 1, 1, 0, 0, 0, 0], ("chest", "b"): [1], ("skin", "c"): [0, 1, 0, 0]}
    rows = [
        {"set": "med", "id": f"{source}{dataset}{n}", "score": float(score), "status": "ok", "data_source": source}
        | {"extra": {"dataset": dataset}, "gold": "x", "extracted": "x" if score else "y"}
        for (source, dataset), scores in parts.items()
        for n, score in enumerate(scores)
    ]
    (table,) = subgroup_tables(evaluation(tmp_path, rows, {}), [], within=["data_source", "dataset"])
    found = {row[0]: row[2] for row in table.rows}
    assert [*found] == ["all", "chest", "chest > a", "chest > b", "skin", "skin > c"]
    assert (found["chest > a"].value, found["chest"].value, found["all"].value) == (0.5, 0.75, 0.5)
    a, b, c = wilson(4, 8), wilson(1, 1), wilson(1, 4)
    low = 0.5 - (((0.5 - a.low) ** 2 + (1 - b.low) ** 2) / 4 + (0.25 - c.low) ** 2) ** 0.5 / 2
    assert found["all"].low == approx(low) and found["all"].high < 1
    with pytest.raises(ConfigError, match="--within hospital: no row of med has it"):
        subgroup_tables(tmp_path, [], within=["hospital"])
