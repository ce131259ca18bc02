"""Prompts: one forward over the pieces of several jobs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from torch import Tensor, nn

from saccade.attention import AttentionPlan
from saccade.engines.embedded.sequences import Job
from saccade.models.families import Family
from saccade.models.load import hidden_states
from saccade.transfer import to_device
from saccade.types import MediaSpan

Part = tuple[Job, int]  # a job and where its next piece ends


def next_parts(jobs: SequenceOf[Job], budget: int, *, pieces: bool) -> list[Part]:
    """About `budget` tokens. With `pieces` a prompt may be cut, else it is computed whole."""
    parts = []
    for job in jobs:
        if job.left and budget > 0:
            end = job.cut(budget) if pieces else len(job.ids)
            budget -= end - job.cached
            parts.append((job, end))
    return parts


def compute(model: nn.Module, family: Family, cache: Any, parts: SequenceOf[Part]) -> None:
    """Keys and values into the cache; a job that is complete gets its last hidden state."""
    cached = np.array([job.cached for job, _ in parts])
    new = np.array([end for _, end in parts]) - cached
    starts = np.concatenate([[0], new.cumsum()]).tolist()
    media = tuple(
        span.moved(start - job.cached)
        for start, (job, end) in zip(starts, parts, strict=False)
        for span in job.members[0].request.media
        if job.cached <= span.start < end
    )
    hidden = forward(
        model,
        family,
        np.concatenate([job.ids[job.cached : end] for job, end in parts]),
        np.concatenate([job.positions[:, job.cached : end] for job, end in parts], axis=1),
        cache.plan(np.array([job.members[0].slot for job, _ in parts]), cached, new),
        media,
    )
    for (job, end), last in zip(parts, starts[1:], strict=True):
        job.cached = job.members[0].cached = end
        if end == len(job.ids):
            job.hidden = hidden[last - 1].clone()


def forward(
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
        model,
        family,
        to_device(ids, device),
        to_device(positions, device),
        media,
        plan,
        places=places,
    )
