"""A family whose tower also reaches the first decoder layers: vLLM agrees with the trainer."""

import pytest

pytest.importorskip("vllm")
NAME = "qwen3_vl"


def test_it_agrees_before_and_after_weights_went_over(probe):
    found = probe()
    assert found.gap < 1e-4 and found.restored < 1e-4
    assert found.by_weight > 0.01 and found.by_picture > 0.01
