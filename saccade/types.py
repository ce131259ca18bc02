"""The records that stages pass to each other: flat, typed, frozen, and free of torch.

A record checks its invariants when it is built and is trusted after that. Arrays are numpy, one entry per token unless
a comment says otherwise. Records hold no pixels: a `Media` says where an image is.

    >>> Message(role="user", parts=("How many?",)).text
    'How many?'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from io import FileIO
from typing import Any, Literal, NamedTuple

import numpy as np


class Source(IntEnum):
    """Who wrote a token. Only `POLICY` tokens are ever trained."""

    PROMPT = 0
    POLICY = 1
    OBSERVATION = 2
    TEMPLATE = 3


POLICY = int(Source.POLICY)  # an enum member is slow to compare with an array

Status = Literal["ok", "truncated", "overturn", "void", "error", "abstain", "aborted", "stale"]
ALWAYS_EXCLUDED: frozenset[str] = frozenset({"error", "abstain", "aborted", "stale"})

# End reason of an episode -> status of the trajectory. `*_pending`: the limit was reached while a tool call waited.
STATUS_OF_END: Mapping[str, Status] = {
    "answered": "ok",
    "env_done": "ok",
    "eos_no_answer": "void",
    "tool_errors": "void",
    "turn_length": "truncated",
    "token_budget": "truncated",
    "max_turns": "overturn",
    "max_images": "overturn",
    "token_budget_pending": "overturn",
    "timeout": "error",
    "env_error": "error",
    "aborted": "aborted",
}


class Extent(NamedTuple):
    """A byte range of an open file that holds many media; valid in this process and its forks."""

    file: FileIO
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Media:
    """A reference to an image, a video, a sound or a time series: content hash, location, upright size, pixel budget.

    The encoded file is at `path` or in `data`, as bytes or as an `Extent` (`media.blob_file.encoded` reads all three).
    A crop refers to the file of the original image and adds `box`, in upright pixels of the original, so it can be made
    again from its reference alone; `parent` is for display. A video lists the `frames` of its file that are shown; one
    without a file has them as images in `pictures`. Its pixel budget is per frame. A sound has its number of samples at
    16 kHz as width, and height 1; a series has the samples of a lead as width and the number of leads as height. The
    hash covers what is shown, not the rest of the file.
    """

    hash: str
    width: int
    height: int
    kind: str = "image"  # a row of media/kinds.py
    path: str | None = field(default=None, compare=False)  # the hash says which content it is
    data: bytes | Extent | None = field(default=None, repr=False, compare=False)
    min_pixels: int = 3136
    max_pixels: int = 1_003_520
    box: tuple[int, int, int, int] | None = None
    parent: str | None = field(default=None, compare=False)
    frames: tuple[int, ...] = field(default=(), repr=False)  # an even number of them
    fps: float = 0.0  # frames that are shown per second
    rate: float = 0.0  # frames per second of the file, in which `frames` are indices
    pictures: tuple[Media, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.width > 0 and self.height > 0, f"media {self.hash}: empty size"
        places = (self.path is not None, self.data is not None, bool(self.pictures))
        assert sum(places) == 1, f"media {self.hash}: needs a path, data or pictures"
        assert self.kind != "video" or (self.frames and len(self.frames) % 2 == 0 and self.fps > 0)

    def __hash__(self) -> int:
        return hash(self.hash)  # hashing all fields is slow, and every prompt lookup hashes its media

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None, int, int]:
        """Equal keys mean that the model sees equal pixels."""
        return (self.hash, self.box, self.min_pixels, self.max_pixels)


def root_hash(hash: str, box: Sequence[int] | None) -> str:
    """The hash of the uncropped medium; a crop's hash is that and its box."""
    return hash.rpartition("-")[0] if box else hash


