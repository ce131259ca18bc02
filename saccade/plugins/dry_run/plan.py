"""The batch arithmetic of a run, as a table that can be read before anything is loaded.

Three numbers are chosen (prompts per step, samples per prompt, updates per step), the rest follows.
Rows are counted where that is cheap; otherwise the lines that depend on them say so.

    >>> plan(load({"train.prompts_per_step": 64}), "rl")[2]
    ('samples per step', '512 = 64 x 8')
"""

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.algorithms.describe import describe, options_in_effect
from saccade.checks import idle_gpus, ignored_options, why_ignored
from saccade.checks.steps import algorithm_of, total_steps
from saccade.config import Config, DataSource
from saccade.config.notation import write
from saccade.models.families import FAMILIES
from saccade.models.files import model_json
from saccade.rewards.resolve import resolve_recipes

COUNTED_BYTES = 256 * 2**20


def print_plan(config: Config, name: str, *, full: bool) -> None:
    """Print the options that were set, or with `full` every option, then the batch arithmetic that follows."""
    algorithm = algorithm_of(config) if name == "rl" else None
    if config.reward.given:
        resolve_recipes(  # refuses unknown verifiers
            config.reward, prompt_format=config.prompt.format, max_tokens=config.rollout.max_tokens, overlong=None
        )
    tree = _read_by(name, config.model_dump(mode="json", exclude_unset=not full))
    if full and algorithm is not None:
        tree["algorithm"] = {"preset": tree["algorithm"]["preset"]} | options_in_effect(algorithm)
    lines = [f"{part}: {write(value, flow=True)}" for part, value in tree.items() if value]
    print(write(tree) if full else "".join(lines), end="")
    if algorithm is not None:
        print(f"\n{describe(algorithm)}")
    print("\nBatch arithmetic")
    for quantity, value in plan(config, name):
        print(f"  {quantity:<30} {value}")
    for line in filter(None, (ignored_options(config, name), idle_gpus(config, name))):
        print(line)
    kind = model_json(Path(config.model.path)).get("model_type", "")
    if kind not in ("", *FAMILIES):  # raises for a model that cannot be used
        import_module("saccade.recipes.model_setup").family_of(config, config.model.path)
    if name == "rl" or (name in ("sft", "dpo") and config.run.gpus > 1):
        import_module("saccade.plugins.estimate.estimate_command").preview(config, name)
    print("nothing was run" + ("" if full else "; --full shows every option with its value"))


