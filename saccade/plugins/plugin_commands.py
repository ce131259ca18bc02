"""The commands of plugins: their options, and the function that runs each.

A plugin is imported when its command runs, so that `saccade --help` stays fast.

    saccade chat models/Qwen2.5-VL-3B-Instruct --serve
"""

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from saccade.cli_run import Arguments, DryRun, Smoke, command, read_config, split
from saccade.errors import ConfigError

Port = Annotated[int, typer.Option(help="Its port; 0: any free one.", min=0, max=65535)]
NoToken = Annotated[bool, typer.Option("--no-token", help="Serve whoever asks on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
COLUMN = partial(typer.Option, metavar="COLUMN", show_default=False)


def read_checked(arguments: Arguments, name: str, reads: str | None = None, plain: str = "") -> Any:
    """The config; raises for a value, or an option on the command line, that has no effect with the command."""
    from saccade.checks import check
    from saccade.config import given

    config = read_config(arguments, reads, plain=plain)
    check(config, name, given(split(arguments or ())[1]))
    return config


def show_tables(tables: Iterable[Any], notes: bool = True) -> None:
    from saccade.plugins.reports.eval_report import text_table

    for table in tables:
        print(*text_table(table), *([table.note] if notes and table.note else []), sep="\n")


@command("quickstart", panel="Start", example="saccade quickstart --out runs/first")
def quickstart(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of data, weights and sampling.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps only, to see that it runs.")] = False,
    kind: Annotated[str, typer.Option(help="Kind of the tiny model, such as gemma3 or smolvlm.")] = "qwen2_5_vl",
) -> None:
    """A tiny vision-language model learns to count, with nothing but a CPU."""
    import_module("saccade.plugins.quickstart.quickstart").run(out, seed=seed, quick=quick, kind=kind)


@command("init", panel="Start", example="saccade init models/Qwen2.5-VL-3B-Instruct train.jsonl")
def init(
    model: Annotated[Path, typer.Argument(help="Hugging Face model folder, or tiny:FAMILY.")],
    data: Annotated[Path, typer.Argument(help="Data file.")],
    keys: Annotated[list[str] | None, typer.Argument(metavar="data.keys.ROLE=COLUMN", show_default=False)] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Config to write.")] = Path("run.yaml"),
    device: Annotated[
        str | None, typer.Option(help="One GPU that it should fit, such as H100; else all of this machine.")
    ] = None,
) -> None:
    """Write a commented run.yaml for a model folder and a data file, with sizes that fit the GPUs of this machine."""
    from saccade.plugins.init.init_config import advice, write_config

    if note := write_config(model, data, out, device, keys or ()):
        print(note)
    print(f"wrote {out}; next: {advice(out)}")


@command("stages", panel="Train", example="saccade stages configs/stages_text_then_images.yaml --dry-run")
def stages(arguments: Arguments = None, dry_run: DryRun = False, smoke: Smoke = False) -> None:
    """Train in stages from one file, such as SFT, RL on text, RL on images; each starts from the previous checkpoint.

    STAGE.KEY=VALUE sets an option of one stage; run.resume=auto continues an interrupted run.
    """
    files, overrides = split(arguments or ())
    if len(files) != 1:
        raise ConfigError(f"one file with `stages`, not {len(files)}; configs/stages_text_then_images.yaml is one")
    import_module("saccade.plugins.stages.stages").run(Path(files[0]), overrides, dry_run=dry_run, smoke=smoke)


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

    An argument without `=` is the model folder: short for model.path=FOLDER. With --serve, clients must send a
    token: the value of the environment variable SACCADE_TOKEN, else a new one, which is printed.
    """
    serving = {"--host": host != "127.0.0.1", "--port": port != 8000, "--no-token": no_token}
    for option in [name for name, changed in serving.items() if changed and not serve]:
        raise ConfigError(f"{option}: has no effect without --serve; add it, or leave this out")
    if serve and (batch or out):
        raise ConfigError("--batch: has no effect with --serve; leave one of them out")
    if out and not batch:
        raise ConfigError("--out: has no effect without --batch; /save FILE keeps a conversation")
    config = read_checked(arguments, "chat", "chat", plain="model.path")
    recipe = import_module("saccade.plugins.serving.chat_command")
    if serve:
        recipe.serve(config, host=host, port=port, token=not no_token, greedy=greedy)
    elif batch is not None:
        recipe.answer_file(config, batch, out, greedy=greedy)
    else:
        recipe.talk(config, greedy=greedy)


@command("rank", panel="Train", example="saccade rank node-1:28400")
def rank(address: Annotated[str, typer.Argument(help="HOST:PORT that the run prints.")]) -> None:
    """Start one rank (one GPU) of a run with run.launcher=join: under Slurm, torchrun or by hand.

    The run prints its address and the token that must be in the environment variable SACCADE_TOKEN.
    """
    import_module("saccade.plugins.ranks.launchers").run_rank(address)


@command("serve-reward", panel="Use", example="saccade serve-reward run.yaml reward.workers=8")
def serve_reward(
    arguments: Arguments = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8400,
    no_token: NoToken = False,
) -> None:
    """Score responses for other runs over HTTP, with the rewards of a config.

    Clients must send a token: the value of the environment variable SACCADE_TOKEN, else a new one, which is
    printed. Clients of OpenRLHF and LMM-R1 send none: --no-token serves them on this machine.
    """
    config = read_checked(arguments, "serve-reward")
    import_module("saccade.plugins.serving.reward_service").serve(config, host=host, port=port, token=not no_token)


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
    config, recipe = read_config(arguments, plain="data.train"), import_module("saccade.plugins.check_data.check_data")
    recipe.show(config, headers_only=headers_only, workers=workers, command=reads, fix=fix, out=out)


@command("estimate", panel="Look", example="saccade estimate run.yaml --device H100")
def estimate(
    arguments: Arguments = None,
    device: Annotated[str | None, typer.Option(help="H200, A100, RTX 4090 …; else this machine's.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a prompt; else that of the data.", min=1)] = None,
    image: Annotated[str | None, typer.Option(metavar="WxH", help="Size of the image in each prompt.")] = None,
    network: Annotated[
        float | None, typer.Option(metavar="GBITS", help="Gb/s from a machine to others; else 3200.", min=0.1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a step of `rl` takes: memory by item, time by phase. Nothing is loaded or trained."""
    config = read_checked(arguments, "estimate", "rl")
    import_module("saccade.plugins.estimate.estimate_command").run(
        config, device=device, prompt_tokens=prompt_tokens, image=image, network=network, as_json=as_json
    )


@command("doctor", panel="Look", example="saccade doctor --model models/Qwen2.5-VL-3B-Instruct")
def doctor(
    arguments: Arguments = None,
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help="Same as model.path=FOLDER.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check packages, devices, engines and disk; with a model, also its files and whether its log-probs agree."""
    models = [one.startswith("tiny:") or Path(one, "config.json").is_file() for one in arguments or []]
    folders = [f"model.path={one}" if named else one for one, named in zip(arguments or [], models, strict=True)]
    config = read_config([*folders, *([f"model.path={model}"] if model else [])])
    import_module("saccade.plugins.doctor").run(config, as_json=as_json)


@command("compare", panel="Look", example="saccade compare runs/base-eval runs/trained-eval")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of an eval.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Folder of another eval of the same sets.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Page to write; else B/compare.html.", show_default=False)
    ] = None,
) -> None:
    """Compare two evaluations item by item: the paired difference, and the questions that changed."""
    tables, notes, page = import_module("saccade.plugins.evaluation.compare").compare(first, second, out)
    show_tables(tables, notes=False)
    print(*notes, sep="\n", end="\n" * bool(notes))
    print(f"wrote {page}")


@command("subgroups", panel="Look", example="saccade subgroups runs/run-eval --by sex --by site")
def subgroups(
    folder: Annotated[Path, typer.Argument(help="Folder of an eval.")],
    by: Annotated[list[str] | None, COLUMN(help="Column of the rows, or age:25,50,65; may be repeated.")] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Precision, recall, F1 … of each label.")] = False,
    within: Annotated[
        list[str] | None, COLUMN(help="Mean of means over its parts; repeated, of parts of parts.")
    ] = None,
) -> None:
    """Show the accuracy of an evaluation by groups of rows, with the gaps between groups; and by label."""
    if not (by or labels or within):
        raise ConfigError("--by: nothing to divide the rows by; name a column, such as --by sex, or add --labels")
    recipe = import_module("saccade.plugins.evaluation.subgroups")
    show_tables(recipe.subgroup_tables(folder, by or [], labels, within or []))


@command("annotate", panel="Look", example="saccade annotate runs/run-eval --out answers.csv --rows 200")
def annotate(
    folder: Annotated[Path, typer.Argument(help="Folder of an eval.")],
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="File to write; with --read a folder.")] = None,
    rows: Annotated[int, typer.Option(help="Answers to draw; 0: all.", min=0)] = 0,
    hide: Annotated[bool, typer.Option("--hide", help="Do not show what the verifier said.")] = False,
    read: Annotated[Path | None, typer.Option(metavar="FILE", help="One that a person filled in.")] = None,
) -> None:
    """Write answers for a person to judge, as CSV or JSON lines; fill in right or wrong in the column `human`.

    --read shows how often person and verifier agree, with Cohen's kappa, and writes the evaluation with the
    person's verdicts, for `saccade compare`.
    """
    recipe = import_module("saccade.plugins.evaluation.annotations")
    if read is None:
        out = out or folder / "annotations.csv"
        print(f"wrote {recipe.write_annotations(folder, out, rows, hide)} answers to {out}; fill in the column human")
        return
    if rows or hide:
        raise ConfigError("--rows, --hide: have no effect with --read; leave them out")
    tables, made = recipe.read_annotations(folder, read, out)
    show_tables(tables)
    print(f"wrote {made}; saccade compare {quote(str(folder))} {quote(str(made))} shows what changed")


