"""The embedded engine: generates in the trainer's process with the trainer's own weight tensors.

Continuous batching over one paged cache; a prompt that several requests share is computed once, its
images are encoded once, and an episode continues from its cache. On a CPU, and in full precision, a
page holds a whole sequence and the host reads every token. On a GPU in half precision sequences
share small pages, the host reads tokens once in many decode steps, long prompts are prefilled in
pieces, and a sequence that runs out of pages is evicted and recomputed later. Knows nothing of
rewards, environments or training.

    engine = EmbeddedEngine(model, family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.engines import Capabilities, Engine, nonfinite_error, require_room
from saccade.engines.embedded.kv_cache import KVCache, cache_shape
from saccade.engines.embedded.sampling import draw, truncates
from saccade.engines.embedded.scheduler import PREFILL_TOKENS, Scheduler
from saccade.engines.embedded.sequences import Outputs, Part, Sequence
from saccade.forest.attention import blocks_at
from saccade.forest.device_ops import to_device
from saccade.models.families import Family
from saccade.models.heads import language_head
from saccade.models.load import banned_mask, hidden_states
from saccade.types import Completion, MediaSpan, Request


class EmbeddedEngine(Engine):
    def __init__(self, model: nn.Module, family: Family, *, max_sequences: int = 512, check_nan: bool = False) -> None:
        """`check_nan`: raise if log-probs are not finite; off while training, which skips the update instead."""
        self.model, self.family, self.max_sequences = model, family, max_sequences
        self.version, self.check_nan = 0, check_nan
        shape = cache_shape(model, family)
        self.banned = banned_mask(family, shape.device)
        self.cache = KVCache(shape, max_sequences)
        self.outputs = Outputs()
        self.scheduler = Scheduler(family, self.cache, self.outputs, max_sequences)
        self.graphs: Any = None  # None without kernels: then no decode step is captured
        if self.cache.kernels is not None:
            self.projections = self.cache.kernels["projections"](model)
            self.graphs = self.cache.kernels["graphs"](model, family, self.cache, banned=self.banned)

    # -- the protocol --

    def submit(self, request: Request) -> None:
        require_room(request, self.family.max_positions)
        self.scheduler.submit(request)

    def poll(self) -> list[Completion]:
        with torch.inference_mode():
            if self.model.training:  # eval() walks through every module: not at every token
                self.model.eval()
            running = self.scheduler.running.values()
            ready = [s for s in running if s.ready and not s.aborted]
            if self.graphs is None:
                self._poll_step(ready)
            else:
                if not running:  # weights may have changed since the last poll
                    self.projections.refresh()
                with self.projections.joined():
                    self._poll_burst(ready)
        done, self.scheduler.aborted = self.scheduler.aborted, []
        ready = [s for s in self.scheduler.running.values() if s.ready]
        for sequence, finish in self.outputs.ended(ready, self.family.chat):
            done.append(self.outputs.completion(sequence, finish))
            self.scheduler.finish(sequence, done[-1])
        return done

    @property
    def pending(self) -> int:
        return self.scheduler.pending

    def abort(self, key: str) -> None:
        self.scheduler.abort(key)

    def progress(self, key: str) -> np.ndarray:
        sequence = self.scheduler.running.get(key)
        return self.outputs.of(sequence).copy() if sequence else np.zeros(0, np.int64)

    def release(self, episode: str) -> None:
        self.scheduler.prefix_cache.release(episode)

    def update_weights(self, source: Any, version: int) -> None:
        """The tensors are the trainer's own, so nothing is copied."""
        if version != self.version:
            self.scheduler.set_version(version)
        self.version = version
        if self.graphs is not None:
            self.graphs.check_weights()
            self.projections.refresh()

    def sleep(self) -> None:
        assert not self.scheduler.running, "sleep while sequences are running"
        self.scheduler.prefix_cache.drop_all()
        self.scheduler.prefill_tokens = PREFILL_TOKENS
        self.cache.clear()
        self.outputs.clear()

    def capabilities(self) -> Capabilities:
        return Capabilities(support=True, shares_weights=True, live_updates=True)

    # -- a poll --

    def _poll_step(self, ready: SequenceOf[Sequence]) -> None:
        """Prefill, or else draw one token for each sequence."""
        self.scheduler.admit()
        if self.scheduler.jobs:
            self._prefill()
        elif ready:  # in the order of their pages, as they are read
            table = self.cache.pages.table
            ready = sorted(ready, key=lambda s: table[s.slot, 0])
            slots, cached, offsets = np.array([(s.slot, s.cached, s.rope_delta) for s in ready]).T
            positions = np.tile(cached + offsets, (self.family.axes, 1))
            hidden = self._forward(self.outputs.last(ready), positions, slots, cached, np.ones_like(cached))
            self._draw(hidden, None, ready)

    def _poll_burst(self, ready: list[Sequence]) -> None:
        """Draw many tokens for each sequence, and prefill."""
        steps = self.scheduler.allocate_pages(ready, self.graphs.steps)
        self.scheduler.admit()
        decode = self.scheduler.should_decode(ready)
        if decode:  # first: the host prepares prompts while the GPU decodes
            slots, pages = np.array([s.slot for s in ready]), self.cache.pages
            table = pages.table[slots, : int(pages.held[slots].max())]
            self.graphs.launch(ready, self.outputs.last(ready), table, steps)
        if self.scheduler.jobs:
            self._prefill()
        if decode:
            self._read(ready)

    def _prefill(self) -> None:
        """Compute pieces of prompts; members of complete ones draw their first token."""
        batches = [self.scheduler.next_parts()]
        if self.graphs is None:
            # In separate forwards: a turn that continues reads padded pages, which fresh prompts need not.
            batches = [[p for p in batches[0] if bool(p[0].cached) == late] for late in (False, True)]
        for batch in filter(None, batches):
            self._compute(batch)
        started = self.scheduler.start()
        members = [sequence for _, some in started for sequence in some]
        if members:
            hidden = torch.stack([last for last, _ in started])
            rows = np.repeat(np.arange(len(started)), [len(some) for _, some in started])
            self._draw(hidden, rows, members)

    def _compute(self, parts: list[Part]) -> None:
        """Prefill; when out of memory, as two halves, with the same result."""
        try:
            self._compute_parts(parts)
        except torch.OutOfMemoryError:
            halves = self.scheduler.halves(parts)
            if halves is None:
                raise
        else:
            return
        torch.cuda.empty_cache()  # outside the except clause: the error refers to the tensors that filled the memory
        for half in halves:
            self._compute(half)

    def _compute_parts(self, parts: list[Part]) -> None:
        """Compute keys and values into the cache; a complete job gets its last hidden state."""
        cached = np.array([job.cached for job, _ in parts])
        new = np.array([end for _, end in parts]) - cached
        starts = np.concatenate([[0], new.cumsum()]).tolist()
        media = [
            span.moved(start - job.cached)
            for start, (job, end) in zip(starts, parts, strict=False)
            for span in job.members[0].request.media
            if job.cached <= span.start < end
        ]
        ids = np.concatenate([job.ids[job.cached : end] for job, end in parts])
        positions = np.concatenate([job.positions[:, job.cached : end] for job, end in parts], axis=1)
        slots = np.array([job.members[0].slot for job, _ in parts])
        hidden = self._forward(ids, positions, slots, cached, new, media)
        for (job, end), last in zip(parts, starts[1:], strict=True):
            job.cached = end
            if end == len(job.ids):
                job.hidden = hidden[last - 1].clone()

    def _forward(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        cached: np.ndarray,
        new: np.ndarray,
        media: SequenceOf[MediaSpan] = (),
    ) -> Tensor:
        """Hidden states of `new` tokens per sequence in `slots`, after `cached` tokens that are in the cache."""
        device, places, blocks = self.cache.device, None, None
        if media:
            places = to_device(np.concatenate([np.arange(s.start, s.end) for s in media]), device)
            blocks = blocks_at(self.family.blocks, ids, self.family.chat.placeholders)
        plan = self.cache.plan(slots, cached, new, blocks)
        ids_there, positions_there = to_device(ids, device), to_device(positions, device)
        return hidden_states(self.model, self.family, ids_there, positions_there, tuple(media), plan, places=places)

    def _draw(self, hidden: Tensor, rows: np.ndarray | None, sequences: SequenceOf[Sequence]) -> None:
        """Draw the next token of each sequence. `rows`: index of its hidden state; None: in order."""
        quick = None if self.graphs is None else self.graphs.draw
        logits = language_head(self.model)(hidden)
        ids, logprobs = draw(logits, rows, sequences, banned=self.banned, quick=quick)
        self._append(sequences, ids[None], logprobs[None])

    def _read(self, ready: SequenceOf[Sequence]) -> None:
        """Read the tokens of the burst, and the ids that truncated sampling kept."""
        ids, logprobs = self.graphs.read()
        asked = [r for r, s in enumerate(ready) if s.request.sampling.support and truncates(s.sampling)]
        if asked:
            kept = self.graphs.read_support()
            for row in asked:
                drawn = np.flatnonzero(ids[:, row] >= 0).tolist()
                ready[row].support += [kept(line, row) for line in drawn]
        self._append(ready, ids, logprobs)
        if self.cache.states is not None:
            self.scheduler.follow_states(ready, ids >= 0)

    def _append(self, sequences: SequenceOf[Sequence], ids: np.ndarray, logprobs: np.ndarray) -> None:
        if self.check_nan and not np.isfinite(logprobs[ids >= 0]).all():
            raise nonfinite_error(self.model.named_parameters())
        self.outputs.append(sequences, ids, logprobs)
