"""The records that travel between stages: flat, typed, frozen, and free of torch.

A record checks its invariants when it is built and is trusted after that. Arrays are numpy, one
entry per token unless a comment says otherwise. Pixels never appear here: a `Media` says where an
image is, not what it looks like.

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

# Why an episode ended -> the status of the member. `*_pending`: the limit struck while a tool call
# was waiting.
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
    """Bytes inside of an open file that holds many things, for this process and its forks."""

    file: FileIO
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Media:
    """A reference to an image, a video, a sound or a time series: a content hash, where to get it,
    its upright size, its pixel budget.

    The encoded file is either at `path` or in `data`, there as bytes or as where they lie
    (`media.blob_file.encoded` reads all three). A crop keeps the file of its root and adds
    `box`, in upright pixels of the root, so a derived image can be made again from its reference
    alone; `parent` is for display. A video says which `frames` of its file are shown; one that is
    no file has them in `pictures`. Its budget is that of a frame. A sound is as wide as it has
    samples at 16 kHz, and 1 high; a series as wide as a lead has samples, and a lead is 1 high.
    The hash covers what is shown, not the rest of the file.
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
    rate: float = 0.0  # frames per second of its file, by which they are numbered
    pictures: tuple[Media, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.width > 0 and self.height > 0, f"media {self.hash}: empty size"
        places = (self.path is not None, self.data is not None, bool(self.pictures))
        assert sum(places) == 1, f"media {self.hash}: needs a path, data or pictures"
        assert self.kind != "video" or (self.frames and len(self.frames) % 2 == 0 and self.fps > 0)

    def __hash__(self) -> int:
        return hash(self.hash)  # not of all fields, for every prompt that is looked up

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None, int, int]:
        """Equal keys mean equal pixels for the model."""
        return (self.hash, self.box, self.min_pixels, self.max_pixels)


@dataclass(frozen=True, kw_only=True)
class MediaSpan:
    """A medium and the run of placeholder tokens that stands for it."""

    media: Media
    start: int
    length: int
    grid: tuple[int, ...]  # (frames, rows, columns) in patches; of parts of different sizes one after the other

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

    Two candidates are the chosen and the rejected one, in this order, unless `extra["labels"]` is
    there: then they are A and B, and it says for each named head which is better ("C": neither),
    such as {"preference": "B", "coherence": "C"}. A head that a row does not label is not in it.
    `extra["sides"]` tells how the order was drawn, `extra["critique"]` what somebody wrote about
    the two. A candidate may be text or media; it is an assistant turn in both cases.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | tuple[str, ...] | None = None
    data_source: str = "default"
    choices: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    candidates: tuple[tuple[Message, ...], ...] = ()  # how it may go on: two, or one
    desirable: bool | None = None  # what was said of a single candidate

    @property
    def media(self) -> tuple[Media, ...]:
        """What the question shows."""
        return tuple(media for message in self.messages for media in message.media)

    @property
    def every_media(self) -> tuple[Media, ...]:
        """Those of its candidates, too."""
        turns = (message for candidate in self.candidates for message in candidate)
        return (*self.media, *(media for message in turns for media in message.media))


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Messages as the model reads them."""

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
    """How tokens are drawn. Training can replay truncated sampling (top_p, top_k) from its
    support.
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
    """One sequence to continue. `noise` keys the randomness together with the index of the sampled
    token.
    """

    key: str
    ids: np.ndarray
    media: tuple[MediaSpan, ...] = ()
    messages: tuple[Message, ...] = ()  # what the ids say, for an engine with its own tokenizer
    sampling: Sampling = Sampling()
    noise: int = 0
    first_index: int = 0  # how many tokens of this trajectory were sampled before
    episode: str | None = None  # keep the cache alive under this name until it is released
    replica: int | None = None  # which replica answers where there are several; None: any


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine answers: the sampled ids and the log-probs of the distribution they were drawn
    from.
    """

    key: str
    ids: np.ndarray  # int64
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32: the weights that sampled each token
    finish: Literal["stop", "length", "aborted"]
    support: tuple[np.ndarray, ...] | None = None  # kept ids per token of truncated sampling

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.logprobs) == len(self.versions)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a reward says of a trajectory: a value, an abstention or an error, with named parts."""

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
    """One episode as tokens. Built append-only: what was sampled is never decoded and encoded
    again.
    """

    sample_id: str  # uid of its group
    repeat: int
    ids: np.ndarray  # int64
    sources: np.ndarray  # int8, a Source each
    logprobs: np.ndarray  # float32, NaN where no policy sampled
    versions: np.ndarray  # int32, -1 where no policy sampled
    media: tuple[MediaSpan, ...] = ()
    messages: tuple[Message, ...] = ()
    context: int = 0  # messages before the first sampled turn
    end_reason: str = "answered"
    status: Status = "ok"
    turns: int = 1
    trained: bool = True
    support: tuple[np.ndarray, ...] | None = None  # one entry per policy token
    turn_rewards: tuple[float, ...] = ()  # of the environment, by turn; the last ones may have none
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
        """Places of the sampled tokens."""
        return self.policy_mask.nonzero()[0]

    @cached_property
    def response_length(self) -> int:
        return int(np.count_nonzero(self.policy_mask))

    @cached_property
    def prompt_length(self) -> int:
        return int(self.policy_mask.argmax()) if self.response_length else len(self.ids)

    @cached_property
    def end(self) -> int:
        """Behind its last sampled token."""
        return len(self.ids) - int(self.policy_mask[::-1].argmax())

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Where it was sampled, from and up to."""
        if self.end - self.prompt_length == self.response_length:
            return [(self.prompt_length, self.end)]
        edges = np.flatnonzero(np.diff(self.policy_mask, prepend=False, append=False)).tolist()
        return [*zip(edges[::2], edges[1::2], strict=True)]

    @property
    def response_ids(self) -> np.ndarray:
        return self.ids[self.policy_mask]


def find_sampled(trajectories: Sequence[Trajectory]) -> None:
    """Notes where each was sampled, as it would by itself: for thousands of them at once that is much faster."""
    if not trajectories:
        return
    mask = np.concatenate([t.sources for t in trajectories]) == POLICY
    starts = np.cumsum([0, *(len(t.sources) for t in trajectories)])
    edges = np.sort(np.concatenate([starts, np.flatnonzero(mask[1:] != mask[:-1]) + 1]))
    runs = np.flatnonzero(np.append(mask, False)[edges])  # between two edges all is sampled, or nothing
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
    uid: str = ""  # differs from sample.id when a sample comes round again
    greedy: Trajectory | None = None  # scored as a baseline, never trained and in no statistic

    def __post_init__(self) -> None:
        repeats = [t.repeat for t in self.trajectories]
        assert repeats == sorted(repeats), f"group {self.sample.id}: members out of order"

    @property
    def everyone(self) -> tuple[Trajectory, ...]:
        """The members, and the baseline behind them."""
        return self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)

    def each(self, change: Callable[[Trajectory], Trajectory]) -> Group:
        """The group with everyone changed."""
        greedy = None if self.greedy is None else change(self.greedy)
        return replace(self, trajectories=tuple(map(change, self.trajectories)), greedy=greedy)


class Metrics:
    """Sums with their denominators, so that means stay right however the work was split; maxima
    beside them.
    """

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
