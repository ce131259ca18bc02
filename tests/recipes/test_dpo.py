"""Preference training end to end: it learns what pictures show, and resumes exactly."""

import json
from pathlib import Path

import pytest

import saccade
from saccade.config import load
from saccade.errors import ConfigError, DataError
from saccade.models.families import load_family
from saccade.plugins.preferences import dpo, pairs
from saccade.plugins.reports.report import from_run
from tests.browser import page_data


@pytest.fixture(scope="module")
def config(config):
    return lambda out, **changes: config(out, **{"train__lr": 5e-3, "dpo__beta": 0.5} | changes)


def test_pairs_of_pictures_are_learned_and_answers_improve(tmp_path, config, rows, numbers):
    sets = [str(rows / f"held-{kind}.jsonl") for kind in ("pairs", "asked")]
    more = {"run.max_steps": 12, "val.every": 12, "dpo.nll_coef": 0.5, "rollout.max_tokens": 3}
    last = saccade.dpo(config(tmp_path, data__val=sets) | more | {"reward.terms": ["exact"]})
    first, *steps = numbers(tmp_path / "run")
    assert first["val/held-pairs/accuracy"] is None and first["val/held-asked/accuracy"] < 0.6  # all are ties
    page = page_data(from_run(tmp_path / "run"))
    assert page["facts"]["accuracy on held-pairs"] == "100.0\u00a0%"  # no gain
    before, after, change = page["tables"][0]["rows"][-1][2:]
    assert (before, after["value"], change) == (None, 1, None)
    assert steps[0]["dpo/accuracy"] == 0 and steps[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)
    assert last["dpo/accuracy"] == 1 and last["val/held-pairs/accuracy"] == 1
    assert last["val/held-asked/accuracy"] >= 0.9  # greedy answers
    assert last["dpo/reward_chosen"] - last["dpo/reward_rejected"] == pytest.approx(last["dpo/margin"], abs=1e-6)
    assert last["dpo/nll"] < 0.3 * steps[0]["dpo/nll"]
    names = ("loss", "logp_chosen", "logp_rejected", "length_chosen", "length_rejected")
    assert all(f"dpo/{name}" in last and f"val/held-pairs/{name}" in last for name in names)


@pytest.mark.parametrize(
    "changes",
    [
        {"dpo.loss": "kto", "dpo.beta": 0.1, "data.train": "train-labels.jsonl"},
        {"model.train": "lora", "model.lora.rank": 4, "dpo.reference": "compute"},
    ],
    ids=["kto", "lora"],
)
def test_stopped_and_resumed_is_the_same_run(tmp_path, config, rows, changes, resumed):
    """An epoch ends within the third step."""
    if "data.train" in changes:
        changes = changes | {"data.train": str(rows / changes["data.train"])}
    resumed(dpo.run, config(tmp_path, train__prompts_per_step=12, run__max_steps=3) | changes)


def test_the_reference_is_scored_once_and_for_all(tmp_path, config, numbers, monkeypatch):
    dpo.run(config(tmp_path, run__name="first", run__max_steps=2))
    (cache,) = (tmp_path / ".cache").glob("reference-*.json")
    rows = map(json.loads, Path(config(tmp_path)["data.train"]).read_text().splitlines())
    different = {(*row["images"], row["chosen"]) for row in rows}
    assert len(json.loads(cache.read_text())) == len(different) > 28
    monkeypatch.setattr(dpo, "LocalTrainer", None)  # nothing is left to score
    dpo.run(config(tmp_path, run__name="second", run__max_steps=2))
    assert numbers(tmp_path / "first") == numbers(tmp_path / "second")


@pytest.mark.parametrize("adapted", [{}, {"model.train": "lora", "model.lora.rank": 4}], ids=["full", "lora"])
def test_a_reference_that_is_computed_is_the_same(tmp_path, config, adapted):
    """Without its adapter the policy is the reference."""
    options = config(tmp_path, run__max_steps=2) | adapted
    rows = [dpo.run(options | {"run.name": how, "dpo.reference": how}) for how in ("compute", "precompute")]
    assert rows[0]["dpo/loss"] == pytest.approx(rows[1]["dpo/loss"], abs=1e-5)
    assert rows[0]["dpo/margin"] != 0


