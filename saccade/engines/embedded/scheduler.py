"""Decides which requests wait, which prompts are prefilled, and which sequences decode. Gives them slots
and pages, and evicts sequences if pages run short. Knows nothing of forwards and sampling.

    scheduler.submit(request)
    scheduler.admit()
    scheduler.next_parts()      # pieces of prompts for one forward
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from saccade.engines import empty_completion, prompt_key
from saccade.engines.embedded.kv_cache import KVCache
from saccade.engines.embedded.sequences import IdleTurn, Outputs, Part, PrefillJob, Prefix, Sequence
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.types import Completion, Request

PREFILL_TOKENS = 16_384  # per forward
PATIENCE = 4  # most prefill forwards for which sequences that could decode wait


class Scheduler:
    def __init__(self, family: Family, cache: KVCache, outputs: Outputs, max_sequences: int) -> None:
        self.family, self.cache, self.outputs = family, cache, outputs
        self.max_sequences, self.version = max_sequences, 0
        self.prefill_tokens = PREFILL_TOKENS  # fewer after running out of memory
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.evicted: deque[Sequence] = deque()  # lost their pages, keep slot and outputs
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.jobs: dict[Any, PrefillJob] = {}
        self.prefix_cache = PrefixCache(cache)
        self.aborted: list[Completion] = []  # of requests that were aborted before they ran
        self._waited = 0  # prefill forwards since the last burst

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.aborted)

    def submit(self, request: Request) -> None:
        # Requests share an opening only if it may be computed with the same weights.
        assert request.key not in self.waiting, f"request {request.key} was submitted twice"
        key = prompt_key(request, request.opening)
        self.waiting[request.key] = Sequence(request=request, prefill_key=(self.version, key))

    def abort(self, key: str) -> None:
        if key in self.running:
            sequence = self.running[key]
            sequence.aborted = True
            if sequence in self.evicted:
                self.evicted.remove(sequence)
                sequence.ready = True  # so that it is collected, without being recomputed
            return
        if key in self.waiting:
            prefill_key = self.waiting.pop(key).prefill_key
            self.aborted.append(empty_completion(key))
            asked = (s.prefill_key for s in self.waiting.values())
            if prefill_key in self.prefix_cache.prefixes and prefill_key not in asked:
                self.prefix_cache.drop(prefill_key)

    def finish(self, sequence: Sequence, completion: Completion) -> None:
        """Free the slot of a sequence that has ended; keep the pages of an episode's turn."""
        request = sequence.request
        del self.running[request.key]
        # Recurrent states may have read tokens that were drawn after a stop string.
        stands = self.cache.state_length(sequence.slot) in (None, sequence.cached)
        fresh = sequence.prefill_key[0] == self.version  # keys of old weights would give the next turn an old version
        pages, row = self.cache.detach(sequence.slot)
        if request.episode and completion.finish != "aborted" and stands and fresh:
            self.prefix_cache.turns[request.episode] = IdleTurn(
                pages=pages,
                row=row,
                ids=np.concatenate([request.ids, completion.ids]),
                media=tuple(span.media.key for span in request.media),
                cached=sequence.cached,
            )
        else:
            self.cache.drop(pages, row)

    def set_version(self, version: int) -> None:
        """The weights have changed: drop kept prompts and turns, and restart unfinished prefills. Waiting requests get
        the new version; decoding sequences keep their keys and the version of these.
        """
        self.version = version
        self.prefix_cache.drop_all()
        for job in reversed(self.jobs.values()):
            if job.prefix is not None:
                self.cache.pages.drop(job.prefix.pages)
            for sequence in reversed(job.members):
                self._evict(sequence)
        self.jobs.clear()
        for sequence in (*self.waiting.values(), *self.evicted):
            sequence.prefill_key = (version, sequence.prefill_key[1])

    # -- admission --

    def admit(self) -> None:
        """Give waiting requests slots and pages, for as many tokens as one forward computes."""
        if not (self.waiting or self.evicted):
            return
        self._make_room()
        tokens = sum(job.left for job in self.jobs.values())
        while tokens < self.prefill_tokens and (self.evicted or self.waiting):
            sequence = self.evicted[0] if self.evicted else next(iter(self.waiting.values()))
            if not self._place(sequence):
                break
            if self.evicted:
                self.evicted.popleft()
            else:
                key, _ = self.waiting.popitem(last=False)
                assert key not in self.running, f"request {key} was submitted twice"
                self.running[key] = sequence
            tokens += self._begin(sequence)

    def _make_room(self) -> None:
        """Reserve memory for waiting requests, as far as it is available."""
        coming = [s.request for s in islice(self.waiting.values(), self.max_sequences)]
        lengths = [*map(_most_tokens, (*coming, *(s.request for s in self.running.values())))]
        if not self.cache.reserve(lengths, len(self.prefix_cache.turns)):
            if self.cache.kernels is not None:
                self._refuse_longest(max(map(_most_tokens, coming)))
            if not self.running:  # else a request that fits into no page waits until all others have ended
                self.prefix_cache.drop_all()
                self.cache.clear()
                self.cache.reserve(lengths, 0)
        if coming:
            self.outputs.resize(self.max_sequences, max(r.sampling.max_tokens for r in coming))

    def _refuse_longest(self, longest: int) -> None:
        """Refuse the longest request alone, so that a server goes on with the others."""
        key = next(key for key, s in self.waiting.items() if _most_tokens(s.request) == longest)
        del self.waiting[key]
        limit = self.cache.pages.count * self.cache.pages.page
        problem = ConfigError(
            f"a request may grow to {longest} tokens, but the memory of the GPU has room for the "
            f"keys and values of {limit}; lower rollout.max_tokens"
        )
        problem.request = key
        raise problem

    def _place(self, sequence: Sequence) -> bool:
        """Give a sequence a slot, if there are pages for it. Returns False if it has to wait."""
        turn = self.prefix_cache.turn_before(sequence.request)
        slot: int | None = None
        if self._find_pages(sequence, turn):
            slot = sequence.slot if sequence.slot >= 0 else self.cache.take(turn)  # it was evicted
        if slot is None:
            if turn is not None:
                self.prefix_cache.turns[sequence.request.episode] = turn  # type: ignore[index]
            return False
        sequence.slot, sequence.cached_prompt = slot, 0 if turn is None else turn.cached
        return True

    def _find_pages(self, sequence: Sequence, turn: IdleTurn | None) -> bool:
        """Whether enough pages are free for a sequence; drops kept prompts and turns if necessary."""
        pages = self.cache.pages
        if pages.pages_for(_most_tokens(sequence.request)) > pages.table.shape[1]:
            return False
        needed = int(pages.pages_for(len(sequence.request.ids) + sequence.sampled))
        if self.cache.kernels is not None:
            # One spare page per running sequence: admitting one should not evict another at once.
            spare = len(self.running) - len(self.evicted)
        else:  # pages for members that get a copy of a prompt when it is complete
            spare = sum(len(job.members) - (job.prefix is None) for job in self.jobs.values())
        while True:
            held = 0 if turn is None else len(turn.pages)
            if sequence.prefill_key in self.jobs or sequence.prefill_key in self.prefix_cache.prefixes:
                held = held or (sequence.opening - 1) // pages.page  # all but its last page are shared
            if needed - held + spare <= pages.free and (sequence.slot >= 0 or self.cache.has_row(turn)):
                return True
            if not self.prefix_cache.drop_one():  # this may drop the very prompt that would be shared
                return False

    # -- prompts --

    def _begin(self, sequence: Sequence) -> int:
        """Start a job for the opening, or join one; or for all behind what is cached. Returns the tokens it adds."""
        cached, media = sequence.cached_prompt, sequence.request.media
        key = sequence.request.key if cached else sequence.prefill_key
        ids = np.concatenate([sequence.request.ids, self.outputs.of(sequence)])
        end = len(ids) if cached else sequence.opening
        if key in self.jobs:
            self.jobs[key].members.append(sequence)
            return len(ids) - end
        prefix = self.prefix_cache.prefixes.get(key)
        if prefix is not None:  # it may be dropped before the job starts
            self.cache.pages.share(prefix.pages)
        else:
            self.cache.pages.extend(np.array([sequence.slot]), np.array([end]))
        job = self.jobs[key] = PrefillJob(
            members=[sequence],
            ids=ids[:end],
            positions=self.family.positions(ids, media)[:, :end],
            cached=cached,
            hidden=None if prefix is None else prefix.hidden,
            prefix=prefix,
        )
        return job.left + len(ids) - end

    def next_parts(self) -> list[Part]:
        """Pieces of prompts for one forward, about `prefill_tokens` together. Without kernels no prompt is
        cut: torch would need a mask of the whole piece.
        """
        parts, budget = [], self.prefill_tokens
        for job in self.jobs.values():
            if job.left and budget > 0:
                end = len(job.ids) if self.cache.kernels is None else job.cut(budget)
                budget -= end - job.cached
                parts.append((job, end))
        return parts

    def halves(self, parts: list[Part]) -> list[list[Part]] | None:
        """Split a forward that ran out of memory in two, and compute fewer tokens from now on.
        Returns None if there is nothing to split, or if recurrent states of a turn have advanced.
        """
        tokens = sum(end - job.cached for job, end in parts)
        self.prefill_tokens = min(self.prefill_tokens, -(-tokens // 2))
        if self.cache.states is not None and any(job.cached for job, _ in parts):
            return None
        if len(parts) > 1:
            middle = len(parts) // 2
            return [parts[:middle], parts[middle:]]
        ((job, end),) = parts
        cut = job.cut(tokens // 2)
        return [[(job, cut)], parts] if self.cache.kernels and job.cached < cut < end else None

    def start(self) -> list[tuple[Tensor, list[Sequence]]]:
        """Let all members of complete jobs begin with what was computed; those with further tokens prefill these next.
        Returns the last hidden state of each job, and the members that draw from it.
        """
        done = {key: job for key, job in self.jobs.items() if job.hidden is not None}
        groups, wanted = [], {s.prefill_key for s in self.waiting.values()} if done else set()
        for key, job in done.items():
            del self.jobs[key]
            assert job.hidden is not None
            pages, others = self.cache.pages.of(job.members[0].slot), job.members[1:]
            if job.prefix is not None:
                pages, others = job.prefix.pages, list(job.members)
            # Not with recurrent states, which advance with the first member.
            if key in wanted and key not in self.prefix_cache.prefixes and self.cache.states is None:
                kept = Prefix(pages=self.cache.pages.share(pages), hidden=job.hidden)
                self.prefix_cache.prefixes[key] = kept
            groups.append((job.members[0].slot, pages, len(job.ids), others))
            for sequence in job.members:
                sequence.rope_delta, sequence.ready = job.rope_delta, True
        self._evict_without_page(groups)
        self.cache.fork_prompts([(first, a, n, [s.slot for s in others]) for first, a, n, others in groups])
        for job in done.values():
            if job.prefix is not None:
                self.cache.pages.drop(job.prefix.pages)
        unwanted = [key for key in self.prefix_cache.prefixes if key not in wanted] if done else []
        for key in unwanted:  # no waiting request begins with these prompts
            self.prefix_cache.drop(key)
        return [
            (job.hidden, [s for s in job.members if s.ready and not self._go_on(s, len(job.ids))])
            for job in done.values()
            if job.hidden is not None
        ]

    def _go_on(self, sequence: Sequence, cached: int) -> bool:
        """Prefill the further tokens of a sequence next, if there are pages for them. Returns whether it has any."""
        length, pages = sequence.cached + 1, self.cache.pages
        if length > cached and not sequence.aborted:
            sequence.ready, sequence.cached_prompt = False, cached
            if pages.lacking(np.array([sequence.slot]), np.array([length])) <= pages.free:
                self._begin(sequence)
            else:
                self._evict(sequence)
        return length > cached

    # -- short of pages --

    def _evict_without_page(self, groups: SequenceOf[tuple[int, Any, int, list[Sequence]]]) -> None:
        """Evict members for which there is no page to copy the partial last page to."""
        free = self.cache.pages.free
        for *_, length, others in groups:
            if length % self.cache.pages.page:
                while len(others) > free:
                    self._evict(others.pop())
                free -= len(others)

    def _evict(self, sequence: Sequence) -> None:
        self.cache.pages.drop(self.cache.pages.detach(sequence.slot))
        sequence.ready, sequence.prefill_key = False, (self.version, sequence.prefill_key[1])
        self.evicted.appendleft(sequence)

    def allocate_pages(self, ready: list[Sequence], steps_of: Callable[[SequenceOf[Sequence]], int]) -> int:
        """Allocate pages for the next burst and return its number of steps. Where pages are short,
        the sequences admitted last lose theirs and leave `ready`.
        """
        pages = self.cache.pages
        while ready:
            steps = steps_of(ready)
            slots = np.array([s.slot for s in ready])
            tokens = np.array([s.cached + min(steps, s.remaining) for s in ready])
            if pages.lacking(slots, tokens) <= pages.free:
                pages.extend(slots, tokens)
                return steps
            if not self.prefix_cache.drop_one():
                self._evict(ready.pop())
        return 0

    def follow_states(self, ready: SequenceOf[Sequence], drawn: np.ndarray) -> None:
        """Count the tokens that recurrent states have read in a burst: one per token `drawn` [steps, sequences].
        If the kept ids overflowed the buffer, the state is one token ahead: recompute the sequence.
        """
        last, counts = self.outputs.last(ready).tolist(), drawn.sum(0).tolist()
        for sequence, token, count in zip(ready, last, counts, strict=True):
            self.cache.states.lengths[self.cache.rows[sequence.slot]] += count
            stops = token in self.family.chat.eos_ids and not sequence.request.sampling.ignore_eos
            if count < len(drawn) and sequence.remaining and not stops:
                self._evict(sequence)

    def should_decode(self, ready: SequenceOf[Sequence]) -> bool:
        """Whether to decode now: not while many more can start soon, as a larger batch decodes
        faster; but a long prompt takes many forwards, so only for PATIENCE of them.
        """
        room = min(len(self.waiting), len(self.cache.free_slots))
        coming = sum(len(job.members) for job in self.jobs.values()) + (room if self.jobs else 0)
        waits = bool(ready) and self._waited < PATIENCE and 4 * coming > len(ready)
        self._waited = self._waited + 1 if waits else 0
        return bool(ready) and not waits


class PrefixCache:
    """Pages that are kept without a running sequence: prompts of waiting requests, and finished turns of
    episodes that may continue. Both may be dropped to free pages, and are recomputed when needed.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.prefixes: dict[Any, Prefix] = {}
        self.turns: dict[str, IdleTurn] = {}  # by episode, least recently used first

    def drop(self, prefill_key: Any) -> None:
        self.cache.pages.drop(self.prefixes.pop(prefill_key).pages)

    def turn_before(self, request: Request) -> IdleTurn | None:
        """Remove and return the turn that a request continues. Another turn of its episode is dropped."""
        turn = self.turns.pop(request.episode, None) if request.episode else None
        if turn is None or turn.extended_by(request):
            return turn
        self.cache.drop(turn.pages, turn.row)
        return None

    def release(self, episode: str) -> None:
        turn = self.turns.pop(episode, None)
        if turn is not None:
            self.cache.drop(turn.pages, turn.row)

    def drop_one(self) -> bool:
        """Drop a prompt, or else the turn that has been idle longest. False if nothing is kept."""
        if self.prefixes:
            self.drop(next(iter(self.prefixes)))
        elif self.turns:
            self.release(next(iter(self.turns)))
        else:
            return False
        return True

    def drop_all(self) -> None:
        while self.drop_one():
            pass


def _most_tokens(request: Request) -> int:
    return len(request.ids) + request.sampling.max_tokens