@dataclass(frozen=True, kw_only=True)
class MediaSpan:
    """A medium and the run of placeholder tokens that stands for it."""

    media: Media
    start: int
    length: int
    grid: tuple[int, ...]  # (frames, rows, columns) in patches; concatenated for parts of different sizes

    @property
    def end(self) -> int:
        return self.start + self.length

    def moved(self, offset: int) -> MediaSpan:
        return replace(self, start=self.start + offset) if offset else self


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation: text and media in the order in which they are shown."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[str | Media, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if isinstance(part, Media))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a data set in canonical form.

    Two candidates are the chosen and the rejected one, in this order. With `extra["labels"]` they are A and B instead,
    and the labels name the better one for each head ("C": neither), such as {"preference": "B", "coherence": "C"};
    heads that are not labelled are absent. `extra["sides"]` says how the order was drawn, `extra["critique"]` is a
    written comparison of the two. A candidate may be text or media; it is an assistant turn in both cases.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | tuple[str, ...] | None = None
    data_source: str = "default"
    choices: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    candidates: tuple[tuple[Message, ...], ...] = ()  # alternative continuations: two, or one
    desirable: bool | None = None  # whether a single candidate was labelled good

    @property
    def media(self) -> tuple[Media, ...]:
        """The media of the prompt."""
        return tuple(media for message in self.messages for media in message.media)

    @property
    def every_media(self) -> tuple[Media, ...]:
        """The media of the prompt and of the candidates."""
        turns = (message for candidate in self.candidates for message in candidate)
        return (*self.media, *(media for message in turns for media in message.media))


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Messages as the tokens that the model reads."""

    ids: np.ndarray  # int64
    sources: np.ndarray  # int8
    media: tuple[MediaSpan, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.sources)
        assert all(span.end <= len(self.ids) for span in self.media)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. With `support`, training can reproduce truncated sampling (top_p, top_k) from the ids that
    it kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 2048
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    support: bool = False  # return the kept ids of truncated sampling
    first: tuple[float, int] | None = None  # temperature and top_k of an episode's first token

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to continue. The randomness of a token follows from `noise` and the token's index alone."""

    key: str
    ids: np.ndarray
    media: tuple[MediaSpan, ...] = ()
    messages: tuple[Message, ...] = ()  # the content of `ids`, for an engine with its own tokenizer
    sampling: Sampling = Sampling()
    noise: int = 0
    first_index: int = 0  # number of tokens of this trajectory that were sampled before
    opening: int | None = None  # number of its first tokens that others begin with, too; None: all
    episode: str | None = None  # keep its KV cache under this name until `Engine.release`
    replica: int | None = None  # index of the replica that must answer; None: any


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The output of an engine: sampled ids, with their log-probs under the distribution they were drawn from."""

    key: str
    ids: np.ndarray  # int64
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32: version of the weights that sampled each token
    finish: Literal["stop", "length", "aborted"]
    support: tuple[np.ndarray, ...] | None = None  # kept ids per token of truncated sampling

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.logprobs) == len(self.versions)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of a reward for a trajectory: a value, an abstention or an error, with named parts."""

    kind: Literal["value", "abstain", "error"]
    value: float = 0.0
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    extracted: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        finite = self.kind != "value" or np.isfinite(self.value)
        assert finite, "a value is finite; say error otherwise"


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode as tokens. Built append-only: sampled ids are never decoded and encoded again."""

    sample_id: str  # uid of its group
    repeat: int
    ids: np.ndarray  # int64
    sources: np.ndarray  # int8, a Source each
    logprobs: np.ndarray  # float32, NaN where no policy sampled
    versions: np.ndarray  # int32, -1 where no policy sampled
    media: tuple[MediaSpan, ...] = ()
    messages: tuple[Message, ...] = ()
    context: int = 0  # number of messages before the first sampled turn
    end_reason: str = "answered"
    status: Status = "ok"
    turns: int = 1
    trained: bool = True
    support: tuple[np.ndarray, ...] | None = None  # one entry per policy token
    turn_rewards: tuple[float, ...] = ()  # from the environment, by turn; may be shorter than `turns`
    reward: float | None = None  # after combination and shaping
    outcome: float | None = None  # the raw outcome term
    parts: Mapping[str, float] = field(default_factory=dict)
    extracted: str | None = None
    reason: str = ""  # why it was excluded or scored zero
    advantages: np.ndarray | None = None  # float32, one per policy token
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.ids)
        assert length == len(self.sources) == len(self.logprobs) == len(self.versions), self.key
        assert all(span.start >= 0 and span.end <= length for span in self.media), self.key
        if self.support is not None:
            assert len(self.support) == self.response_length, self.key

    @property
    def key(self) -> tuple[str, int]:
        return (self.sample_id, self.repeat)

    @cached_property
    def policy_mask(self) -> np.ndarray:
        return self.sources == POLICY

    @cached_property
    def policy(self) -> np.ndarray:
        """Indices of the sampled tokens."""
        return self.policy_mask.nonzero()[0]

    @cached_property
    def response_length(self) -> int:
        return int(np.count_nonzero(self.policy_mask))

    @cached_property
    def prompt_length(self) -> int:
        return int(self.policy_mask.argmax()) if self.response_length else len(self.ids)

    @cached_property
    def end(self) -> int:
        """Index after the last sampled token."""
        return len(self.ids) - int(self.policy_mask[::-1].argmax())

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The [start, stop) ranges of sampled tokens."""
        if self.end - self.prompt_length == self.response_length:
            return [(self.prompt_length, self.end)]
        edges = np.flatnonzero(np.diff(self.policy_mask, prepend=False, append=False)).tolist()
        return [*zip(edges[::2], edges[1::2], strict=True)]

    @property
    def response_ids(self) -> np.ndarray:
        return self.ids[self.policy_mask]


