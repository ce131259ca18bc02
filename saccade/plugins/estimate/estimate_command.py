"""`saccade estimate`: prints the estimate, or writes it as JSON, and raises an error if the run does not
fit. Also the check before a run loads its weights.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory

from saccade.checks import idle_gpus
from saccade.config import Config, load
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import FAMILIES, Family
from saccade.plugins.estimate import Estimate, estimate
from saccade.plugins.estimate.layout_choice import choose_layout
from saccade.plugins.estimate.memory_items import GIB, OFFLOADED, host_peak, total
from saccade.recipes.model_setup import quiet_libraries
from saccade.system import devices
from saccade.system.devices import Device
from saccade.types import Sample

OFF = 1.15  # factor by which an estimate may be wrong
PHASES = ("rollout", "update")


def run(
    config: Config,
    *,
    device: str | None,
    prompt_tokens: int | None,
    image: str | None,
    network: float | None,
    as_json: bool,
) -> None:
    """The command. `network`: Gb/s between machines."""
    quiet_libraries()
    planned = find_device(device, config.run.device)
    planned = replace(planned, network=network / 8) if network else planned
    size = None if image is None else parse_size(image)
    found = estimate(config, planned, prompt_tokens=prompt_tokens, image=size)
    if device is None and (short := short_of_memory(config, found)):
        found = replace(found, notes=(*found.notes, short))
    if as_json:
        memory = asdict(found.memory) | {"peaks": found.memory.peaks, "fits": found.memory.fits}
        print(json.dumps(asdict(found) | {"memory": memory}, indent=2))
    else:
        print(*by_item(found), in_short(found), sep="\n")
    if not found.memory.fits:
        raise ConfigError(refusal(found))


def preview(config: Config, command: str) -> None:
    """The estimate that a dry run prints, for this machine's device; refuses nothing."""
    quiet_libraries()
    with TemporaryDirectory() as scratch:  # for files of a tiny model: a dry run leaves no files
        try:
            device = find_device(None, config.run.device)
            config = load(config, [f"run.out={scratch}"], command)
            found = estimate(config, device, command=command)
        except EnvironmentProblem as problem:
            print(f"no estimate: {problem}")
            return
    lines = told(config, found, command)
    if command == "rl" and found.memory.fits:
        lines.append("`saccade estimate` shows it by item")
    if not found.memory.fits:
        lines.append(refusal(found, command))
    print(*lines, sep="\n")


def preflight(config: Config, family: Family, samples: Sequence[Sample], *, device: Device | None = None) -> list[str]:
    """Warnings for a run of `saccade rl` that may not fit, before weights are loaded. Refuses a run that
    is far too large, if its family is in our table. No warnings on a CPU, which has more memory, or for
    a model that cannot be built without its weights.
    """
    card, device = device, device or devices.device_with_free_memory(config.run.device)
    if not device.is_gpu or not samples:
        return []
    if config.run.gpus > 1:  # the layout of the run does not depend on what is free now
        config = load(config, [f"train.layout={choose_layout(config, 'rl', family, card)[0]}"], "rl")
    try:
        found = estimate(config, device, family=family, samples=samples)
    except EnvironmentProblem:
        return []
    short = short_of_memory(config, found)
    if short and not config.run.overcommit:
        raise ConfigError(f"{short}; run.overcommit=true starts all the same")
    if found.memory.fits:
        return [short] if short else []
    far = max(found.memory.peaks.values()) > OFF * found.device.memory
    counted = family.name in FAMILIES and config.rollout.engine == "embedded" and not config.rollout.replicas
    if far and counted and not config.run.overcommit:
        raise ConfigError(f"{refusal(found)}; run.overcommit=true starts all the same")
    return [f"the run starts, but by `saccade estimate` it {refusal(found)}"]


def short_of_memory(config: Config, found: Estimate) -> str | None:
    """Says if `train.offload` needs more main memory than is free here; other machines are not checked."""
    needed, free = total(found.host, "always"), devices.free_host_bytes() / GIB
    if not config.train.offload or config.run.launcher != "local" or needed <= free:
        return None
    of_state = next((item.gib for item in found.host if item.name == OFFLOADED), 0.0)
    smaller = "train.optimizer=adamw_bf16, or " * (config.train.optimizer == "adamw")
    return (
        f"train.offload: {needed:.1f} GiB of main memory are needed ({OFFLOADED} {of_state:.1f}), and {free:.1f} are "
        f"free; try {smaller}train.offload=false"
    )


# -- options ---------------------------------------------------------------------------------------


def find_device(name: str | None, wanted: str) -> Device:
    """The device `name` of the table, or without a name the one that run.device (`wanted`) selects here."""
    if name is None:
        here = devices.current_device(wanted)
        if wanted == "cuda" and not here.is_gpu:
            raise EnvironmentProblem("run.device=cuda, but torch sees no GPU; name one: saccade estimate --device H100")
        return here
    if name.lower() == "cpu":
        return devices.current_device("cpu")
    found = devices.lookup(name) or devices.lookup_unique(name)
    if found is None:
        raise ConfigError(f"--device {name}: expected one of {', '.join(devices.table())}, cpu")
    if devices.memory_contradicts(name, found):
        has = f"the one in the table has {found.memory:.1f} GiB"
        raise ConfigError(f"--device {name}: {has}; to plan with less of it use run.gpu_memory_gib=GIB")
    return found


def parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"0*([1-9]\d*)[xX]0*([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"--image {text}: write width and height in pixels, such as 448x448")
    return int(match[1]), int(match[2])


# -- output ----------------------------------------------------------------------------------------


def about(found: Estimate) -> str:
    chosen = f"\ntrain.layout={found.layout}: {found.reason}" if found.reason else ""
    return f"{_devices(found)}, prompts of {found.prompts}{chosen}"


def _devices(found: Estimate) -> str:
    return found.device.name if found.gpus == 1 else f"each of {found.gpus} {found.device.name}"


def in_short(found: Estimate, command: str = "rl") -> str:
    memory, seconds = found.memory, found.pace.step if found.pace else 0.0
    phases, rows = (PHASES, "") if command == "rl" else (("update",), " with rows as long as the config allows")
    peaks = " and ".join(f"{memory.peaks[phase]:.2f} GiB in the {phase}" for phase in phases)
    time = f", and about {seconds:.1f} seconds{rows}" if seconds else ""
    return f"a step of `saccade {command}` takes {peaks}, of {memory.limit:.2f} GiB that can be planned with{time}"


def told(config: Config, found: Estimate, command: str = "rl") -> list[str]:
    """A short summary; with several GPUs and known seconds, also the comparison with one GPU."""
    idle = idle_gpus(config, command, devices.count(config.run.device))
    lines = [*about(found).splitlines(), *found.notes, short_of_memory(config, found), idle, in_short(found, command)]
    if found.efficiency and found.pace:
        waits = " and ".join(f"{found.pace.seconds[name]:.2f} in the {name}" for name in ("exchange", "controller"))
        speeds = ", ".join(f"{share:.0%} with as many {same}" for same, share in found.efficiency.items())
        lines.append(f"of these seconds {waits}; speed of a GPU: {speeds}, of one alone; a prediction")
    if command == "rl" and found.gpus > 1 and not found.device.is_gpu:
        lines.append("`saccade estimate --device H200` shows layout, memory and seconds of GPUs that are not here")
    return [line for line in lines if line]


def refusal(found: Estimate, command: str = "rl") -> str:
    """Says which phase needs the most memory, and which options of the command make it fit."""
    memory, device = found.memory, found.device
    phase = max(memory.peaks, key=lambda name: memory.peaks[name] - memory.room(name))
    largest = max(memory.during(phase), key=lambda item: item.gib)
    text = (
        f"does not fit: the {phase} needs {memory.peaks[phase]:.1f} GiB ({largest.name} "
        f"{largest.gib:.1f}), and of {device.memory:.1f} GiB on {_devices(found)} "
        f"{max(0.0, memory.room(phase)):.1f} can be planned with; "
    )
    if found.advice:
        own = "rollout" if command == "rl" else command
        return text + "try " + ", or ".join(found.advice).replace("rollout.max_tokens", f"{own}.max_tokens")
    return text + "no options make it fit, not even together: take a smaller model or another device"


def by_item(found: Estimate) -> Iterator[str]:
    """Lines of the full report: memory by item, main memory, notes, and the phases of a step."""

    def line(name: str, *cells: str, note: str = "") -> str:
        return f"{name:<26}{''.join(f'{cell:>10}' for cell in cells)}  {note}".rstrip()

    memory, pace = found.memory, found.pace
    yield about(found)
    yield "\nMemory"
    yield line("GiB", *PHASES)
    for item in memory.items:
        shown = [f"{item.gib:.2f}" if item in memory.during(phase) else "" for phase in PHASES]
        yield line(item.name, *shown, note=item.note)
    peaks = [f"{memory.peaks[phase]:.2f}" for phase in PHASES]
    yield line("peak", *peaks, note=f"of {memory.limit:.2f} that can be planned with")
    if found.host:
        yield "\nMain memory (GiB)"
        yield from (line(item.name, f"{item.gib:.2f}", note=item.note) for item in found.host)
        yield line("peak", f"{host_peak(found.host):.2f}")
    yield from found.notes
    if pace is None:
        return
    seconds = pace.seconds
    yield "\nA step (seconds: an estimate)" if seconds else "\nA step"
    yield line("", "TFLOP", *(["seconds"] if seconds else []))
    for phase in seconds or pace.tflop:
        count = f"{pace.tflop[phase]:,.1f}" if phase in pace.tflop else ""
        yield line(phase, count, *([f"{seconds[phase]:.2f}"] if seconds else []))
    if pace.recomputed:
        yield line("recomputed in the update", f"{pace.recomputed:,.1f}")
    if seconds:
        yield line("step", "", f"{pace.step:.2f}")
    for same, share in found.efficiency.items():
        yield line("speed of a GPU", "", f"{share:.0%}", note=f"of that of one alone with as many {same}; a prediction")
