"""How a command that takes a config runs: read it, check it, show the plan or hand it to a recipe.

What is slow is imported where it is needed, so that `saccade --help` stays instant.

    run_recipe("rl", ["run.yaml", "train.lr=2e-6"], dry_run=True, full=False, smoke=False, seed=0)
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import ConfigError, DataError, SelfTestError

if TYPE_CHECKING:
    from rich.console import Console

    from saccade.config import Config
    from saccade.plugins.check_data.check_rows import Report

LISTED = 20  # bad rows on the screen
MODULES = {
    "rl": "recipes.rl",
    "sft": "recipes.sft",
    "dpo": "plugins.preferences.dpo",
    "reward-model": "plugins.reward_models.reward_training",
    "eval": "recipes.evaluate",
    "generate": "recipes.generate",
}


def run_recipe(
    name: str,
    arguments: Sequence[str] | None,
    *,
    dry_run: bool,
    full: bool,
    smoke: bool,
    seed: int | None,
    out: str | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    from saccade.checks import check
    from saccade.config import given

    if full and not dry_run:
        raise ConfigError("--full: has no effect without --dry-run; add it, or leave this out")
    flags = {"run.seed": seed, "run.out": out}
    arguments = [*(arguments or []), *(f"{k}={v}" for k, v in flags.items() if v is not None)]
    config = read_config(arguments, name)
    named = given(overrides_of(arguments))
    if smoke:
        config = _shrunk(config, name, config_files(arguments), named)
    check(config, "rescore" if more and more.get("rescore") else name, named)
    if dry_run:
        _print_plan(config, name, full=full)
    else:
        if smoke:  # of an earlier one, so that it can be repeated
            shutil.rmtree(Path(config.run.out) / config.run.name, ignore_errors=True)
        if name == "rl":  # refuses what does not fit
            more = {"preflight": import_module("saccade.plugins.estimate.estimate_command").preflight}
        import_module(f"saccade.{MODULES[name]}").run(config, **(more or {}))


def _shrunk(config: Config, name: str, files: Sequence[str], given: Sequence[str]) -> Config:
    shrink = import_module("saccade.plugins.smoke.smoke")
    for file in files:
        config, replaced = shrink.with_examples(config, Path(file), given)
        for line in replaced:
            print(line)
    small, path = shrink.smoke(config, name), config.model.path
    if path and path != small.model.path:
        known = config.model.family or (Path(path) / "config.json").is_file()
        guess = "" if known else ", guessed by name as the folder is not here; model.family says it"
        print(f"{small.model.path} stands in for model.path: {path}{guess}")
    return small


def read_config(arguments: Sequence[str], command: str | None = None) -> Config:
    from saccade.config import load

    files = config_files(arguments)
    if len(files) > 1:
        raise ConfigError(f"one config file, not {len(files)}: {', '.join(files)}")
    for path in map(Path, files):
        if path.name == "config.resolved.yaml" and path.with_name("config.yaml").is_file():
            raise ConfigError(
                f"{path} lists all options, also those of other commands; those that were chosen "
                f"are in {path.with_name('config.yaml')}: give that, with run.resume=auto to go on "
                "or another run.name=… to run it again"
            )
    return load(files[0] if files else None, overrides_of(arguments), command)


def overrides_of(arguments: Sequence[str]) -> list[str]:
    return [item for item in arguments if "=" in item]


def config_files(arguments: Sequence[str]) -> list[str]:
    return [item for item in arguments if "=" not in item]


def as_override(key: str, arguments: Sequence[str] | None) -> list[str]:
    """`check-data train.jsonl` means `check-data data.train=train.jsonl`."""
    return [item if "=" in item or item.endswith((".yaml", ".yml")) else f"{key}={item}" for item in arguments or ()]


def _print_plan(config: Config, name: str, *, full: bool) -> None:
    """What was chosen, or every option, then the arithmetic that follows from it."""
    from saccade.algorithms.build import from_config
    from saccade.algorithms.describe import cells, describe
    from saccade.checks import not_counted
    from saccade.config.notation import write

    algorithm = from_config(config) if name == "rl" else None
    if config.reward.given:
        from saccade.rewards.resolve import resolve_recipes

        resolve_recipes(  # refuses unknown verifiers
            config.reward, prompt_format=config.prompt.format, max_tokens=config.rollout.max_tokens, overlong=None
        )
    tree = _read_by(name, config.model_dump(mode="json", exclude_unset=not full))
    if full and algorithm is not None:
        tree["algorithm"] = {"preset": tree["algorithm"]["preset"]} | cells(algorithm)
    lines = [f"{part}: {write(value, flow=True)}" for part, value in tree.items() if value]
    print(write(tree) if full else "".join(lines), end="")
    if algorithm is not None:
        print(f"\n{describe(algorithm)}")
    print("\nBatch arithmetic")
    for quantity, value in import_module("saccade.plugins.dry_run.plan").plan(config, name):
        print(f"  {quantity:<30} {value}")
    if others := not_counted(config, name):
        print(others)
    if name == "rl":
        import_module("saccade.plugins.estimate.estimate_command").preview(config)
    print("nothing was run" + ("" if full else "; --full shows every option with its value"))


def _read_by(command: str, tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The options that the command reads."""
    from saccade.checks import unread

    kept = {name: value for name, value in tree.items() if not unread(above + name, command)}
    return {
        name: _read_by(command, value, f"{above}{name}.") if isinstance(value, dict) else value
        for name, value in kept.items()
    }


