"""Preference training end to end: it learns what pictures show, and resumes exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import saccade
from saccade.checks import check
from saccade.cli import app
from saccade.config import given, load
from saccade.errors import ConfigError, DataError
from saccade.models.families import load_family
from saccade.plugins.preferences import dpo, pairs

Make = Callable[..., dict[str, Any]]
Read = Callable[[Path], list[dict[str, Any]]]
OTHER = {"red": "blue", "blue": "red"}


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One big shape each: the right colour is preferred. Pairs, labels, and questions alone."""
    from saccade.plugins.quickstart import counting

    folder = tmp_path_factory.mktemp("colours")
    for split, n in {"train": 32, "held": 12}.items():
        scenes = counting.counting_split(n, seed=n, colours=tuple(OTHER), counts=(1, 1), radius=(16, 20))
        drawn = counting.write_jsonl(scenes, folder, name="drawn").read_text().splitlines()
        rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "labels": [], "asked": []}
        for number, line in enumerate(drawn):
            scene = json.loads(line)
            right = scene["colours"][0]
            row = {"id": scene["id"], "images": scene["images"], "answer": right}
            asked = {"prompt": "<image>how many objects ?"}
            rows["asked"].append(row | asked)
            rows["pairs"].append(row | asked | {"chosen": right, "rejected": OTHER[right]})
            judged = {"output": right if number % 2 else OTHER[right], "label": number % 2}
            rows["labels"].append(row | {"input": f"<image>how many {number % 5} ?"} | judged)
        for kind, listed in rows.items():
            text = "".join(json.dumps(row) + "\n" for row in listed)
            (folder / f"{split}-{kind}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def config(colours: Path, word_model: str) -> Make:
    def make(out: Path, **changes: Any) -> dict[str, Any]:
        options = {
            "run.out": str(out),
            "run.max_steps": 4,
            "run.device": "cpu",
            "model.path": word_model,
            "data.train": str(colours / "train-pairs.jsonl"),
            "prompt.format": "direct",
            "prompt.instruction": "",
            "dpo.beta": 0.5,
            "train.prompts_per_step": 8,
            "train.lr": 5e-3,
            "train.schedule": "constant",
            "train.warmup": 0,
            "track.tensorboard": False,
        }
        return options | {name.replace("__", "."): value for name, value in changes.items()}

    return make


def test_questions_that_nothing_scores_are_no_validation(tmp_path: Path, config: Make, colours: Path) -> None:
    asked = config(tmp_path, data__val=str(colours / "held-asked.jsonl"), val__every=2)
    with pytest.raises(ConfigError, match=r"data\.val: held-asked .*reward\.terms=\[exact\]"):
        dpo.run(asked)
    assert not (tmp_path / "run").exists()


def test_pairs_of_pictures_are_learned_and_answers_improve(
    tmp_path: Path, config: Make, colours: Path, numbers: Read
) -> None:
    sets = [str(colours / f"held-{kind}.jsonl") for kind in ("pairs", "asked")]
    more = {"run.max_steps": 12, "val.every": 12, "dpo.nll_coef": 0.5, "rollout.max_tokens": 3}
    last = saccade.dpo(config(tmp_path, data__val=sets) | more | {"reward.terms": ["exact"]})
    first, *steps = numbers(tmp_path / "run")
    assert first["val/held-pairs/accuracy"] == 0 and first["val/held-asked/accuracy"] < 0.6
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
        {},
        {"dpo.reference": "compute"},
        {"dpo.loss": "kto", "dpo.beta": 0.1, "data.train": "train-labels.jsonl"},
        {"model.train": "lora", "model.lora.rank": 4, "dpo.reference": "compute"},
    ],
    ids=["precompute", "compute", "kto", "lora"],
)
def test_stopped_and_resumed_is_the_same_run(
    tmp_path: Path,
    config: Make,
    colours: Path,
    numbers: Read,
    same_weights: Callable[..., bool],
    changes: dict[str, Any],
) -> None:
    if "data.train" in changes:
        changes = changes | {"data.train": str(colours / changes["data.train"])}
    options = config(tmp_path, train__prompts_per_step=12, run__max_steps=5) | changes
    dpo.run(options | {"run.name": "whole"})  # an epoch ends within the third step
    dpo.run(options | {"run.name": "parts", "run.max_steps": 2})
    dpo.run(options | {"run.name": "parts", "run.resume": "auto"})
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    ends = (tmp_path / name / "checkpoints" / "step-5" for name in ("whole", "parts"))
    assert same_weights(*ends)


