"""Which layers recompute: the plan alone; tests/gpu measures with it."""

import pytest
import torch

from saccade.trainer import checkpointing
from saccade.trainer.checkpointing import Recompute

GIB = 2**30


@pytest.fixture
def plan(load, monkeypatch):
    """As if on a GPU, per 1,000 tokens: 2 vision layers of 2 GiB, 2 text layers of 1 GiB, 3 GiB beside them."""
    made = Recompute(load("qwen2_5_vl"), True)
    made.planned, made.overhead = True, (3 * GIB, 1000, 1000)
    vision, text = made.kinds
    vision.kept, vision.tokens, vision.of_media = 2 * GIB, 1000, True
    text.kept, text.tokens = 1 * GIB, 1000

    def choose(room: float, tokens: int, media_tokens: int) -> list[bool]:
        monkeypatch.setattr(checkpointing, "total_bytes", lambda *_: 0)  # no margin
        monkeypatch.setattr(checkpointing, "free_gpu_bytes", lambda *_: room * GIB)
        made.choose(tokens, media_tokens)
        return [not layer.gradient_checkpointing for kind in made.kinds for layer in kind.layers]

    return made, choose


def test_the_last_layers_keep_what_fits(plan):
    made, choose = plan
    assert choose(3.0, 1000, 1000) == [False] * 4
    assert choose(4.5, 1000, 1000) == [False, False, False, True]
    assert choose(5.5, 1000, 1000) == [False, False, True, True]
    assert choose(7.5, 1000, 1000) == [False, True, True, True]
    assert choose(10.0, 1000, 1000) == [True] * 4 and made.spare == GIB
    assert choose(0.1, 1000, 1000) == [False] * 4 and made.spare == 0


def test_costs_grow_with_the_micro_batch(plan):
    made, choose = plan
    assert choose(4.5, 500, 0) == [True] * 4  # 3 + 2 · 0.5, and no media
    assert choose(9.9, 2000, 0) == [True, True, False, True]  # 2 · 3 + 2 · 2 is too much
    assert made.keeping == 3
    made.choose(10, 0, cautious=True)
    assert made.keeping == 0


def test_a_first_micro_batch_that_failed_is_measured_again(plan, monkeypatch):
    """Its layers were seen in the forward, its peak was not."""
    made, choose = plan
    made.overhead = (0, 1, 1)
    measured = {"memory_allocated": 0, "reset_peak_memory_stats": None, "max_memory_allocated": 3 * GIB}
    for name, value in measured.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    choose(10.0, 1000, 1000)
    made.after_oom()
    assert made.margin == pytest.approx(checkpointing.MARGIN + 0.03)
    made.choose(1000, 1000, cautious=True)
    made.after_backward()
    assert made.overhead == (0, 1, 1)
    choose(10.0, 1000, 1000)
    made.after_backward()
    assert made.overhead == (3 * GIB, 1000, 1000)
    assert choose(10.0, 1000, 1000) == [True] * 4


@pytest.mark.parametrize(("wanted", "keeping"), [("auto", 4), (False, 4), (True, 0)])
def test_without_a_gpu_nothing_is_planned(load, wanted, keeping):
    model = load("qwen2_5_vl")
    recompute = Recompute(model, wanted)
    recompute.choose(10_000_000, 0)
    recompute.after_backward()
    assert recompute.keeping == keeping and recompute.spare == 0
    assert model.is_gradient_checkpointing is (wanted is True)
    assert not torch.cuda.is_initialized()
