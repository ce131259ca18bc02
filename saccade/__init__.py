"""saccade fine-tunes vision-language models with reinforcement learning.

Every function takes a config (YAML path, mapping or `Config`) and `section.key=value` overrides, and runs what the
command of the same name runs. Importing this is fast: it loads neither torch nor other large libraries.

    >>> import saccade
    >>> saccade.load_config({"train.lr": 1e-6}).train.lr
    1e-06
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.config import Config
    from saccade.plugins.check_data.check_data import Report

    Source = str | Path | Mapping[str, Any] | Config | None

__version__ = "0.1.0"
__all__ = [
    "check_data",
    "dpo",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "quickstart",
    "reward_model",
    "rl",
    "sft",
]


def load_config(config: Source, *overrides: str) -> Config:
    """Return the config, with every option validated."""
    from saccade.config import load

    return load(config, overrides)


def rl(config: Source, *overrides: str) -> dict[str, Any]:
    """Train with reinforcement learning; returns the metrics of the last step."""
    return _result_of("rl", config, *overrides)


def sft(config: Source, *overrides: str) -> dict[str, Any]:
    """Train on demonstrations; returns the metrics of the last step."""
    return _result_of("sft", config, *overrides)


def dpo(config: Source, *overrides: str) -> dict[str, Any]:
    """Train on preferences; returns the metrics of the last step."""
    return _result_of("dpo", config, *overrides)


def reward_model(config: Source, *overrides: str) -> dict[str, Any]:
    """Train a reward model; returns the metrics of the last step."""
    return _result_of("reward-model", config, *overrides)


def evaluate(config: Source, *overrides: str, out: str | Path | None = None, rescore: str | Path | None = None) -> Any:
    """Evaluate on the validation sets, or score the saved responses in `rescore` again."""
    folders = {"out": out and Path(out), "rescore": rescore and Path(rescore)}
    return _result_of("eval", config, *overrides, **folders)


def generate(config: Source, *overrides: str) -> Any:
    """Generate responses and write them to a file."""
    return _result_of("generate", config, *overrides)


def export(
    checkpoint: str | Path, out: str | Path, dtype: str | None = None, verify: bool = True, adapter_only: bool = False
) -> Path:
    """Write a stand-alone Hugging Face folder from a checkpoint, or from the latest one of a run folder."""
    exporting = import_module("saccade.plugins.export.export")
    return exporting.export(checkpoint, out, dtype, verify, adapter_only)


def quickstart(out: str | Path = "runs/quickstart", seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Teach a tiny model to count: demonstrations, reinforcement learning, evaluation, report."""
    return import_module("saccade.plugins.quickstart.quickstart").run(Path(out), seed=seed, quick=quick)


def check_data(config: Source, *overrides: str, **options: Any) -> Report:
    """Report every problem of the data sets, row by row."""
    return import_module("saccade.plugins.check_data.check_data").run(load_config(config, *overrides), **options)


def _result_of(name: str, config: Source, *overrides: str, **more: Any) -> Any:
    return import_module("saccade.cli_run").result_of(name, load_config(config, *overrides), **more)
