"""Who waits, whose prompt is being computed, who decodes: gives sequences slots and pages, and
takes pages away where they are short. Refuses to know what is computed or drawn.

    scheduler.submit(request, version=0)
    scheduler.admit()
    scheduler.next_parts()      # pieces of prompts for one forward
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from saccade.engines.embedded.kept import Kept
from saccade.engines.embedded.records import Records
from saccade.engines.embedded.sequences import Job, Live, Part, Sequence
from saccade.engines.requests import content_of, nothing_sampled
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.types import Completion, Request

PREFILL_TOKENS = 16_384  # of one forward
PATIENCE = 4  # forwards over prompts for which sequences that could decode wait at most


class Scheduler:
    def __init__(self, family: Family, cache: Any, records: Records, max_sequences: int) -> None:
        self.family, self.cache, self.records = family, cache, records
        self.max_sequences = max_sequences
        self.prefill_tokens = PREFILL_TOKENS  # fewer where memory was too short for them
        self.waiting: deque[Sequence] = deque()
        self.evicted: deque[Sequence] = deque()  # lost their pages, keep slot and records
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.jobs: dict[Any, Job] = {}
        self.kept = Kept(cache)
        self.aborted: list[Completion] = []  # before they ran
        self._waited = 0  # forwards over prompts since the last burst

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.aborted)

    def submit(self, request: Request, version: int) -> None:
        # Prompts are shared by requests that may be computed with the same weights.
        sequence = Sequence(request=request, content=(version, content_of(request)))
        self.waiting.append(sequence)
        self.kept.wanted[sequence.content] += 1

    def abort(self, key: str) -> None:
        if key in self.running:
            sequence = self.running[key]
            sequence.aborted = True
            if sequence in self.evicted:
                self.evicted.remove(sequence)
                sequence.ready = True  # to be collected, not computed
            return
        for sequence in [s for s in self.waiting if s.request.key == key]:
            self.waiting.remove(sequence)
            self.kept.no_longer_want(sequence.content)
            self.aborted.append(nothing_sampled(key))
        self.kept.forget_unwanted()

    def leave(self, sequence: Sequence, completion: Completion) -> None:
        """A sequence has ended: its slot is free, the cache of a live episode is kept."""
        request = sequence.request
        del self.running[request.key]
        if request.episode and completion.finish != "aborted":
            self.kept.live[request.episode] = Live(
                parked=self.cache.park(sequence.slot),
                ids=np.concatenate([request.ids, completion.ids]),
                media=tuple(span.media.key for span in request.media),
                cached=sequence.cached,
            )
        else:
            self.cache.release(sequence.slot)

    def renew(self, version: int) -> None:
        """Other weights: what is kept belongs to the old ones, what waits to the new ones."""
        while self.kept.drop_one():
            pass
        for sequence in self.waiting:
            sequence.content = (version, sequence.content[1])
        self.kept.wanted = Counter(sequence.content for sequence in self.waiting)

    # -- admission --

    def admit(self) -> None:
        """Move waiting requests into slots, as many as one forward should compute."""
        if not (self.waiting or self.evicted):
            return
        self._make_room()
        tokens = sum(job.left for job in self.jobs.values())
        while tokens < self.prefill_tokens and (queue := self.evicted or self.waiting):
            sequence = queue[0]
            if not self._place(sequence):
                break
            queue.popleft()
            if queue is self.waiting:
                key = sequence.request.key
                assert key not in self.running, f"request {key} was submitted twice"
                self.running[key] = sequence
                self.kept.no_longer_want(sequence.content)
            tokens += self._begin(sequence)

    def _make_room(self) -> None:
        """Memory for what waits, as far as there is some."""
        coming = [s.request for s in islice(self.waiting, self.max_sequences)]
        longest = max(map(_most_tokens, coming), default=0)
        if self.cache.paged:
            slots = self.max_sequences
            known = [*coming, *(s.request for s in self.running.values())]
            self.cache.reserve(sum(map(_most_tokens, known)), longest)
            if longest > self.cache.pages.count * self.cache.pages.page:
                self._refuse_longest(longest)
        elif coming:
            self._make_slots(longest)
            slots = self.cache.slots
        if coming:
            self.records.resize(slots, max(r.sampling.max_tokens for r in coming))

    def _refuse_longest(self, longest: int) -> None:
        """It alone: whoever serves many goes on with the others."""
        sequence = next(s for s in self.waiting if _most_tokens(s.request) == longest)
        self.waiting.remove(sequence)
        self.kept.no_longer_want(sequence.content)
        limit = self.cache.pages.count * self.cache.pages.page
        problem = ConfigError(
            f"a request may grow to {longest} tokens, but the memory of the GPU has room for the "
            f"keys and values of {limit}; lower rollout.max_tokens"
        )
        problem.request = sequence.request.key
        raise problem

    def _make_slots(self, longest: int) -> None:
        """As many as are wanted, and as long. Where there is no memory for the present ones in that
        length they end first: what does not fit into them waits.
        """
        if longest > self.cache.capacity and self.cache.slots > self.cache.affordable(longest):
            if self.running:
                return
            while self.kept.drop_one():
                pass
            self.cache.clear()
        capacity = max(longest, self.cache.capacity)
        wanted = min(self.max_sequences, self.pending + len(self.kept.live))
        slots = max(self.cache.slots, min(wanted, self.cache.affordable(capacity)))
        self.cache.reserve(slots, capacity)

    def _place(self, sequence: Sequence) -> bool:
        """Give a sequence a slot, and pages where there are pages; False when it has to wait."""
        live = self.kept.turn_before(sequence.request)
        if not self._has_room(sequence, live):
            slot = None
        elif sequence.slot >= 0:
            slot = sequence.slot  # it was evicted
        elif live is not None:
            slot = self.cache.resume(live.parked)
        else:
            slot = self.cache.take()
            # A finished turn that sits in a slot will be computed again when its turn comes.
            if slot is None and not self.cache.paged and self.kept.drop_one():
                slot = self.cache.take()
        if slot is None:
            if live is not None:
                self.kept.live[sequence.request.episode] = live  # type: ignore[index]
            return False
        sequence.slot, sequence.cached = slot, 0 if live is None else live.cached
        return True

    def _has_room(self, sequence: Sequence, live: Live | None) -> bool:
        if self.cache.paged:
            return self._find_pages(sequence, live)
        return _most_tokens(sequence.request) <= self.cache.capacity

    def _find_pages(self, sequence: Sequence, live: Live | None) -> bool:
        pages = self.cache.pages
        tokens = len(sequence.request.ids) + sequence.sampled
        fresh = live is None and not sequence.sampled
        # One more for each that runs: admitting a sequence should not evict another at once.
        spare = len(self.running) - len(self.evicted)
        while True:
            if fresh and (sequence.content in self.jobs or sequence.content in self.kept.prefixes):
                needed = 1  # all but the last page are shared
            else:
                needed = pages.pages_for(tokens) - (0 if live is None else len(live.parked))
            if needed + spare <= pages.free:
                return True
            if not self.kept.drop_one():  # perhaps the very prompt that would be shared
                return False

    # -- prompts --

    def _begin(self, sequence: Sequence) -> int:
        """Compute its prompt, alone or with others that begin alike. Tokens that are added."""
        alone = sequence.cached or sequence.sampled
        key = sequence.request.key if alone else sequence.content
        if key in self.jobs:
            self.jobs[key].members.append(sequence)
            return 0
        ids = sequence.request.ids
        if alone:
            ids = np.concatenate([ids, self.records.of(sequence)])
        prefix = self.kept.prefixes.get(key)
        if prefix is not None:  # it may be given back before the job starts
            self.cache.pages.share(prefix.parked)
        elif self.cache.paged:
            self.cache.pages.extend(np.array([sequence.slot]), np.array([len(ids)]))
        job = self.jobs[key] = Job(
            members=[sequence],
            ids=ids,
            positions=self.family.positions(len(ids), sequence.request.media),
            cached=sequence.cached,
            hidden=None if prefix is None else prefix.hidden,
            prefix=prefix,
        )
        return job.left

    def next_parts(self) -> list[Part]:
        """About `prefill_tokens`. In pages a prompt may be cut, in slots it is computed whole."""
        parts, budget = [], self.prefill_tokens
        for job in self.jobs.values():
            if job.left and budget > 0:
                end = job.cut(budget) if self.cache.paged else len(job.ids)
                budget -= end - job.cached
                parts.append((job, end))
        return parts

    def halves(self, parts: list[Part]) -> list[list[Part]] | None:
        """Two forwards instead of one that memory was too short for, and fewer tokens for those to
        come. None where there is nothing to halve.
        """
        tokens = sum(end - job.cached for job, end in parts)
        self.prefill_tokens = min(self.prefill_tokens, -(-tokens // 2))
        if len(parts) > 1:
            middle = len(parts) // 2
            return [parts[:middle], parts[middle:]]
        ((job, end),) = parts
        cut = job.cut(tokens // 2)
        return [[(job, cut)], parts] if self.cache.paged and job.cached < cut < end else None

    def start(self) -> list[tuple[Tensor, list[Sequence]]]:
        """All members of complete jobs begin with what was computed: the last hidden state of each
        prompt, and who draws from it.
        """
        done = {key: job for key, job in self.jobs.items() if job.hidden is not None}
        groups, started = [], []
        for key, job in done.items():
            del self.jobs[key]
            assert job.hidden is not None
            source, others = self.cache.contents(job.members[0].slot), job.members[1:]
            if job.prefix is not None:
                source, others = job.prefix.parked, list(job.members)
            self.kept.keep_prompt(key, source, job.hidden)
            groups.append((source, len(job.ids), others))
            started.append((job.hidden, job.members))
            for sequence in job.members:
                sequence.cached, sequence.ahead, sequence.ready = len(job.ids), job.ahead, True
        if self.cache.paged:
            self._send_away(groups)
        self.cache.begin_alike([(a, n, [s.slot for s in others]) for a, n, others in groups])
        for job in done.values():
            if job.prefix is not None:
                self.cache.drop(job.prefix.parked)
        if done:
            self.kept.forget_unwanted()
        return [(hidden, [s for s in members if s.ready]) for hidden, members in started]

    # -- short of pages --

    def _send_away(self, groups: SequenceOf[tuple[Any, int, list[Sequence]]]) -> None:
        """Members for whose own last page there is none left wait again."""
        free = self.cache.pages.free
        for _, length, others in groups:
            if length % self.cache.pages.page:
                while len(others) > free:
                    self._evict(others.pop())
                free -= len(others)

    def _evict(self, sequence: Sequence) -> None:
        self.cache.drop(self.cache.pages.detach(sequence.slot))
        sequence.cached, sequence.ready = 0, False
        self.evicted.appendleft(sequence)

    def secure(self, ready: list[Sequence], steps_of: Callable[[SequenceOf[Sequence]], int]) -> int:
        """Pages for the next burst and its number of steps. Where pages are short, sequences that
        came last lose theirs and leave `ready`.
        """
        pages = self.cache.pages
        while ready:
            steps = steps_of(ready)
            slots = np.array([s.slot for s in ready])
            tokens = np.array([s.cached + min(steps, s.remaining) for s in ready])
            if pages.lacking(slots, tokens) <= pages.free:
                pages.extend(slots, tokens)
                return steps
            if not self.kept.drop_one():
                self._evict(ready.pop())
        return 0

    def decodes(self, ready: SequenceOf[Sequence]) -> bool:
        """Not where many more can start soon: better to wait for them than to decode a part of the
        batch. Not for ever: a long prompt takes many forwards.
        """
        room = min(len(self.waiting), len(self.cache.free))
        coming = sum(len(job.members) for job in self.jobs.values()) + (room if self.jobs else 0)
        waits = bool(ready) and self._waited < PATIENCE and 4 * coming > len(ready)
        self._waited = self._waited + 1 if waits else 0
        return bool(ready) and not waits


def _most_tokens(request: Request) -> int:
    return len(request.ids) + request.sampling.max_tokens
