"""The batch arithmetic of a run, as a table that can be read before anything is loaded.

Three numbers are chosen (prompts per step, samples per prompt, updates per step), the rest follows.
Rows are counted where that is cheap; otherwise the lines that depend on them say so.

    >>> plan(load({"train.prompts_per_step": 64}), "rl")[2]
    ('samples per step', '512 = 64 x 8')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from saccade.checks.steps import total_steps
from saccade.config import Config, DataSource

COUNTED_BYTES = 256 * 2**20


def plan(config: Config, command: str) -> list[tuple[str, str]]:
    """(quantity, value) rows for `saccade COMMAND --dry-run`."""
    plans = {"rl": _rl, "sft": _sft, "dpo": _dpo, "reward-model": _reward_model, "eval": _eval}
    return (plans | {"generate": _generate})[command](config)


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
        ("updates per step", str(updates)),
        ("prompts per update", _share(prompts, updates)),
        ("epochs per batch", str(train.epochs_per_batch)),
        ("optimizer steps per step", str(updates * train.epochs_per_batch)),
        *_steps(config, prompts),
        ("longest response", f"{rollout.max_tokens} tokens"),
        ("longest sequence", f"{longest} tokens"),
        ("token budget of a micro-batch", f"{train.micro_tokens} tokens"),
    ]


def _sft(config: Config) -> list[tuple[str, str]]:
    return [
        ("rows per step", str(config.train.prompts_per_step)),
        *_steps(config, config.train.prompts_per_step),
        ("longest row", f"{config.sft.max_tokens} tokens"),
        ("token budget of a micro-batch", f"{config.train.micro_tokens} tokens"),
    ]


def _dpo(config: Config) -> list[tuple[str, str]]:
    what = "responses" if config.dpo.loss == "kto" else "pairs"
    return _compared(config, what, config.dpo.max_tokens)


def _reward_model(config: Config) -> list[tuple[str, str]]:
    what = "pairs" if config.reward_model.kind == "scalar" else "rows of steps"
    return _compared(config, what, config.reward_model.max_tokens)


def _compared(config: Config, what: str, longest: int | None) -> list[tuple[str, str]]:
    return [
        (f"{what} per step", str(config.train.prompts_per_step)),
        *_steps(config, config.train.prompts_per_step),
        ("longest prompt with a response", f"{longest} tokens"),
        ("token budget of a micro-batch", f"{config.train.micro_tokens} tokens"),
    ]


def _eval(config: Config) -> list[tuple[str, str]]:
    return [
        *_rows("rows", config.data.val),
        ("responses per prompt", str(config.val.n)),
        ("longest response", f"{config.val.max_tokens} tokens"),
    ]


def _generate(config: Config) -> list[tuple[str, str]]:
    return [
        *_rows("rows", config.data.train or config.data.val),
        ("responses per prompt", str(config.generate.n)),
        ("longest response", f"{config.rollout.max_tokens} tokens"),
    ]


def _steps(config: Config, per_step: int) -> list[tuple[str, str]]:
    weighted = any(source.weight is not None for source in config.data.train)
    rows = None if weighted else total_rows(config.data.train)  # a mixture draws its epochs
    if rows is not None and config.data.max_samples is not None:
        rows = min(rows, config.data.max_samples)
    per_epoch = "not counted" if rows is None else f"{rows / per_step:.4g} ({rows} rows)"
    if rows and per_step > rows:
        per_epoch += f"; a step takes each row {per_step / rows:.2g} times"
    if rows is None and config.run.max_steps is None:
        steps = f"{config.train.epochs:g} epochs"
    else:
        steps = str(total_steps(config, rows or 0))
    return [("steps per epoch", per_epoch), ("steps", steps)]


def _rows(name: str, sources: Sequence[DataSource]) -> list[tuple[str, str]]:
    rows = total_rows(sources)
    return [(name, "not counted" if rows is None else str(rows))]


def _share(prompts: int, updates: int) -> str:
    low, high = prompts // updates, math.ceil(prompts / updates)
    return str(low) if low == high else f"{low} or {high}"


def total_rows(sources: Sequence[DataSource]) -> int | None:
    """Rows of all sets, or None where one of them cannot be counted quickly."""
    total = 0
    for source in sources:
        rows = count_rows(source)
        if rows is None:
            return None
        rows = max(0, rows - source.offset)
        total += rows if source.max_samples is None else min(rows, source.max_samples)
    return total


def count_rows(source: DataSource) -> int | None:
    from saccade.data.sources import open_source

    path = Path(source.path)
    if path.suffix == ".parquet" and path.is_file():  # its footer knows, its rows may hold images
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if not path.is_file() or path.stat().st_size > COUNTED_BYTES:
        return None
    return sum(1 for _ in open_source(source).rows)
