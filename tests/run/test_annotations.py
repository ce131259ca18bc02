"""Answers that a person judges: written, filled in, read back."""

import csv
import json

import pytest
from pytest import approx
from typer.testing import CliRunner

from saccade.cli import app
from saccade.plugins.evaluation.annotations import kappa, kappa_interval
from tests.run.conftest import evaluation


def saccade(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return done.output + (done.stderr if done.exit_code else "")


@pytest.fixture
def folder(tmp_path):
    rows = []
    for number in range(20):
        row = {"set": "vqa", "id": f"q{number}", "repeat": 0, "score": float(number < 12), "status": "ok"}
        row |= {"prompt": 'What, "exactly"?\nSay.', "gold": ["cat", "dog"], "response": "=1+1", "extracted": "cat"}
        rows.append(row | {"media": [{"hash": "a" * 64, "path": "a.png", "size": [56, 56]}], "extra": {}})
    rows.append(rows[0] | {"id": "broken", "score": None, "status": "reward_error"})
    return evaluation(tmp_path / "run-eval", rows, {})


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_what_a_person_says_is_compared_and_scored(folder, tmp_path, ending, monkeypatch):
    file = tmp_path / "new" / f"answers.{ending}"
    assert "wrote 20 answers" in saccade("annotate", folder, "--out", file)
    assert "exists and is not overwritten" in saccade("annotate", folder, "--out", file)
    assert "no row has a verdict" in saccade("annotate", folder, "--read", file)
    if ending == "csv":
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [*csv.DictReader(lines)]
        assert rows[0]["response"] == "'=1+1" and rows[0]["question"] == 'What, "exactly"?\nSay.'  # runs nowhere
    else:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["gold"] == "cat or dog" and [row["verifier"] for row in rows].count("right") == 12
    for number, row in enumerate(rows[:16]):
        row["human"] = "Right " if number < 9 or number == 15 else "wrong"

    def save(separator=","):
        if ending == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return
        with file.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, rows[0].keys(), delimiter=separator)
            writer.writeheader()
            writer.writerows(rows)

    save(";")  # as some spreadsheets save
    assert "cannot be written" in saccade("annotate", folder, "--read", file, "--out", "/proc/human")
    monkeypatch.chdir(folder)
    said = saccade("annotate", ".", "--read", file)
    pairs = [(n < 12, n < 9 or n == 15) for n in range(16)]
    low, high = kappa_interval(pairs, [f"q{n}" for n in range(16)])
    assert f"0.750 [0.505, 0.898]  {kappa(pairs):.3f} [{low:.3f}, {high:.3f}]" in said and "q15" in said
    results = json.loads((tmp_path / "run-eval-human" / "results.json").read_text())
    assert results["vqa"]["accuracy"] == approx(10 / 20) and results["vqa"]["items"] == 20
    assert "run-eval-human-2;" in saccade("annotate", ".", "--read", file)
    assert "20 items" in saccade("compare", folder, tmp_path / "run-eval-human")
    rows[3] |= {"human": "perhaps", "response": "so " * 50_000}
    save()
    assert "row 4: human is 'perhaps'; expected right or wrong" in saccade("annotate", folder, "--read", file)
    rows[3] |= {"human": "wrong", "id": "q99"}
    save()
    assert "vqa q99 0 is no scored answer" in saccade("annotate", folder, "--read", file)
    rows[3] |= {"human": "wrong", "id": "q0"}
    save()
    assert "row 4: two verdicts on vqa q0 0" in saccade("annotate", folder, "--read", file)
    file.write_text("été", encoding="latin-1")
    broken = "save it as 'CSV UTF-8'" if ending == "csv" else "is no JSON"
    assert broken in saccade("annotate", folder, "--read", file)


def test_kappa_is_agreement_beyond_chance(folder, tmp_path):
    # Fleiss, Levin and Paik: 20 both yes, 15 both no, 5 and 10 mixed: 0.7 observed, 0.5 by chance.
    pairs = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    assert kappa(pairs) == approx(0.4) and kappa([(True, True)] * 9) is None
    kind = [(True, True)] * 3 + [(True, False)]
    assert kappa(kind) == 0 and kappa_interval(kind, "abcd") == (None, None)
    low, high = kappa_interval(pairs, range(50))
    assert 0.1 < low < 0.2 and 0.6 < high < 0.7  # its standard error is 0.13
    fewer = kappa_interval(pairs * 4, [*range(50)] * 4)  # four answers to each question, which say the same
    assert fewer == approx((low, high))
    stored = folder / "trajectories" / "images" / f"{'b' * 64}.png"  # of a picture inside another file
    stored.parent.mkdir(parents=True)
    stored.touch()
    samples = folder / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"a.png"', "null").replace("a" * 64, "b" * 64, 1))
    assert "wrote 20 answers" in saccade("annotate", folder, "--hide")
    written = (folder / "annotations.csv").read_text()
    assert "right" not in written and written.count(str(stored)) == 1 and written.count("a" * 64) == 19
    assert "wrote 5 answers" in saccade("annotate", folder, "--rows", 5, "--out", tmp_path / "few.csv")
    samples.write_text(json.dumps({"set": "pairs", "id": "1", "chosen": {"a": 1.0}, "rejected": {"a": 0.0}}) + "\n")
    assert "no answer has a score" in saccade("annotate", folder, "--out", tmp_path / "none.csv")
    assert "ends in neither" in saccade("annotate", folder, "--out", tmp_path / "a.txt")
