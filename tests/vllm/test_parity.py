"""The parity probe against real vLLM: it passes, and with the caches left alone it says so."""

from collections.abc import Callable
from typing import Any

import pytest

from saccade.backends import Scoring
from saccade.engines import parity
from saccade.errors import EnvironmentProblem
from saccade.types import Message, Sample, Sampling

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def probe(engine: Any, backend: Any, image: Callable[..., Any]) -> Callable[[], parity.Parity]:
    shown = ((image(84, 56, 1),), (image(56, 56, 2), image(56, 56, 3)))
    samples = [
        Sample(id=str(n), messages=(Message(role="user", parts=(*media, "what?")),))
        for n, media in enumerate(shown)
    ]

    def score(batches: Any, temperature: float, ban: bool) -> list[Any]:
        scored = backend.logprobs(batches, Scoring(temperature=temperature, ban=ban))
        return [logprobs for logprobs, _ in scored]

    def run() -> parity.Parity:
        return parity.probe(
            engine,
            parity.Trainer(score=score, source=backend, changed=backend.changed),
            backend.family,
            samples,
            sampling=Sampling(temperature=0.8, max_tokens=16),
            limit=1e-4,
            version=0,
        )

    return run


def test_it_agrees_before_and_after_weights_went_over(probe):
    found = probe()
    assert found.gap < 1e-4 and found.restored < 1e-4
    assert found.by_weight > 0.01 and found.by_picture > 0.01


def test_caches_that_outlive_the_weights_are_named(engine, probe, monkeypatch):
    monkeypatch.setattr(engine, "_invalidates", False)
    with pytest.raises(EnvironmentProblem, match="encoder or prefix cache is stale"):
        probe()


def test_and_with_them_emptied_again_it_agrees(probe):
    assert probe().restored < 1e-4
