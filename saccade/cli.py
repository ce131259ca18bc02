"""The `saccade` command: hands a config to a recipe and turns errors into exit codes.

Knows no option of a run (that is `config`) and no work (that is `recipes`). What is slow is
imported inside the command that needs it, so `saccade --help` is instant.

    saccade rl run.yaml train.lr=2e-6 --dry-run
"""

from __future__ import annotations

import functools
import os
import shutil
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from saccade import __version__
from saccade.cli_data import data_commands
from saccade.errors import ConfigError, DataError, SaccadeError, SelfTestError

if TYPE_CHECKING:
    from rich.console import Console

    from saccade.config import Config
    from saccade.data.check import Report

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
    bool,
    typer.Option(
        "--dry-run", help="Print the resolved config, batch arithmetic and memory, then stop."
    ),
]
Smoke = Annotated[
    bool,
    typer.Option("--smoke", help="Two steps with a tiny model of the same family, on any machine."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same as run.seed=N.", show_default=False)]
Out = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Same as run.out=DIR.", show_default=False),
]


def command(
    name: str, *, example: str, panel: str | None = None, group: typer.Typer = app
) -> Callable[[Command], Command]:
    """Register a command whose SaccadeErrors become a red message and an exit code."""

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except SaccadeError as error:
                _explain(str(error), error)
                raise typer.Exit(error.exit_code) from None
            except KeyboardInterrupt as interrupt:
                _explain("interrupted", interrupt)
                raise typer.Exit(130) from None

        group.command(name, rich_help_panel=panel, epilog=f"Example: [bold]{example}[/bold]")(
            guarded
        )
        return function

    return register


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(help="Seed of data, weights and sampling.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps only, to see that it runs.")
    ] = False,
) -> None:
    """A tiny vision-language model learns to count, with nothing but a CPU."""
    import_module("saccade.recipes.quickstart").run(out, seed=seed, quick=quick)


@command("init", panel="Start", example="saccade init models/Qwen2.5-VL-3B-Instruct train.jsonl")
def init(
    model: Annotated[Path, typer.Argument(help="Hugging Face model folder.")],
    data: Annotated[Path, typer.Argument(help="Data file.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Config to write.")] = Path("run.yaml"),
) -> None:
    """Write a commented run.yaml for a model folder and a data file."""
    from saccade.recipes.init import write_config

    write_config(model, data, out)
    print(f"wrote {out}; next: saccade rl {out} --dry-run")


# -- train -----------------------------------------------------------------------------------------


@command("rl", panel="Train", example="saccade rl run.yaml train.lr=2e-6 run.max_steps=100")
def rl(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Train with reinforcement learning."""
    _run("rl", arguments, dry_run=dry_run, smoke=smoke, seed=seed, out=out)


@command("sft", panel="Train", example="saccade sft run.yaml data.train=demonstrations.jsonl")
def sft(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Train on demonstrations (supervised fine-tuning)."""
    _run("sft", arguments, dry_run=dry_run, smoke=smoke, seed=seed, out=out)


@command("dpo", panel="Train", example="saccade dpo run.yaml data.train=pairs.jsonl dpo.beta=0.1")
def dpo(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Train on preferences: pairs of responses, or responses called good or bad (dpo.loss=kto)."""
    _run("dpo", arguments, dry_run=dry_run, smoke=smoke, seed=seed, out=out)


@command("reward-model", panel="Train", example="saccade reward-model run.yaml train.lr=9e-6")
def reward_model(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Train a model that scores: on pairs, or on steps that are labelled one by one."""
    _run("reward-model", arguments, dry_run=dry_run, smoke=smoke, seed=seed, out=out)


# -- use -------------------------------------------------------------------------------------------


@command(
    "eval", panel="Use", example="saccade eval run.yaml model.path=runs/run/checkpoints/step-100"
)
def evaluate(
    arguments: Arguments = None,
    rescore: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score the responses of an earlier samples.jsonl again."),
    ] = None,
    dry_run: DryRun = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for results.json and samples.jsonl."),
    ] = None,
) -> None:
    """Measure a model on the sets of data.val."""
    _run(
        "eval",
        arguments,
        dry_run=dry_run,
        smoke=smoke,
        seed=seed,
        more={"out": out, "rescore": rescore},
    )


