"""The optimizer's state in files. A single process writes whole tensors; each of several writes the flat ranges that
it updates, and lists them in its file. Any number of processes can load either form; each reads only what it updates.

    write_files(folder, [optimizer_file(optimizer, copy=False)])
    load_optimizer(optimizer, folder)
"""

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from saccade.errors import EnvironmentProblem
from saccade.system.contents import File, host_copies, tensor_file
from saccade.trainer.optimizer import COUNTS, Optimizer


def optimizer_file(optimizer: Optimizer, *, copy: bool) -> File:
    """The file with the state that this process updates."""
    ranges = {"ranges": json.dumps(optimizer.ranges())} if optimizer.world > 1 else None
    return _name(optimizer.rank, optimizer.world), tensor_file(host_copies(optimizer.state(), copy=copy), ranges)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Load the state. Refuses files that do not hold every element of these parameters exactly once."""
    mine, ranges, stored = optimizer.state(), optimizer.ranges(), _stored(folder)
    names = {key: key.partition("/")[2] for key in stored}
    complete = {key for key, name in names.items() if name in ranges or name not in optimizer.parameters}
    if complete != mine.keys():
        listed = ", ".join(sorted(complete ^ mine.keys())[:3])
        text = "the optimizer's state is of other parameters or of another optimizer"
        raise EnvironmentProblem(f"{folder}: {text} ({listed}); resume with the options of the run that saved it")
    for key, tensor in mine.items():
        parts = sorted(stored[key], key=lambda part: part[0])
        if key.partition("/")[0] in COUNTS:  # every file has these
            tensor.copy_(parts[0][1].view_as(tensor))
            continue
        size = tensor.numel() if optimizer.world == 1 else optimizer.parameters[names[key]].numel()
        first, end = ranges[names[key]]
        if [*(start for start, _ in parts), size] != [0, *(start + len(part) for start, part in parts)]:
            raise EnvironmentProblem(f"{folder}: the files do not hold every number of {key} exactly once")
        for start, part in parts:
            low, high = max(start, first), min(start + len(part), end)
            if low < high:
                tensor.view(-1)[low - first : high - first] = part[low - start : high - start]


def _name(rank: int, world: int) -> str:
    return "optimizer.safetensors" if world == 1 else f"optimizer-{rank:03}-of-{world:03}.safetensors"


def _stored(folder: Path) -> dict[str, list[tuple[int, Tensor]]]:
    """By key: start and flat tensor of each part; the tensors are read from disk when they are used."""
    from safetensors import safe_open

    found = {path.name for path in folder.glob("optimizer*.safetensors")}
    world = max((int(name[-15:-12]) for name in found if "-of-" in name), default=1)
    if missing := {_name(rank, world) for rank in range(world)} - found:
        listed = ", ".join(sorted(missing))
        raise EnvironmentProblem(f"{folder}: {listed} is missing; each process of the run wrote one file: copy all")
    stored = defaultdict(list)
    for name in sorted(found):
        with safe_open(folder / name, framework="pt") as file:
            ranges = json.loads((file.metadata() or {}).get("ranges", "{}"))
            for key in file.keys():  # noqa: SIM118
                first, _ = ranges.get(key.partition("/")[2], (0, 0))
                stored[key].append((first, file.get_tensor(key).reshape(-1)))
    return stored
