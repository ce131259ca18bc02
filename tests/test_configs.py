"""Every shipped recipe loads, passes the checks and runs two steps at the smallest size."""

from __future__ import annotations

import json
import math
import wave
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from saccade.algorithms.build import from_config
from saccade.checks import check
from saccade.cli_run import MODULES
from saccade.config import Config, defaults_for, load
from saccade.errors import ConfigError
from saccade.smoke import smoke
from tests.public_sets import write_all

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
CALL = '<grounding>{"bbox_2d": [0, 0, 0.5, 0.5], "source": "original_image"}</grounding>'
COMMANDS = {
    "minio3_sft": "sft",
    "minio3_eval": "eval",
    "sft_demonstrations": "sft",
    "dpo": "dpo",
    "kto": "dpo",
    "rejection_sampling": "sft",
    "iter_dpo": "dpo",
    "kd": "sft",
    "mixtral_lora": "sft",
    "continue_pretrain": "sft",
    "lightrft_grm_sft": "sft",
    "rm": "reward-model",
    "prm": "reward-model",
    "lightrft_srm_vl": "reward-model",
    "lightrft_srm_al": "reward-model",
}
SHOWN = {"rl": "reward/mean", "sft": "sft/loss", "dpo": "dpo/loss", "reward-model": "rm/loss"}
SUMS = [(n, n + 3) for n in range(8)]


