"""Formulas of the estimate for several GPUs: which share of a model a rank holds, how many bytes it sends in a step,
and how long that takes. Bandwidths are those of data sheets; no number here was measured on more than one GPU.

    >>> share_held("whole", "state", gpus=8)
    0.125
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from math import gcd, lcm, prod
from pathlib import Path
from typing import NamedTuple

from saccade.config import Config
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.models.files import header_of, shards
from saccade.system import devices


class Layout(NamedTuple):
    divided: tuple[str, ...]  # what is sharded over the ranks; the rest is whole on each
    inside: tuple[str, ...] = ()  # of these, what is sharded only within each machine
    overhead: float = 0.0  # seconds per layer and forest, at any bandwidth


LAYOUTS: Mapping[str, Layout] = {  # by `train.layout`
    "whole": Layout(("state",)),
    "sharded": Layout(("state", "sums", "weights"), overhead=2.5e-3),  # one rank of 8, 3B model; 7B: 1.4e-3
    "hybrid": Layout(("state", "sums", "weights"), inside=("sums", "weights"), overhead=2.5e-3),
}


class Sizes(NamedTuple):
    """Bytes that ranks exchange."""

    sums: float  # gradient sums, which are reduced
    trained: float  # weights that an update changes
    divided: float  # sharded weights, including frozen ones: gathered twice per forest
    copied: float  # weights that are written to the copy for generation after a step


NODE = 8  # GPUs of a machine
Pair = tuple[float, float]
REACHED = 0.73  # share of the bandwidth that a collective reaches: 330 of 450 GB/s are assumed for an H200
CONTROLLER = 0.1e-6  # seconds per sampled token in which all ranks wait for it, from `benchmarks/controller.py`


def share_held(layout: str, kind: str, *, gpus: int, whole: float = 0.0) -> float:
    """The share of all weights, gradient sums or optimizer state that a rank holds. `whole`: the share of the weights
    that no layout shards, such as a tower.
    """
    if kind not in LAYOUTS[layout].divided:
        return 1.0
    kept = 0.0 if kind == "state" else whole
    return kept + (1 - kept) / (min(gpus, NODE) if kind in LAYOUTS[layout].inside else gpus)


def numbers_in(folder: Path, *, ranks: int = 1, tower_of: Callable[[str], str] = lambda name: "llm") -> int:
    """The number of parameters in a model folder. With several `ranks`: the most that one of them holds at a time while
    they load and shard it: towers, its rows, and either one whole layer or all weights outside of layers.
    """
    headers = [found for name in shards(folder) if isinstance(found := header_of(folder / name), dict)]
    sizes = {name: prod(entry["shape"]) for header in headers for name, entry in header.items()}
    if ranks == 1:
        return sum(sizes.values())
    divided, layers = {name: size for name, size in sizes.items() if tower_of(name) == "llm"}, Counter[str]()
    for name, size in divided.items():
        numbered = re.match(r".*?\.\d+\.", name)
        layers[numbered[0] if numbered else ""] += size
    rest = sum(sizes.values()) - sum(divided.values())
    return rest + sum(divided.values()) // ranks + max(layers.values(), default=0)


def collective_seconds(size: float, links: Pair, *, gpus: int) -> float:
    """Seconds of a reduce-scatter or all-gather of `size` bytes: each rank sends all but its shard, at the speed of the
    slowest link, because the ring runs through every machine. `links`: GB/s within a machine, and between machines.
    """
    slowest = links[0] if gpus <= NODE else min(links)
    return size * (gpus - 1) / gpus / (1e9 * REACHED * slowest)


def exchange_seconds(
    layout: str, sizes: Sizes, links: Pair, *, gpus: int, updates: float, forests: float, layers: int, compute: float
) -> float:
    """Seconds of the collectives of a step. `whole`: gradient sums and trained weights, once per update. `sharded`:
    each forest gathers twice and reduces; of that only what exceeds the `compute` seconds of all forests, and at least
    FSDP's overhead per layer and forest; plus the copy. `hybrid`: `sharded` within a machine, `whole` between machines.
    """
    kind, machines = LAYOUTS[layout], -(-gpus // NODE)
    near = min(gpus, NODE) if kind.inside else gpus
    reduced, renewed, gathered, copied = (collective_seconds(size, links, gpus=near) for size in sizes)
    if "weights" not in kind.divided:
        return updates * (reduced + renewed)
    waiting = max(kind.overhead * layers * forests, forests * (reduced + 2 * gathered) - compute)
    between = links[1], links[1]
    far = sum(collective_seconds(size, between, gpus=machines) for size in sizes[:2]) if kind.inside else 0.0
    return copied + waiting + updates * far


def generates(config: Config, command: str) -> bool:
    """Whether the run generates, in training or validation."""
    return command == "rl" or (command in ("sft", "dpo") and bool(config.data.val and config.val.every))


def candidates(wanted: str, *, gpus: int, cuda: bool) -> tuple[tuple[str, ...], str]:
    """The layouts that `train.layout` may become, and the reason if there is only one. If step times are unknown, an
    earlier one is preferred.
    """
    if gpus == 1:
        return ("whole",), ""
    if wanted != "auto":
        return (wanted,), "as the config says"
    if not cuda:
        return ("whole",), "this machine has no GPU"
    return ("whole", *["hybrid"] * (gpus > NODE and gpus % NODE == 0), "sharded"), ""


def gpus_here(device: str) -> int:
    """Returns the number that `run.gpus=all` stands for: 1 on a CPU."""
    return max(1, devices.count(device))


def more_gpus(gpus: int, layout: str) -> list[str]:
    """Values of `run.gpus` to try for a run that does not fit, smallest first."""
    values = [f"{more}" for more in (2, 4, NODE) if more > gpus]
    return values + [f"{NODE} train.layout=sharded"] * bool(values and layout == "whole")


def key_repeats(heads: int, together: int) -> int:
    """How often each key head is repeated, so that `together` ranks can divide the attention heads evenly."""
    return lcm(heads, together) // heads


def require_heads(config: Config, family: Family) -> None:
    """Refuse a `train.sequence_parallel` that does not divide the query heads, or that the model does not support."""
    if config.train.sequence_parallel == 1:
        return
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(family.path, trust_remote_code=config.model.trust_remote_code)
    text = settings.get_text_config()
    heads, size = text.num_attention_heads, config.train.sequence_parallel
    if {"linear_attention", "conv"} & set(getattr(text, "layer_types", None) or ()):
        why = f"a {family.name} has recurrent layers, which read the tokens of a row on one GPU"
        raise ConfigError(f"train.sequence_parallel: {why}; use train.sequence_parallel=1")
    if family.blocks:
        why = f"pictures of a {family.name} see themselves both ways, which stretches of a row do not know of"
        raise ConfigError(f"train.sequence_parallel: {why}; use train.sequence_parallel=1")
    if heads % size:
        most = gcd(heads, config.run.gpus)
        works = " or ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        what = f"{size} does not divide {heads} heads of attention of {family.path}"
        raise ConfigError(f"train.sequence_parallel: {what}; try {works}")
