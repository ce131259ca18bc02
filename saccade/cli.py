"""The `saccade` command: hands a config to a recipe and turns errors into exit codes.

Knows no option of a run (that is `config`) and no work (that is `recipes`). What is slow is
imported inside the command that needs it, so `saccade --help` is instant.

    saccade rl run.yaml train.lr=2e-6 --dry-run
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from saccade import __version__
from saccade.cli_run import as_override, overrides_of, read_config, run_recipe, show_error
from saccade.errors import ConfigError, EnvironmentProblem, SaccadeError
from saccade.plugins.visual_search.data_commands import data_commands
from saccade.registry import Table
from saccade.run.messages import shown_by
from saccade.system.disk import refusal, require_writable

Command = TypeVar("Command", bound=Callable[..., Any])

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
        help="Config file, then options that override it (docs/configuration.md lists all).",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what was chosen, batch arithmetic and memory, then stop.")
]
Full = Annotated[bool, typer.Option("--full", help="With --dry-run: every option with the value it has.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Two steps with a tiny model of the same family, on any machine.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same as run.seed=N.", show_default=False)]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Same as run.out=DIR.", show_default=False)]
Port = Annotated[int, typer.Option(help="Its port; 0: any free one.", min=0, max=65535)]
NoToken = Annotated[bool, typer.Option("--no-token", help="Serve whoever asks on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def command(
    name: str, *, example: str, panel: str | None = None, group: typer.Typer = app
) -> Callable[[Command], Command]:
    """Register a command whose SaccadeErrors, and what a file system refuses, become a red message
    and an exit code.
    """

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except SaccadeError as error:
                show_error(str(error), error)
                raise typer.Exit(error.exit_code) from None
            except Exception as error:
                if (reason := refusal(error)) is None:
                    raise
                show_error(reason, error)
                raise typer.Exit(EnvironmentProblem.exit_code) from None
            except KeyboardInterrupt as interrupt:
                show_error("interrupted", interrupt)
                raise typer.Exit(130) from None

        group.command(name, rich_help_panel=panel, epilog=f"Example: [bold]{example}[/bold]")(guarded)
        return function

    return register


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Fine-tune vision-language models with reinforcement learning.

    New here? [bold]saccade quickstart[/bold] needs no GPU, no download and a few minutes.
    """
    if version:
        print(f"saccade {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# -- start -----------------------------------------------------------------------------------------


@command("quickstart", panel="Start", example="saccade quickstart --out runs/first")
def quickstart(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of data, weights and sampling.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps only, to see that it runs.")] = False,
) -> None:
    """A tiny vision-language model learns to count, with nothing but a CPU."""
    import_module("saccade.plugins.quickstart.quickstart").run(out, seed=seed, quick=quick)


@command("init", panel="Start", example="saccade init models/Qwen2.5-VL-3B-Instruct train.jsonl")
def init(
    model: Annotated[Path, typer.Argument(help="Hugging Face model folder, or tiny:FAMILY.")],
    data: Annotated[Path, typer.Argument(help="Data file.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Config to write.")] = Path("run.yaml"),
) -> None:
    """Write a commented run.yaml for a model folder and a data file."""
    from saccade.plugins.init.init_config import advice, write_config

    write_config(model, data, out)
    print(f"wrote {out}; next: {advice(out)}")


# -- train -----------------------------------------------------------------------------------------


def recipe(name: str, example: str, does: str, *, panel: str = "Train") -> None:
    """Register a command that hands its config to the recipe of that name."""

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


# -- use -------------------------------------------------------------------------------------------


@command(
    "eval", panel="Use", example="saccade eval run.yaml data.val=test.jsonl model.path=runs/run/checkpoints/step-100"
)
def evaluate(
    arguments: Arguments = None,
    rescore: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Score the responses of an earlier samples.jsonl again.")
    ] = None,
    dry_run: DryRun = False,
    full: Full = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for results.json and samples.jsonl.")] = None,
) -> None:
    """Measure a model on the sets of data.val."""
    more = {"out": out, "rescore": rescore}
    run_recipe("eval", arguments, dry_run=dry_run, full=full, smoke=smoke, seed=seed, more=more)


