"""The schema, its loading and its reference page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from saccade.config import Config, load, options, to_yaml, type_name
from saccade.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parent.parent


def refusal(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {lr: 1.0e-6, prompts_per_step: 16}\ndata: {train: rows.jsonl}\n")
    config = load(path, ["train.lr=2e-6", "algorithm.preset=rloo"])
    assert config.train.lr == 2e-6
    assert config.train.prompts_per_step == 16
    assert config.algorithm.preset == "rloo"
    assert [source.path for source in config.data.train] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.lr=1e-6", "train", "lr", 1e-6),
        ("train.updates_per_step=4", "train", "updates_per_step", 4),
        ("run.max_steps=", "run", "max_steps", None),
        ("val.before=false", "val", "before", False),
        ("rollout.stop=['</answer>']", "rollout", "stop", ("</answer>",)),
        ("train.lr_scale={vision: 0.1}", "train", "lr_scale", {"vision": 0.1}),
        ("resume=auto", "run", "resume", "auto"),
        ("run.name=2025-run", "run", "name", "2025-run"),
    ],
)
def test_an_override_is_read_as_its_type(
    override: str, section: str, name: str, value: object
) -> None:
    assert getattr(getattr(load(None, [override]), section), name) == value


def test_mappings_and_configs_load_alike() -> None:
    nested = load({"train": {"lr": 3e-6}, "model": {"path": "tiny:qwen2_5_vl"}})
    dotted = load({"train.lr": 3e-6, "model.path": "tiny:qwen2_5_vl"})
    assert nested == dotted == load(nested)
    assert load(nested, ["train.lr=4e-6"]).train.lr == 4e-6
    assert nested.train.lr == 3e-6


def test_a_loaded_config_remembers_what_was_set() -> None:
    config = load(load({"train.lr": 3e-6}))
    assert config.model_fields_set == {"train"}
    assert config.train.model_fields_set == {"lr"}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.lrr=1e-6", "train.lr"),
        ("train.prompt_per_step=8", "train.prompts_per_step"),
        ("rollout.temprature=1", "rollout.temperature"),
        ("algoritm.preset=grpo", "algorithm"),
        ("train.temperature=1", "rollout.temperature"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(override: str, nearest: str) -> None:
    assert f"did you mean '{nearest}'?" in refusal(None, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.micro_tokens=0", ["train.micro_tokens", "greater than or equal to 1", "0"]),
        ("rollout.top_p=1.5", ["rollout.top_p", "less than or equal to 1"]),
        ("train.prompts_per_step=many", ["train.prompts_per_step", "integer", "'many'"]),
        ("train.schedule=cosinus", ["train.schedule", "'cosine'", "'cosinus'"]),
        ("train.lr", ["write section.key=value"]),
        ("name=x", ["several sections", "run.name"]),
    ],
)
def test_a_bad_value_is_refused_with_field_and_reason(override: str, words: list[str]) -> None:
    message = refusal(None, override)
    assert all(word in message for word in words), message


def test_every_problem_is_reported_at_once() -> None:
    message = refusal(None, "train.lr=-1", "rollout.max_tokens=0", "val.evry=1")
    assert len(message.splitlines()) == 3


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    assert "must hold sections" in refusal(path)
    path.write_text("train: {lr: [\n")
    assert "not valid YAML" in refusal(path)


def test_yaml_round_trip() -> None:
    config = load({"data.train": ["a.jsonl"], "reward.terms": ["math"], "train.lr": 1e-6})
    assert load(yaml.safe_load(to_yaml(config))).model_dump() == config.model_dump()
    assert load(yaml.safe_load(to_yaml(config, full=False))) == config


def test_every_option_says_what_it_does() -> None:
    for name, field in options():
        assert field.description and field.description.endswith("."), name
        assert "saccade.config" not in type_name(field.annotation)


def test_defaults_are_valid() -> None:
    assert load(None) == Config()


def test_the_reference_page_is_current() -> None:
    script = REPOSITORY / "scripts" / "config_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
