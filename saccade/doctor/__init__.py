"""What keeps a run from working here: packages, devices, engines, disk, and of a model its files,
its chat template and whether everyone who computes with it gets the same numbers.

A check is a function from a config to findings; what is not ok says how to mend it. Nothing is
written or left running, and torch is imported only where it can be said that it is missing.

    run(load(None, ["model.path=my-model"]))
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path

from saccade.config import Config
from saccade.doctor import machine
from saccade.doctor.finding import AS_IT_SAYS, Finding, failure, note
from saccade.errors import EnvironmentProblem, SaccadeError

MODEL_CHECKS = ("folder", "template", "agreement")  # modules here; a later one needs the earlier
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "red"}


def examine(config: Config) -> Iterator[Finding]:
    """The machine, then the model if the config names one."""
    for check in machine.CHECKS:
        yield from check(config)
    path = config.model.path
    if path.startswith("tiny:"):
        yield from _guarded("model", partial(_examine_tiny, config))
    elif path and not Path(path).is_dir():
        yield failure("model", f"{path} is not a folder", "give a Hugging Face model folder")
    elif path:
        yield from _examine_model(config)


def _examine_tiny(config: Config) -> Iterator[Finding]:
    build = import_module("saccade.models.tiny").build
    with tempfile.TemporaryDirectory(prefix="saccade-doctor-") as folder:
        path = build(config.model.path.removeprefix("tiny:"), folder, seed=config.run.seed)
        model = config.model.model_copy(update={"path": str(path)})
        yield from _examine_model(config.model_copy(update={"model": model}))


def _examine_model(config: Config) -> Iterator[Finding]:
    """As far as it goes: what cannot be read cannot be rendered, nor loaded."""
    for number, name in enumerate(MODEL_CHECKS):
        found = list(_guarded(name, partial(_check, name, config)))
        yield from found
        if any(finding.status == "failure" for finding in found):
            for left in MODEL_CHECKS[number + 1 :]:
                yield note(left, "not looked at: see above")
            return


def _check(name: str, config: Config) -> Iterator[Finding]:
    return import_module(f"saccade.doctor.{name}").check(config)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Whatever a broken folder or library raises is a finding, too."""
    try:
        yield from check()
    except Exception as error:
        text = str(error) if isinstance(error, SaccadeError) else f"{type(error).__name__}: {error}"
        yield failure(name, text.strip()[:500], AS_IT_SAYS)


def run(config: Config, *, as_json: bool = False) -> None:
    """Print what is found; raise if any of it keeps a run from working."""
    from rich.console import Console
    from rich.text import Text

    console, found = Console(soft_wrap=True, emoji=False), []
    for finding in examine(config):
        found.append(finding)
        if not as_json:
            line = Text(f"{finding.status:<8} ", style=STYLES[finding.status])
            line.append(f"{finding.name:<16} {finding.text}", style="default")
            console.print(line)
            if finding.mend:
                console.print(Text(f"{'':<26}to mend it: {finding.mend}", style="dim"))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in found]}, indent=2))
    failed = [finding.name for finding in found if finding.status == "failure"]
    if failed:
        raise EnvironmentProblem(
            f"{len(failed)} of {len(found)} checks failed: {', '.join(dict.fromkeys(failed))}"
        )
    if not as_json:
        print(f"none of {len(found)} checks failed")
