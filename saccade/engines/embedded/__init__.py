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

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.engines import Capabilities
from saccade.engines.embedded.cache import Cache, Shape, can_page, shape_of
from saccade.engines.embedded.drawing import draw
from saccade.engines.embedded.forward import compute, step
from saccade.engines.embedded.records import Records
from saccade.engines.embedded.rows import fields_of, heats_of
from saccade.engines.embedded.scheduler import PREFILL_TOKENS, Scheduler
from saccade.engines.embedded.sequences import Part, Sequence, cuts
from saccade.engines.requests import require_room
from saccade.engines.weights import not_finite
from saccade.errors import EnvironmentProblem
from saccade.models.families import Family
from saccade.models.load import banned_mask
from saccade.types import Completion, Request


class EmbeddedEngine:
    def __init__(
        self, model: nn.Module, family: Family, *, max_sequences: int = 512, finite: bool = False
    ) -> None:
        """`finite`: log-probs that are not are an error; a trainer skips its update instead."""
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        kinds = getattr(text, "layer_types", None)
        everywhere = kinds is None and getattr(text, "sliding_window", None)
        if everywhere or "sliding_attention" in (kinds or ()):
            raise EnvironmentProblem(
                "the embedded engine does not serve models with sliding windows"
            )
        self.model, self.family, self.max_sequences = model, family, max_sequences
        self.version, self.finite = 0, finite
        shape = shape_of(model)
        self.banned = banned_mask(family, shape.device)
        self.cache: Any = Cache(shape)
        self.graphs: Any = None
        if can_page(shape):
            self._use_pages(shape)
        self.records = Records()
        self.scheduler = Scheduler(family, self.cache, self.records, max_sequences)

    def _use_pages(self, shape: Shape) -> None:
        from saccade.engines.embedded.graphs import Graphs
        from saccade.engines.embedded.paged import PagedCache
        from saccade.engines.embedded.projections import Projections

        self.projections = Projections(self.model)
        self.cache = PagedCache(shape, self.max_sequences)
        eos = np.array(sorted(self.family.chat.eos_ids), dtype=np.int64)
        self.graphs = Graphs(self.model, self.family, self.cache, banned=self.banned, eos=eos)

    # -- the protocol --

    def submit(self, request: Request) -> None:
        require_room(request, self.family.max_positions)
        self.scheduler.submit(request, self.version)

    def poll(self) -> list[Completion]:
        with torch.inference_mode():
            if self.model.training:  # walks through every module: not at every token
                self.model.eval()
            running = self.scheduler.running.values()
            ready = [s for s in running if s.ready and not s.aborted]
            if self.cache.paged:
                if not running:  # weights may have changed since
                    self.projections.refresh()
                with self.projections.joined():
                    self._poll_pages(ready)
            else:
                self._poll_slots(ready)
        return self._collect_finished()

    @property
    def pending(self) -> int:
        return self.scheduler.pending

    def abort(self, key: str) -> None:
        self.scheduler.abort(key)

    def progress(self, key: str) -> np.ndarray:
        sequence = self.scheduler.running.get(key)
        return self.records.of(sequence).copy() if sequence else np.zeros(0, np.int64)

    def release(self, episode: str) -> None:
        self.scheduler.kept.release(episode)

    def update_weights(self, source: Any, version: int) -> None:
        """The tensors are the trainer's own, so nothing moves."""
        if version != self.version:
            self.scheduler.renew(version)
        self.version = version
        if self.graphs is not None:
            self.graphs.check_weights()
            self.projections.refresh()

    def sleep(self) -> None:
        assert not self.scheduler.running, "sleep while sequences are running"
        self.scheduler.kept.clear()
        self.scheduler.prefill_tokens = PREFILL_TOKENS
        self.cache.clear()
        self.records.clear()

    def wake(self) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=True, support=True, shares_weights=True, live_episodes=True)

    def close(self) -> None:
        pass

    # -- a poll --

    def _poll_slots(self, ready: SequenceOf[Sequence]) -> None:
        """A forward over prompts, or else one token for each."""
        self.scheduler.admit()
        if self.scheduler.jobs:
            self._prefill()
        elif ready:
            ready = sorted(ready, key=lambda s: s.slot)
            last = self.records.last(ready)
            self._draw(step(self.model, self.family, self.cache, ready, last), None, ready)

    def _poll_pages(self, ready: list[Sequence]) -> None:
        """Many tokens for each, and a forward over prompts."""
        steps = self.scheduler.secure(ready, self.graphs.steps)
        self.scheduler.admit()
        decode = self.scheduler.decodes(ready)
        if decode:  # first: the host prepares prompts while the GPU decodes
            self._launch(ready, steps)
        if self.scheduler.jobs:
            self._prefill()
        if decode:
            self._read(ready)

    def _prefill(self) -> None:
        """Compute pieces of prompts; who begins with a complete one draws its first token."""
        batches = [self.scheduler.next_parts()]
        if not self.cache.paged:
            # Apart: what continues reads padded rows of the cache, which fresh prompts need not.
            batches = [
                [p for p in batches[0] if bool(p[0].cached) == late] for late in (False, True)
            ]
        for batch in filter(None, batches):
            self._compute(batch)
        started = self.scheduler.start()
        members = [sequence for _, some in started for sequence in some]
        if members:
            hidden = torch.stack([last for last, _ in started])
            rows = np.repeat(np.arange(len(started)), [len(some) for _, some in started])
            self._draw(hidden, rows, members)

    def _compute(self, parts: list[Part]) -> None:
        """Out of memory: as two halves, which give the same."""
        try:
            compute(self.model, self.family, self.cache, parts)
        except torch.OutOfMemoryError:
            halves = self.scheduler.halves(parts)
            if halves is None:
                raise
        else:
            return
        torch.cuda.empty_cache()  # outside of the error, which holds what filled the memory
        for half in halves:
            self._compute(half)

    def _draw(
        self, hidden: Tensor, rows: np.ndarray | None, sequences: SequenceOf[Sequence]
    ) -> None:
        """The next token of each sequence; `rows` says which hidden state is whose."""
        quick = None if self.graphs is None else self.graphs.draw
        logits = self.model.lm_head(hidden)  # type: ignore[operator]
        ids, logprobs = draw(logits, rows, sequences, banned=self.banned, quick=quick)
        self._note(sequences, ids[None], logprobs[None])

    def _launch(self, ready: SequenceOf[Sequence], steps: int) -> None:
        slots = np.array([s.slot for s in ready])
        pages = self.cache.pages
        table = pages.table[slots, : int(pages.held[slots].max())]
        cutting = any(cuts(s.request.sampling) for s in ready)
        fields = fields_of(ready, self.records.last(ready))
        self.graphs.launch(fields, table, heats_of(ready), steps, cutting=cutting)

    def _read(self, ready: SequenceOf[Sequence]) -> None:
        """What the burst has drawn, and what was kept where ids were cut away."""
        ids, logprobs = self.graphs.read()
        asked = [r for r, s in enumerate(ready) if s.request.sampling.support and cuts(s.sampling)]
        if asked:
            kept = self.graphs.read_support()
            for row in asked:
                drawn = np.flatnonzero(ids[:, row] >= 0).tolist()
                ready[row].support += [kept(look, row) for look in drawn]
        for sequence, count in zip(ready, (ids >= 0).sum(0).tolist(), strict=True):
            sequence.cached += count
        self._note(ready, ids, logprobs)

    def _note(self, sequences: SequenceOf[Sequence], ids: np.ndarray, logprobs: np.ndarray) -> None:
        if self.finite and not np.isfinite(logprobs[ids >= 0]).all():
            raise not_finite(self.model.named_parameters())
        self.records.note(sequences, ids, logprobs, self.version)

    def _collect_finished(self) -> list[Completion]:
        done, self.scheduler.aborted = self.scheduler.aborted, []
        ready = [s for s in self.scheduler.running.values() if s.ready]
        for sequence, finish in self.records.ended(ready, self.family.chat):
            done.append(self.records.completion(sequence, finish))
            self.scheduler.leave(sequence, done[-1])
        return done
