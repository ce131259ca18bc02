"""The parity probe of a run: before step 1, whenever the engine has weights of its own.

metrics = check(config, engine, policy, data.samples, version=0)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

import numpy as np

from saccade.config import Config
from saccade.engines import Engine, parity
from saccade.recipes.parts import rollout_sampling
from saccade.run.quarantine import decode_error
from saccade.trainer import Scoring
from saccade.trainer.local import LocalBackend
from saccade.types import Batch, Sample

log = logging.getLogger(__name__)

LOOKED_AT = 256  # rows among which prompts with pictures are searched


def check(
    config: Config, engine: Engine, policy: LocalBackend, samples: Sequence[Sample], *, version: int
) -> dict[str, float]:
    """Metrics of the comparison, which is also logged in one line; a difference stops the run."""
    found = compare(config, engine, policy, samples, version=version)
    log.info(str(found))
    return found.metrics()


def compare(
    config: Config, engine: Engine, policy: LocalBackend, samples: Sequence[Sample], *, version: int
) -> parity.Parity:
    def score(batches: Sequence[Batch], temperature: float, ban: bool) -> list[np.ndarray]:
        scored = policy.logprobs(batches, Scoring(temperature=temperature, ban=ban))
        return [logprobs for logprobs, _ in scored]

    with_pictures = sorted(samples[:LOOKED_AT], key=lambda sample: not sample.media)
    dtype = str(policy.dtype).removeprefix("torch.")
    return parity.probe(
        engine,
        parity.Trainer(score=score, source=policy, changed=policy.changed),
        policy.family,
        [*islice((s for s in with_pictures if decode_error(s) is None), parity.PROMPTS)],
        sampling=rollout_sampling(config),
        limit=config.rollout.parity_max or parity.LIMITS[dtype],
        version=version,
        copies=max(1, config.rollout.replicas),
    )
