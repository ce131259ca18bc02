from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saccade.algorithms.advantages import compute
from saccade.algorithms.algorithm import AXES
from saccade.algorithms.build import from_config, old_mode, resolve
from saccade.algorithms.describe import describe, explain
from saccade.algorithms.kl import KINDS
from saccade.algorithms.presets import PRESETS
from saccade.config import AlgorithmConfig, load
from saccade.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def algorithm(*overrides: str, **changes):
    config = load(None, [f"algorithm.{override}" for override in overrides])
    return resolve(config.algorithm, **({"max_tokens": 2048} | changes))


@pytest.mark.parametrize(
    ("preset", "advantage", "loss", "aggregation", "clip", "kl", "samples"),
    [
        ("grpo", "grpo", "clip", "seq_mean", (0.2, 0.2), (0.04, "k3", "loss"), 8),
        ("dr_grpo", "no_std", "clip", "fixed", (0.2, 0.2), (0.0, "k3", "loss"), 8),
        ("dapo", "grpo", "clip", "token_mean", (0.2, 0.28), (0.0, "k3", "loss"), 16),
        ("rloo", "rloo", "clip", "token_mean", (0.2, 0.2), (0.01, "k1", "reward"), 4),
        (
            "reinforce_pp_baseline",
            "reinforce_pp_baseline",
            "clip",
            "token_mean",
            (0.2, 0.2),
            (1e-3, "k2", "loss"),
            8,
        ),
        ("gspo", "grpo", "gspo", "seq_mean", (3e-4, 4e-4), (0.0, "k3", "loss"), 8),
        ("gmpo", "grpo", "gmpo", "seq_mean", (0.4, 0.4), (0.0, "k3", "loss"), 8),
        (
            "reinforce_pp",
            "reinforce_pp",
            "clip",
            "token_mean",
            (0.2, 0.2),
            (1e-3, "k1", "reward"),
            1,
        ),
    ],
)
def test_rows(preset, advantage, loss, aggregation, clip, kl, samples):
    row = algorithm(f"preset={preset}")
    assert (row.advantage, row.policy_loss, row.aggregation) == (advantage, loss, aggregation)
    assert (row.loss_options.clip_low, row.loss_options.clip_high) == clip
    assert (row.kl.coef, row.kl.kind, row.kl.place) == kl
    assert row.samples_per_prompt == samples
    assert row.needs_reference == (kl[0] > 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_resolves_and_crosses_a_process(preset):
    row = algorithm(f"preset={preset}")
    assert pickle.loads(pickle.dumps(row)) == row
    assert row.warnings == ()
    text = explain(preset)
    assert row.advantage in text and row.estimator.formula in text and row.paper in text


def test_dapo_has_the_pieces_of_its_paper():
    row = algorithm("preset=dapo", max_tokens=20480)
    assert (row.filter.dynamic, row.filter.low, row.filter.high) == (True, 0.01, 0.99)
    assert (row.filter.max_rounds, row.filter.on_exhausted) == (10, "train_partial")
    assert (row.overlong.buffer, row.overlong.factor) == (4096, 1.0)
    assert algorithm("preset=dapo", max_tokens=2048).overlong.buffer == 409
    assert algorithm("preset=dapo", max_tokens=32768).overlong.buffer == 4096


def test_a_row_s_cells_hold_only_for_its_own_entry():
    assert algorithm("policy_loss=gspo").loss_options.clip_high == 4e-4
    assert algorithm("preset=dapo", "policy_loss=gspo").aggregation == "seq_mean"
    assert algorithm("preset=rloo", "kl.place=loss").kl.kind == "k3"
    assert algorithm("kl.place=reward").kl.kind == "k1"
    assert algorithm("preset=dapo", "clip_low=0.1").loss_options.clip_high == 0.28


def test_fixed_length_is_the_longest_response_unless_given():
    assert algorithm("preset=dr_grpo", max_tokens=512).fixed_length == 512
    assert algorithm("preset=dr_grpo", "fixed_length=100", max_tokens=512).fixed_length == 100


def test_the_whole_config_says_how_it_trains():
    config = load(None, ["train.updates_per_step=4", "train.samples_per_prompt=5"])
    row = from_config(config)
    assert (row.old, row.samples_per_prompt, row.overlong.max_tokens) == ("recompute", 5, 2048)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preset=gropo"], ("algorithm.preset=gropo", "'grpo'")),
        (["advantage=rlo"], ("algorithm.advantage=rlo", "'rloo'")),
        (["policy_loss=clipp"], ("algorithm.policy_loss=clipp", "'clip'")),
        (["aggregation=tokenmean"], ("algorithm.aggregation=tokenmean", "'token_mean'")),
        (["exclude_status=[overturned]"], ("algorithm.exclude_status", "'overturn'")),
        (["kl.kind=k1"], ("algorithm.kl.kind=k1", "k1+")),
        (["kl.kind=abs"], ("algorithm.kl.kind=abs", "place=reward")),
        (["overlong.buffer=2048"], ("algorithm.overlong.buffer=2048", "buffer=409")),
        (
            ["preset=dapo", "exclude_status=[truncated]"],
            ("exclude_status=[truncated]", "overlong.buffer=0"),
        ),
        (["dual_clip=3", "delta=4"], ("algorithm.delta=4", "dual_clip=3")),
        (
            ["filter.dynamic=true", "filter.low=0.9", "filter.high=0.1"],
            ("algorithm.filter.low=0.9", "filter.low=0.01"),
        ),
        (["policy_loss=pg", "clip_low=0.1"], ("algorithm.clip_low", "pg", "policy_loss=clip")),
        (["preset=rloo", "std_eps=1e-4"], ("algorithm.std_eps", "rloo", "advantage=grpo")),
        (["fixed_length=9"], ("algorithm.fixed_length", "seq_mean", "aggregation=fixed")),
        (["policy_loss=gspo", "dual_clip=3"], ("algorithm.dual_clip", "gspo")),
        (["filter.low=0.1"], ("algorithm.filter.low", "filter.dynamic=true")),
        (["preset=dapo", "kl.kind=k3"], ("algorithm.kl.kind", "kl.coef=0.01")),
        (["kl.kind=k2", "kl.clamp=zero"], ("algorithm.kl.clamp", "kl.kind=k3")),
        (["overlong.factor=2"], ("algorithm.overlong.factor", "overlong.buffer=512")),
        (["excluded_in_baseline=true"], ("algorithm.excluded_in_baseline", "exclude_status=")),
        (["preset=reinforce", "drop_constant=true"], ("algorithm.drop_constant", "no groups")),
        (["advantage=nowhere.py:name"], ("algorithm.advantage", "nowhere.py", "file.py:name")),
    ],
)
def test_refusals_name_the_field_and_what_works(overrides, words):
    with pytest.raises(ConfigError) as refusal:
        algorithm(*overrides)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_group_estimators_need_a_group():
    with pytest.raises(ConfigError, match=r"train\.samples_per_prompt=1.*samples_per_prompt=8"):
        algorithm(samples_per_prompt=1)
    assert algorithm("preset=reinforce_pp", samples_per_prompt=1).samples_per_prompt == 1
    with pytest.raises(ConfigError, match=r"filter\.dynamic would keep no group"):
        algorithm("preset=reinforce", "filter.dynamic=true")


