"""The quickstart in its quickest form: every stage, every file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import saccade
from saccade.cli import app
from saccade.config import load
from saccade.plugins.quickstart import quickstart
from saccade.run.checkpoint import complete_steps
from tests.browser import page_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "first"
    few = {"demonstrations": 16, "prompts": 12, "evaluation": 8, "sft": 2, "rl": 2}
    with pytest.MonkeyPatch.context() as now:
        now.setitem(quickstart.SIZES, "quick", few)
        done = CliRunner().invoke(app, ["quickstart", "--quick", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "GRPO gained" in done.output
    return out


def test_the_summary_and_the_report(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {"seconds", "model_parameters", "sft", "rl", "sft_only"}
    assert summary["seconds"] > 0 and summary["model_parameters"] > 100_000
    for stage in ("sft", "rl", "sft_only"):
        assert set(summary[stage]) == {"val", "ood"}
        assert all(0 <= accuracy <= 1 for accuracy in summary[stage].values())
        assert load(folder / f"{stage}.yaml").run.name == stage  # it can be run again
        assert complete_steps(folder / stage / "checkpoints")
    page = page_data(folder / "report.html")
    assert page["title"] == "saccade quickstart" and page["charts"] and page["phases"]
    assert "gain of GRPO" in page["tables"][0]["columns"] and page["episodes"]["pictures"]
    assert list(page["texts"]) == ["sft.yaml", "rl.yaml", "sft_only.yaml"]


def test_the_exported_model_is_the_trained_one_and_no_scene_is_in_two_sets(folder, same_weights, tensors):
    assert same_weights(folder / "exported", folder / "rl" / "checkpoints" / "step-2")
    stored = sum(t.numel() for t in tensors(folder / "exported").values())
    assert json.loads((folder / "summary.json").read_text())["model_parameters"] == stored
    files = [folder / "data" / f"{name}.jsonl" for name in ("demonstrations", "train", "val", "ood")]
    seen = [{json.loads(line)["images"][0] for line in file.open()} for file in files]
    assert len(set().union(*seen)) == sum(len(images) for images in seen)


def test_python_starts_it_too_and_earlier_ones_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart, "run", lambda out, **options: {"out": out, **options})
    assert saccade.quickstart("x", quick=True) == {"out": Path("x"), "seed": 0, "quick": True}
    out = tmp_path / "first"
    for number in range(3):
        out.mkdir(exist_ok=True)
        quickstart._make_room(out)
        (out / "summary.json").write_text(str(number))
    assert (tmp_path / "first.1" / "summary.json").read_text() == "0"
    assert (tmp_path / "first.2" / "summary.json").read_text() == "1"
    assert (out / "summary.json").read_text() == "2"
