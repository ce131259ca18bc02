"""The parity probe against real vLLM: it passes, and with the caches left alone it says so."""

import pytest

from saccade.errors import EnvironmentProblem

pytest.importorskip("vllm")


def test_it_agrees_before_and_after_weights_went_over(probe):
    found = probe()
    assert found.gap < 1e-4 and found.restored < 1e-4
    assert found.by_weight > 0.01 and found.by_picture > 0.01


def test_caches_that_outlive_the_weights_are_named(engine, probe, monkeypatch):
    monkeypatch.setattr(engine, "_invalidates", False)
    with pytest.raises(EnvironmentProblem, match="encoder or prefix cache is stale"):
        probe()
