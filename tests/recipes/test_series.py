"""Runs with time series: they are learned from, go on exactly, and leave a folder that works."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade.config import load
from saccade.errors import ConfigError
from saccade.models.files import SERIES_FILE
from saccade.plugins.check_data import check_data
from saccade.plugins.estimate.batch_plan import empty_model
from saccade.plugins.evaluation import evaluate
from saccade.plugins.export.export import export
from saccade.plugins.families import tiny
from saccade.plugins.preferences import dpo
from saccade.plugins.reward_models import reward_training
from saccade.recipes import model_setup, rl, sft

LEADS = 4


def write(path, count, *, seed, shown=True, pairs=False):
    """Which lead carries a wave? Its place is random, so all other leads are noise."""
    rng, lines = np.random.default_rng(seed), []
    for number in range(count):
        lead, start = int(rng.integers(LEADS)), int(rng.integers(30))
        values = rng.normal(size=(LEADS, 40))
        values[lead, start : start + 10] += 4
        row = {"id": f"{seed}-{number}", "answer": str(lead)}
        asked = "<series>lead?" if shown else "lead?"
        row |= {"series": values.round(2).tolist()} if shown else {}
        if pairs:
            row |= {"prompt": asked, "chosen": str(lead), "rejected": str((lead + 1) % LEADS)}
        else:
            turns = [("user", asked), ("assistant", str(lead))]
            row["messages"] = [{"role": role, "content": text} for role, text in turns]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return str(path)


def options(out, rows, **changes):
    series = {"encoder": "patches", "channels": LEADS, "patch": 20, "width": 32, "layers": 1}
    train = {"prompts_per_step": 4, "lr": 3e-3, "schedule": "constant", "warmup": 0}
    always = {
        **{"run.out": str(out), "run.device": "cpu", "run.max_steps": 2, "model.path": "tiny:qwen2"},
        **{f"model.series.{name}": value for name, value in series.items()},
        **{f"train.{name}": value for name, value in train.items()},
        **{"data.train": rows, "prompt.format": "direct", "prompt.instruction": "", "rollout.max_tokens": 2},
        "track.tensorboard": False,
    }
    return always | {name.replace("__", "."): value for name, value in changes.items()}


def encoder_of(folder):
    return load_file(folder / SERIES_FILE)


def test_a_model_learns_to_read_series_and_cannot_guess_them(tmp_path):
    found = {}
    for shown, steps in ((True, 70), (False, 4)):
        name = f"shown-{shown}"
        rows = write(tmp_path / f"{name}.jsonl", 512 if shown else 64, seed=1, shown=shown)
        val = write(tmp_path / f"{name}-val.jsonl", 64, seed=2, shown=shown)
        run = options(tmp_path, rows, run__name=name, run__max_steps=steps, val__every=steps)
        run |= {"data.val": val, "train.prompts_per_step": 32, "train.epochs": 100}
        last = sft.run(run | {"reward.terms": ["exact"], "val.before": False})
        found[shown] = last[f"val/{name}-val/accuracy"]
    assert found[True] > 0.6 and found[False] < 0.45  # chance is a quarter
    # The checkpoint alone says how its series are read.
    val = str(tmp_path / "shown-True-val.jsonl")
    run = options(tmp_path, val, model__path=str(tmp_path / "shown-True" / "checkpoints/step-70"))
    run = {name: value for name, value in run.items() if "series" not in name}
    run |= {"data.val": val, "reward.terms": ["exact"]}
    (again,) = evaluate.run(run | {"run.name": "again"}).values()
    assert again["accuracy"] == found[True]


def test_rl_trains_the_encoder_and_goes_on_exactly(tmp_path, resumed, numbers):
    rows = write(tmp_path / "rows.jsonl", 8, seed=3)
    # Hardly any byte of a random answer would be right; of these about half are.
    (tmp_path / "own.py").write_text("def score(s): return float(sum(map(ord, s.response)) % 2)")
    run = options(tmp_path, rows, model__path="tiny:qwen2_5_vl", rollout__max_tokens=4)
    run |= {"reward.terms": [f"{tmp_path}/own.py:score"], "train.samples_per_prompt": 4}
    run |= {"reward.self_test": "off", "algorithm.preset": "grpo"}
    last, _ = resumed(rl.run, run)
    assert 0 < numbers(last.parents[1])[-1]["reward/mean"] < 1
    early, late = encoder_of(last.with_name("step-1")), encoder_of(last)
    assert all(not torch.equal(early[tensor], late[tensor]) for tensor in early)
    config = load(run)
    family = model_setup.family_of(config, model_setup.start_folder(config))
    drawn = model_setup.load_policy(config, family).series.state_dict()
    empty = empty_model(family)
    assert sum(p.numel() for p in empty.series.parameters()) == sum(map(torch.numel, drawn.values()))
    assert drawn.keys() == early.keys() and not torch.equal(drawn["inner.first.weight"], early["inner.first.weight"])
    exported = export(last, tmp_path / "out", dtype="bfloat16")
    assert all(torch.equal(t, late[n]) for n, t in encoder_of(exported).items())
    opened = model_setup.family_of(load({"model.path": str(exported)}), str(exported))
    assert opened.series is not None and opened.series.patch == 20


def test_preferences_and_reward_models_read_series(tmp_path):
    rows = write(tmp_path / "pairs.jsonl", 8, seed=4, pairs=True)
    for recipe in (dpo, reward_training):
        name = recipe.__name__.rpartition(".")[2]
        learned = options(tmp_path, rows, run__name=name, train__epochs=2)
        del learned["rollout.max_tokens"]  # nothing is sampled
        recipe.run(learned)
        folder = tmp_path / name / "checkpoints" / "step-2"
        assert (folder / SERIES_FILE).is_file()
    # A reward model scores the answers of a policy that reads the same series.
    term = {"verifier": "model", "args": {"path": str(tmp_path / "reward_training/checkpoints/step-2")}}
    run = options(tmp_path, write(tmp_path / "rows.jsonl", 8, seed=5), run__name="rated")
    last = rl.run(run | {"reward.terms": [term], "train.samples_per_prompt": 2})
    assert np.isfinite(last["reward/mean"]) and last["reward/mean"] != 0


def test_rows_of_another_shape_are_listed_and_no_encoder_is_an_error(tmp_path):
    rows = Path(write(tmp_path / "rows.jsonl", 3, seed=6))
    odd = {"id": "odd", "question": "?", "answer": "1", "series": [[1.0, 2.0]]}
    none = {"id": "none", "question": "<series>?", "answer": "1"}  # a mark, and nothing there
    spoken = {"id": "spoken", "question": "What is \\<series>?", "answer": "1"}
    odd_rows = "".join(json.dumps(row) + "\n" for row in (odd, none, spoken))
    (tmp_path / "odd.jsonl").write_text(odd_rows)
    run = options(tmp_path, str(rows)) | {"data.train": [str(rows), str(tmp_path / "odd.jsonl")]}
    report = check_data.run({n: v for n, v in run.items() if not n.startswith(("train", "roll"))})
    bad, lost = report.bad
    assert bad.id == "odd" and "1 leads, model.series.channels is 4" in bad.reason
    assert lost.id == "none" and "1 <series> placeholder(s) but 0 series" in lost.reason
    assert report.good == 4 and report.lengths["max"] < 60
    without = {name: value for name, value in run.items() if "series" not in name}
    with pytest.raises(ConfigError, match=r"try model\.series\.encoder=patches"):
        sft.run(without | {"run.name": "without"})


def test_a_teacher_has_to_read_series_too(tmp_path):
    rows = write(tmp_path / "rows.jsonl", 8, seed=7)
    sft.run(options(tmp_path, rows, run__name="teacher"))
    teacher = str(tmp_path / "teacher" / "checkpoints" / "step-2")
    last = sft.run(options(tmp_path, rows, run__name="pupil", sft__teacher=teacher))
    assert np.isfinite(last["sft/loss"])
    plain = tiny.build("qwen2", tmp_path / "plain")
    run = options(tmp_path, rows, model__path=str(plain)) | {"data.val": rows}
    with pytest.raises(ConfigError, match="holds no encoder, and one that is drawn has learnt"):
        evaluate.run(run | {"reward.terms": ["exact"]})
    with pytest.raises(ConfigError, match="with an encoder of time series if that has one"):
        sft.run(options(tmp_path, rows, run__name="alone", sft__teacher=plain))
