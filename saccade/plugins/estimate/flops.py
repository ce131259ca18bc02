"""FLOPs and bytes that a phase needs, counted from the shape of a model and the records of a step.

Counts the necessary work, not what kernels do: a shared prefix once however many branches it has, a
key only for the queries that attend to it (so half of a causal square), an image or a sound once per
node that holds it, no padding. Recomputed activations are counted separately and are not useful work.
Knows nothing of weights or time.

    shape = shape_of(model, family.tower_of)
    useful, repeated = Meter(shape=shape).train_step([batch])

Legend: a product of [m, k] and [k, n] is 2·m·k·n FLOPs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from saccade.forest.batch import Batch
from saccade.plugins.estimate.shapes import SENSES, Shape, Stack
from saccade.plugins.gpu.decode_state import members_of
from saccade.types import Group, MediaSpan, Trajectory

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of a 4-bit weight with its doubly quantised scales
TOWERS = (*SENSES, "projector", "llm")
HEAD = "head"
NUMBERED = re.compile(r"\.(?:layers?|blocks)\.(\d+)\.")


# FLOPs of a forward by part of the model, because the cost of backward differs. Parts are
# `TOWER/layers` (their matrices) and `TOWER/attention` of the towers llm, vision and audio;
# `SENSE/inputs` (the first product with pixels or mel frames, which need no gradient), `SENSE/stem`
# (from there to the layers) and `SENSE/projector`; `head` and `adapters`.
Work = Counter[str]


# -- trained parameters ----------------------------------------------------------------------------


class Trained(NamedTuple):
    """How a tower is trained: the share of its matrix weights that are trained, the share of its layers
    that a gradient passes (0: it is frozen), and the number of weights of its adapters.
    """

    learns: float = 1.0
    passed: float = 1.0
    adapters: int = 0


Training = Mapping[str, Trained]  # of every tower, and of the head, which is separate from the decoder here
FULL: Training = dict.fromkeys((*TOWERS, HEAD), Trained())
FROZEN: Training = dict.fromkeys((*TOWERS, HEAD), Trained(learns=0.0, passed=0.0))


def towers_frozen(training: Training) -> bool:
    """Whether all towers are frozen, so that an image is encoded once per step."""
    return not any(training[tower].passed for tower in (*SENSES, "projector"))


def training_of(model: Any, trained: Mapping[str, int], tower_of: Callable[[str], str]) -> Training:
    """How each part of a model is trained; `trained`: name → number of elements of trained parameters."""
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1 and ".lora_" not in name}
    head = "embed_tokens"  # if they are tied
    if any("lm_head." in name for name in matrices):  # untied: embeddings are only looked up, not multiplied
        head, matrices = "lm_head.", {n: size for n, size in matrices.items() if "embed_tokens" not in n}
    found: dict[str, Trained] = {}
    for part in (*TOWERS, HEAD):
        inside = {n: size for n, size in matrices.items() if (HEAD if head in n else tower_of(n)) == part}
        learning = sum(size for name, size in inside.items() if name in trained)
        found[part] = Trained(
            learns=learning / max(1, sum(inside.values())),
            passed=_reach(part, trained, matrices, tower_of),
            adapters=sum(size for name, size in trained.items() if ".lora_" in name and tower_of(name) == part),
        )
    return found


def _reach(tower: str, trained: Iterable[str], matrices: Iterable[str], tower_of: Callable[[str], str]) -> float:
    """Share of the layers of a tower that a gradient passes: from the lowest trained one on, or all if
    a module before them is trained.
    """
    inside, learning = ([name for name in names if tower_of(name) == tower] for names in (matrices, trained))
    count = max((int(n[1]) for n in map(NUMBERED.search, inside) if n), default=-1) + 1
    lowest = min((int(n[1]) for n in map(NUMBERED.search, learning) if n), default=count)
    before = [name for name in learning if not NUMBERED.search(name)]  # a stem
    if tower == "llm":  # its last norm and the head come after its layers, the other towers before
        before = [n for n in trained if "embed_tokens" in n or tower_of(n) != tower]
    return 1.0 if before else (count - lowest) / max(1, count)


# -- one forward -----------------------------------------------------------------------------------


def _patches(vision: Stack, grid: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Returns patches, patches in the stem, tokens in the layers, and pairs of tokens over all layers."""
    patches, tokens, pairs = 0, 0, 0.0
    for frames, rows, columns in zip(*[iter(grid)] * 3, strict=True):
        seen = rows * columns + vision.extra
        squares = [_squares(side // vision.merge, vision.window) for side in (rows, columns)]
        windowed = float(vision.merge) ** 4 * squares[0] * squares[1]
        others = vision.layers - vision.full_layers
        patches, tokens = patches + frames * rows * columns, tokens + frames * seen
        pairs += frames * (vision.full_layers * float(seen) ** 2 + others * windowed)  # each frame is a sequence
    return patches, patches, tokens, pairs


def _frames(audio: Stack, grid: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Returns frames (without the silence that pads a sound to 30 seconds), tokens after the convolutions
    (once for the stem, once for the layers), and pairs of tokens over all layers.
    """
    frames = grid[2]
    windows = np.diff([*range(0, frames, audio.window or frames), frames])
    left = -(-windows // audio.stride)
    heard = float(left.sum())
    return frames, heard, heard, audio.layers * float((left**2).sum())


SENSE_OF = {"audio": "audio", "image": "vision", "video": "vision"}  # by the kind of media
READ = {"audio": _frames, "vision": _patches}


def sensed(shape: Shape, media: Iterable[MediaSpan]) -> Counter[str]:
    """Tokens of the media in the layers of each tower, including those of silence that pads a sound."""
    found = Counter[str]()
    for span in media:
        sense = SENSE_OF.get(span.media.kind, "")
        if tower := shape.senses.get(sense):
            found[sense] += int(max(READ[sense](tower, span.grid)[2], tower.filled))
    return found


def _squares(side: int, window: int | None) -> float:
    """Sum of the squared sides, in merged patches, of the windows along one direction."""
    window = window or side
    return float(side // window * window**2 + (side % window) ** 2)


def _pairs(before: np.ndarray, sizes: np.ndarray, window: int | None) -> float:
    """Query-key pairs of runs of `sizes` tokens, each with itself; `before`: keys before the first of a run."""
    near = sizes if window is None else (window - before).clip(0, sizes)  # tokens whose window holds all before them
    return float((near * before + near * (near + 1) // 2 + (sizes - near) * (window or 0)).sum())


# -- training --------------------------------------------------------------------------------------


def shares(shape: Shape, training: Training) -> dict[str, tuple[float, float]]:
    """For each part, FLOPs of backward and of activation checkpointing as multiples of its forward. The
    latter are no useful work. Backward takes twice the forward, minus gradients of frozen matrices and
    of pixels and mel frames, and minus everything below the first trained tower. Checkpointing repeats
    the layers that a gradient passes.
    """
    found = {"adapters": (2.0, 1.0), "head": (1 + training[HEAD].learns, 0.0)}
    for tower, stack in {"llm": shape.text, **shape.senses}.items():
        learns, passed, _ = training[tower]
        # Torch stops recomputing once it has all that backward needs. The output of the last matrix is
        # not needed; outputs of experts are, since they are weighted.
        again = 1.0 if stack.experts else 1 - stack.last / max(1, stack.matrices)
        projected = bool(passed or training["projector"].passed) * (1 + training["projector"].learns)
        found |= {
            f"{tower}/inputs": (learns, 0.0),
            f"{tower}/stem": (2 * learns, 0.0),
            f"{tower}/layers": (learns + passed, passed * again),
            f"{tower}/attention": (2 * passed, passed),
            f"{tower}/projector": (projected, 0.0),
        }
    return found


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Counts the work of a model."""

    shape: Shape
    training: Training = field(default_factory=lambda: FULL)
    head: bool = True  # computes logits, not values
    repeats: Callable[[Batch], float] = lambda batch: 0.0  # share of the layers that recompute their activations

    def count(self, before: np.ndarray, sizes: np.ndarray, reads: int, media: Iterable[MediaSpan] = ()) -> Work:
        """Work of a forward over runs of tokens (such as the nodes of a forest) with `reads` rows of logits, and media.
        `before`: tokens before the first one of each run, `sizes`: tokens of each run.
        """
        text, tokens = self.shape.text, int(sizes.sum())
        seen = sum(flops * _pairs(before, sizes, window) for window, flops in self.shape.pair_flops.items())
        work = Work(
            {
                "llm/layers": 2.0 * tokens * text.weights,
                "llm/attention": seen + tokens * self.shape.token_flops,
                "head": 2.0 * reads * self.shape.head_weights,
                "adapters": 2.0 * tokens * self.training["llm"].adapters,
            }
        )
        return work + self.encode(media)

    def encode(self, media: Iterable[MediaSpan]) -> Work:
        """Work of towers and projectors. The encoder of time series is small and not counted."""
        work = Work()
        alike = Counter((span.media.kind, span.grid, span.length) for span in media)
        for (kind, grid, length), count in alike.items():
            sense = SENSE_OF.get(kind, "")
            tower = self.shape.senses.get(sense)
            if tower is None:
                continue
            inputs, stemmed, tokens, pairs = (count * number for number in READ[sense](tower, grid))
            length *= count
            adapters, projected = (self.training[part].adapters for part in (sense, "projector"))
            work += Work(
                {
                    f"{sense}/inputs": 2.0 * inputs * tower.inputs,
                    f"{sense}/stem": 2.0 * stemmed * tower.stem,
                    f"{sense}/layers": 2.0 * tokens * tower.weights,
                    f"{sense}/attention": tower.pair_flops * pairs,
                    # If the tower has no layers, padding is projected, too.
                    f"{sense}/projector": 2.0 * (length if tower.layers else tokens) * tower.projector
                    + 2.0 * tokens * tower.looking,
                    "adapters": 2.0 * (tokens * adapters + length * projected),
                }
            )
        return work

    def forward(self, batches: Sequence[Batch], *, media: bool = True) -> list[Work]:
        """The work of each batch, followed by that of media, if frozen towers encode each once for all batches."""
        frozen = towers_frozen(self.training)
        shown = media and not frozen
        works = [
            self.count(b.forest.above, b.forest.sizes, b.target_count * self.head, b.media if shown else ())
            for b in batches
        ]
        if media and frozen:
            works.append(self.encode({span.media.key: span for batch in batches for span in batch.media}.values()))
        return works

    def score(self, batches: Sequence[Batch], *, media: bool = True) -> float:
        return sum(work.total() for work in self.forward(batches, media=media))

    def learn(self, batches: Sequence[Batch], *, media: bool = True) -> list[tuple[Work, Work]]:
        """As `forward`, for forward and backward: (useful work, recomputation) of each entry."""
        of, repeats = shares(self.shape, self.training), [*map(self.repeats, batches), 0.0]
        return [
            (
                Work({part: flops * (1 + of[part][0]) for part, flops in work.items()}),
                Work({part: again * flops * of[part][1] for part, flops in work.items()}),
            )
            for work, again in zip(self.forward(batches, media=media), repeats, strict=False)
        ]

    def train_step(self, batches: Sequence[Batch], *, media: bool = True) -> tuple[float, float]:
        """Returns useful FLOPs, and those of recomputation."""
        useful, again = zip(*self.learn(batches, media=media), strict=True) if batches else ((), ())
        return sum(work.total() for work in useful), sum(work.total() for work in again)


# -- generation ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The least work of sampling some groups, however it is scheduled."""

    prefill: Work  # prompts once per group, tokens of environments, and all media
    decode: Work  # sampled tokens
    sampled: int
    longest: int  # most tokens that one member sampled
    weight_bytes: Callable[[float], float]  # bytes of weights that a decode step of this many sequences reads
    cache_bytes: float  # bytes of the KV cache read in total

    def read_bytes(self, max_sequences: int) -> float:
        """Bytes read in the fewest decode steps that are possible with `max_sequences` at a time."""
        steps = max(self.longest, -(-self.sampled // max_sequences))
        return steps * self.weight_bytes(self.sampled / max(1, steps)) + self.cache_bytes


def generation(
    meter: Meter, groups: Iterable[Group], *, element: int, four_bit: bool = False, together: int | None = None
) -> Generation:
    """The work of sampling these groups. `element`: bytes per weight and per number in the KV cache.
    `together`: members for which the decode kernel reads a shared prompt once; default: its maximum.
    """
    shape = meter.shape
    together = together or members_of(shape.queries_per_key)
    beside = element * (shape.head_weights + meter.training["llm"].adapters)

    def weight_bytes(rows: float) -> float:
        return shape.text.read_by(rows, matrix=NF4 if four_bit else element, expert=element) + beside

    # Work is a sum over tokens and media, so all runs are collected first and counted at once.
    given, drawn = list[tuple[int, int]](), list[tuple[int, int]]()  # runs of tokens: (first index, length)
    media, sampled, contexts = list[MediaSpan](), [0], 0
    prompts: dict[Any, list[Trajectory]] = {}  # trajectories by the ids and media of their prompt
    for member in (member for group in groups for member in group.everyone):
        start = member.prompt_length
        shown = tuple(span.media.key for span in member.media if span.start < start)
        prompts.setdefault((member.ids[:start].tobytes(), shown), []).append(member)
    for members in prompts.values():
        start, steps = members[0].prompt_length, []
        given.append((0, start))
        media += [span for span in members[0].media if span.start < start]
        for member in members:
            if not member.response_length:
                continue
            sampled.append(member.response_length)
            steps.append(sampled[-1] - 1)  # the last sampled token is never an input
            runs, end = [start], member.end - 1
            if end - start >= sampled[-1]:  # there are tokens of an environment
                runs += (np.flatnonzero(np.diff(member.policy_mask[start:end])) + start + 1).tolist()
            both = [(first, last - first) for first, last in pairwise([*runs, end])]
            drawn += both[::2]
            given += both[1::2]
            media += [span for span in member.media if span.start >= start]
            contexts += sum(n * (first - start) + n * (n + 1) // 2 for first, n in both[::2])
        # Sequences that still run stay adjacent, so they share the reads of the prompt.
        contexts += start * sum(sorted(steps, reverse=True)[::together])
    # The first logits of all members are computed once, with the prompt.
    later = sum(sampled) - len(sampled) + 1
    return Generation(
        prefill=meter.count(*_columns(given), reads=len(prompts), media=media),
        decode=meter.count(*_columns(drawn), reads=later),
        sampled=sum(sampled),
        longest=max(sampled),
        weight_bytes=weight_bytes,
        cache_bytes=float(contexts * shape.kv_bytes(element)),
    )


def _columns(runs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    first, sizes = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return first, sizes