def print_report(report: Report) -> None:
    counts = {
        "bad": len(report.bad),
        "overlong": len(report.overlong),
        "left out": len(report.left_out),
        "filtered by the mapping": report.filtered,
    }
    others = "".join(f", {n} {what}" for what, n in counts.items() if n or what == "bad")
    looked_at = "decoded" if report.decoded else "with a readable header"
    lines = {
        "rows": f"{report.rows}, {report.good} good{others}",
        "format": ", ".join(f"{name}: {format}" for name, format in report.formats.items()),
        "media" if {"video", "audio", "series"} & set(report.media_kinds) else "images": (
            f"{report.images} different, {looked_at}"
        ),
        "answers": f"{report.gold_rate:.1%} of the good rows",
        "duplicate ids": "0",
    }
    if report.answerless == report.good and not report.gold_rate:
        del lines["answers"]
    if report.duplicate_ids:
        renamed = "1 row" if report.renamed == 1 else f"{report.renamed} rows"
        lines["duplicate ids"] = f"{len(report.duplicate_ids)}, and {renamed} got a suffix"
    if report.repeated:
        lines["val in train"] = f"{report.repeated} different rows of data.val are in data.train"
    if report.lengths:
        lines["prompt tokens"] = ", ".join(f"{k} {v:.0f}" for k, v in report.lengths.items())
    if report.self_test is not None:
        verdict = "passed" if report.self_test["passed"] else "FAILED"
        lines["reward test"] = f"{verdict} on {report.self_test['rows']} rows"
        if not report.self_test["rows"]:
            why = "; ".join(report.self_test["skipped"]) or "no good row"
            lines["reward test"] = f"tested nothing: {why}"
    for name, text in lines.items():
        print(f"{name:<14} {text}")
    for text in report.notes:
        print(f"{'note':<14} {text}")
    for failure in report.self_test["failures"][:LISTED] if report.self_test else ():
        print(f"  {failure}")
    listed = (*report.bad, *report.overlong)
    for row in listed[:LISTED]:
        print(f"  {row}")
    if len(listed) > LISTED:
        print(f"  and {len(listed) - LISTED} more; --out FILE lists all")
    reasons = Counter(row.reason for row in report.left_out)
    firsts = {row.reason: row for row in reversed(report.left_out)}
    for reason, count in reasons.items():  # good rows, so the first stands for all of them
        print(f"  {count} left out, first {firsts[reason]}")


def refuse_data(report: Report, config: Config, fixed: Path | None) -> None:
    """Where training would stop."""
    if not report.acceptable:
        raise DataError(
            f"{len(report.bad)} of {report.rows} rows are bad, and data.max_bad_fraction is "
            f"{config.data.max_bad_fraction:g}; "
            + (f"the good ones are in {fixed}" if fixed else "mend them, or use --fix FILE")
        )
    if empty := [split for split, samples in report.samples.items() if not samples]:
        raise DataError(f"data.{empty[0]} has no usable row; the reasons stand above")
    if report.self_test is not None and not report.self_test["passed"]:
        does = "fails on" if report.self_test["broken"] else "misjudges"
        raise SelfTestError(f"the reward {does} known answers; see the rows above")


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True, emoji=False)


def show_error(message: str, error: BaseException) -> None:
    if os.environ.get("SACCADE_DEBUG"):
        traceback.print_exception(error)
    _console(stderr=True).print(message, style="red", markup=False, highlight=False)
