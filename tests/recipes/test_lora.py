"""Runs that train adapters: what moves, what is written, going on as if never stopped."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saccade.cli import app
from saccade.errors import ConfigError
from saccade.plugins.evaluation import evaluate
from saccade.plugins.export.export import export
from saccade.recipes import rl, sft
from tests.recipes.documented import unnamed

pytest.importorskip("peft")

LORA = {"model.train": "lora", "model.lora.rank": 4, "train.lr": 2e-2}
WITH_KL = {"algorithm.kl.coef": 0.05}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rl_config):
    """Four steps of GRPO with a KL, adapters on the language model."""
    config = rl_config(tmp_path_factory.mktemp("lora")) | LORA | WITH_KL
    rl.run(config)
    return config


def last(config, name="run", step=4):
    return Path(config["run.out"]) / name / "checkpoints" / f"step-{step}"


def moved(config, tensors, **place):
    """Tensors of the checkpoint that are not those of the start."""
    start, now = tensors(config["model.path"]), tensors(last(config, **place))
    assert start.keys() == now.keys()
    return {name for name in start if not bool((start[name] == now[name]).all())}


def test_only_what_is_adapted_moves(trained, tensors, numbers):
    names = moved(trained, tensors)
    assert len(names) == 14 and all("layers." in n and n.endswith("proj.weight") for n in names)
    rows = numbers(last(trained).parent.parent)
    assert unnamed(rows) == []
    assert rows[0]["policy/kl_ref"] == 0.0  # the reference is the model at the start
    assert rows[-1]["policy/kl_ref"] > 1e-3
    for row in rows:  # the engine samples with the adapter
        assert row["mismatch/logp_gap_max"] < 1e-5
    log = (last(trained).parent.parent / "log.txt").read_text()
    assert "trained weights: vision 0 of" in log and "llm 8,192 in adapters beside" in log


def test_a_tower_of_its_own_and_its_learning_rate(tmp_path, sft_config, tensors):
    config = sft_config(tmp_path, run__max_steps=2) | LORA
    sft.run(config | {"run.name": "vision", "model.lora.targets": "vision"})
    names = moved(config, tensors, name="vision", step=2)
    assert names and all("visual.blocks." in name for name in names)
    both = {"model.lora.vision": True, "train.lr_scale": {"vision": 1e-20, "projector": 1e-20}}
    sft.run(config | {"run.name": "scaled"} | both)
    assert len(moved(config, tensors, name="scaled", step=2)) == 14


RESUMED = {
    "rl whose reference follows": ("rl", WITH_KL | {"algorithm.kl.update": "copy", "algorithm.kl.update_every": 1}),
    "sft with dropout in bf16 with fp32 masters": ("sft", {"model.lora.dropout": 0.2, "model.dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_stopped_and_resumed_is_the_same_run(tmp_path, name, rl_config, sft_config, tensors, resumed):
    kind, changes = RESUMED[name]
    recipe, make = {"rl": (rl.run, rl_config), "sft": (sft.run, sft_config)}[kind]
    whole, _ = resumed(recipe, make(tmp_path, run__max_steps=2) | LORA | changes)
    state = tensors(whole / "state")
    assert all(".lora_" in n for n in state if n.startswith(("exp_avg", "master")))
    assert "model.lora.dropout" not in changes or "cpu" in state  # where its random numbers stand


def test_a_blended_reference_is_refused(tmp_path, rl_config):
    config = rl_config(tmp_path) | LORA | WITH_KL
    with pytest.raises(ConfigError, match=r"kl\.update=ema: .* use algorithm\.kl\.update=copy"):
        rl.run(config | {"algorithm.kl.update": "ema", "algorithm.kl.ema": 0.1})


def test_a_critic_has_no_adapters(tmp_path, rl_config, tensors):
    config = rl_config(tmp_path, run__max_steps=2, algorithm__preset="ppo") | LORA
    rl.run(config)
    critic = tensors(last(config, step=2) / "state" / "critic")
    assert not any(".lora_" in name for name in critic)
    assert any(name.startswith("exp_avg/model.visual.") for name in critic)
    assert len(moved(config, tensors, step=2)) == 14


def test_export_gives_both(trained, tmp_path, same_weights):
    folder = last(trained)
    out = export(folder, tmp_path / "both")
    assert same_weights(out, folder) and same_weights(out / "adapter", folder / "adapter")
    assert not list(out.glob("adapter_*"))
    command = ["export", str(folder), "--out", str(tmp_path / "alone"), "--adapter-only"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    with pytest.raises(ConfigError, match="has no adapter"):
        export(trained["model.path"], tmp_path / "none", adapter_only=True)


def test_a_checkpoint_is_evaluated_and_trained_on_like_any_model(trained, tmp_path, scenes):
    config = trained | {"model.path": str(last(trained)), "run.out": str(tmp_path)}
    evaluate.run(config | {"data.val": str(scenes / "val.jsonl")}, out=tmp_path / "eval")
    assert json.loads((tmp_path / "eval" / "results.json").read_text())
    rl.run(config | {"run.max_steps": 1})
    assert not list(last(config, step=1).glob("adapter_*"))


def test_four_bits_train_and_resume(tmp_path, rl_config, resumed, numbers):
    pytest.importorskip("bitsandbytes")
    whole, _ = resumed(rl.run, rl_config(tmp_path, run__max_steps=2) | LORA | WITH_KL | {"model.train": "qlora"})
    rows = numbers(whole.parents[1])
    assert rows[0]["policy/kl_ref"] == 0.0 and rows[-1]["policy/kl_ref"] > 1e-3
    assert all(row["mismatch/logp_gap_max"] < 1e-5 for row in rows)