def command_of(name: str) -> str:
    return COMMANDS.get(name, "rl")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, image: Any) -> dict[str, str]:
    """A small file in the layout that each recipe describes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("rows")
    for n, _ in SUMS:
        Image.new("RGB", (56 + 28 * n, 84), (20 * n, 90, 120)).save(folder / f"{n}.png")
        with wave.open(str(folder / f"{n}.png.wav"), "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(bytes(range(256)) * (25 + n))
    asked = [(f"{a} + {b}?", str(a + b), f"{a}.png") for a, b in SUMS]
    layouts: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
        "geo3k_grpo": lambda q, a, i: {"problem": f"<image>{q}", "answer": a, "images": [i]},
        "clevr_grpo": lambda q, a, i: {
            "image": i,
            "problem": q,
            "solution": f"<answer> {a} </answer>",
        },
        "gsm8k_grpo": lambda q, a, i: {"question": q, "answer": f"Add them. #### {a}"},
        "dapo_math": lambda q, a, i: {
            "prompt": [{"role": "user", "content": q}],
            "reward_model": {"ground_truth": a},
        },
        "sft_demonstrations": lambda q, a, i: {
            "image": i,
            "problem": q,
            "thinking": "<think>Add.</think>",
            "solution": f"<answer> {a} </answer>",
        },
        "minio3_sft": lambda q, a, i: {
            "conversations": [
                {"from": "human", "value": f"<image>{q}"},
                {"from": "gpt", "value": f"<think>Small.</think>{CALL}"},
                {"from": "human", "value": "Result of request 1: observation_1.\n<image>"},
                {"from": "gpt", "value": f"<think>Now.</think><answer>{a}</answer>"},
            ],
            "images": [i, i],
        },
        "minio3_small": lambda q, a, i: {"problem": f"<image>{q}", "answer": a, "images": [i]},
        "dpo": lambda q, a, i: {
            "prompt": f"<image>{q}",
            "images": [i],
            "chosen": a,
            "rejected": "none",
        },
        "kto": lambda q, a, i: {"input": q, "images": [i], "output": a, "label": int(a) % 4 // 2},
        "rejection_sampling": lambda q, a, i: {
            "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
            "answer": a,
        },
        "iter_dpo": lambda q, a, i: {
            "prompt": [{"role": "user", "content": q}],
            "chosen": [{"role": "assistant", "content": a}],
            "rejected": [{"role": "assistant", "content": "none"}],
            "answer": a,
        },
        "kd": lambda q, a, i: {
            "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
        },
        "continue_pretrain": lambda q, a, i: {"text": f"{q} {a}."},
        "lightrft_aqa": lambda q, a, i: {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "audio", "audio": f"{i}.wav"},
                        {"type": "text", "text": q},
                    ],
                }
            ],
            "reference": a,
            "choices": [a, "none"],
            "label": "avqa_rule",
        },
        "lightrft_grm_sft": lambda q, a, i: {
            "conversations": [
                {"from": "human", "value": f"<image>\n<image>\nCompare them for: {q}"},
                {
                    "from": "gpt",
                    "value": f"<think>It shows {a}.</think>"
                    f"<answer>Image {int(a) % 4 // 2 + 1} is better</answer>",
                },
            ],
            "images": [i, "0.png"],
        },
        "lightrft_grm_rl": lambda q, a, i: {
            "prompt": q,
            "path1": i,
            "path2": "0.png",
            "confidence": 0.99,
        },
        "prm": lambda q, a, i: {"input": f"{q} Add. ки\nIt is {a}. ки", "label": ["+", "-"]},
        "lightrft_srm_al": lambda q, a, i: {
            "prompt": q,
            "chosen": {"path": f"{i}.wav"},
            "rejected": {"path": "0.png.wav"},
        },
        "lightrft_srm_vl": lambda q, a, i: {
            "prompt": q,
            "images": [i, "0.png"],
            "chosen": "<image>",
            "rejected": "<image>",
        },
    }
    layouts["rm"], layouts["mixtral_lora"] = layouts["dpo"], layouts["kd"]
    for name in ("ppo_70b", "text_ppo", "text_grpo", "text_rpp", "text_rpp_baseline"):
        layouts[name] = lambda q, a, i: {"prompt": q}
    layouts["lightrft_gsm8k"] = lambda q, a, i: {"prompt": q, "reference": a, "label": "gsm8k_rule"}
    for name in ("lightrft_geo3k", "lightrft_geo3k_ppo"):
        layouts[name] = lambda q, a, i: {
            "prompt": [{"role": "user", "content": q}],
            "images": [i],
            "reference": a,
            "label": "geo3k_rule",
        }
    layouts["minio3_rl"] = lambda q, a, i: {
        "doc_id": i,
        "problem": f"<image>{q}",
        "solution": a,
        "images": [i],
    }
    write_all(folder, image)
    return {"public": str(folder)} | {
        name: write_rows(folder / f"{name}.jsonl", [layout(*row) for row in asked])
        for name, layout in layouts.items()
    }


def runnable(name: str, rows: dict[str, str], out: Path) -> Config:
    """The recipe with a model and rows that are here."""
    config = load(FILES[name])
    changes = [f"model.path=tiny:{TINY[name]}", f"run.out={out}"]
    if config.data.train:
        changes.append(f"data.train={rows[name]}")
    if config.data.val:
        changes.append(f"data.val={rows[name]}")
    if config.sft.teacher:
        changes.append(f"sft.teacher=tiny:{TINY[name]}")
    if config.eval.suites:
        changes.append(f"eval.folder={rows['public']}")
    if any(term.verifier == "model" for term in config.reward.terms):
        term = {"verifier": "model", "args": {"path": f"tiny:{TINY[name]}"}}
        changes.append(f"reward.terms={json.dumps([term])}")
    return defaults_for(command_of(name), load(config, changes))


def test_these_recipes_are_shipped() -> None:
    assert set(FILES) == set(TINY)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_is_short_explained_and_names_no_place_of_its_own(name: str) -> None:
    text = FILES[name].read_text(encoding="utf-8")
    assert text.startswith("# ") and len(text.splitlines()) < 50
    config = load(FILES[name])
    assert config.run.name == name
    assert all(not Path(source.path).is_absolute() for source in config.data.train)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_passes_the_checks(name: str, rows: dict[str, str], tmp_path: Path) -> None:
    config = runnable(name, rows, tmp_path)
    check(config, command_of(name))
    if command_of(name) == "rl":
        assert from_config(config).samples_per_prompt == config.train.samples_per_prompt


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_runs(name: str, rows: dict[str, str], tmp_path: Path) -> None:
    command = command_of(name)
    config = smoke(runnable(name, rows, tmp_path), command)
    config = load(config, ["track.tensorboard=false", "run.device=cpu"])
    check(config, command)
    last = import_module(f"saccade.recipes.{MODULES[command]}").run(config)
    if command == "eval":
        assert all(0 <= found["accuracy"] <= 1 for found in last.values())
        return
    assert math.isfinite(last[SHOWN[command]])
    assert (tmp_path / config.run.name / "checkpoints" / "step-2" / "config.json").is_file()


@pytest.mark.parametrize("name", ["rejection_sampling", "iter_dpo"])
def test_a_recipe_of_rounds_makes_its_rows(name: str, rows: dict[str, str], tmp_path: Path) -> None:
    config = smoke(runnable(name, rows, tmp_path), "generate")
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