def cache_sampled(trajectories: Sequence[Trajectory]) -> None:
    """Fills the cached `response_length`, `prompt_length`, `end` and `runs` of many at once: faster than one by one."""
    if not trajectories:
        return
    mask = np.concatenate([t.sources for t in trajectories]) == POLICY
    starts = np.cumsum([0, *(len(t.sources) for t in trajectories)])
    edges = np.sort(np.concatenate([starts, np.flatnonzero(mask[1:] != mask[:-1]) + 1]))
    runs = np.flatnonzero(np.append(mask, False)[edges])  # between two edges, all tokens are sampled or none
    owners = np.searchsorted(starts, edges[runs], side="right") - 1
    counts = np.bincount(owners, edges[runs + 1] - edges[runs], len(trajectories)).astype(int)
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    lasts, some = np.append(firsts[1:], len(runs)) - 1, owners[firsts]
    found = (some, counts[some], edges[runs[firsts]] - starts[some], edges[runs[lasts] + 1] - starts[some])
    for index, count, first, end in zip(*(column.tolist() for column in found), strict=True):
        fields = vars(trajectories[index])
        fields["response_length"], fields["prompt_length"], fields["end"] = count, first, end
        if count == end - first:
            fields["runs"] = [(first, end)]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A sample and its trajectories, in order of repeat."""

    sample: Sample
    trajectories: tuple[Trajectory, ...]
    uid: str = ""  # differs from sample.id when a sample is drawn again
    greedy: Trajectory | None = None  # scored as a baseline; never trained, in no statistic

    def __post_init__(self) -> None:
        repeats = [t.repeat for t in self.trajectories]
        assert repeats == sorted(repeats), f"group {self.sample.id}: members out of order"

    @property
    def everyone(self) -> tuple[Trajectory, ...]:
        """The trajectories, followed by the greedy baseline if there is one."""
        return self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)

    def each(self, change: Callable[[Trajectory], Trajectory]) -> Group:
        """Return the group with `change` applied to every trajectory, the greedy baseline included."""
        greedy = None if self.greedy is None else change(self.greedy)
        return replace(self, trajectories=tuple(map(change, self.trajectories)), greedy=greedy)


class Metrics:
    """Sums with their denominators, so that means are correct however the work was split; also maxima."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self.maxima: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)

    def add_max(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def merge(self, *others: Metrics) -> None:
        for other in others:
            for name, (total, count) in other.sums.items():
                self.add(name, total, count)
            for name, value in other.maxima.items():
                self.add_max(name, value)

    def means(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self.sums.items() if count}
        return means | self.maxima
