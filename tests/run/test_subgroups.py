"""An evaluation by groups of its rows and by label."""

import json

import pytest
from pytest import approx
from typer.testing import CliRunner

from saccade.cli import app
from saccade.errors import ConfigError
from saccade.plugins.evaluation.subgroups import label_counts, subgroup_tables
from saccade.plugins.reports.comparison import independent_difference
from saccade.run.statistics import wilson


@pytest.fixture
def folder(tmp_path):
    rows = []
    for number in range(40):
        sex, right = ("f", number % 4 == 0) if number < 20 else ("m", number % 4 != 0)
        gold, said = ["edema", "effusion"], "edema" if right else "edema; fracture"
        row = {"set": "xray", "id": str(number), "score": float(right), "status": "ok", "gold": gold, "extracted": said}
        rows.append(row | {"extra": {"sex": sex} if number else {"sex": None}})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "results.json").write_text("{}")
    return tmp_path


def test_the_gap_of_a_group_is_that_to_the_best(folder):
    (table,) = subgroup_tables(folder, ["sex"])
    (f, m, unknown) = table.rows
    assert [row[0] for row in table.rows] == ["f", "m", "unknown"]
    assert (f[1].value, f[2].value, m[2].value, unknown[1].value) == (19, approx(4 / 19), 0.75, 1)
    assert m[3] is None and unknown[2].value == 1  # who does not say is no group to compare with
    change, low, high = independent_difference(0.75, wilson(15, 20), 4 / 19, wilson(4, 19))
    assert (f[3].value, f[3].low, f[3].high) == approx((change, low, high)) and f[3].high < 0
    with pytest.raises(ConfigError, match="--by age: no row of xray has it; rows have sex"):
        subgroup_tables(folder, ["age"])


def test_every_label_has_its_f1(folder):
    (table,) = subgroup_tables(folder, [], labels=True)
    rows = {row[0]: [cell and cell.value for cell in row[1:]] for row in table.rows}
    assert rows["edema"] == [40, 1, 1, 1] and rows["effusion"] == [40, 0, 0, 0] and rows["fracture"] == [0, 0, 0, 0]
    assert rows["mean of labels"][0] is None and rows["mean of labels"][1:] == approx([1 / 3] * 3)
    assert label_counts([({"a"}, {"a", "b"}), ({"b"}, {"b"})]) == {"a": (1, 0, 0), "b": (1, 0, 1)}
    done = CliRunner().invoke(app, ["subgroups", str(folder), "--by", "sex", "--labels"])
    assert done.exit_code == 0 and "xray by sex" in done.output and "mean of labels" in done.output