@command("generate", panel="Use", example="saccade generate run.yaml generate.n=4")
def generate(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    smoke: Smoke = False,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Write responses of a model to a file; rows that are there already are skipped."""
    _run("generate", arguments, dry_run=dry_run, smoke=smoke, seed=seed, out=out)


@command("chat", panel="Use", example="saccade chat models/Qwen2.5-VL-3B-Instruct --serve")
def chat(
    arguments: Arguments = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token; else rollout.temperature.")
    ] = False,
    batch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Answer a JSON list of conversations, all at once."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where --batch writes; else to the screen.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="An OpenAI-compatible endpoint and a page to chat.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address that --serve listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0: any free one.", min=0, max=65535)] = 8000,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve whoever asks on this machine.")
    ] = False,
) -> None:
    """Talk with a model about images: /image PATH, /system TEXT, /greedy, /clear, /save FILE, exit.

    A plain argument is a model folder, as model.path=FOLDER is. --serve asks clients for a token,
    which it prints; the environment variable SACCADE_TOKEN sets one.
    """
    from saccade.checks import check
    from saccade.config import defaults_for

    folders = [
        item if "=" in item or item.endswith((".yaml", ".yml")) else f"model.path={item}"
        for item in arguments or []
    ]
    serving = {"--host": host != "127.0.0.1", "--port": port != 8000, "--no-token": no_token}
    for option in [name for name, given in serving.items() if given and not serve]:
        raise ConfigError(f"{option}: has no effect without --serve; add it, or leave this out")
    if serve and (batch or out):
        raise ConfigError("--batch: has no effect with --serve; leave one of them out")
    if out and not batch:
        raise ConfigError("--out: has no effect without --batch; /save FILE keeps a conversation")
    config = defaults_for("chat", _config(folders))
    check(config, "chat")
    recipe = import_module("saccade.recipes.chat")
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
    port: Annotated[int, typer.Option(help="Its port; 0: any free one.", min=0, max=65535)] = 8400,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve whoever asks on this machine.")
    ] = False,
) -> None:
    """Score responses for other runs over HTTP, with the rewards of a config.

    Clients are asked for a token, which is printed; the environment variable SACCADE_TOKEN sets
    one. Clients of OpenRLHF and LMM-R1 send none: --no-token serves them on this machine.
    """
    recipe = import_module("saccade.recipes.serve_reward")
    recipe.serve(_config(arguments or []), host=host, port=port, token=not no_token)


@command(
    "export", panel="Use", example="saccade export runs/run/checkpoints/step-100 --out my-model"
)
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
    folder = import_module("saccade.export").export(checkpoint, out, dtype, verify, adapter_only)
    print(folder)


# -- look ------------------------------------------------------------------------------------------


@command("check-data", panel="Look", example="saccade check-data train.jsonl data.format=easyr1")
def inspect_data(
    arguments: Arguments = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read image headers instead of all pixels.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Threads that decode images.", min=1)] = 2,
    fix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the good rows as canonical JSONL.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the whole report as JSON.")
    ] = None,
) -> None:
    """Look at every row and image of a data set and list what is wrong, row by row."""
    from saccade.data.check import write_fixed
    from saccade.recipes.check_data import run

    if fix is not None and fix.exists():
        raise ConfigError(f"--fix {fix} exists; give a new file, nothing is overwritten")
    config = _config(_data_as_override(arguments or []))
    report = run(config, headers_only=headers_only, workers=workers)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_json() + "\n", encoding="utf-8")
    _print_report(report)
    if fix is not None:
        print("wrote " + ", ".join(map(str, write_fixed(report, fix))))
    if not report.acceptable:
        raise DataError(
            f"{len(report.bad)} of {report.rows} rows are bad, and data.max_bad_fraction is "
            f"{config.data.max_bad_fraction:g}; "
            + (f"the good ones are in {fix}" if fix else "mend them, or use --fix FILE")
        )
    if report.self_test is not None and not report.self_test["passed"]:
        raise SelfTestError("the reward misjudges known answers; see the rows above")


@command("estimate", panel="Look", example="saccade estimate run.yaml --device H100")
def estimate(
    arguments: Arguments = None,
    device: Annotated[
        str | None, typer.Option(help="H200, A100, RTX 4090 …; else this machine's.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Length of a prompt; else that of the data.", min=1)
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="WxH", help="Size of the picture in each prompt.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What a step of `rl` takes: memory by item, time by phase. Nothing is loaded or trained."""
    from saccade.checks import check
    from saccade.config import defaults_for

    config = defaults_for("rl", _config(arguments or []))
    check(config, "estimate")
    import_module("saccade.estimate.show").run(
        config, device=device, prompt_tokens=prompt_tokens, image=image, as_json=as_json
    )


@command("doctor", panel="Look", example="saccade doctor --model models/Qwen2.5-VL-3B-Instruct")
def doctor(
    arguments: Arguments = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Same as model.path=FOLDER.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What is missing or does not fit: packages, devices, engines, disk, and a model in full."""
    named = [f"model.path={model}"] if model else []
    config = _config([*(arguments or []), *named])
    import_module("saccade.doctor").run(config, as_json=as_json)


@command("algorithms", panel="Look", example="saccade algorithms dapo")
def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="One preset in full.", show_default=False)
    ] = None,
) -> None:
    """List the algorithm presets, or explain one: its parts, its formula, its paper."""
    from saccade.algorithms.describe import explain

    print(explain(name))


@command("report", panel="Look", example="saccade report runs/quickstart")
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run or of an eval.")]) -> None:
    """Write the report of a run or an eval as one HTML file, its episodes as another."""
    if (folder / "config.resolved.yaml").is_file():
        print(import_module("saccade.tracking.report").from_run(folder))
    elif (folder / "results.json").is_file():
        print(import_module("saccade.tracking.eval_report").write_eval_report(folder))
    else:
        raise ConfigError(f"{folder} is not a run folder; give one such as runs/NAME")


# -- data -----------------------------------------------------------------------------------------

app.add_typer(
    data_commands(command, lambda arguments: _config(arguments)),
    name="data",
    rich_help_panel="Start",
)

# -- how a config command runs ---------------------------------------------------------------------

LISTED = 20  # bad rows on the screen
MODULES = {
    "rl": "rl",
    "sft": "sft",
    "dpo": "dpo",
    "reward-model": "reward_model",
    "eval": "evaluate",
    "generate": "generate",
}


def _run(
    name: str,
    arguments: Sequence[str] | None,
    *,
    dry_run: bool,
    smoke: bool,
    seed: int | None,
    out: str | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    from saccade.checks import check
    from saccade.config import defaults_for

    flags = {"run.seed": seed, "run.out": out}
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    config = defaults_for(name, _config([*(arguments or []), *overrides]))
    if smoke:
        from saccade.smoke import smoke as shrink

        config = shrink(config, name)
        # Nothing of a smoke test is worth keeping, and it must be repeatable.
        shutil.rmtree(Path(config.run.out) / config.run.name, ignore_errors=True)
    check(config, name)
    if dry_run:
        _print_plan(config, name)
    else:
        import_module(f"saccade.recipes.{MODULES[name]}").run(config, **(more or {}))


def _config(arguments: Sequence[str]) -> Config:
    from saccade.config import load

    files = [item for item in arguments if "=" not in item]
    if len(files) > 1:
        raise ConfigError(f"one config file, not {len(files)}: {', '.join(files)}")
    return load(files[0] if files else None, [item for item in arguments if "=" in item])


def _data_as_override(arguments: Sequence[str]) -> list[str]:
    """`check-data train.jsonl` means `check-data data.train=train.jsonl`."""
    return [
        item if "=" in item or item.endswith((".yaml", ".yml")) else f"data.train={item}"
        for item in arguments
    ]


def _print_plan(config: Config, name: str) -> None:
    from rich.syntax import Syntax
    from rich.table import Table

    from saccade.algorithms.build import from_config
    from saccade.config import to_yaml
    from saccade.plan import plan

    algorithm = from_config(config) if name == "rl" else None
    if algorithm is not None and (config.reward.terms or config.reward.preset):
        from saccade.rewards.resolve import resolve_recipes

        resolve_recipes(  # refuses unknown verifiers
            config.reward,
            prompt_format=config.prompt.format,
            max_tokens=config.rollout.max_tokens,
            overlong=None,
        )
    console = _console()
    text = to_yaml(config)
    console.print(Syntax(text, "yaml", background_color="default") if console.is_terminal else text)
    if algorithm is not None:
        from saccade.algorithms.describe import describe

        console.print(describe(algorithm) + "\n", markup=False, highlight=False)
    table = Table("quantity", "value", title="Batch arithmetic", title_justify="left")
    samples, updates = (
        (algorithm.samples_per_prompt, algorithm.updates_per_step) if algorithm else (1, 1)
    )
    rows = plan(config, name, samples_per_prompt=samples, updates_per_step=updates)
    for quantity, value in rows:
        table.add_row(quantity, value)
    console.print(table)
    if name == "rl":
        import_module("saccade.estimate.show").preview(config)


def _print_report(report: Report) -> None:
    lines = {
        "rows": f"{report.rows}, {report.good} good, {len(report.bad)} bad",
        "format": ", ".join(f"{name}: {format}" for name, format in report.formats.items()),
        "images": f"{report.images} {'decoded' if report.decoded else 'with a readable header'}",
        "answers": f"{report.gold_rate:.1%} of the good rows",
        "duplicate ids": str(len(report.duplicate_ids)),
    }
    if report.lengths:
        lines["prompt tokens"] = ", ".join(f"{k} {v:.0f}" for k, v in report.lengths.items())
        lines["overlong"] = f"{len(report.overlong)} rows"
    if report.self_test is not None:
        verdict = "passed" if report.self_test["passed"] else "FAILED"
        lines["reward test"] = f"{verdict} on {report.self_test['rows']} rows"
    for name, text in lines.items():
        print(f"{name:<14} {text}")
    for failure in report.self_test["failures"][:LISTED] if report.self_test else ():
        print(f"  {failure}")
    for row in report.bad[:LISTED]:
        print(f"  {row}")
    if len(report.bad) > LISTED:
        print(f"  and {len(report.bad) - LISTED} more; --out FILE lists all")


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True)


def _explain(message: str, error: BaseException) -> None:
    if os.environ.get("SACCADE_DEBUG"):
        traceback.print_exception(error)
    _console(stderr=True).print(message, style="red", markup=False, highlight=False)


def main() -> None:
    app(prog_name="saccade")


if __name__ == "__main__":
    main()
