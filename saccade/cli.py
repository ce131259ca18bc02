"""The `saccade` command: hands a config to a recipe and turns errors into exit codes.

Options of a run are declared in `config`, and recipes do the work. Slow modules are imported inside the command that
needs them, so `saccade --help` is instant.

    saccade rl run.yaml train.lr=2e-6 --dry-run
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade import __version__
from saccade.cli_run import Arguments, DryRun, Full, Seed, Smoke, app, command, run_recipe, show_error
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins import plugin_commands  # noqa: F401  registers its commands
from saccade.plugins.drawn import data_commands
from saccade.registry import Table
from saccade.run.messages import shown_by
from saccade.system.revision import revision

PANELS = ("Start", "Train", "Use", "Look")
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Same as run.out=DIR.", show_default=False)]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print version and commit.")] = False,
) -> None:
    """Fine-tune vision-language models with reinforcement learning.

    New here? [bold]saccade quickstart[/bold] needs no GPU, no download and a few minutes.
    """
    if version:
        print(f"saccade {__version__}, commit {revision() or 'unknown'}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def recipe(name: str, example: str, does: str, *, panel: str = "Train") -> None:
    """Register the command `name`, which hands its config to the recipe of that name."""

    def run(
        arguments: Arguments = None,
        dry_run: DryRun = False,
        full: Full = False,
        smoke: Smoke = False,
        seed: Seed = None,
        out: Out = None,
    ) -> None:
        run_recipe(name, arguments, dry_run=dry_run, full=full, smoke=smoke, seed=seed, out=out)

    run.__doc__ = does
    command(name, panel=panel, example=f"saccade {name} {example}")(run)


recipe("rl", "run.yaml train.lr=2e-6 run.max_steps=100", "Train with reinforcement learning.")
recipe("sft", "run.yaml data.train=demonstrations.jsonl", "Train on demonstrations (supervised fine-tuning).")
recipe(
    "dpo",
    "run.yaml data.train=pairs.jsonl dpo.beta=0.1",
    "Train on preferences: pairs of responses, or responses called good or bad (dpo.loss=kto).",
)
recipe(
    "reward-model",
    "run.yaml data.train=pairs.jsonl",
    "Train a model that scores: on pairs, or on steps that are labelled one by one.",
)


@command(
    "eval", panel="Use", example="saccade eval run.yaml data.val=test.jsonl model.path=runs/run/checkpoints/step-100"
)
def evaluate(
    arguments: Arguments = None,
    rescore: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Score the responses of an earlier samples.jsonl again.")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="blind: ask without pictures, too; leaks: count items that data.train has.", show_default=False
        ),
    ] = None,
    dry_run: DryRun = False,
    full: Full = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for results.json and samples.jsonl.")] = None,
) -> None:
    """Measure a model on the sets of data.val and eval.suites."""
    more = {"out": out, "rescore": rescore, "also": also or ()}
    run_recipe("eval", arguments, dry_run=dry_run, full=full, smoke=smoke, seed=seed, more=more)


recipe(
    "generate",
    "run.yaml generate.n=4",
    "Write responses of a model to a file; rows that are there already are skipped.",
    panel="Use",
)


@command("export", panel="Use", example="saccade export runs/run/checkpoints/step-100 --out my-model")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; empty: as stored.", show_default=False)
    ] = None,
    verify: Annotated[bool, typer.Option(help="Open the folder again and compare logits.")] = True,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the LoRA adapter for peft, nothing else.")
    ] = False,
    dcp: Annotated[bool, typer.Option("--dcp", help="Write a checkpoint of torch DCP instead.")] = False,
    zero: Annotated[
        bool, typer.Option("--zero", help="Write weights for DeepSpeed's load_checkpoint instead.")
    ] = False,
    like: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a sharded checkpoint: a folder with the config of its model.")
    ] = None,
) -> None:
    """Write a stand-alone Hugging Face folder from a checkpoint, also from one of DeepSpeed ZeRO, FSDP or DCP."""
    import_module("saccade.recipes.model_setup").quiet_libraries()
    exporting = import_module("saccade.plugins.export.export")
    if dcp + zero + adapter_only > 1:
        raise ConfigError("--dcp, --zero and --adapter-only write different things; give one")
    beside = {"--like": like, "--no-verify": not verify}
    if (dcp or zero) and (given := [name for name, used in beside.items() if used]):
        raise ConfigError(f"--dcp and --zero copy the config and always verify; leave out {' and '.join(given)}")
    if dcp or zero:
        folder = exporting.export_for(checkpoint, out, zero=zero, dtype=dtype)
    else:
        folder = exporting.export(checkpoint, out, dtype, verify, adapter_only, like)
    print(f"wrote {folder}")


@command("algorithms", panel="Look", example="saccade algorithms dapo")
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One preset in full.", show_default=False)] = None,
) -> None:
    """List the algorithm presets, or explain one: its parts, its formula, its paper."""
    print(import_module("saccade.plugins.more_algorithms.explain").explain(name))


app.registered_commands.sort(key=lambda command: PANELS.index(str(command.rich_help_panel)))
app.add_typer(data_commands.group, name="data", rich_help_panel="Start")


def add_installed_commands() -> None:
    """Register the commands of installed packages: entry points in the group saccade.commands, each a function whose
    parameters and docstring define the command, as typer reads them.
    """
    installed: Table[Callable[..., Any]] = Table("commands", {})
    for name in installed:
        try:
            command(name, panel="Installed", example=f"saccade {name} --help")(installed[name])
        except EnvironmentProblem as error:  # the other commands still work
            show_error(str(error), error)


class Outlasting:
    """An output stream that survives a closed pipe (`| head -1`): later output is discarded, the run goes on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., Any], *arguments: str) -> Any:
        try:
            return action(*arguments)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def main() -> None:
    sys.stdout, sys.stderr = (stream and Outlasting(stream) for stream in (sys.stdout, sys.stderr))
    if sys.argv[1:2] not in [[command.name] for command in app.registered_commands]:
        add_installed_commands()
    with shown_by(print):
        app(prog_name="saccade")


if __name__ == "__main__":
    main()