def test_a_loss_without_a_reference_loads_none(tmp_path, config, monkeypatch, capsys):
    monkeypatch.setattr(dpo, "cached_reference", None)
    row = dpo.run(config(tmp_path, dpo__loss="simpo", run__max_steps=1) | {"reward.terms": ["exact"]})
    assert row["dpo/reward_chosen"] < 0
    assert "reward scores nothing here" in capsys.readouterr().out


def test_kto_learns_from_labels_and_from_pairs(tmp_path, config, rows, numbers):
    for name, steps, loss in (("labels", 15, 0.4), ("pairs", 3, 0.5)):
        options = {"dpo.loss": "kto", "run.name": name, "run.max_steps": steps}
        dpo.run(config(tmp_path, data__train=str(rows / f"train-{name}.jsonl")) | options)
        first, *others = numbers(tmp_path / name)
        assert first["dpo/loss"] == pytest.approx(0.5, abs=1e-5) and first["dpo/z"] == pytest.approx(0, abs=1e-4)
        assert others[-1]["dpo/loss"] < loss and others[-1]["dpo/margin"] > 0
        assert all(row["dpo/z"] >= 0 for row in others)


def test_a_stranger_is_the_answer_to_another_question(rows, config):
    resolved = load(config(rows), command="dpo")
    family = load_family(resolved.model.path)
    first, other, *_ = pairs.load_pairs(resolved, resolved.data.train, family, paired=True).samples
    assert dpo.mismatched_pairs([first, first, other])[first.id].candidates == other.candidates[:1]
    with pytest.raises(DataError, match="all rows ask the same one"):
        dpo.mismatched_pairs([first, first])


def test_ties_are_left_out_and_other_rows_are_set_aside(tmp_path, config):
    good = {"prompt": "how many ?", "chosen": "red", "rejected": "blue"}
    rows = [
        good, good | {"rejected": "red"}, good | {"tie": True}, good | {"rejected": "red " * 600},
        good | {"chosen": ""}, good | {"labels": {"size": "A"}},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"id": n}) + "\n" for n, row in enumerate(rows)))
    options = config(tmp_path, data__train=str(path), train__prompts_per_step=1, run__max_steps=1)
    dpo.run(options | {"data.max_bad_fraction": 1})
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "rows: 1 of 6 rows" in log and "1 bad row excluded" in log
    assert "1 row over dpo.max_tokens (512 tokens, data.overlong=drop) left out" in log
    assert "2 rows left out: a tie prefers neither side" in log
    aside = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    found = {row["id"]: row["reason"] for row in map(json.loads, aside)}
    assert sorted(found) == ["1", "2", "3", "4", "5"]
    assert "dpo.max_tokens is 512" in found["3"] and "head preference" in found["5"]
    with pytest.raises(DataError, match=r"data.train has no usable row:\n.*\n1 row left out: a tie"):
        path.write_text(json.dumps(rows[1]) + "\n")
        dpo.run(options | {"run.name": "alike"})
    assert not (tmp_path / "alike").exists()
    with pytest.raises(DataError, match=r"dpo.loss=kto learns from single"):
        path.write_text(json.dumps({"input": "how ?", "output": "red", "label": 1}) + "\n")
        dpo.run(options | {"run.name": "other"})
    with pytest.raises(DataError, match=r"all 1 rows have the label 1; add rows with the label 0"):
        dpo.run(options | {"run.name": "other", "dpo.loss": "kto"})
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "how many ?", "answer": "red"}) + "\n")
    path.write_text(json.dumps(good) + "\n")
    with pytest.raises(ConfigError, match=r"data\.val: asked .*reward\.terms=\[exact\]"):
        dpo.run(options | {"run.name": "other", "data.val": str(tmp_path / "asked.jsonl"), "val.every": 2})
    assert not (tmp_path / "other").exists()


def test_a_damaged_picture_costs_its_row(tmp_path, config, rows):
    some = [json.loads(line) for line in (rows / "train-pairs.jsonl").read_text().splitlines()[:6]]
    for number, row in enumerate(some):
        picture = (rows / row["images"][0]).read_bytes()
        row["images"] = [f"{number}.png"]
        (tmp_path / f"{number}.png").write_bytes(picture[: len(picture) // 2] if number == 2 else picture)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    options = config(tmp_path, train__prompts_per_step=5, run__max_steps=2, data__max_bad_fraction=0.5)
    dpo.run(options | {"data.train": str(tmp_path / "rows.jsonl")})
    assert some[2]["id"] in (tmp_path / "run" / "quarantine.jsonl").read_text()
