"""Reinforcement learning with vLLM in the trainer's process."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.errors import ConfigError
from saccade.plugins.evaluation import evaluate
from saccade.recipes import rl
from saccade.run.loggers import read_metrics

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

Make = Callable[..., dict[str, Any]]
ENGINE = {"rollout.engine": "vllm", "data.max_prompt_tokens": 256, "rollout.max_sequences": 64}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rl_config):
    """Twenty steps over all scenes at once; counts that are wrong by two are right: all runs come to the same."""
    near = {"verifier": "count", "args": {"order": ["last_number"], "tolerance": 2}}
    found = {}
    for engine in ("embedded", "vllm"):
        out = tmp_path_factory.mktemp(engine)
        config = rl_config(out) | {
            "run.max_steps": 20, "train.prompts_per_step": 24, "train.samples_per_prompt": 4, "train.lr": 1e-2,
            "reward.terms": [near],
        }  # fmt: skip
        rl.run(config | ENGINE | {"rollout.engine": engine})
        found[engine] = [row for row in read_metrics(out / "run") if "reward/mean" in row]
        found[f"{engine} before"] = [row for row in read_metrics(out / "run") if row["step"] == 0]
    return found


def test_vllm_learns_what_the_embedded_engine_learns(runs):
    first, last = (
        {e: np.mean([row["reward/mean"] for row in runs[e][part]]) for e in ("embedded", "vllm")}
        for part in (slice(3), slice(-6, None))
    )
    assert last["vllm"] == pytest.approx(last["embedded"], abs=0.08)
    assert min(last.values()) > max(first.values()) + 0.2


def test_log_probs_agree_from_the_first_step_to_the_last(runs):
    assert max(row["mismatch/logp_gap_max"] for row in runs["vllm"]) < 1e-4
    assert runs["vllm before"][0]["parity/gap"] < 1e-4
    assert all(row["time/hand_over"] > 0 for row in runs["vllm"])


def test_adapters_are_handed_over_merged(tmp_path, rl_config):
    adapted = {"model.train": "lora", "model.lora.rank": 4, "model.lora.vision": True}
    rl.run(rl_config(tmp_path) | ENGINE | adapted)
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(rows) == 4 and max(row["mismatch/logp_gap_max"] for row in rows) < 1e-4


def test_a_checkpoint_is_evaluated_alike(tmp_path, rl_config, scenes):
    config = rl_config(tmp_path) | {"data.val": str(scenes / "val.jsonl")}
    scores = [
        evaluate.run(config | ENGINE | {"rollout.engine": engine}, out=tmp_path / engine)
        for engine in ("embedded", "vllm")
    ]
    assert scores[0] == scores[1]


def test_truncated_sampling_is_refused_in_training(tmp_path, rl_config):
    truncated = {"rollout.top_p": 0.9, "rollout.truncated_sampling": "replay"}
    with pytest.raises(ConfigError, match=r"rollout\.truncated_sampling.*embedded"):
        rl.run(rl_config(tmp_path) | ENGINE | truncated)


def test_a_model_split_over_two_workers(tmp_path):
    program = Path(__file__).with_name("two_workers.py")
    answer = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(program.parents[2])},
        timeout=600,
    )
    assert answer.stdout.splitlines()[-1:] == ["both agree"], answer.stderr[-2000:]