recipe(
    "generate",
    "run.yaml generate.n=4",
    "Write responses of a model to a file; rows that are there already are skipped.",
    panel="Use",
)


@command("chat", panel="Use", example="saccade chat models/Qwen2.5-VL-3B-Instruct --serve")
def chat(
    arguments: Arguments = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token; else rollout.temperature.")
    ] = False,
    batch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer a JSON list of conversations, all at once.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where --batch writes; else to the screen.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="An OpenAI-compatible endpoint and a page to chat.")] = False,
    host: Annotated[str, typer.Option(help="Address that --serve listens on.")] = "127.0.0.1",
    port: Port = 8000,
    no_token: NoToken = False,
) -> None:
    """Talk with a model about images: /image PATH, /series PATH, /system TEXT, /greedy, /clear,
    /save FILE, exit.

    A plain argument is a model folder, as model.path=FOLDER is. --serve asks clients for a token,
    which it prints; the environment variable SACCADE_TOKEN sets one.
    """
    from saccade.checks import check

    serving = {"--host": host != "127.0.0.1", "--port": port != 8000, "--no-token": no_token}
    for option in [name for name, given in serving.items() if given and not serve]:
        raise ConfigError(f"{option}: has no effect without --serve; add it, or leave this out")
    if serve and (batch or out):
        raise ConfigError("--batch: has no effect with --serve; leave one of them out")
    if out and not batch:
        raise ConfigError("--out: has no effect without --batch; /save FILE keeps a conversation")
    config = read_config(as_override("model.path", arguments), "chat")
    check(config, "chat")
    recipe = import_module("saccade.plugins.serving.chat_command")
    if serve:
        recipe.serve(config, host=host, port=port, token=not no_token, greedy=greedy)
    elif batch is not None:
        recipe.answer_file(config, batch, out, greedy=greedy)
    else:
        recipe.talk(config, greedy=greedy)


@command("serve-reward", panel="Use", example="saccade serve-reward run.yaml reward.workers=8")
def serve_reward(
    arguments: Arguments = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8400,
    no_token: NoToken = False,
) -> None:
    """Score responses for other runs over HTTP, with the rewards of a config.

    Clients are asked for a token, which is printed; the environment variable SACCADE_TOKEN sets
    one. Clients of OpenRLHF and LMM-R1 send none: --no-token serves them on this machine.
    """
    recipe = import_module("saccade.plugins.serving.serve_reward")
    recipe.serve(read_config(arguments or []), host=host, port=port, token=not no_token)


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
) -> None:
    """Write a stand-alone Hugging Face folder from a checkpoint."""
    import_module("saccade.recipes.model_setup").quiet_libraries()
    exporting = import_module("saccade.plugins.export.export")
    folder = exporting.export(checkpoint, out, dtype, verify, adapter_only)
    print(f"wrote {folder}{exporting.pictures(folder)}")


# -- look ------------------------------------------------------------------------------------------


@command("check-data", panel="Look", example="saccade check-data train.jsonl data.format=easyr1")
def inspect_data(
    arguments: Arguments = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read image headers instead of all pixels.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Threads that decode images.", min=1)] = 2,
    fix: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the good rows as canonical JSONL.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole report as JSON.")] = None,
    reads: Annotated[
        str | None, typer.Option("--for", metavar="COMMAND", help="Also what rl, sft, dpo or reward-model drop.")
    ] = None,
) -> None:
    """Look at every row and image of a data set and list what is wrong, row by row."""
    from saccade.cli_run import print_report, refuse_data
    from saccade.plugins.check_data.check_data import run
    from saccade.plugins.check_data.check_rows import write_fixed

    if fix is not None and fix.exists():
        raise ConfigError(f"--fix {fix} exists; give a new file, nothing is overwritten")
    for option, path in (("--fix", fix), ("--out", out)):
        if path is not None:
            require_writable(path, option, file=True)
    config = read_config(as_override("data.train", arguments))
    report = run(config, headers_only=headers_only, workers=workers, command=reads)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_json() + "\n", encoding="utf-8")
    fixed: list[Path] = []
    try:
        fixed = write_fixed(report, fix) if fix is not None else []
    finally:  # whether or not it can be written
        print_report(report)
    written = [*fixed, *filter(None, [out])]
    wrote = f"; wrote {', '.join(map(str, written))}" if written else ""
    print(f"{report.good} of {report.rows} rows can be used{wrote}")
    refuse_data(report, config, fix)