def test_warnings():
    (warning,) = algorithm("delta=1.1").warnings
    assert "algorithm.delta=1.1" in warning and "delta=4" in warning
    (warning,) = algorithm("preset=gspo", "aggregation=token_mean").warnings
    assert "seq_mean" in warning
    assert warning in describe(algorithm("preset=gspo", "aggregation=token_mean"))


@pytest.mark.parametrize(
    ("overrides", "updates", "epochs", "mode"),
    [
        ([], 1, 1, "detach"),
        ([], 4, 1, "recompute"),
        ([], 1, 2, "recompute"),
        (["old=recompute"], 1, 1, "recompute"),
        (["old=rollout"], 4, 1, "rollout"),
        (["preset=rloo"], 1, 1, "recompute"),
        (["preset=rloo", "kl.coef=0"], 1, 1, "detach"),
        (["preset=gpg"], 1, 1, "detach"),
    ],
)
def test_old_log_probs(overrides, updates, epochs, mode):
    row = algorithm(*overrides, updates_per_step=updates, epochs_per_batch=epochs)
    assert row.old == mode


def test_old_log_probs_that_would_be_wrong_are_refused():
    for updates, epochs in ((4, 1), (1, 2)):
        with pytest.raises(ConfigError, match=r"use 1 and 1, or algorithm\.old=recompute"):
            old_mode("detach", updates, epochs)
    for old in ("detach", "rollout"):
        with pytest.raises(ConfigError, match=r"kl\.place=reward"):
            algorithm("preset=rloo", f"old={old}")


def test_an_advantage_of_your_own(golden):
    path = ROOT / "examples" / "my_advantage.py"
    row = algorithm(f"advantage={path}:median")
    inputs = golden.members(rewards=(0, 0, 1, 5), groups=torch.tensor([0, 0, 0, 0]))
    values = compute(row.estimator, inputs).values
    assert values[golden.position == 0].tolist() == [-0.5, -0.5, 0.5, 4.5]
    constant = compute(row.estimator, golden.members(rewards=(1, 1, 0, 1)))
    assert constant.values[golden.sequence < 2].abs().sum() == 0
    assert "R - median_g" in describe(row)
    with pytest.raises(ConfigError, match="compares the members of a group"):
        algorithm(f"advantage={path}:median", samples_per_prompt=1)
    with pytest.raises(ConfigError, match="did you mean 'median'"):
        algorithm(f"advantage={path}:medain")


def test_bare_functions_of_your_own_read_every_option(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def squared(new, inputs, options):\n"
        '    """(new - old)^2"""\n'
        "    return (new - inputs.old) ** 2 * options.clip_low, {}\n"
        "def halves(lengths, trajectory, group, *, fixed_length):\n"
        "    return (lengths > 0) * 0.5 / fixed_length\n"
    )
    monkeypatch.chdir(tmp_path)
    row = algorithm(
        "policy_loss=mine.py:squared",
        "aggregation=mine.py:halves",
        "clip_low=0.3",
        "fixed_length=2",
    )
    monkeypatch.chdir(tmp_path.parent)
    assert row.loss_options.clip_low == 0.3 and row.loss.formula == "(new - old)^2"
    assert row.aggregate.function(torch.tensor([3, 0]), None, None, fixed_length=2).tolist() == [
        0.25,
        0.0,
    ]
    assert "fixed_length=2" in describe(row)


def test_the_listing_names_every_row():
    assert [line.split()[0] for line in explain().splitlines()] == list(PRESETS)


def test_resolving_and_describing_import_no_torch():
    code = (
        "import sys; from saccade.algorithms.describe import explain; explain('dapo');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_algorithm_has_code_of_its_own():
    for file in (ROOT / "saccade").rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip().startswith(("if ", "elif ")):
                assert not any(f'"{name}"' in line for name in PRESETS), (file, line)


def test_the_documentation_names_every_row_and_entry():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    names = [*PRESETS, *KINDS, *(name for table in AXES.values() for name in table)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_default_config_is_grpo():
    assert resolve(AlgorithmConfig(), max_tokens=9).preset == "grpo"
