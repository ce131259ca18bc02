"""Runs of a mixture of experts: all commands balance it, checkpoints go on exactly."""

import json

import pytest
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.errors import ConfigError
from saccade.plugins.families.tiny import build
from saccade.plugins.preferences import dpo
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.plugins.reward_models import reward_training
from saccade.plugins.smoke.smoke import model_type, smoke
from saccade.recipes import rl, sft


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("mixtral", tmp_path_factory.mktemp("mixtral"), words=WORDS)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Questions with an answer, a better and a worse reply."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    listed = [
        {"prompt": "how many " + "red " * n, "answer": str(n), "chosen": "red", "rejected": "blue"} for n in range(1, 9)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in listed))
    return str(file)


@pytest.fixture
def config(model, rows, tmp_path):
    def make(**changes):
        options = {
            "run.out": str(tmp_path), "run.max_steps": 2, "run.device": "cpu", "model.path": model, "data.train": rows,
            "prompt.format": "none", "train.prompts_per_step": 4, "train.lr": 5e-3, "train.warmup": 0,
            "train.aux_coef": 0.01, "track.tensorboard": False,
        }  # fmt: skip
        return options | {name.replace("__", "."): value for name, value in changes.items()}

    return make


RL = {
    "rollout__max_tokens": 6,
    "reward__terms": [{"verifier": "count", "args": {"order": ["last_number"], "tolerance": 2}}],
    "train__samples_per_prompt": 4,
}


def test_rl_reports_the_balance_of_policy_and_critic_and_goes_on_exactly(config, numbers, resumed):
    last, _ = resumed(rl.run, config(train__epochs=9, algorithm__preset="ppo", **RL))
    found = numbers(last.parents[1])
    assert all(2 < row["moe/aux_loss"] < 4 and row["flops/update"] > 0 for row in found)
    assert all(row["moe/aux_loss_critic"] > 2 for row in found)
    assert all(row["mismatch/logp_gap_max"] < 1e-4 for row in found)


@pytest.mark.parametrize("command", [sft, dpo, reward_training])
def test_learning_from_rows_evens_out_the_experts(command, config, tmp_path, numbers):
    command.run(config(run__max_steps=6, train__aux_coef=1.0, train__epochs=9))
    found = [row["moe/aux_loss"] for row in numbers(tmp_path / "run")]
    assert found[-1] < found[0] - 0.05 and len(found) == 6


@pytest.mark.parametrize(
    ("path", "described", "tiny"),
    [
        ("models/Qwen3-30B-A3B", None, "qwen3_moe"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", None, "mixtral"),
        ("here", {"model_type": "olmoe", "num_attention_heads": 8, "num_experts": 64}, "qwen3_moe"),
        ("here", {"model_type": "smollm3", "num_attention_heads": 8}, "llama"),
        ("models/Llama-4-Scout-17B-16E", None, "llama4"),
        ("models/Llama-3.1-8B", None, "llama"),
        ("google/paligemma2-3b-mix-448", None, "paligemma"),
        ("moonshotai/Kimi-K2.5", None, "kimi_k25"),
        ("models/gemma-3-270m", None, "llama"),
        ("here", {"model_type": "florence2", "vision_config": {}}, "qwen2_5_vl"),
        ("here", {"model_type": "qwen3_omni_moe", "thinker_config": {}}, "qwen3_omni_moe_thinker"),
    ],
)
def test_a_smoke_test_takes_a_tiny_model_of_the_same_kind(path, described, tiny, tmp_path, rows):
    if described:
        path = str(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(described))
    assert model_type(load({"model.path": path, "data.train": rows})) == tiny


def test_a_smoke_test_says_what_stands_in_and_refuses_what_a_run_refuses(tmp_path, rows):
    options = ["sft", f"model.path={tmp_path}", f"data.train={rows}", f"run.out={tmp_path}", "--smoke", "--dry-run"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "florence2", "vision_config": {}}))
    said = CliRunner().invoke(app, options).stdout
    assert (
        f"tiny:qwen2_5_vl stands in for model.path: {tmp_path}, for there is no tiny model of type florence2\n" in said
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "num_heads": 8}))
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 3 and "'t5' has no attention heads" in result.stderr.replace("\n", " ")


def test_what_is_no_mixture_or_cannot_read_one_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.aux_coef=0.01: Llama"):
        sft.run(config(model__path="tiny:llama"))
    with pytest.raises(ConfigError, match=r"rollout.engine=sglang: .*use rollout.engine=embedded"):
        rl.run(config(rollout__engine="sglang", run__name="other", **RL))


def test_a_smoke_test_drops_what_only_other_engines_read():
    parallel = {"rollout.engine": "vllm", "rollout.tensor_parallel": 2, "rollout.replicas": 4}
    shrunk = smoke(load({"model.path": "tiny:llama"} | parallel), "rl").rollout
    assert (shrunk.engine, shrunk.replicas) == ("embedded", 0)
    assert "tensor_parallel" not in shrunk.model_fields_set
