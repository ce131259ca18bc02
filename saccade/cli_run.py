"""How commands are registered and run: read the config, check it, show the plan or hand it to a recipe.

Slow modules are imported where they are needed, so that `saccade --help` stays instant.

    run_recipe("rl", ["run.yaml", "train.lr=2e-6"], dry_run=True)
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from saccade.errors import ConfigError, EnvironmentProblem, SaccadeError
from saccade.run.messages import show_error
from saccade.system.disk import refusal

if TYPE_CHECKING:
    from saccade.config import Config

Command = TypeVar("Command", bound=Callable[..., Any])

MODULES = {
    "rl": "recipes.rl",
    "sft": "recipes.sft",
    "dpo": "plugins.preferences.dpo",
    "reward-model": "plugins.reward_models.reward_training",
    "eval": "plugins.evaluation.evaluate",
    "generate": "plugins.generate.generate",
}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN.YAML | KEY=VALUE",
        help="Config file, others over it, then options that override them (docs/configuration.md lists all).",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what was chosen, batch arithmetic and memory, then stop.")
]
Full = Annotated[bool, typer.Option("--full", help="With --dry-run: every option with the value it has.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Two steps with a tiny model of the same family, on any machine.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same as run.seed=N.", show_default=False)]


def command(
    name: str, *, example: str, panel: str | None = None, group: typer.Typer = app
) -> Callable[[Command], Command]:
    """Register a command; a SaccadeError or a file system's refusal ends it with a red message and an exit code."""

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except SaccadeError as error:
                fail(str(error), error, error.exit_code)
            except Exception as error:
                if (reason := refusal(error)) is None:
                    raise
                fail(reason, error, EnvironmentProblem.exit_code)
            except KeyboardInterrupt as interrupt:
                fail("interrupted", interrupt, 130)

        shown = example.replace("[", r"\[")  # no markup
        group.command(name, rich_help_panel=panel, epilog=f"Example: [bold]{shown}[/bold]")(guarded)
        return function

    return register


def fail(message: str, error: BaseException, code: int) -> None:
    show_error(message, error)
    raise typer.Exit(code) from None


def run_recipe(
    name: str,
    arguments: Sequence[str] | None,
    *,
    dry_run: bool = False,
    full: bool = False,
    smoke: bool = False,
    more: dict[str, Any] | None = None,
    **flags: Any,
) -> None:
    """Check the config and run the recipe. `flags` are options of the section run; `more` is passed to the recipe."""
    from saccade.checks import check
    from saccade.config import given

    if full and not dry_run:
        raise ConfigError("--full: has no effect without --dry-run; add it, or leave this out")
    arguments = [*(arguments or []), *(f"run.{k}={v}" for k, v in flags.items() if v is not None)]
    config = read_config(arguments, name)
    taken = {"data.train"} if more and "leaks" in more.get("also", ()) else set[str]()
    named = given(split(arguments)[1])
    if smoke:
        config = import_module("saccade.plugins.smoke.smoke").shrunk(config, name, split(arguments)[0], named)
    check(config, "rescore" if more and more.get("rescore") else name, [n for n in named if n not in taken])
    if dry_run:
        import_module("saccade.plugins.dry_run.plan").print_plan(config, name, full=full)
        return
    if smoke:  # remove an earlier smoke run, so that it can be repeated
        shutil.rmtree(Path(config.run.out) / config.run.name, ignore_errors=True)
    result_of(name, config, **(more or {}))


def result_of(name: str, config: Config, **more: Any) -> Any:
    """Run a command's recipe, with the restarts of a run on several GPUs; `more`: keyword arguments of the recipe."""
    if name == "rl":  # refuses a run that does not fit into memory
        more["preflight"] = import_module("saccade.plugins.estimate.estimate_command").preflight
    recipe = functools.partial(import_module(f"saccade.{MODULES[name]}").run, **more)
    if config.run.restarts:
        recipe = functools.partial(import_module("saccade.plugins.ranks.starts").run_again, recipe, name)
    return recipe(config)


def read_config(arguments: Sequence[str] | None, command: str | None = None, *, plain: str = "") -> Config:
    """Read the config of a command line. With `plain`, an argument that is no YAML file is the value of that option:
    `check-data train.jsonl` means `check-data data.train=train.jsonl`.
    """
    from saccade.config import load, merged

    files, overrides = split(arguments or ())
    if plain:
        overrides = [f"{plain}={item}" for item in files if not item.endswith((".yaml", ".yml"))] + overrides
        files = [item for item in files if item.endswith((".yaml", ".yml"))]
    for path in map(Path, files):
        chosen = path.parent / "config.yaml"
        if path.name == "config.resolved.yaml" and chosen.is_file():
            raise ConfigError(f"{path} lists all options; give {chosen}, with run.resume=auto or another run.name=…")
    return load(merged(files), overrides, command)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into config files and the options that override them."""
    return [_shipped(item) for item in arguments if "=" not in item], [item for item in arguments if "=" in item]


def _shipped(name: str) -> str:
    """Find a shipped config by its name or its path in the source tree; a file that exists under that name wins."""
    inside = Path(__file__).parent / "configs"  # in a wheel; in a checkout, configs/ is next to the package
    found = (inside if inside.is_dir() else inside.parents[1] / "configs") / f"{Path(name).stem}.yaml"
    wanted = name in (found.stem, found.name, f"configs/{found.name}")
    return str(found) if wanted and found.is_file() and not Path(name).exists() else name