@command("report", panel="Look", example="saccade report runs/quickstart/rl")
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run or of an eval.")]) -> None:
    """Write the report of a run or an eval, with its episodes, as one HTML file."""
    if import_module("saccade.plugins.reports.episodes").is_evaluation(folder):
        page = import_module("saccade.plugins.reports.eval_report").write_eval_report(folder)
    elif (folder / "config.resolved.yaml").is_file():
        page = import_module("saccade.plugins.reports.report").from_run(folder)
    else:
        inside = sorted({*folder.glob("*/config.resolved.yaml"), *folder.glob("*/results.json")})
        one = inside[0].parent if inside else "runs/NAME"
        raise ConfigError(f"{folder} is not the folder of a run or an eval; give one such as {one}")
    print(f"wrote {page}")


@command("view", panel="Look", example="saccade view runs")
def view(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or of one run.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML file instead of serving.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8300,
    no_token: NoToken = False,
) -> None:
    """Look at runs in a browser while they train: curves, options, rollouts, two runs side by side.

    The address is printed with a token: the value of the environment variable SACCADE_TOKEN, else a new one.
    """
    recipe = import_module("saccade.plugins.view.view_server")
    if out is None:
        recipe.serve(folder, host=host, port=port, token=not no_token)
    else:
        recipe.write_page(folder, out)
        print(f"wrote {out}")
