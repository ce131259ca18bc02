"""Pages that are kept without a running sequence: prompts that waiting requests begin with, and
finished turns of episodes that may go on. Both may be dropped to free pages; what was dropped is
computed again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from saccade.engines.embedded.kv_cache import KVCache
from saccade.engines.embedded.sequences import IdleTurn, Prefix
from saccade.types import Request


class PrefixCache:
    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.wanted: Counter[Any] = Counter()  # waiting requests by content
        self.prefixes: dict[Any, Prefix] = {}
        self.turns: dict[str, IdleTurn] = {}  # by episode, least recently used first

    # -- prompts --

    def no_longer_want(self, content: Any) -> None:
        self.wanted[content] -= 1
        if not self.wanted[content]:
            del self.wanted[content]

    def keep_prompt(self, content: Any, prefix: Prefix) -> None:
        """Keep a computed prompt if requests with the same one wait."""
        if self.wanted[content] and content not in self.prefixes:
            self.cache.pages.share(prefix.pages)
            self.prefixes[content] = prefix

    def drop_unwanted(self) -> None:
        """Drop prompts that no waiting request begins with."""
        for content in [content for content in self.prefixes if not self.wanted[content]]:
            self.cache.pages.drop(self.prefixes.pop(content).pages)

    # -- turns --

    def turn_before(self, request: Request) -> IdleTurn | None:
        """Take out the turn that a request continues. One that it does not continue is dropped."""
        turn = self.turns.pop(request.episode, None) if request.episode else None
        if turn is None or turn.extended_by(request):
            return turn
        self.cache.pages.drop(turn.pages)
        return None

    def release(self, episode: str) -> None:
        turn = self.turns.pop(episode, None)
        if turn is not None:
            self.cache.pages.drop(turn.pages)

    # -- both --

    def drop_one(self) -> bool:
        """Drop a prompt, or else the turn that has been idle longest. False if nothing is kept."""
        if self.prefixes:
            self.cache.pages.drop(self.prefixes.pop(next(iter(self.prefixes))).pages)
        elif self.turns:
            self.release(next(iter(self.turns)))
        else:
            return False
        return True

    def drop_all(self) -> None:
        while self.drop_one():
            pass

    def clear(self) -> None:
        """Forget everything, together with the pool."""
        self.turns.clear()
        self.prefixes.clear()
