"""Trainings one after another, each from the last or best checkpoint of the one before: SFT, RL on text, RL on images.

A file has the options that all stages share, and the list `stages`: command, name and own options of each. The folder
OUT/NAME holds a config and a run folder per stage, and stages.json, which lists finished stages. Each stage runs as the
command that a user would give, in its own process, which frees its memory.

    saccade stages configs/stages_text_then_images.yaml text.train.lr=1e-6 run.resume=auto
"""

import difflib
import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

from saccade.checks import check
from saccade.config import Config, given, load, to_yaml
from saccade.config.notation import parse
from saccade.config.schema.presets import unknown
from saccade.config.schema.section import TRAINING, is_name
from saccade.errors import ConfigError
from saccade.run import checkpoint
from saccade.run.folder import REFUSALS, write_whole

log = logging.getLogger(__name__)

OVER = "stages.json"  # name and last checkpoint of each finished stage
STARTS = {"last": "auto", "best": "best"}  # `from` of a stage → which checkpoint, as in run.resume
KEYS = ("command", "name", "from")  # keys of a stage that are not config sections
SHARED = ("run.name", "run.out", "run.resume")  # options that a stage cannot set
RUN = "from saccade.system.process import end_with_parent; end_with_parent(); from saccade.cli import main; main()"
EXAMPLE = "stages:\n- {command: sft, name: cold, data: {train: shown.jsonl}}\n- {command: rl, name: text}"


class Stage(NamedTuple):
    name: str
    command: str
    start: str  # a key of STARTS; empty: start from the model of its config
    config: Config


def run(file: Path, overrides: Sequence[str], *, dry_run: bool, smoke: bool) -> None:
    """Run the stages that are not finished; with `dry_run`, print their plans instead."""
    shared, stages = read(file, overrides, smoke=smoke)
    if dry_run:
        for stage in stages:
            start = f", from the {stage.start} checkpoint" * bool(stage.start)
            print(f"== {stage.name}: saccade {stage.command}{start}")
            import_module("saccade.plugins.dry_run.plan").print_plan(stage.config, stage.command, full=False)
        return
    folder = Path(shared.run.out, "smoke/stages" if smoke else "", shared.run.name)
    if smoke:  # remove an earlier smoke run, so that it can be repeated
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists() and shared.run.resume != "auto":
        raise ConfigError(f"{folder} exists; continue with run.resume=auto, or choose another run.name=…")
    over, before = folder / OVER, Path()
    finished: dict[str, str] = json.loads(over.read_text()) if over.is_file() else {}
    for stage in stages:
        own = {"run.out": folder, "run.name": stage.name, "run.resume": "none"}
        if stage.start:
            own["model.path"] = checkpoint.find(before / "checkpoints", STARTS[stage.start])
        before = folder / stage.name
        config = load(stage.config, [f"{name}={value}" for name, value in own.items()])
        _run_stage(stage, config, folder, finished)
        finished[stage.name] = str(checkpoint.find(before / "checkpoints", "auto"))
        write_whole(over, json.dumps(finished, indent=1))
    log.info(f"all stages are over; the last checkpoint is {finished[stages[-1].name]}")


def read(file: Path, overrides: Sequence[str], *, smoke: bool = False) -> tuple[Config, list[Stage]]:
    """Returns the shared options and the stages, each checked as its command would check it. An override that begins
    with a stage's name is for that stage only.
    """
    try:
        tree = parse(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    rows = tree.pop("stages", None) if isinstance(tree, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{file}: no list `stages`; write for example\n{EXAMPLE}")
    names = [str(row.get("name", row.get("command"))) for row in rows]
    common = [text for text in overrides if text.split(".")[0] not in names]
    if strange := [text for text in common if text.split(".")[0] not in Config.model_fields]:
        raise ConfigError(f"{strange[0]}: no section and no stage begins so; stages are {', '.join(names)}")
    stages: list[Stage] = []
    for name, row in zip(names, rows, strict=True):
        try:
            if not is_name(name) or names.count(name) > 1 or name in Config.model_fields:
                raise ConfigError("`name`: expects one that no other stage and no section has, such as text-1")
            own = [text.removeprefix(f"{name}.") for text in overrides if text.startswith(f"{name}.")]
            changes = [*_options_of(row), *own]
            if taken := set(given(changes)) & set(SHARED):
                raise ConfigError(f"{taken.pop()} is that of all stages; set it outside of `stages`")
            command, start = row.get("command"), row.get("from", "last")
            if command not in TRAINING:
                raise ConfigError(f"command={command or ''}: is no training; try command={', '.join(TRAINING)}")
            if start not in STARTS:
                raise unknown("from", str(start), STARTS)
            config = load(tree, [*changes, *common], command)
            if smoke:
                small = import_module("saccade.plugins.smoke.smoke").shrunk
                config = small(config, command, [str(file)], given(own + common))
            check(config, command, given(own))
            if start == "best" and stages and not (stages[-1].config.data.val and stages[-1].config.val.every):
                raise ConfigError(f"`from: best` needs validations in stage {stages[-1].name}; give it data.val")
        except ConfigError as error:
            raise ConfigError(f"{file}: stage {name}: {error}") from None
        stages.append(Stage(name, command, start if stages and "model.path" not in given(changes) else "", config))
    return load(tree, common), stages


def _options_of(row: Mapping[str, Any]) -> Iterator[str]:
    """A stage's own options, as overrides."""
    for section, options in row.items():
        if section in KEYS:
            continue
        if not isinstance(options, dict):
            raise ConfigError(f"{section}: expects options of a section, such as train: {{lr: 1e-6}}")
        yield from (f"{section}.{name}={json.dumps(value)}" for name, value in options.items())


def _run_stage(stage: Stage, config: Config, folder: Path, finished: Mapping[str, str]) -> None:
    file, text = folder / f"{stage.name}.yaml", to_yaml(config, full=False)
    if stage.name in finished:
        lines = file.read_text(encoding="utf-8").splitlines(), text.splitlines()
        if changed := "\n".join(line for line in difflib.ndiff(*lines) if line[0] in "+-"):
            raise ConfigError(f"stage {stage.name} is over; for another choose another run.name=…\n{changed}")
        log.info(f"stage {stage.name} is over: {finished[stage.name]}")
        return
    write_whole(file, text)
    log.info(f"stage {stage.name}: saccade {stage.command} {file} run.resume=auto")
    line = [sys.executable, "-c", RUN, stage.command, str(file), "run.resume=auto"]
    child = subprocess.Popen(line, start_new_session=True)  # Ctrl-C reaches it once, through this process
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for number, handler in signals.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    if code:
        after = "" if code in REFUSALS else "; the same command with run.resume=auto continues it"
        log.warning(f"stage {stage.name} ended with exit code {code}{after}")
        raise typer.Exit(code if code > 0 else 128 - code)
