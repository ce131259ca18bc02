"""Checks of options for an encoder of time series."""

from collections.abc import Iterator
from pathlib import Path

from saccade.checks.model_rules import frozen
from saccade.config import ADAPTED, Config
from saccade.config.schema.section import given_options
from saccade.models.files import SERIES_FILE


def series(config: Config) -> Iterator[str]:
    model, rollout = config.model, config.rollout
    held = bool(model.path) and (Path(model.path) / SERIES_FILE).is_file()
    encoder = model.series.encoder
    if encoder is None and not held:
        for name, _, _ in given_options(model.series):
            yield f"model.series.{name}: has no effect without an encoder; try model.series.encoder=patches"
        return
    file, _, function = (encoder or "").rpartition(":")
    if encoder not in (None, "patches") and not (function and file.endswith(".py") and Path(file).is_file()):
        hint = f"write patches, or FILE.py:FUNCTION (looked in {Path.cwd()})"
        yield f"model.series.encoder: {file or encoder} does not exist or is no .py file; {hint}"
    if rollout.engine != "embedded" or rollout.replicas:
        name = "replicas" if rollout.engine == "embedded" else "engine"
        hint = "try rollout.engine=embedded rollout.replicas=0"
        yield f"rollout.{name}: {getattr(rollout, name)} has no encoder for time series; {hint}"
    if (model.train in ADAPTED or "series" in frozen(model.train)) and not held:
        hint = "train it first with model.train=freeze:llm, or try model.train=full"
        yield f"model.train: {model.train} would leave the encoder of time series as it was drawn; {hint}"


def trained_series(config: Config) -> Iterator[str]:
    path = config.model.path
    held = (Path(path) / SERIES_FILE).is_file()
    if config.model.series.encoder and path and not held and not path.startswith("tiny:"):
        hint = "train it first: saccade sft, then model.path=runs/NAME/checkpoints/step-N"
        yield f"model.series.encoder: {path} holds no encoder, and one that is drawn has learnt nothing; {hint}"
