"""The embedded engine: generates in the trainer's process with the trainer's own weight tensors.

Continuous batching; a prompt that several requests share is computed once, its images encoded once;
a live episode continues from its cache. On a CPU, and in full precision, every sequence has a slot
of a cache and the host looks at every token. On a GPU in half precision keys and values lie in
shared pages, decoding runs many steps between two looks, long prompts are computed in pieces, and a
sequence that finds no page is computed again later. Knows nothing of rewards, environments or
training.

    engine = EmbeddedEngine(model, family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.devices import free_bytes
from saccade.engines import Capabilities
from saccade.engines.embedded.cache import Cache, Shape, can_page, shape_of
from saccade.engines.embedded.drawing import draw
from saccade.engines.embedded.prefill import compute, forward, next_parts
from saccade.engines.embedded.records import Records
from saccade.engines.embedded.rows import fields_of, heats_of
from saccade.engines.embedded.sequences import Job, Live, Prefix, Sequence, cuts
from saccade.engines.requests import content_of, nothing_sampled, require_room
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.models.load import banned_mask
from saccade.types import Completion, Request

PREFILL_TOKENS = 16_384  # of one forward
PATIENCE = 4  # forwards over prompts for which sequences that could decode wait at most
CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.6  # of the memory that is free when the slot cache grows


class EmbeddedEngine:
    def __init__(self, model: nn.Module, family: Family, *, max_sequences: int = 512) -> None:
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        kinds = getattr(text, "layer_types", None)
        everywhere = kinds is None and getattr(text, "sliding_window", None)
        if everywhere or "sliding_attention" in (kinds or ()):
            raise EnvironmentProblem(
                "the embedded engine does not serve models with sliding windows"
            )
        self.model, self.family, self.max_sequences = model, family, max_sequences
        self.version = 0
        shape = shape_of(model)
        self.banned = banned_mask(family, shape.device)
        self._eos = np.array(sorted(family.chat.eos_ids), dtype=np.int64)
        self.cache: Any = Cache(shape)
        self.graphs: Any = None
        if can_page(shape):
            self._use_pages(shape)
        self._waiting: deque[Sequence] = deque()
        self._wanted: Counter[Any] = Counter()  # by content, of what waits
        self._evicted: deque[Sequence] = deque()  # lost their pages, keep slot and records
        self._running: dict[str, Sequence] = {}  # in the order of admission
        self._jobs: dict[Any, Job] = {}
        self._prefixes: dict[Any, Prefix] = {}
        self._live: dict[str, Live] = {}  # by episode, least recently used first
        self._aborted: list[Completion] = []
        self._records = Records()
        self._waited = 0  # forwards over prompts since the last burst

    def _use_pages(self, shape: Shape) -> None:
        from saccade.engines.embedded.graphs import Graphs
        from saccade.engines.embedded.paged import PagedCache
        from saccade.engines.embedded.projections import Projections

        self.projections = Projections(self.model)
        self.cache = PagedCache(shape, self.max_sequences)
        self.graphs = Graphs(self.model, self.family, self.cache, banned=self.banned, eos=self._eos)

    @property
    def _free(self) -> list[int]:
        return self.cache.free

    @property
    def _tokens(self) -> np.ndarray:
        return self._records.tokens

    # -- the protocol --

    def submit(self, request: Request) -> None:
        require_room(request, self.family.max_positions)
        # Prompts are shared by requests that may be computed with the same weights.
        sequence = Sequence(request=request, content=(self.version, content_of(request)))
        self._waiting.append(sequence)
        self._wanted[sequence.content] += 1

    def poll(self) -> list[Completion]:
        with torch.inference_mode():
            if self.model.training:  # walks through every module: not at every token
                self.model.eval()
            ready = [s for s in self._running.values() if s.ready and not s.aborted]
            if self.cache.paged:
                if not self._running:  # weights may have changed since
                    self.projections.refresh()
                with self.projections.joined():
                    self._poll_pages(ready)
            else:
                self._admit()
                if self._jobs:
                    self._prefill()
                elif ready:
                    self._step(ready)
        return self._collect_finished()

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._aborted)

    def abort(self, key: str) -> None:
        if key in self._running:
            sequence = self._running[key]
            sequence.aborted = True
            if sequence in self._evicted:
                self._evicted.remove(sequence)
                sequence.ready = True  # to be collected, not computed
            return
        for sequence in [s for s in self._waiting if s.request.key == key]:
            self._waiting.remove(sequence)
            self._no_longer_wanted(sequence.content)
            self._aborted.append(nothing_sampled(key))
        self._forget_prefixes()

    def progress(self, key: str) -> np.ndarray:
        sequence = self._running.get(key)
        return self._records.of(sequence).copy() if sequence else np.zeros(0, np.int64)

    def release(self, episode: str) -> None:
        live = self._live.pop(episode, None)
        if live is not None:
            self.cache.drop(live.parked)

    def update_weights(self, source: Any, version: int) -> None:
        """The tensors are the trainer's own, so nothing moves; caches of idle episodes belong to
        the old weights.
        """
        if version != self.version:
            while self._drop_idle():
                pass
            for sequence in self._waiting:  # they will be computed with the new ones
                sequence.content = (version, sequence.content[1])
            self._wanted = Counter(sequence.content for sequence in self._waiting)
        self.version = version
        if self.graphs is not None:
            self.graphs.check_weights()
            self.projections.refresh()

    def sleep(self) -> None:
        assert not self._running, "sleep while sequences are running"
        self._live.clear()
        self._prefixes.clear()
        self.cache.clear()
        self._records.clear()

    def wake(self) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=True, support=True, shares_weights=True, live_episodes=True)

    def close(self) -> None:
        pass

    def _poll_pages(self, ready: list[Sequence]) -> None:
        steps = self._secure(ready)
        self._admit()
        decode = bool(ready) and not self._filling_up(ready)
        self._waited = self._waited + 1 if ready and not decode else 0
        if decode:  # first: the host prepares prompts while the GPU decodes
            self._launch(ready, steps)
        if self._jobs:
            self._prefill()
        if decode:
            self._read(ready)

    # -- admission --

    def _admit(self) -> None:
        """Move waiting requests into slots, as many as one forward should compute."""
        if not (self._waiting or self._evicted):
            return
        self._make_room()
        tokens = sum(job.left for job in self._jobs.values())
        while tokens < PREFILL_TOKENS and (queue := self._evicted or self._waiting):
            sequence = queue[0]
            if queue is self._waiting:
                key = sequence.request.key
                assert key not in self._running, f"request {key} was submitted twice"
            if not self._place(sequence):
                break
            queue.popleft()
            if queue is self._waiting:
                self._running[key] = sequence
                self._no_longer_wanted(sequence.content)
            tokens += self._begin(sequence)

    def _make_room(self) -> None:
        """Memory for what waits, as far as there is some."""
        coming = [s.request for s in islice(self._waiting, self.max_sequences)]
        longest = max((len(r.ids) + r.sampling.max_tokens for r in coming), default=0)
        if self.cache.paged:
            slots = self.max_sequences
            known = [*coming, *(s.request for s in self._running.values())]
            self.cache.reserve(sum(len(r.ids) + r.sampling.max_tokens for r in known), longest)
            if (limit := self.cache.pages.count * self.cache.pages.page) < longest:
                raise ConfigError(
                    f"a request may grow to {longest} tokens, but the memory of the GPU has room "
                    f"for the keys and values of {limit}; lower rollout.max_tokens"
                )
        elif coming:
            capacity = max(longest, self.cache.capacity)
            wanted = min(self.max_sequences, self.pending + len(self._live))
            affordable = max(1, self._budget() // self.cache.bytes_per_slot(capacity))
            if self._running:  # what runs keeps its slot
                affordable = max(affordable, self.cache.slots)
            slots = max(self.cache.slots, min(wanted, affordable))
            self.cache.reserve(slots, capacity)
        if coming:
            self._records.resize(slots, max(r.sampling.max_tokens for r in coming))

    def _budget(self) -> int:
        if self.cache.device.type != "cuda":
            return CPU_CACHE_BYTES
        mine = self.cache.bytes_per_slot(self.cache.capacity) * self.cache.slots
        return int(GPU_CACHE_SHARE * (free_bytes(self.cache.device) + mine))

    def _place(self, sequence: Sequence) -> bool:
        """Give a sequence a slot, and pages where there are pages; False when it has to wait."""
        request = sequence.request
        live = self._live.pop(request.episode, None) if request.episode else None
        if live is not None and not live.extended_by(request):
            self.cache.drop(live.parked)
            live = None
        if self.cache.paged and not self._find_pages(sequence, live):
            slot = None
        elif sequence.slot >= 0:
            slot = sequence.slot  # it was evicted
        elif live is not None:
            slot = self.cache.resume(live.parked)
        else:
            slot = self.cache.take()
            # A finished turn that sits in a slot will be computed again when its turn comes.
            if slot is None and not self.cache.paged and self._drop_idle():
                slot = self.cache.take()
        if slot is None:
            if live is not None:
                self._live[request.episode] = live  # type: ignore[index]
            return False
        sequence.slot, sequence.cached = slot, 0 if live is None else live.cached
        return True

    def _find_pages(self, sequence: Sequence, live: Live | None) -> bool:
        pages = self.cache.pages
        tokens = len(sequence.request.ids) + sequence.sampled
        # One more for each that runs: admitting a sequence should not evict another at once.
        spare = len(self._running) - len(self._evicted)
        while True:
            if live is None and not sequence.sampled and self._known(sequence.content):
                needed = 1  # all but the last page are shared
            else:
                needed = pages.pages_for(tokens) - (0 if live is None else len(live.parked))
            if needed + spare <= pages.free:
                return True
            if not self._drop_idle():  # perhaps the very prompt that would be shared
                return False

    def _known(self, content: Any) -> bool:
        return content in self._jobs or content in self._prefixes

    def _drop_idle(self) -> bool:
        """Give back what no sequence in a slot needs: prompts kept for others, then the turn that
        waited longest.
        """
        if self._prefixes:
            self.cache.drop(self._prefixes.pop(next(iter(self._prefixes))).parked)
            return True
        if self._live:
            self.release(next(iter(self._live)))
            return True
        return False

    def _no_longer_wanted(self, content: Any) -> None:
        self._wanted[content] -= 1
        if not self._wanted[content]:
            del self._wanted[content]

    def _forget_prefixes(self) -> None:
        """Prompts that nobody waits for any more."""
        for key in [key for key in self._prefixes if not self._wanted[key]]:
            self.cache.drop(self._prefixes.pop(key).parked)

    def _begin(self, sequence: Sequence) -> int:
        """Compute its prompt, alone or with others that begin alike. Tokens that are added."""
        alone = sequence.cached or sequence.sampled
        key = sequence.request.key if alone else sequence.content
        if key in self._jobs:
            self._jobs[key].members.append(sequence)
            return 0
        ids = sequence.request.ids
        if alone:
            ids = np.concatenate([ids, self._records.of(sequence)])
        prefix = self._prefixes.get(key)
        if prefix is not None:  # it may be given back before the job starts
            self.cache.pages.share(prefix.parked)
        job = self._jobs[key] = Job(
            members=[sequence],
            ids=ids,
            positions=self.family.positions(len(ids), sequence.request.media),
            cached=sequence.cached,
            hidden=None if prefix is None else prefix.hidden,
            prefix=prefix,
        )
        if self.cache.paged and prefix is None:
            self.cache.pages.extend(np.array([sequence.slot]), np.array([len(ids)]))
        return job.left

    # -- prompts --

    def _prefill(self) -> None:
        """Compute about PREFILL_TOKENS tokens of prompts; start those that are complete."""
        jobs = list(self._jobs.values())
        parts = next_parts(jobs, PREFILL_TOKENS, pieces=self.cache.paged)
        if self.cache.paged:
            batches = [parts]
        else:  # apart: what continues reads padded rows of the cache, which fresh prompts need not
            batches = [[p for p in parts if bool(p[0].cached) == late] for late in (False, True)]
        for batch in batches:
            if batch:
                compute(self.model, self.family, self.cache, batch)
        done = {key: job for key, job in self._jobs.items() if job.hidden is not None}
        if done:
            self._start(done)

    def _start(self, done: dict[Any, Job]) -> None:
        """All members of these jobs begin with what was computed, and draw their first token."""
        groups, used = [], []
        for key, job in done.items():
            del self._jobs[key]
            assert job.hidden is not None
            length, first = len(job.ids), job.members[0]
            if job.prefix is None:
                source, others = self.cache.contents(first.slot), job.members[1:]
            else:
                source, others = job.prefix.parked, list(job.members)
                used.append(job.prefix)
            if self.cache.paged and self._wanted[key] and key not in self._prefixes:
                kept = Prefix(parked=self.cache.pages.share(source), hidden=job.hidden)
                self._prefixes[key] = kept
            groups.append((source, length, others))
            for sequence in job.members:
                sequence.cached, sequence.ahead, sequence.ready = length, job.ahead, True
        if self.cache.paged:
            self._send_away(groups)
        self.cache.begin_alike([(a, n, [s.slot for s in others]) for a, n, others in groups])
        for prefix in used:
            self.cache.drop(prefix.parked)
        self._forget_prefixes()
        jobs = [(job, [s for s in job.members if s.ready]) for job in done.values()]
        members = [s for _, some in jobs for s in some]
        if members:
            hidden = torch.stack([job.hidden for job, _ in jobs if job.hidden is not None])
            rows = np.repeat(np.arange(len(jobs)), [len(some) for _, some in jobs])
            self._note(members, *self._draw(hidden, rows, members))

    def _send_away(self, groups: SequenceOf[tuple[Any, int, list[Sequence]]]) -> None:
        """Members for whose own last page there is none left wait again."""
        free = self.cache.pages.free
        for _, length, others in groups:
            while length % self.cache.pages.page and len(others) > free:
                sequence = others.pop()
                sequence.cached, sequence.ready = 0, False
                self._evicted.appendleft(sequence)
            free -= len(others) if length % self.cache.pages.page else 0

    # -- decoding --

    def _step(self, ready: SequenceOf[Sequence]) -> None:
        """One token for each, over slots."""
        ready = sorted(ready, key=lambda s: s.slot)
        slots = np.array([s.slot for s in ready])
        cached = np.array([s.cached for s in ready])
        positions = np.tile(cached + np.array([s.ahead for s in ready]), (self.family.axes, 1))
        plan = self.cache.plan(slots, cached, np.ones(len(slots), dtype=np.int64))
        hidden = forward(self.model, self.family, self._records.last(ready), positions, plan)
        for sequence in ready:
            sequence.cached += 1
        self._note(ready, *self._draw(hidden, None, ready))

    def _secure(self, ready: list[Sequence]) -> int:
        """Pages for the next burst and its number of steps. Where pages are short, sequences that
        came last lose theirs and leave `ready`.
        """
        pages = self.cache.pages
        while ready:
            steps = self.graphs.steps(ready)
            slots = np.array([s.slot for s in ready])
            tokens = np.array([s.cached + min(steps, s.remaining) for s in ready])
            if pages.lacking(slots, tokens) <= pages.free:
                pages.extend(slots, tokens)
                return steps
            if not self._drop_idle():
                sequence = ready.pop()
                pages.drop(pages.detach(sequence.slot))
                sequence.cached, sequence.ready = 0, False
                self._evicted.appendleft(sequence)
        return 0

    def _filling_up(self, ready: SequenceOf[Sequence]) -> bool:
        """Many more can start soon: better to wait for them than to decode a part of the batch. Not
        for ever: a long prompt takes many forwards.
        """
        if self._waited == PATIENCE:
            return False
        room = min(len(self._waiting), len(self.cache.free))
        coming = sum(len(job.members) for job in self._jobs.values()) + (room if self._jobs else 0)
        return 4 * coming > len(ready)

    def _launch(self, ready: SequenceOf[Sequence], steps: int) -> None:
        slots = np.array([s.slot for s in ready])
        pages = self.cache.pages
        table = pages.table[slots, : int(pages.held[slots].max())]
        cutting = any(cuts(s.request.sampling) for s in ready)
        fields = fields_of(ready, self._records.last(ready))
        self.graphs.launch(fields, table, heats_of(ready), steps, cutting=cutting)

    def _read(self, ready: SequenceOf[Sequence]) -> None:
        """What the burst has drawn, and what was kept where ids were cut away."""
        ids, logprobs = self.graphs.read()
        asked = [r for r, s in enumerate(ready) if s.request.sampling.support and cuts(s.sampling)]
        if asked:
            kept = self.graphs.read_support()
            for row in asked:
                drawn = np.flatnonzero(ids[:, row] >= 0).tolist()
                ready[row].support += [kept(step, row) for step in drawn]
        for sequence, count in zip(ready, (ids >= 0).sum(0).tolist(), strict=True):
            sequence.cached += count
        self._records.note(ready, ids, logprobs, self.version)

    def _draw(
        self, hidden: Tensor, rows: np.ndarray | None, sequences: SequenceOf[Sequence]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each sequence; `rows` says which hidden state is whose."""
        quick = None if self.graphs is None else self.graphs.draw
        logits = self.model.lm_head(hidden)  # type: ignore[operator]
        return draw(logits, rows, sequences, banned=self.banned, quick=quick)

    def _note(self, sequences: SequenceOf[Sequence], ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._records.note(sequences, ids[None], logprobs[None], self.version)

    # -- finishing --

    def _collect_finished(self) -> list[Completion]:
        done, self._aborted = self._aborted, []
        running = [s for s in self._running.values() if s.ready]
        if running:
            ends = np.isin(self._records.last(running), self._eos).tolist()
            for sequence, at_eos in zip(running, ends, strict=True):
                finish = self._finish(sequence, at_eos)
                if finish is not None:
                    done.append(self._complete(sequence, finish))
        return done

    def _finish(self, sequence: Sequence, at_eos: bool) -> str | None:
        sampling = sequence.request.sampling
        if sequence.aborted:
            return "aborted"
        if sampling.stop and self._reaches_stop(sequence, sampling.stop):
            return "stop"
        if at_eos and not sampling.ignore_eos:
            return "stop"
        return "length" if not sequence.remaining else None

    def _reaches_stop(self, sequence: Sequence, stop: tuple[str, ...]) -> bool:
        """Looks at each new token; what was drawn after a stop string is forgotten."""
        # A stop string has at most one token per byte; a few more cover what its first token begins
        # with.
        window = max(len(text.encode()) for text in stop) + 8
        for length in range(sequence.looked + 1, sequence.sampled + 1):
            tail = self._records.of(sequence)[max(0, length - window) : length]
            text = self.family.chat.decode(tail, special=True)
            if any(end in text for end in stop):
                sequence.cached -= sequence.sampled - length
                sequence.sampled = length
                return True
        sequence.looked = sequence.sampled
        return False

    def _complete(self, sequence: Sequence, finish: Any) -> Completion:
        request = sequence.request
        del self._running[request.key]
        completion = self._records.completion(sequence, finish)
        if request.episode and finish != "aborted":
            self._live[request.episode] = Live(
                parked=self.cache.park(sequence.slot),
                ids=np.concatenate([request.ids, completion.ids]),
                media=tuple(span.media.key for span in request.media),
                cached=sequence.cached,
            )
        else:
            self.cache.release(sequence.slot)
        return completion