def test_the_reference_is_scored_once_and_for_all(
    tmp_path: Path, config: Make, numbers: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    dpo.run(config(tmp_path, run__name="first"))
    (cache,) = (tmp_path / ".cache").glob("reference-*.json")
    rows = map(json.loads, Path(config(tmp_path)["data.train"]).read_text().splitlines())
    different = {(*row["images"], row["chosen"]) for row in rows}
    assert len(json.loads(cache.read_text())) == len(different) > 28
    monkeypatch.setattr(pairs, "_score_all", None)  # nothing is left to score
    dpo.run(config(tmp_path, run__name="second"))
    dpo.run(config(tmp_path, run__name="third", dpo__reference="compute"))
    first, second, third = (numbers(tmp_path / name) for name in ("first", "second", "third"))
    assert first == second
    for precomputed, computed in zip(first, third, strict=True):
        assert precomputed["dpo/loss"] == pytest.approx(computed["dpo/loss"], abs=1e-5)


def test_without_its_adapter_the_policy_is_the_reference(tmp_path: Path, config: Make) -> None:
    adapted = config(tmp_path, model__train="lora", run__max_steps=3)
    rows = [
        dpo.run(adapted | {"run.name": how, "dpo.reference": how, "model.lora.rank": 4})
        for how in ("compute", "precompute")
    ]
    assert rows[0]["dpo/loss"] == pytest.approx(rows[1]["dpo/loss"], abs=1e-5)
    assert rows[0]["dpo/margin"] != 0


@pytest.mark.parametrize("loss", ["simpo", "reference_free"])
def test_a_loss_without_a_reference_loads_none(
    tmp_path: Path, config: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    monkeypatch.setattr(pairs, "precomputed", None)
    unused = {"reward.terms": ["exact"]} if loss == "simpo" else {}
    row = dpo.run(config(tmp_path, dpo__loss=loss, run__max_steps=1) | unused)
    assert row["dpo/reward_chosen"] < 0
    assert ("reward scores nothing here" in capsys.readouterr().out) == bool(unused)


def test_kto_learns_from_labels_and_from_pairs(tmp_path: Path, config: Make, colours: Path, numbers: Read) -> None:
    for name in ("labels", "pairs"):
        options = {"dpo.loss": "kto", "run.name": name, "run.max_steps": 15, "dpo.beta": 0.5}
        train = str(colours / f"train-{name}.jsonl")
        dpo.run(config(tmp_path, data__train=train) | options)
        rows = numbers(tmp_path / name)
        assert rows[0]["dpo/loss"] == pytest.approx(0.5, abs=1e-5)
        assert rows[-1]["dpo/loss"] < 0.4 and rows[-1]["dpo/margin"] > 0.5
        assert rows[0]["dpo/z"] == pytest.approx(0, abs=1e-4)
        assert all(row["dpo/z"] >= 0 for row in rows)


def test_a_stranger_is_the_answer_to_another_question(colours: Path, config: Make) -> None:
    resolved = load(config(colours), command="dpo")
    family = load_family(resolved.model.path)
    samples = pairs.load_pairs(resolved, resolved.data.train, family, paired=True).samples
    strange = pairs.mismatched_pairs([samples[0], samples[0], samples[1]])
    assert strange[samples[0].id].candidates == samples[1].candidates[:1]
    with pytest.raises(DataError, match="all rows ask the same one"):
        pairs.mismatched_pairs([samples[0], samples[0]])


def test_ties_are_left_out_and_other_rows_are_set_aside(tmp_path: Path, config: Make) -> None:
    good = {"prompt": "how many ?", "chosen": "red", "rejected": "blue"}
    rows = [
        good,
        good | {"rejected": "red"},
        good | {"tie": True},
        good | {"rejected": "red " * 600},
        good | {"chosen": ""},
        good | {"labels": {"size": "A"}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"id": n}) + "\n" for n, row in enumerate(rows)))
    options = config(tmp_path, data__train=str(path), train__prompts_per_step=1, run__max_steps=1)
    dpo.run(options | {"data.max_bad_fraction": 1})
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "rows: 1 of 6 rows" in log and "1 bad row set aside" in log
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
    with pytest.raises(DataError, match=r"dpo.loss=kto learns from such rows"):
        path.write_text(json.dumps({"input": "how ?", "output": "red", "label": 1}) + "\n")
        dpo.run(options | {"run.name": "other"})
    with pytest.raises(DataError, match=r"all 1 rows have the label 1; add rows with the label 0"):
        dpo.run(options | {"run.name": "other", "dpo.loss": "kto"})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dpo.args.gamma=0.5", "dpo.args.gamma: has no effect with dpo.loss=dpo"),
        ("dpo.args.label_smoothing=0.2", "dpo.args.label_smoothing: has no effect with dpo.loss=dpo"),
    ],
)
def test_what_dpo_refuses(config: Make, tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dpo.run(load(config(tmp_path), [override]))
    assert words in str(caught.value)


@pytest.mark.parametrize("override", ["sft.loss_on=all", "train.samples_per_prompt=4", "algorithm.preset=rloo"])
def test_what_dpo_does_not_read(config: Make, tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="has no effect in `saccade dpo`"):
        check(load(config(tmp_path), [override]), "dpo", given([override]))


def test_defaults_and_the_dry_run(config: Make, tmp_path: Path) -> None:
    plain = load(None, command="dpo")
    assert (plain.train.lr, plain.dpo.max_tokens, plain.dpo.nll_coef) == (1e-5, 512, 0.0)
    kto = load({"dpo.loss": "kto"}, command="dpo").dpo
    assert (kto.beta, kto.max_tokens) == (0.01, 2048)
    words = [f"{k}={json.dumps(v)}" for k, v in config(tmp_path).items() if k != "model.path"]
    shown = CliRunner().invoke(app, ["dpo", *words, "model.path=tiny:qwen2_5_vl", "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "pairs per step" in shown.output and "512 tokens" in shown.output


@pytest.mark.parametrize("how", ["precompute", "compute"])
def test_a_damaged_picture_costs_its_row(tmp_path: Path, config: Make, colours: Path, how: str) -> None:
    lines = (colours / "train-pairs.jsonl").read_text().splitlines()[:6]
    rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        picture = (colours / row["images"][0]).read_bytes()
        row["images"] = [f"{number}.png"]
        cut = picture[: len(picture) // 2] if number == 2 else picture
        (tmp_path / f"{number}.png").write_bytes(cut)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"train.prompts_per_step": 5, "run.max_steps": 2, "data.max_bad_fraction": 0.5}
    train = {"data.train": str(tmp_path / "rows.jsonl"), "dpo.reference": how}
    dpo.run(config(tmp_path) | options | train)
    aside = (tmp_path / "run" / "quarantine.jsonl").read_text()
    assert aside.count("\n") >= 1 and rows[2]["id"] in aside
