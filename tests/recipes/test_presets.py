"""Every row of the table, and what can be added to it, trains two steps; what has state goes on bit by bit."""

import json
import shutil
from math import isfinite
from pathlib import Path

import pytest

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.config.schema.presets import ADD_ONS, PRESETS
from saccade.recipes import rl

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_algorithm.py"

# What makes state: it must come back from a checkpoint.
WITH_STATE = {
    "adaptive KL and entropy": {
        "algorithm.preset": "grpo",
        "algorithm.kl.controller": "adaptive",
        "algorithm.kl.target": 1e-4,
        "algorithm.kl.horizon": 100,
        "algorithm.entropy_target": 5.0,
    },
    "a reference that follows": {
        "algorithm.preset": "grpo",
        "algorithm.kl.update": "ema",
        "algorithm.kl.update_every": 1,
        "algorithm.kl.ratio_correct": True,
    },
    "running moments": {"algorithm.preset": "rloo", "reward.running_norm": "mean_std"},
    "surplus": {
        "algorithm.preset": "dapo",
        "algorithm.overlong.buffer": 0,
        "algorithm.filter.keep_surplus": True,
        "train.prompts_per_step": 6,
    },
    "fire that is not trained": {
        "algorithm.preset": ["gspo", "fire"],
        "algorithm.hot_first_token.first_token": "mask",
        "train.updates_per_step": 2,
    },
    "selection at each update": {"algorithm.preset": "kl_cov", "train.updates_per_step": 2},
    "ppo warming up": {
        "algorithm.preset": "ppo",
        "algorithm.critic.warmup_steps": 1,
        "algorithm.critic.bootstrap_truncated": True,
        "train.epochs_per_batch": 2,
    },
    "kept denominator": {
        "algorithm.preset": ["grpo", "entropy_top", "icepop"],
        "algorithm.denominator": "kept",
        "algorithm.self_normalise": True,
    },
    "functions of your own": {
        "algorithm.preset": "grpo",
        "algorithm.advantage": f"{EXAMPLE}:best_of_rest",
        "algorithm.policy_loss": f"{EXAMPLE}:soft_clip",
        "algorithm.args": {"width": 0.3},
        "algorithm.aggregation": f"{EXAMPLE}:root_length",
        "algorithm.kl.kind": f"{EXAMPLE}:huber",
        "algorithm.correct": f"{EXAMPLE}:drop_outliers",
        "algorithm.filter.function": f"{EXAMPLE}:only_pictures",
    },
    "drpo damped": {"algorithm.preset": "drpo", "algorithm.args.drpo_kl_damp": 0.75},
}
CASES = {
    **{name: {"algorithm.preset": name} for name in PRESETS},
    **{f"grpo+{name}": {"algorithm.preset": ["grpo", name]} for name in ADD_ONS},
    # Six prompts: of four, all groups of the second step are dead, and it moves nothing.
    "grpo+fire": {"algorithm.preset": ["grpo", "fire"], "train.prompts_per_step": 6},
    **WITH_STATE,
}


@pytest.fixture(scope="module")
def rows_with_domains(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("domains")
    rows = [json.loads(line) for line in (scenes / "train.jsonl").read_text().splitlines()]
    lines = [
        json.dumps(row | {"domain": "ab"[n % 2], "images": [str(scenes / image) for image in row["images"]]})
        for n, row in enumerate(rows)
    ]
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(case, out, rl_config, rows):
    changes = CASES[case]
    row = resolve(AlgorithmConfig(preset=changes["algorithm.preset"]), max_tokens=6)
    config = rl_config(out, run__max_steps=2, save__every=1)
    config |= {"data.train": str(rows), "data.allow_outside": True}
    config["train.samples_per_prompt"] = min(4, row.samples_per_prompt)
    config["train.prompts_per_step"] = max(4, 12 // row.samples_per_prompt)
    if row.estimator.components:
        config["reward.terms"] = [*config["reward.terms"], {"verifier": "length", "args": {"target": 3}}]
    return config | changes


@pytest.mark.parametrize("case", CASES)
def test_two_steps_and_what_has_state_resumed(
    case, tmp_path, rl_config, rows_with_domains, numbers, same_weights, word_model
):
    config = config_of(case, tmp_path / "whole", rl_config, rows_with_domains)
    resumed = case in WITH_STATE
    last = rl.run(config | {"save.every": int(resumed)})
    whole = tmp_path / "whole" / "run"
    assert isfinite(last["policy/loss"]) and last["policy/grad_norm"] > 0
    assert last["guard/nonfinite"] == 0
    before = whole / "checkpoints/step-1" if resumed else word_model
    assert not same_weights(before, whole / "checkpoints/step-2")
    if not resumed:
        return

    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    again = tmp_path / "again" / "run"
    shutil.rmtree(again / "checkpoints" / "step-2")
    rl.run(config | {"run.out": str(tmp_path / "again"), "run.resume": "auto"})
    assert same_weights(whole / "checkpoints/step-2", again / "checkpoints/step-2")
    assert same_state(whole / "checkpoints/step-2/state", again / "checkpoints/step-2/state")
    assert numbers(again) == numbers(whole)


def same_state(one, other):
    """Every file of the state, byte for byte: optimizers, critic, reference, surplus, progress."""
    names = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    return all((one / n).read_bytes() == (other / n).read_bytes() for n in names)
