"""`saccade estimate`: the estimate on the screen or as JSON, and an error where it does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

from saccade import devices
from saccade.config import Config, load
from saccade.devices import Device
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.estimate import Estimate, estimate
from saccade.estimate.host import host_peak
from saccade.recipes.models import quiet_libraries


def run(
    config: Config,
    *,
    device: str | None,
    prompt_tokens: int | None,
    image: str | None,
    as_json: bool,
) -> None:
    quiet_libraries()
    found = estimate(
        config,
        find_device(device, config),
        prompt_tokens=prompt_tokens,
        image=None if image is None else size_of(image),
    )
    if as_json:
        print(json.dumps(to_json(found), indent=2))
    else:
        show(found)
        print(in_short(found))
    if not found.memory.fits:
        raise ConfigError(refusal(found))


def preview(config: Config) -> None:
    """Beside the batch arithmetic of a dry run, on this machine's device; refuses nothing."""
    quiet_libraries()
    with TemporaryDirectory() as scratch:  # of a tiny model; a dry run leaves nothing behind
        try:
            found = estimate(load(config, [f"run.out={scratch}"]), find_device(None, config))
        except EnvironmentProblem as problem:
            print(f"no estimate: {problem}")
            return
    for line in (about(found), *found.notes, in_short(found)):
        print(line)
    print("`saccade estimate` shows it by item" if found.memory.fits else refusal(found))


def about(found: Estimate) -> str:
    return f"{found.device.name}, prompts of {found.prompts}"


def in_short(found: Estimate) -> str:
    memory, seconds = found.memory, found.pace.seconds if found.pace else {}
    peaks = [f"{memory.peaks[phase]:.2f} GiB in the {phase}" for phase in ("rollout", "update")]
    return (
        f"a step of `saccade rl` takes {' and '.join(peaks)}, of {memory.limit:.2f} GiB that can "
        "be planned with" + (f", and about {sum(seconds.values()):.1f} seconds" if seconds else "")
    )


def find_device(name: str | None, config: Config) -> Device:
    if name is None:
        found = devices.present(config.run.device)
        if config.run.device == "cuda" and not found.is_gpu:
            raise EnvironmentProblem(
                "run.device=cuda, but torch sees no GPU; name the one to plan for: --device H100"
            )
        return found
    if name.lower() == "cpu":
        return devices.present("cpu")
    known = devices.named(name) or devices.only(name)
    if known is None:
        names = ", ".join(row[0] for row in devices.TABLE)
        raise ConfigError(f"--device {name}: not in the table; known are {names}, cpu")
    if devices.says_otherwise(name, known):
        raise ConfigError(
            f"--device {name}: the one in the table has {known.memory:.1f} GiB; leave the memory "
            "out of the name, and plan with less of it by run.memory=GIB"
        )
    return known


def size_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[xX](\d+)", text)
    if match is None or not all(map(int, match.groups())):
        raise ConfigError(f"--image {text}: write width and height in pixels, such as 448x448")
    return int(match[1]), int(match[2])


def to_json(found: Estimate) -> dict[str, Any]:
    memory = asdict(found.memory) | {"peaks": found.memory.peaks, "fits": found.memory.fits}
    return asdict(found) | {"memory": memory}


def refusal(found: Estimate) -> str:
    """The phase that needs most, and what makes it fit."""
    memory, device = found.memory, found.device
    phase = max(memory.peaks, key=lambda name: memory.peaks[name])
    parts = [item for item in memory.items if item.phase in ("always", phase)]
    largest = max(parts, key=lambda item: item.gib)
    text = (
        f"does not fit: the {phase} needs {memory.peaks[phase]:.1f} GiB ({largest.name} "
        f"{largest.gib:.1f}), and of {device.memory:.1f} GiB on {device.name} "
        f"{max(0.0, memory.limit):.1f} can be planned with; "
    )
    if found.advice:
        return text + "try " + ", or ".join(found.advice)
    return text + (
        "recomputing, smaller batches, responses and pictures, a smaller optimizer and adapters "
        "do not make it fit, not even together: take a smaller model or another device"
    )


def show(found: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    memory, console = found.memory, Console(soft_wrap=True, emoji=False)
    console.print(about(found), highlight=False)
    table = Table("GiB", "rollout", "update", "", title="Memory", title_justify="left")
    for item in memory.items:
        cells = [
            f"{item.gib:.2f}" if item.phase in ("always", phase) else ""
            for phase in ("rollout", "update")
        ]
        table.add_row(item.name, *cells, item.note)
    peaks = [f"{memory.peaks[phase]:.2f}" for phase in ("rollout", "update")]
    table.add_row("peak", *peaks, f"of {memory.limit:.2f} that can be planned with", style="bold")
    console.print(table)
    if found.host:
        table = Table("GiB", "", "", title="Main memory", title_justify="left")
        for item in found.host:
            table.add_row(item.name, f"{item.gib:.2f}", item.note)
        table.add_row("peak", f"{host_peak(found.host):.2f}", style="bold")
        console.print(table)
    for note in found.notes:
        console.print(note, highlight=False, markup=False)
    if found.pace is None:
        return
    seconds, again = found.pace.seconds, found.pace.recomputed
    title = "A step (seconds: an estimate)" if seconds else "A step"
    table = Table("phase", "TFLOP", title=title, title_justify="left")
    if seconds:
        table.add_column("seconds")
    for phase, count in found.pace.tflop.items():
        table.add_row(phase, f"{count:,.1f}", *([f"{seconds[phase]:.2f}"] if seconds else []))
    if again:
        table.add_row("recomputed in the update", f"{again:,.1f}")
    if seconds:
        table.add_row("step", "", f"{sum(seconds.values()):.2f}", style="bold")
    console.print(table)
