"""Family, engine and evaluator of the commands that do not train: of a model folder, or of an HTTP endpoint."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.config import Config, ModelConfig
from saccade.engines import Engine, Settings
from saccade.engines.builders import build
from saccade.models.families import Family
from saccade.plugins.engines.http_family import endpoint_family
from saccade.recipes import model_setup, run_parts
from saccade.recipes.engines import longest_sequence, settings_of, start_engine
from saccade.recipes.evaluator import Evaluator, read_of
from saccade.run.console import Console
from saccade.run.quarantine import Quarantine

log = logging.getLogger(__name__)


def answering_family(config: Config) -> Family:
    if config.rollout.engine == "http":
        return endpoint_family(config.rollout.http.url)
    return model_setup.family_of(config, model_setup.start_folder(config))


def answering_engine(
    config: Config, family: Family, *, logs: Path | None = None, answers: Path | None = None
) -> Engine:
    """An engine that loads the model folder's weights, or a client of an endpoint, whose answers are cached in the
    folder `answers` unless the config names another.
    """
    rollout = config.rollout
    if rollout.engine == "http":
        cache = rollout.http.cache or (str(answers) if answers else None)
        http = rollout.http.model_copy(update={"cache": cache})
        return build(Settings(engine="http", folder="", dtype="", args=rollout.engine_args, http=http), family)
    return start_engine(config.rollout, replace(settings_of(config, family), check_nan=True), family, logs=logs)


def model_name(model: ModelConfig, engine: Engine) -> str:
    """The model's name at its endpoint, or its path in the config."""
    return getattr(engine, "model_name", model.path)


def room(config: Config, family: Family) -> int:
    """Most tokens of a prompt with its answer; vllm and sglang are started with the longest sequence of the config."""
    bounded = config.rollout.engine in ("vllm", "sglang")
    return min(family.max_positions, longest_sequence(config) if bounded else family.max_positions)


@contextmanager
def evaluator_of(
    config: Config, family: Family, folder: Path, *, answers: Path, command: str, name: str
) -> Iterator[tuple[Evaluator, Console]]:
    """Context manager: an evaluator (engine and scorer) and the console of a command. Logs at the end the requests to
    endpoints of the model and the judge, and their cost.
    """
    scorer = run_parts.make_scorer(config)
    engine = answering_engine(config, family, logs=folder, answers=answers)
    with scorer or nullcontext(), closing(engine), Console(command, name) as console:
        used: dict[str, Any] = {"engine": engine, "scorer": scorer, "quarantine": Quarantine(folder, config.data)}
        yield Evaluator(family=family, progress=console.progress, **used, **read_of(config, family)), console
        asked: list[Any] = [engine, scorer.judge if scorer is not None else None]
        for one in asked:
            if hasattr(one, "expenses"):
                log.info(one.expenses())
