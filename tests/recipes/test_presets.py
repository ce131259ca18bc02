"""Every row of the table, and what can be added to it, trains; what has state goes on bit by bit."""

import json
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
        "algorithm.preset": "grpo", "algorithm.kl.controller": "adaptive", "algorithm.kl.target": 1e-4,
        "algorithm.kl.horizon": 100, "algorithm.entropy_target": 5.0,
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
    "ppo warming up": {
        "algorithm.preset": "ppo",
        "algorithm.critic.warmup_steps": 1,
        "algorithm.critic.bootstrap_truncated": True,
        "train.epochs_per_batch": 2,
    },
}  # fmt: skip
CASES = {
    "fire that is not trained": {
        "algorithm.preset": ["gspo", "fire"],
        "algorithm.hot_first_token.first_token": "mask",
        "train.updates_per_step": 2,
    },
    "selection at each update": {"algorithm.preset": "kl_cov", "train.updates_per_step": 2},
    "kept denominator": {
        "algorithm.preset": ["grpo", "entropy_top", "icepop"],
        "algorithm.denominator": "kept",
        "algorithm.self_normalise": True,
    },
    "functions of your own": {
        "algorithm.preset": "grpo", "algorithm.advantage": f"{EXAMPLE}:best_of_rest",
        "algorithm.policy_loss": f"{EXAMPLE}:soft_clip", "algorithm.args": {"width": 0.3},
        "algorithm.aggregation": f"{EXAMPLE}:root_length", "algorithm.kl.kind": f"{EXAMPLE}:huber",
        "algorithm.correct": f"{EXAMPLE}:drop_outliers", "algorithm.filter.function": f"{EXAMPLE}:only_pictures",
    },
    "drpo damped": {"algorithm.preset": "drpo", "algorithm.args.drpo_kl_damp": 0.75},
    **{name: {"algorithm.preset": name} for name in PRESETS},
    **{f"grpo+{name}": {"algorithm.preset": ["grpo", name]} for name in ADD_ONS},
    **WITH_STATE,
}  # fmt: skip


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


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITH_STATE])
def test_a_step(case, tmp_path, rl_config, rows_with_domains, same_weights, word_model):
    config = config_of(case, tmp_path, rl_config, rows_with_domains)
    last = rl.run(config | {"run.max_steps": 1, "save.every": 0})
    assert isfinite(last["policy/loss"]) and last["policy/grad_norm"] > 0 and last["guard/nonfinite"] == 0
    assert not same_weights(word_model, tmp_path / "run" / "checkpoints" / "step-1")


@pytest.mark.parametrize("case", WITH_STATE)
def test_what_has_state_is_resumed(case, tmp_path, rl_config, rows_with_domains, same_weights, resumed, numbers):
    last, _ = resumed(rl.run, config_of(case, tmp_path, rl_config, rows_with_domains))
    assert not same_weights(last.with_name("step-1"), last)
    row = numbers(last.parents[1])[-1]
    assert isfinite(row["policy/loss"]) and row["policy/grad_norm"] > 0 and row["guard/nonfinite"] == 0