@command("estimate", panel="Look", example="saccade estimate run.yaml --device H100")
def estimate(
    arguments: Arguments = None,
    device: Annotated[str | None, typer.Option(help="H200, A100, RTX 4090 …; else this machine's.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a prompt; else that of the data.", min=1)] = None,
    image: Annotated[str | None, typer.Option(metavar="WxH", help="Size of the picture in each prompt.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a step of `rl` takes: memory by item, time by phase. Nothing is loaded or trained."""
    from saccade.checks import check
    from saccade.config import given

    config = read_config(arguments or [], "rl")
    check(config, "estimate", given(overrides_of(arguments or [])))
    import_module("saccade.plugins.estimate.estimate_command").run(
        config, device=device, prompt_tokens=prompt_tokens, image=image, as_json=as_json
    )


@command("doctor", panel="Look", example="saccade doctor --model models/Qwen2.5-VL-3B-Instruct")
def doctor(
    arguments: Arguments = None,
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help="Same as model.path=FOLDER.")] = None,
    as_json: AsJson = False,
) -> None:
    """What is missing or does not fit: packages, devices, engines, disk, and a model in full."""
    named = [f"model.path={model}"] if model else []
    config = read_config([*(arguments or []), *named])
    import_module("saccade.plugins.doctor").run(config, as_json=as_json)


@command("algorithms", panel="Look", example="saccade algorithms dapo")
def algorithms(
    name: Annotated[str | None, typer.Argument(help="One preset in full.", show_default=False)] = None,
) -> None:
    """List the algorithm presets, or explain one: its parts, its formula, its paper."""
    from saccade.algorithms.describe import explain

    print(explain(name))


@command("report", panel="Look", example="saccade report runs/quickstart")
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run or of an eval.")]) -> None:
    """Write the report of a run or an eval as one HTML file, its episodes included."""
    if (folder / "config.resolved.yaml").is_file():
        page = import_module("saccade.plugins.reports.report").from_run(folder)
    elif (folder / "results.json").is_file():
        page = import_module("saccade.plugins.reports.eval_report").write_eval_report(folder)
    else:
        raise ConfigError(f"{folder} is not a run folder; give one such as runs/NAME")
    print(f"wrote {page}")


# -- commands of installed packages ----------------------------------------------------------------


def add_installed_commands() -> None:
    """A package adds a command by an entry point of the group saccade.commands: a function whose
    parameters and docstring are those of the command, as typer reads them.
    """
    installed: Table[Callable[..., Any]] = Table("commands", {})
    for name in installed:
        try:
            command(name, panel="Installed", example=f"saccade {name} --help")(installed[name])
        except EnvironmentProblem as error:  # the other commands still work
            show_error(str(error), error)


# -- data -----------------------------------------------------------------------------------------

app.add_typer(data_commands(command, read_config), name="data", rich_help_panel="Start")


class Outlasting(io.FileIO):
    """A file whose reader may leave (`| head -1`): what follows goes nowhere, the work goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def main() -> None:
    sys.stdout, sys.stderr = map(_outlasting, (sys.stdout, sys.stderr))
    if sys.argv[1:2] not in [[known.name] for known in app.registered_commands]:
        add_installed_commands()
    with shown_by(print):
        app(prog_name="saccade")


def _outlasting(stream: Any) -> Any:
    if stream is None or stream.isatty():  # closed from the start, or nobody's pipe
        return stream
    file = Outlasting(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


if __name__ == "__main__":
    main()
