"""The result files of an evaluation: results.json, and samples.jsonl with a row for each answer.

add_rows(folder, sample_rows(result, family))
write_numbers(folder, {result.name: result.metrics})
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saccade.checks.steps import val_by_set
from saccade.config import Config, ValConfig
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.plugins.reports.rollout_record import rollout_row, same
from saccade.recipes.evaluator import Result
from saccade.run.folder import RESULTS, write_whole

SAMPLE_ROWS = "samples.jsonl"
# The columns of a verdict, which rescoring replaces.
VERDICT = {**same("extracted", "reward", "end_reason", "status", "reason", "parts"), "score": "outcome"}
SAMPLES = {
    **VERDICT,
    **same("id", "data_source", "prompt", "response", "think_prefilled", "gold", "choices", "repeat", "turns"),
    "tokens": "response_tokens",
    **same("said", "tool_calls", "media", "extra"),
}


def what_answers(config: Config, model: str) -> dict[str, str]:
    """The model, the prompt and the sampling, as a report shows them."""
    prompt = config.prompt.format
    own = {f"sampling of {name}": _sampling(val) for name, val in val_by_set(config).items()}
    return {
        "model": model,
        "engine": config.rollout.engine,
        "prompt": prompt if isinstance(prompt, str) else ", ".join(f"{name}: {own}" for name, own in prompt.items()),
        "sampling": _sampling(config.val),
        **own,
    }


def _sampling(val: ValConfig) -> str:
    how = f"temperature {val.temperature:g}, top_p {val.top_p:g}" if val.temperature else "greedy"
    answers = f"{val.n} answers, " if val.n > 1 else ""
    return f"{answers}{how}, at most {val.max_tokens:,} tokens"


def sample_rows(result: Result, family: Family) -> list[dict[str, Any]]:
    """The rows of samples.jsonl for a set, one for each answer."""
    return [
        {"set": result.name, **rollout_row(SAMPLES, group, trajectory, family)}
        for group in result.groups
        for trajectory in group.trajectories
    ]


def add_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with (folder / SAMPLE_ROWS).open("a", encoding="utf-8") as file:
        file.write(to_lines(rows))


def read_summary(folder: Path) -> dict[str, Any]:
    """The results of the finished sets; empty without a file."""
    file = folder / RESULTS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_numbers(folder: Path, summary: Mapping[str, Any]) -> None:
    write_whole(folder / RESULTS, json.dumps(summary, indent=2) + "\n")


def to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows that `to_lines` wrote; empty without a file. Splits at line feeds only, as texts may hold other breaks."""
    data = path.read_bytes() if path.is_file() else b""
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            rows += [json.loads(line)] if line else []
        except ValueError as error:
            raise ConfigError(f"{path} line {number} is no JSON: {error}") from None
    return rows
