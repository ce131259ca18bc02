"""The embedded engine: generates in the trainer's process with the trainer's own weight tensors.

Continuous batching over slots; a prompt that several requests share is computed once, its images
encoded once; a live episode continues from its cache. Needs torch and transformers alone, on a CPU
too. Knows nothing of rewards, environments or training.

    engine = EmbeddedEngine(model, family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.attention import forest_plan
from saccade.engines import Capabilities
from saccade.engines.embedded.cache import Cache, PrefillPlan, extend_plan
from saccade.engines.embedded.sampler import sample
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.models.load import banned_mask, hidden_states
from saccade.types import Completion, Request, Sampling

PREFILL_TOKENS = 16_384  # of one forward
CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.6  # of the memory that is free when the cache grows
NOTHING_CUT = np.empty(0, dtype=np.int64)  # the support of a token drawn from the whole vocabulary


@dataclass(kw_only=True)
class _Sequence:
    """A request while it is in a slot."""

    request: Request
    slot: int
    cached: int  # tokens of it in the cache
    next_position: int = 0  # position id of the next token, minus `cached`
    sampled: int = 0
    aborted: bool = False
    support: list[np.ndarray] = field(default_factory=list)

    @property
    def sampling(self) -> Sampling:
        """Of the next token. The first of an episode may have a temperature and a top_k of its own:
        top_p does not touch it then, and its support stays empty, for the trainer scores it at the
        ordinary temperature, where nothing is cut away.
        """
        sampling = self.request.sampling
        if sampling.first is None or self.request.first_index + self.sampled:
            return sampling
        temperature, top_k = sampling.first
        return replace(sampling, temperature=temperature, top_k=top_k, top_p=1.0, support=False)


@dataclass(frozen=True, kw_only=True)
class _Live:
    """A finished turn whose cache is kept."""

    slot: int
    ids: np.ndarray
    media: tuple[Any, ...]
    cached: int


class EmbeddedEngine:
    def __init__(self, model: nn.Module, family: Family, *, max_sequences: int = 512) -> None:
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
            raise EnvironmentProblem(
                "the embedded engine does not serve models with sliding windows"
            )
        self.model, self.family, self.max_sequences = model, family, max_sequences
        self.version = 0
        self.cache = Cache(model)
        self.banned = banned_mask(family, self.cache.device)
        self._waiting: deque[Request] = deque()
        self._running: dict[str, _Sequence] = {}
        self._live: dict[str, _Live] = {}  # by episode, least recently used first
        self._free: list[int] = []
        self._aborted: list[Completion] = []
        self._eos = np.array(sorted(family.chat.eos_ids), dtype=np.int64)
        self._tokens = np.zeros((0, 0), dtype=np.int64)  # [slots, sampled]
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._versions = np.zeros((0, 0), dtype=np.int32)

    # -- the protocol --

    def submit(self, request: Request) -> None:
        length = len(request.ids) + request.sampling.max_tokens
        if length > self.family.max_positions:
            raise ConfigError(
                f"request {request.key}: {len(request.ids)} prompt tokens + "
                f"{request.sampling.max_tokens} new "
                f"ones exceed the model's {self.family.max_positions} positions; lower "
                "rollout.max_tokens "
                "or data.max_prompt_tokens"
            )
        self._waiting.append(request)

    def poll(self) -> list[Completion]:
        with torch.inference_mode():
            if self.model.training:  # walks through every module: not at every token
                self.model.eval()
            fresh = self._admit()
            if not fresh and self._running:
                self._decode()
        return self._collect_finished()

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._aborted)

    def abort(self, key: str) -> None:
        if key in self._running:
            self._running[key].aborted = True
            return
        waiting = [r for r in self._waiting if r.key == key]
        self._waiting = deque(r for r in self._waiting if r.key != key)
        for request in waiting:  # never computed, so nothing was sampled
            nothing = np.zeros(0)
            self._aborted.append(
                Completion(
                    key=request.key,
                    ids=nothing.astype(np.int64),
                    logprobs=nothing.astype(np.float32),
                    versions=nothing.astype(np.int32),
                    finish="aborted",
                )
            )

    def release(self, episode: str) -> None:
        live = self._live.pop(episode, None)
        if live is not None:
            self._free.append(live.slot)

    def update_weights(self, source: Any, version: int) -> None:
        """The tensors are the trainer's own, so nothing moves; caches of idle episodes belong to
        the old weights.
        """
        if version != self.version:
            for episode in list(self._live):
                self.release(episode)
        self.version = version

    def sleep(self) -> None:
        assert not self._running, "sleep while sequences are running"
        self._live.clear()
        self._free.clear()
        self.cache.clear()
        self._resize_records(0, 0)

    def wake(self) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=True, support=True, shares_weights=True, live_episodes=True)

    # -- admission and prefill --

    def _admit(self) -> bool:
        """Move waiting requests into slots and sample their first token. True when any was
        admitted.
        """
        if not self._waiting:
            return False
        self._make_room()
        prefixes: dict[Any, list[_Sequence]] = {}
        tokens = 0
        while self._waiting and tokens < PREFILL_TOKENS:
            request = self._waiting[0]
            assert request.key not in self._running, f"request {request.key} was submitted twice"
            sequence = self._place(request)
            if sequence is None:
                break
            self._waiting.popleft()
            self._running[request.key] = sequence
            shared = prefixes.setdefault(self._content(sequence), [])
            if not shared:
                tokens += len(request.ids) - sequence.cached
            shared.append(sequence)
        # Apart: what continues reads padded rows of the cache, which fresh prompts need not.
        fresh = [group for group in prefixes.values() if not group[0].cached]
        continued = [group for group in prefixes.values() if group[0].cached]
        for groups in (fresh, continued):
            if groups:
                self._prefill(groups)
        return bool(prefixes)

    def _make_room(self) -> None:
        """Slots for what waits, within the memory that the cache may take."""
        capacity = max(len(r.ids) + r.sampling.max_tokens for r in self._waiting)
        capacity = max(capacity, self.cache.capacity)
        wanted = min(self.max_sequences, self.pending + len(self._live))
        affordable = max(1, self._budget() // self.cache.bytes_per_slot(capacity))
        if self._running:  # what runs keeps its slot
            affordable = max(affordable, self.cache.slots)
        slots = max(self.cache.slots, min(wanted, affordable))
        if slots > self.cache.slots or capacity > self.cache.capacity:
            self._free += range(self.cache.slots, slots)
            self.cache.reserve(slots, capacity)
        longest = max(r.sampling.max_tokens for r in self._waiting)
        self._resize_records(slots, longest)

    def _budget(self) -> int:
        if self.cache.device.type != "cuda":
            return CPU_CACHE_BYTES
        free, _ = torch.cuda.mem_get_info(self.cache.device)
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        mine = self.cache.bytes_per_slot(self.cache.capacity) * self.cache.slots
        return int(GPU_CACHE_SHARE * (free + unused + mine))

    def _resize_records(self, slots: int, longest: int) -> None:
        if slots == 0 or slots > self._tokens.shape[0] or longest > self._tokens.shape[1]:
            for name in ("_tokens", "_logprobs", "_versions"):
                old = getattr(self, name)
                new = np.zeros((slots, max(longest, old.shape[1]) if slots else 0), dtype=old.dtype)
                if slots:
                    new[: old.shape[0], : old.shape[1]] = old
                setattr(self, name, new)

    def _place(self, request: Request) -> _Sequence | None:
        live = self._live.get(request.episode) if request.episode else None
        if live is not None and _extends(request, live):
            del self._live[request.episode]  # type: ignore[arg-type]
            return _Sequence(request=request, slot=live.slot, cached=live.cached)
        if live is not None:
            self.release(request.episode)  # type: ignore[arg-type]
        if not self._free and self._live:
            self.release(next(iter(self._live)))  # it will be computed again when its turn comes
        if not self._free:
            return None
        # The lowest slot first: decoding reads every slot up to the highest busy one.
        slot = min(self._free)
        self._free.remove(slot)
        return _Sequence(request=request, slot=slot, cached=0)

    @staticmethod
    def _content(sequence: _Sequence) -> Any:
        """What must be equal for two sequences to share a prefill."""
        if sequence.cached:
            return sequence.request.key
        media = tuple((span.start, span.media.key) for span in sequence.request.media)
        return (sequence.request.ids.tobytes(), media)

    def _prefill(self, groups: Sequence[list[_Sequence]]) -> None:
        """One computation per distinct prompt; the others of a group copy its cache. All fresh, or
        all continued.
        """
        leaders = [group[0] for group in groups]
        slots = np.array([s.slot for s in leaders])
        cached = np.array([s.cached for s in leaders])
        new = np.array([len(s.request.ids) for s in leaders]) - cached
        ids = np.concatenate([s.request.ids[s.cached :] for s in leaders])
        places = [self.family.positions(len(s.request.ids), s.request.media) for s in leaders]
        ahead = [int(p[:, -1].max()) + 1 - p.shape[1] for p in places]
        places = [p[:, s.cached :] for p, s in zip(places, leaders, strict=True)]
        media = tuple(span for s in leaders for span in s.request.media if span.start >= s.cached)
        starts = np.concatenate([[0], new.cumsum()])
        if cached.any():
            plan: Any = extend_plan(self.cache, slots, cached, new)
        else:
            plan = PrefillPlan(
                cache=self.cache,
                inner=forest_plan(
                    starts, np.full(len(new), -1), self.cache.device, self.cache.dtype
                ),
                slots=self._tensor(np.repeat(slots, new)),
                places=self._tensor(np.concatenate([np.arange(n) for n in new])),
            )
        hidden = self._forward(ids, np.concatenate(places, axis=1), media, plan)
        logits = self.model.lm_head(hidden[self._tensor(starts[1:] - 1)])  # type: ignore[operator]
        pairs = [(group[0].slot, s.slot) for group in groups for s in group[1:]]
        if pairs:  # what lies behind a shorter prompt is copied too, and never read
            source, target = zip(*pairs, strict=True)
            self.cache.copy_prefix(source, target, int((cached + new).max()))
        for group, length, position in zip(groups, (cached + new).tolist(), ahead, strict=True):
            for sequence in group:
                sequence.cached, sequence.next_position = length, position
        rows = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self._sample(logits[self._tensor(rows)], [s for group in groups for s in group])

    # -- decoding --

    def _decode(self) -> None:
        sequences = sorted(self._running.values(), key=lambda s: s.slot)
        slots = np.array([s.slot for s in sequences])
        cached = np.array([s.cached for s in sequences])
        sampled = np.array([s.sampled for s in sequences])
        ids = self._tokens[slots, sampled - 1]
        position = cached + np.array([s.next_position for s in sequences])
        positions = np.tile(position, (self.family.axes, 1))
        plan = extend_plan(self.cache, slots, cached, np.ones(len(slots), dtype=np.int64))
        hidden = self._forward(ids, positions, (), plan)
        for sequence in sequences:
            sequence.cached += 1
        self._sample(self.model.lm_head(hidden), sequences)  # type: ignore[operator]

    def _forward(self, ids: np.ndarray, positions: np.ndarray, media: Any, plan: Any) -> Tensor:
        return hidden_states(
            self.model,
            self.family,
            self._tensor(ids),
            self._tensor(np.ascontiguousarray(positions)),
            media,
            plan,
        )

    def _sample(self, logits: Tensor, sequences: Sequence[_Sequence]) -> None:
        for sampling, rows in _by_sampling(sequences):
            members = [sequences[row] for row in rows]
            keys = np.array([s.request.noise for s in members], dtype=np.int64)
            index = np.array([s.request.first_index + s.sampled for s in members], dtype=np.int64)
            everyone = len(rows) == len(sequences)
            drawn = sample(
                logits if everyone else logits[self._tensor(np.array(rows))],
                sampling,
                banned=self.banned,
                keys=self._tensor(keys),
                index=self._tensor(index),
            )
            slots = np.array([s.slot for s in members])
            places = np.array([s.sampled for s in members])
            self._tokens[slots, places] = drawn.ids.cpu().numpy()
            self._logprobs[slots, places] = drawn.logprobs.cpu().numpy()
            self._versions[slots, places] = self.version
            read = sampling.support and drawn.kept is not None
            kept = drawn.kept.cpu().numpy() if read else None  # type: ignore[union-attr]
            for row, sequence in enumerate(members):
                sequence.sampled += 1
                if kept is not None:
                    sequence.support.append(np.flatnonzero(kept[row]))
                elif _returns_support(sequence.request.sampling):
                    sequence.support.append(NOTHING_CUT)

    # -- finishing --

    def _collect_finished(self) -> list[Completion]:
        done, self._aborted = self._aborted, []
        running = list(self._running.values())
        if running:
            last = self._tokens[[s.slot for s in running], [s.sampled - 1 for s in running]]
            for sequence, at_eos in zip(running, np.isin(last, self._eos).tolist(), strict=True):
                finish = self._finish(sequence, at_eos)
                if finish is not None:
                    done.append(self._complete(sequence, finish))
        return done

    def _finish(self, sequence: _Sequence, at_eos: bool) -> str | None:
        sampling = sequence.request.sampling
        if sequence.aborted:
            return "aborted"
        if at_eos and not sampling.ignore_eos:
            return "stop"
        if sampling.stop and self._ends_with_stop(sequence, sampling.stop):
            return "stop"
        return "length" if sequence.sampled >= sampling.max_tokens else None

    def _ends_with_stop(self, sequence: _Sequence, stop: tuple[str, ...]) -> bool:
        # A stop string has at most one token per byte; a few more cover what its first token begins
        # with.
        window = max(len(text.encode()) for text in stop) + 8
        first = max(0, sequence.sampled - window)
        tail = self.family.chat.decode(
            self._tokens[sequence.slot, first : sequence.sampled], special=True
        )
        return any(text in tail for text in stop)

    def _complete(self, sequence: _Sequence, finish: Any) -> Completion:
        request, slot, n = sequence.request, sequence.slot, sequence.sampled
        del self._running[request.key]
        completion = Completion(
            key=request.key,
            ids=self._tokens[slot, :n].copy(),
            logprobs=self._logprobs[slot, :n].copy(),
            versions=self._versions[slot, :n].copy(),
            finish=finish,
            support=tuple(sequence.support) or None,
        )
        if request.episode and finish != "aborted":
            ids = np.concatenate([request.ids, completion.ids])
            media = tuple(span.media.key for span in request.media)
            self._live[request.episode] = _Live(
                slot=slot, ids=ids, media=media, cached=sequence.cached
            )
        else:
            self._free.append(slot)
        return completion

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.cache.device)


def _extends(request: Request, live: _Live) -> bool:
    """The request continues exactly what the slot holds; media inside the cached part are the same
    ones.
    """
    n = live.cached
    media = tuple(span.media.key for span in request.media)
    return (
        len(request.ids) > n
        and np.array_equal(request.ids[:n], live.ids[:n])
        and media[: len(live.media)] == live.media
    )


def _by_sampling(sequences: Sequence[_Sequence]) -> list[tuple[Sampling, list[int]]]:
    groups: dict[Sampling, list[int]] = {}
    for row, sequence in enumerate(sequences):
        groups.setdefault(sequence.sampling, []).append(row)
    return list(groups.items())


def _returns_support(sampling: Sampling) -> bool:
    return sampling.support and sampling.truncated and sampling.temperature > 0
