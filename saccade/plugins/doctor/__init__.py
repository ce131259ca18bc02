"""`saccade doctor` checks that a run can work here: packages, devices, engines, disk, and for a model its files, its
chat template, and that engines and trainer compute the same log-probs.

A check is a row `(name, function)`; it yields findings `(status, text, fix)`, without a fix if ok or a note. It leaves
no processes and no files, except logs of processes that failed. Only checks that can report it missing import torch.

    run(load(None, ["model.path=my-model"]))
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from saccade.config import Config
from saccade.errors import EnvironmentProblem, SaccadeError
from saccade.plugins.doctor import machine, model_files
from saccade.plugins.doctor.machine import Rows
from saccade.run.messages import shown_by

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "red"}
RERUN = "fix this and run doctor again"  # fix for an exception, whose message says what helps
SHOWN, FIRST = 4000, 500  # characters shown of an error, and how many of them from its beginning
Check = tuple[str, Callable[[], Rows]]


class Finding(NamedTuple):
    name: str
    status: str
    text: str
    fix: str = ""


def run(config: Config, *, as_json: bool = False) -> None:
    """Print all findings; raise EnvironmentProblem if any is a failure."""
    from rich.console import Console
    from rich.text import Text

    console, found = Console(soft_wrap=True, emoji=False), []
    with shown_by(partial(print, file=sys.stderr)) if as_json else nullcontext():
        for finding in examine(config):
            found.append(finding)
            if not as_json:
                status = Text(f"{finding.status:<8} ", style=STYLES[finding.status])
                console.print(status.append(f"{finding.name:<16} {finding.text}", style="default"))
                if finding.fix:
                    console.print(Text(f"{'':<26}to fix it: {finding.fix}", style="dim"))
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in found]}, indent=2))
    if failed := [finding.name for finding in found if finding.status == "failure"]:
        raise EnvironmentProblem(f"{len(failed)} of {len(found)} checks failed: {', '.join(dict.fromkeys(failed))}")
    if not as_json:
        print(f"none of {len(found)} checks failed")


def examine(config: Config) -> Iterator[Finding]:
    """Findings on the machine, then on the model if the config names one, up to its first failure."""
    rollout, path = config.rollout, config.model.path
    allowed = partial(import_module("saccade.checks").check, config, "chat")
    machine_checks: list[Check] = [
        ("python", machine.python),
        ("packages", machine.packages),
        ("devices", partial(machine.devices, config.run.device)),
        ("attention", machine.kernels),
        ("engine", partial(machine.engines, rollout.engine)),
        ("endpoint", partial(machine.endpoint, rollout, allowed)),
        ("loopback", partial(machine.loopback, rollout)),
        ("disk", partial(machine.disk, config.run.out)),
        ("ranks", partial(_ranks_meet, config)),
    ]
    for name, check in machine_checks:
        yield from look(name, check)
    stopped = False
    with tempfile.TemporaryDirectory(prefix="saccade-doctor-") as folder:
        build: list[Check] = []
        if path.startswith("tiny:"):
            model = config.model.model_copy(update={"path": folder})
            config = config.model_copy(update={"model": model})
            build = [("model", partial(_build_tiny, path.removeprefix("tiny:"), folder, config.run.seed))]
        for name, check in [*build, *model_checks(config)] if path else ():
            found = [Finding(name, "note", "not looked at: see above")] if stopped else look(name, check)
            stopped |= any(finding.status == "failure" for finding in found)
            yield from found


def look(name: str, check: Callable[[], Rows]) -> list[Finding]:
    """The findings of a check; any exception becomes a failure."""
    found: list[Finding] = []
    try:
        for row in check():
            found.append(Finding(name, *row))
    except Exception as error:
        text = (str(error) if isinstance(error, SaccadeError) else f"{type(error).__name__}: {error}").strip()
        if len(text) > SHOWN:  # keep the beginning (what failed) and the end (of its log)
            text = f"{text[:FIRST]} ... {text[FIRST - SHOWN :]}"
        found.append(Finding(name, "failure", text, RERUN))
    return found


def model_checks(config: Config) -> list[Check]:
    """The checks of a model, in order: each relies on the earlier ones."""
    path, rollout = Path(config.model.path), config.rollout
    embedded = config.model_copy(update={"rollout": rollout.model_copy(update={"engine": "embedded", "replicas": 0})})

    @cache
    def family() -> Any:
        from saccade.recipes.model_setup import family_of, quiet_libraries

        quiet_libraries()
        found = family_of(config, config.model.path)
        # Skip the proof on loading: the check `rows` runs it and shows all comparisons.
        return replace(found, spec=replace(found.spec, prove=lambda model, family: None)) if found.spec.prove else found

    @cache
    def loaded() -> tuple[Any, Any]:
        from saccade.recipes.engines import make_engine
        from saccade.recipes.model_setup import load_policy
        from saccade.trainer.local import LocalTrainer

        policy = LocalTrainer(load_policy(config, family(), train="full"), family())
        return policy, make_engine(embedded, policy)

    agreement = partial(import_module, "saccade.plugins.doctor.agreement")

    def parity(asked: Config, engine: Any) -> Rows:
        samples = agreement().questions(family())
        yield "ok", str(agreement().parity.compare(asked, engine, loaded()[0], samples, version=0))

    def layout() -> Rows:
        """Layout and memory as in a dry run of `saccade rl`. Misfits are warnings, as other commands may need less."""
        from saccade.plugins.estimate.estimate_command import estimate, refusal, told
        from saccade.plugins.estimate.layout_choice import choose_layout
        from saccade.plugins.ranks.layouts import require_heads
        from saccade.system import devices

        require_heads(config, family())
        try:
            found = estimate(config, devices.current_device(config.run.device), family=family())
        except SaccadeError as error:
            chosen, why = choose_layout(config, "rl", family())
            yield "ok", f"train.layout={chosen}: {why}" + f"; no estimate: {error}" * (str(error) not in why)
            return
        for line in told(config, found):
            if line.startswith("train.offload: "):  # too little host memory
                yield "warning", *line.rsplit("; ", 1)
            else:
                yield "note" if line in found.notes else "ok", line
        if found.device.is_gpu and not found.memory.fits:
            problem, _, fix = refusal(found).partition("; ")
            yield "warning", f"by `saccade estimate` a step of `saccade rl` {problem}", fix

    def foreign() -> Rows:
        from saccade.recipes.engines import make_engine

        with (
            tempfile.TemporaryDirectory(prefix="saccade-doctor-") as logs,
            closing(make_engine(config, loaded()[0], logs=Path(logs))) as engine,
        ):
            yield from parity(config, engine)

    checks: list[Check] = [
        ("model", lambda: model_files.check(path, bool(config.prompt.chat_template))),
        ("tokenizer", lambda: model_files.tokenizer(family(), config.data)),
        ("template", lambda: model_files.traps(family())),
        ("rows", lambda: agreement().rows_agree(*loaded())),
        ("parity embedded", lambda: parity(embedded, loaded()[1])),
    ]
    if config.run.gpus > 1:
        checks.insert(3, ("layout", layout))
    if rollout.engine not in ("embedded", "http") or rollout.replicas:
        checks.append((f"parity {rollout.engine}", foreign))
    return checks


def _ranks_meet(config: Config) -> Rows:
    """Start the rank processes as a run does, and test that they connect; loads no weights."""
    if config.run.gpus == 1:
        return
    from saccade.plugins.ranks.starts import start_team

    model = config.model.path if Path(config.model.path).is_dir() else ""
    place = Path(config.run.out).absolute()
    shared = next(folder for folder in (place, *place.parents) if folder.is_dir())  # visible to all machines
    out = None if config.run.launcher == "local" else shared
    logs = Path(tempfile.mkdtemp(prefix="saccade-doctor-", dir=out))
    try:
        with closing(start_team(config, "doctor", model=model, folder=None, logs=logs)) as team:
            found = [one.row["result"] for one in team.ask_all("sum_speed", [{}] * team.size)]
    except SaccadeError as error:
        if any(logs.iterdir()):
            error.args = (f"{error}\nall logs are in {logs}",)
        else:  # nothing was started
            logs.rmdir()
        raise
    shutil.rmtree(logs)
    hosts = dict.fromkeys(one["host"] for one in found)
    speed, backend = min(one["speed"] for one in found), found[0]["backend"]
    yield "ok", f"{len(found)} of {', '.join(hosts)} meet, see the same files and sum over {backend}, {speed:.3g} GB/s"


def _build_tiny(kind: str, folder: str, seed: int) -> Rows:
    from saccade.plugins.families.tiny_kinds import build

    build(kind, folder, seed=seed)
    yield from ()
