"""What keeps a run from working here: packages, devices, engines, disk, and of a model its files,
its chat template and whether everyone who computes with it gets the same numbers.

A table names each check; a check yields rows `(status, text, fix)`, without a fix where it is ok or
a note: worth knowing, nothing to do about it yet. Nothing is written or left running, and torch is
imported only where it can be said that it is missing.

    run(load(None, ["model.path=my-model"]))
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.errors import EnvironmentProblem, SaccadeError
from saccade.plugins.doctor import machine

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "red"}
RERUN = "fix this and run doctor again"  # of an error, whose text ends with what helps
Check = tuple[str, Callable[[], Iterator[tuple[str, ...]]]]


@dataclass(frozen=True)
class Finding:
    name: str
    status: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.status in ("ok", "note"), f"{self.name}: no fix"


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
            if finding.fix:
                console.print(Text(f"{'':<26}to fix it: {finding.fix}", style="dim"))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in found]}, indent=2))
    failed = [finding.name for finding in found if finding.status == "failure"]
    if failed:
        raise EnvironmentProblem(f"{len(failed)} of {len(found)} checks failed: {', '.join(dict.fromkeys(failed))}")
    if not as_json:
        print(f"none of {len(found)} checks failed")


def examine(config: Config) -> Iterator[Finding]:
    """The machine, then the model if the config names one."""
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
    ]
    for check in machine_checks:
        yield from look(check)[0]
    with tempfile.TemporaryDirectory(prefix="saccade-doctor-") as folder:
        if path.startswith("tiny:"):
            kind, path = path.removeprefix("tiny:"), folder
            model = config.model.model_copy(update={"path": folder})
            config = config.model_copy(update={"model": model})
            build = partial(_build_tiny, kind, folder, config.run.seed)
            yield from look_in_turn([[("model", build)], *model_checks(config)])
        elif path:
            yield from look_in_turn(model_checks(config))


def look(check: Check) -> tuple[list[Finding], bool]:
    """What a check finds, and whether an error ended it: whatever a broken folder or library raises
    is a finding, too.
    """
    name, rows = check
    found: list[Finding] = []
    try:
        for row in rows():
            found.append(Finding(name, *row))
    except Exception as error:
        text = str(error) if isinstance(error, SaccadeError) else f"{type(error).__name__}: {error}"
        return [*found, Finding(name, "failure", text.strip()[:500], RERUN)], True
    return found, False


def look_in_turn(stages: Sequence[Sequence[Check]]) -> Iterator[Finding]:
    """What the stages find, as far as it goes: what cannot be read cannot be rendered, nor loaded.
    An error ends its stage, a failure all later ones.
    """
    failed = False
    for stage in stages:
        stopped = failed
        for check in stage:
            found = [Finding(check[0], "note", "not looked at: see above")]
            if not stopped:
                found, stopped = look(check)
                failed |= any(finding.status == "failure" for finding in found)
            yield from found


def model_checks(config: Config) -> list[list[Check]]:
    """Stages of checks, each of which needs what the earlier ones looked at."""
    path, template, rollout = Path(config.model.path), config.prompt.chat_template, config.rollout
    embedded = config.model_copy(update={"rollout": rollout.model_copy(update={"engine": "embedded", "replicas": 0})})
    part = cache(lambda name: import_module(f"saccade.plugins.doctor.{name}"))

    @cache
    def family() -> Any:
        from saccade.recipes.model_setup import family_of, quiet_libraries

        quiet_libraries()
        return family_of(config, config.model.path)

    @cache
    def loaded() -> tuple[Any, Any, Any]:
        from saccade.recipes.engines import make_engine
        from saccade.recipes.model_setup import load_policy
        from saccade.trainer.local import LocalBackend

        policy = load_policy(config, family(), train="full")
        return policy, LocalBackend(policy.model, family()), make_engine(embedded, policy)

    def parity(asked: Any, engine: Any) -> Iterator[tuple[str, ...]]:
        from saccade.plugins.engines.parity import compare

        samples = part("agreement").questions(family())
        try:
            yield "ok", str(compare(asked, engine, loaded()[1], samples, version=0))
        except EnvironmentProblem as error:
            yield "failure", str(error), RERUN

    def foreign() -> Iterator[tuple[str, ...]]:
        from saccade.recipes.engines import make_engine

        policy, *_ = loaded()
        with (
            tempfile.TemporaryDirectory(prefix="saccade-doctor-") as logs,
            closing(make_engine(config, policy, logs=Path(logs))) as engine,
        ):
            yield from parity(config, engine)

    numbers: list[Check] = [
        ("rows", lambda: part("agreement").rows_agree(*loaded()[1:])),
        ("parity embedded", lambda: parity(embedded, loaded()[2])),
    ]
    if rollout.engine not in ("embedded", "http") or rollout.replicas:
        numbers.append((f"parity {rollout.engine}", foreign))
    return [
        [("model", lambda: part("model_files").check(path, bool(template)))],
        [
            ("tokenizer", lambda: part("template").tokenizer(family(), config.data)),
            ("template", lambda: part("template").traps(family())),
        ],
        numbers,
    ]


def _build_tiny(kind: str, folder: str, seed: int) -> Iterator[tuple[str, ...]]:
    import_module("saccade.models.tiny").build(kind, folder, seed=seed)
    yield from ()
