"""Every shipped recipe loads, passes the checks and runs two steps at the smallest size."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path

import pytest

from saccade.algorithms.build import from_config
from saccade.checks import check
from saccade.cli_run import MODULES
from saccade.config import Config, defaults_for, load
from saccade.errors import ConfigError
from saccade.smoke import smoke, with_examples

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FILES = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
TINY = {
    "geo3k_grpo": "qwen2_5_vl",
    "clevr_grpo": "qwen2_vl",
    "gsm8k_grpo": "qwen2",
    "dapo_math": "qwen3",
    "sft_demonstrations": "qwen2_vl",
    "minio3_sft": "qwen2_5_vl",
    "minio3_rl": "qwen2_5_vl",
    "minio3_eval": "qwen2_5_vl",
    "minio3_small": "qwen2_5_vl",
    "dpo": "qwen2_5_vl",
    "kto": "qwen2_vl",
    "rejection_sampling": "qwen2_5_vl",
    "iter_dpo": "qwen2_vl",
    "kd": "qwen2_5_vl",
    "continue_pretrain": "qwen2",
    "lightrft_aqa": "qwen2_audio",
    "ecg_grpo": "qwen2",
    "lightrft_grm_sft": "qwen2_5_vl",
    "lightrft_grm_rl": "qwen2_vl",
    "rm": "qwen2_5_vl",
    "prm": "qwen2",
    "lightrft_srm_vl": "qwen2_5_vl",
    "lightrft_srm_al": "qwen2_audio",
    "mixtral_lora": "mixtral",
    "ppo_70b": "llama",
    "text_ppo": "llama",
    "text_grpo": "qwen3",
    "text_rpp": "qwen2",
    "text_rpp_baseline": "qwen2",
    "lightrft_gsm8k": "qwen2",
    "lightrft_geo3k": "qwen2_5_vl",
    "lightrft_geo3k_ppo": "qwen2_vl",
}
SHOWN = {"rl": "reward/mean", "sft": "sft/loss", "dpo": "dpo/loss", "reward-model": "rm/loss"}


def command_of(name: str) -> str:
    """As the first line of the recipe says."""
    _, command, path = FILES[name].read_text(encoding="utf-8").splitlines()[0].split()[1:]
    assert path == f"configs/{name}.yaml"
    return command


def runnable(name: str, out: Path) -> Config:
    """The recipe with a model that is here and the example rows beside it."""
    config, replaced = with_examples(load(FILES[name]), FILES[name])
    assert replaced
    changes = [f"model.path=tiny:{TINY[name]}", f"run.out={out}"]
    if config.sft.teacher:
        changes.append(f"sft.teacher=tiny:{TINY[name]}")
    if any(term.verifier == "model" for term in config.reward.terms):
        term = {"verifier": "model", "args": {"path": f"tiny:{TINY[name]}"}}
        changes.append(f"reward.terms={json.dumps([term])}")
    return defaults_for(command_of(name), load(config, changes))


def test_these_recipes_are_shipped() -> None:
    assert set(FILES) == set(TINY)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_is_short_explained_and_names_no_place_of_its_own(name: str) -> None:
    text = FILES[name].read_text(encoding="utf-8")
    assert text.startswith("# saccade ") and len(text.splitlines()) < 50
    config = load(FILES[name])
    assert config.run.name == name
    assert all(not Path(source.path).is_absolute() for source in config.data.train)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_passes_the_checks(name: str, tmp_path: Path) -> None:
    config = runnable(name, tmp_path)
    check(config, command_of(name))
    if command_of(name) == "rl":
        assert from_config(config).samples_per_prompt == config.train.samples_per_prompt


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_runs(name: str, tmp_path: Path) -> None:
    command = command_of(name)
    config = smoke(runnable(name, tmp_path), command)
    config = load(config, ["track.tensorboard=false", "run.device=cpu"])
    check(config, command)
    last = import_module(f"saccade.recipes.{MODULES[command]}").run(config)
    if command == "eval":
        assert all(0 <= found["accuracy"] <= 1 for found in last.values())
        return
    assert math.isfinite(last[SHOWN[command]])
    assert (tmp_path / config.run.name / "checkpoints" / "step-2" / "config.json").is_file()


@pytest.mark.parametrize("name", ["rejection_sampling", "iter_dpo"])
def test_a_recipe_of_rounds_makes_its_rows(name: str, tmp_path: Path) -> None:
    config = smoke(runnable(name, tmp_path), "generate")
    check(config, "generate")
    result = import_module("saccade.recipes.generate").run(config)
    assert result["rows"] == 8 and Path(result["selected"]).is_file()


def test_the_judge_of_minio3_is_switched_on_as_its_recipe_says(tmp_path: Path) -> None:
    text = FILES["minio3_rl"].read_text(encoding="utf-8")
    line, *_ = (line for line in text.splitlines() if line.startswith("reward:"))
    before, block = text.replace(line, "").split("# reward:\n")
    lines = block.splitlines()
    judged = [line for line in lines if line.startswith("#   ")]
    changed = "\n".join(["reward:", *(line[1:] for line in judged), *lines[len(judged) :]])
    path = tmp_path / "judged.yaml"
    path.write_text(before + changed, encoding="utf-8")
    options = next(line for line in text.splitlines() if "reward.judge.url=" in line)
    for config in (load(path), load(FILES["minio3_rl"], options.lstrip("# ").split())):
        assert (config.reward.preset, config.reward.terms) == ("minio3", ())
        assert config.reward.judge.url and config.reward.judge.concurrency == 300
        with pytest.raises(ConfigError) as missing:  # the files that it names, and nothing else
            check(config, "rl")
        assert "reward" not in str(missing.value)
