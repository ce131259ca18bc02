"""What the scheduler of the embedded engine keeps of each request: while it waits, while its prompt
is computed, while it decodes, and between two turns of an episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from saccade.types import Request, Sampling


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request from its submission to its completion. Where it stands changes only in the methods
    here: waiting → placed → started (it decodes) → ended, or evicted and placed again.
    """

    request: Request
    content: Any  # equal for prompts that are computed once
    slot: int = -1
    resumed: int = 0  # tokens that a kept turn has of its prompt
    ahead: int = 0  # position id of a new token, minus its index
    sampled: int = 0
    searched: int = 0  # sampled tokens in which stop strings were looked for
    ready: bool = False  # all but its last token is cached, so it can decode
    aborted: bool = False
    support: list[np.ndarray] = field(default_factory=list)

    def place(self, slot: int, resumed: int) -> None:
        self.slot, self.resumed = slot, resumed

    def start(self, ahead: int) -> None:
        """Its prompt is in the cache, and its next token is drawn now."""
        self.ahead, self.ready = ahead, True

    def evict(self) -> None:
        self.ready = False

    def abort(self, *, collect: bool) -> None:
        """`collect`: it is to be collected now, without being computed."""
        self.aborted, self.ready = True, self.ready or collect

    def add(self, tokens: int) -> None:
        self.sampled += tokens

    def end_at(self, sampled: int) -> None:
        """Forget what was sampled after a stop string."""
        self.sampled = sampled

    @property
    def cached(self) -> int:
        """Tokens in the cache while it decodes: all but the last one."""
        return len(self.request.ids) + self.sampled - 1

    @property
    def sampling(self) -> Sampling:
        """Of the next token. The first token of an episode may have its own temperature and top_k:
        top_p does not apply to it then, and its support stays empty, because the trainer scores it
        at the ordinary temperature, where nothing is cut away.
        """
        sampling = self.request.sampling
        if sampling.first is None or self.request.first_index + self.sampled:
            return sampling
        temperature, top_k = sampling.first
        return replace(sampling, temperature=temperature, top_k=top_k, top_p=1.0, support=False)

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_tokens - self.sampled


@dataclass(frozen=True, kw_only=True)
class IdleTurn:
    """A finished turn whose pages are kept."""

    pages: np.ndarray
    ids: np.ndarray
    media: tuple[Any, ...]
    cached: int

    def extended_by(self, request: Request) -> bool:
        """Whether a request continues exactly what is cached, with the same media in that part."""
        n = self.cached
        media = tuple(span.media.key for span in request.media)
        return (
            len(request.ids) > n
            and np.array_equal(request.ids[:n], self.ids[:n])
            and media[: len(self.media)] == self.media
        )


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A computed prompt that is kept because waiting requests begin with it."""

    pages: np.ndarray
    hidden: Tensor


@dataclass(kw_only=True)
class PrefillJob:
    """A prompt being computed, perhaps piece by piece, for all members that begin with it. It fills
    the pages of the first member, unless a kept prefix has it all.
    """

    members: list[Sequence]
    ids: np.ndarray
    positions: np.ndarray  # [axes, tokens]
    cached: int
    hidden: Tensor | None = None  # [E] of the last token, when all is computed
    prefix: Prefix | None = None

    @property
    def left(self) -> int:
        return 0 if self.hidden is not None else len(self.ids) - self.cached

    @property
    def ahead(self) -> int:
        return int(self.positions[:, -1].max()) + 1 - len(self.ids)

    def cut(self, budget: int) -> int:
        """Where a piece of about `budget` tokens ends: never inside an image, whose features are
        computed at once.
        """
        end = min(self.cached + budget, len(self.ids))
        for span in self.members[0].request.media:
            if span.start < end < span.end:
                return span.start if span.start > self.cached else span.end
        return end


Part = tuple[PrefillJob, int]  # a job and where its next piece ends
