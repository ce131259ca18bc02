"""Forwards of the embedded engine: over pieces of several prompts, or a token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from torch import Tensor, nn

from saccade.engines.embedded.kv_cache import KVCache
from saccade.engines.embedded.sequences import Part, Sequence
from saccade.forest.attention import AttentionPlan
from saccade.forest.to_device import to_device
from saccade.models.families import Family
from saccade.models.load import hidden_states
from saccade.types import MediaSpan


def prefill(model: nn.Module, family: Family, cache: KVCache, parts: SequenceOf[Part]) -> None:
    """Compute keys and values into the cache; a complete job gets its last hidden state."""
    cached = np.array([job.cached for job, _ in parts])
    new = np.array([end for _, end in parts]) - cached
    starts = np.concatenate([[0], new.cumsum()]).tolist()
    media = tuple(
        span.moved(start - job.cached)
        for start, (job, end) in zip(starts, parts, strict=False)
        for span in job.members[0].request.media
        if job.cached <= span.start < end
    )
    hidden = _forward(
        model,
        family,
        np.concatenate([job.ids[job.cached : end] for job, end in parts]),
        np.concatenate([job.positions[:, job.cached : end] for job, end in parts], axis=1),
        cache.plan(np.array([job.members[0].slot for job, _ in parts]), cached, new),
        media,
    )
    for (job, end), last in zip(parts, starts[1:], strict=True):
        job.cached = end
        if end == len(job.ids):
            job.hidden = hidden[last - 1].clone()


def step(model: nn.Module, family: Family, cache: KVCache, ready: SequenceOf[Sequence], last: np.ndarray) -> Tensor:
    """Compute the tokens drawn `last` into the cache. Returns hidden states for the next draw."""
    slots = np.array([s.slot for s in ready])
    cached = np.array([s.cached for s in ready])
    positions = np.tile(cached + np.array([s.ahead for s in ready]), (family.axes, 1))
    plan = cache.plan(slots, cached, np.ones(len(slots), dtype=np.int64))
    return _forward(model, family, last, positions, plan)


def _forward(
    model: nn.Module,
    family: Family,
    ids: np.ndarray,
    positions: np.ndarray,
    plan: AttentionPlan,
    media: SequenceOf[MediaSpan] = (),
) -> Tensor:
    device = next(model.parameters()).device
    places = None
    if media:
        places = to_device(np.concatenate([np.arange(s.start, s.end) for s in media]), device)
    return hidden_states(
        model, family, to_device(ids, device), to_device(positions, device), media, plan, places=places
    )