def _read_by(command: str, tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The options that the command reads."""
    read = {name: value for name, value in tree.items() if not why_ignored(above + name, command)}
    return {n: _read_by(command, v, f"{above}{n}.") if isinstance(v, dict) else v for n, v in read.items()}


def plan(config: Config, command: str) -> list[tuple[str, str]]:
    """(quantity, value) rows for `saccade COMMAND --dry-run`."""
    if command == "rl":
        return _rl(config)
    if command in ("eval", "generate"):
        return _answers(config, command)
    per_step, longest = config.train.prompts_per_step, getattr(config, command.replace("-", "_")).max_tokens
    what = {"sft": "rows", "dpo": "responses" if config.dpo.loss == "kto" else "pairs"}.get(
        command, "pairs" if config.reward_model.kind == "scalar" else "rows of steps"
    )
    return [
        (f"{what} per step", str(per_step)),
        *_steps(config, per_step),
        ("longest row" if command == "sft" else "longest prompt with a response", f"{longest} tokens"),
        ("token budget of a micro-batch", f"{config.train.micro_tokens} tokens"),
    ]


def _rl(config: Config) -> list[tuple[str, str]]:
    train, rollout = config.train, config.rollout
    prompts, samples = train.prompts_per_step, train.samples_per_prompt
    updates = train.updates_per_step
    response = rollout.max_tokens * config.env.max_turns
    longest = min(config.env.max_total_tokens, config.data.max_prompt_tokens + response)
    return [
        ("prompts per step", str(prompts)),
        ("samples per prompt", str(samples)),
        ("samples per step", f"{prompts * samples} = {prompts} x {samples}"),
        *_ahead(config),
        ("updates per step", str(updates)),
        ("prompts per update", _share(prompts, updates)),
        ("epochs per batch", str(train.epochs_per_batch)),
        ("optimizer steps per step", str(updates * train.epochs_per_batch)),
        *_steps(config, prompts),
        ("longest response", f"{rollout.max_tokens} tokens"),
        ("longest sequence", f"{longest} tokens"),
        ("token budget of a micro-batch", f"{train.micro_tokens} tokens"),
    ]


def _ahead(config: Config) -> list[tuple[str, str]]:
    """Of rollouts that run ahead: those of a step and of the next ones are unfinished at a time."""
    if not (ahead := config.rollout.ahead):
        return []
    last = (_steps_of(config, _rows(config)) or ahead + 2) - 1  # none begins behind the last step
    ahead, carried = min(ahead, last), min(ahead + 1, last)
    algorithm = algorithm_of(config)
    answers = config.train.prompts_per_step * (algorithm.samples_per_prompt + algorithm.estimator.greedy)
    oldest = f"{ahead} steps" + f", {carried} in a carried surplus" * algorithm.filter.keep_surplus
    flying = f"{(1 + ahead) * answers} = {1 + ahead} x {answers}"
    return [("answers in flight at most", flying), ("oldest token when trained", oldest)]


def _answers(config: Config, command: str) -> list[tuple[str, str]]:
    evaluates = command == "eval"
    sources = config.data.val if evaluates else config.data.train or config.data.val
    if evaluates and config.eval.suites:
        suite_sources = import_module("saccade.plugins.suites.suites").suite_sources
        sources = (*sources, *(one for name in config.eval.suites for one in suite_sources(name, config.eval)))
    rows = total_rows(sources)
    return [
        ("rows", "not counted" if rows is None else str(rows)),
        ("responses per prompt", str(config.val.n if evaluates else config.generate.n)),
        ("longest response", f"{config.val.max_tokens if evaluates else config.rollout.max_tokens} tokens"),
    ]


def _rows(config: Config) -> int | None:
    weighted = any(source.weight is not None for source in config.data.train)
    rows = None if weighted else total_rows(config.data.train)  # a mixture by weights has no epochs
    return rows if rows is None else min(rows, config.data.max_samples or rows)


def _steps_of(config: Config, rows: int | None) -> int | None:
    return None if rows is None and config.run.max_steps is None else total_steps(config, rows or 0)


def _steps(config: Config, per_step: int) -> list[tuple[str, str]]:
    rows = _rows(config)
    per_epoch = "not counted" if rows is None else f"{rows / per_step:.4g} ({rows} rows)"
    if rows and per_step > rows:
        per_epoch += f"; a step takes each row {per_step / rows:.2g} times"
    steps = str(_steps_of(config, rows) or f"{config.train.epochs:g} epochs")
    return [("steps per epoch", per_epoch), ("steps", steps)]


def _share(prompts: int, updates: int) -> str:
    low, high = prompts // updates, math.ceil(prompts / updates)
    return str(low) if low == high else f"{low} or {high}"


def total_rows(sources: Sequence[DataSource]) -> int | None:
    """Rows of all sets, or None where one of them cannot be counted quickly."""
    total = 0
    for source in sources:
        if (rows := count_rows(source)) is None:
            return None
        rows = max(0, rows - source.offset)
        total += rows if source.max_samples is None else min(rows, source.max_samples)
    return total


def count_rows(source: DataSource) -> int | None:
    from saccade.data.sources import open_source

    path = Path(source.path)
    if path.suffix == ".parquet" and path.is_file():  # count by the footer: the rows may hold images
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if not path.is_file() or path.stat().st_size > COUNTED_BYTES:
        return None
    return sum(1 for _ in open_source(source).rows)
