"""What a rank holds of a model, what it sends in a step, and how long that takes: the formulas of an
estimate for several GPUs. Bandwidths are those of data sheets, and no number here was measured on more than one GPU.

    >>> held("whole", "state", gpus=8)
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


class Layout(NamedTuple):
    divided: tuple[str, ...]  # among the ranks; the rest is whole on each
    inside: tuple[str, ...] = ()  # of these, what is divided among the ranks of a machine only
    beside: float = 0.0  # seconds of a layer and forest, however fast the exchange is


LAYOUTS: Mapping[str, Layout] = {  # by `train.layout`
    "whole": Layout(("state",)),
    "sharded": Layout(("state", "sums", "weights"), beside=2.5e-3),  # one rank of 8 with a 3B; with a 7B 1.4e-3
    "hybrid": Layout(("state", "sums", "weights"), inside=("sums", "weights"), beside=2.5e-3),
}


class Sizes(NamedTuple):
    """Bytes that ranks exchange."""

    sums: float  # of gradients: reduced
    trained: float  # weights that an update changes
    divided: float  # weights of which a rank holds a part, frozen ones too: each forest gathers them, twice
    copied: float  # weights that the copy for generation gets after a step


NODE = 8  # GPUs of a machine
Pair = tuple[float, float]
REACHED = 0.73  # of a bandwidth, in a collective: 330 of 450 GB/s are assumed for an H200
CONTROLLER = 0.1e-6  # seconds for each sampled token of a step, by `benchmarks/controller.py`


def held(layout: str, kind: str, *, gpus: int, whole: float = 0.0) -> float:
    """The share of all weights, gradient sums or optimizer state that a rank holds. `whole`: the share of the weights
    that no layout divides, as those of a tower.
    """
    if kind not in LAYOUTS[layout].divided:
        return 1.0
    kept = 0.0 if kind == "state" else whole
    return kept + (1 - kept) / (min(gpus, NODE) if kind in LAYOUTS[layout].inside else gpus)


def numbers_in(folder: Path, *, ranks: int = 1, tower_of: Callable[[str], str] = lambda name: "llm") -> int:
    """How many numbers the weights of a model have. With several `ranks`: the most that one of them has at once while
    they divide it: towers, its rows, and a layer that is whole, or what is beside all layers.
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
    """A reduce-scatter or all-gather of so many bytes: each rank sends all but its part of them, at the speed of the
    slowest link, because the ring runs through every machine. `links`: GB/s inside of one, and from one to others.
    """
    slowest = links[0] if gpus <= NODE else min(links)
    return size * (gpus - 1) / gpus / (1e9 * REACHED * slowest)


def exchange_seconds(
    layout: str, sizes: Sizes, links: Pair, *, gpus: int, updates: float, forests: float, layers: int, compute: float
) -> float:
    """Seconds of the collectives of a step. `whole`: sums and trained weights, once for each update. `sharded`: each
    forest gathers twice and reduces, of which counts what takes longer than to `compute` all forests, and at least what
    FSDP does beside it for each of their `layers`; and the copy. `hybrid`: so inside a machine; between, as `whole`.
    """
    kind, machines = LAYOUTS[layout], -(-gpus // NODE)
    near = min(gpus, NODE) if kind.inside else gpus
    reduced, renewed, gathered, copied = (collective_seconds(size, links, gpus=near) for size in sizes)
    if "weights" not in kind.divided:
        return updates * (reduced + renewed)
    waiting = max(kind.beside * layers * forests, forests * (reduced + 2 * gathered) - compute)
    between = links[1], links[1]
    far = sum(collective_seconds(size, between, gpus=machines) for size in sizes[:2]) if kind.inside else 0.0
    return copied + waiting + updates * far


def generates(config: Config, command: str) -> bool:
    """Whether the run generates, in training or validation."""
    return command == "rl" or (command in ("sft", "dpo") and bool(config.data.val and config.val.every))


def candidates(wanted: str, *, gpus: int, cuda: bool) -> tuple[tuple[str, ...], str]:
    """What `train.layout` may become, and why, if there is no choice. Whole is first, and where nothing is known of
    seconds the earlier is better.
    """
    if gpus == 1:
        return ("whole",), ""
    if wanted != "auto":
        return (wanted,), "as the config says"
    if not cuda:
        return ("whole",), "this machine has no GPU"
    return ("whole", *["hybrid"] * (gpus > NODE and gpus % NODE == 0), "sharded"), ""


def more_gpus(gpus: int, layout: str) -> list[str]:
    """Values of `run.gpus` that make a run fit that does not, the smallest first."""
    values = [f"{more}" for more in (2, 4, NODE) if more > gpus]
    return values + [f"{NODE} train.layout=sharded"] * bool(values and layout == "whole")


def key_repeats(heads: int, together: int) -> int:
    """How often key heads are repeated where so many ranks divide the heads of attention among them."""
    return lcm(heads, together) // heads


def require_heads(config: Config, family: Family) -> None:
    """Ranks of a group compute equally many query heads. Key heads are repeated where there are fewer."""
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


def efficiency(seconds: Mapping[str, float], alone: Mapping[str, float] | None, *, gpus: int) -> dict[str, float]:
    """For a step on several GPUs: the share of its seconds that one GPU would need for the prompts of a rank, and for
    the prompts of the step divided by the number of GPUs, if that is known (`alone`).
    """
    if gpus == 1 or not seconds:
        return {}
    step = sum(seconds.values())
    found = {"prompts per GPU": 1 - (seconds["exchange"] + seconds["controller"]) / step}
    return found | ({"prompts per step": sum(alone.values()) / gpus / step} if alone else {})


def controller_seconds(sampled: float, *, gpus: int) -> float:
    """In which all ranks wait for the controller. `sampled`: tokens of one rank in a step."""
    return CONTROLLER * sampled * gpus
