"""What lies in the cache without a sequence of its own: prompts that requests wait for, and
finished turns of live episodes. Others may need the room: what was dropped is computed again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from saccade.engines.embedded.sequences import Live, Prefix
from saccade.types import Request


class Kept:
    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.wanted: Counter[Any] = Counter()  # by content, of what waits
        self.prefixes: dict[Any, Prefix] = {}
        self.live: dict[str, Live] = {}  # by episode, least recently used first

    # -- prompts --

    def no_longer_want(self, content: Any) -> None:
        self.wanted[content] -= 1
        if not self.wanted[content]:
            del self.wanted[content]

    def keep_prompt(self, content: Any, parked: Any, hidden: Tensor) -> None:
        """For those that wait; pages are shared, a slot could not be."""
        if self.cache.paged and self.wanted[content] and content not in self.prefixes:
            parked = self.cache.pages.share(parked)
            self.prefixes[content] = Prefix(parked=parked, hidden=hidden)

    def forget_unwanted(self) -> None:
        """Prompts that nobody waits for any more."""
        for content in [content for content in self.prefixes if not self.wanted[content]]:
            self.cache.drop(self.prefixes.pop(content).parked)

    # -- turns --

    def turn_before(self, request: Request) -> Live | None:
        """The turn that a request continues, no longer kept."""
        live = self.live.pop(request.episode, None) if request.episode else None
        if live is None or live.extended_by(request):
            return live
        self.cache.drop(live.parked)
        return None

    def release(self, episode: str) -> None:
        live = self.live.pop(episode, None)
        if live is not None:
            self.cache.drop(live.parked)

    # -- both --

    def drop_one(self) -> bool:
        """Give back a prompt kept for others, or else the turn that waited longest; False when
        nothing is kept.
        """
        if self.prefixes:
            self.cache.drop(self.prefixes.pop(next(iter(self.prefixes))).parked)
        elif self.live:
            self.release(next(iter(self.live)))
        else:
            return False
        return True

    def clear(self) -> None:
        """With the cache, which is emptied whole."""
        self.live.clear()
        self.prefixes.clear()
