"""What of the vLLM engine needs no vLLM; tests/vllm runs the real one."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from saccade.engines import Settings
from saccade.engines.builders import build
from saccade.errors import EnvironmentProblem, TrainingError
from saccade.plugins.engines.copy_engine import require_finite
from saccade.plugins.engines.vllm.vllm_probe import probe
from saccade.plugins.engines.vllm.vllm_weights import place_of, sample_for
from saccade.plugins.engines.weights import HandOver


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_the_install_line_is_named(family_of):
    family = family_of("qwen2_5_vl")
    assert "pip install" in probe().problem and not probe().device
    with pytest.raises(EnvironmentProblem, match=r"not installed; run: pip install .*saccade\[vllm"):
        build(Settings(engine="vllm", folder=family.path, dtype="float32"), family)


def test_log_probs_that_are_no_numbers_are_refused():
    require_finite(np.array([-1.0, -2.0], np.float32))
    for value in (np.nan, -np.inf):
        with pytest.raises(TrainingError, match=r"not finite; `saccade doctor MODEL` names"):
            require_finite(np.array([-1.0, value], np.float32))


PARAMETERS = {
    "norm.weight": torch.ones(4),
    "a.qkv_proj.weight": torch.arange(8.0)[:, None].expand(8, 3),
    "a.down_proj.weight": torch.empty(0),  # packed elsewhere
}
SHAPES = {
    "norm.weight": (4,), "a.q_proj.weight": (4, 3), "a.k_proj.weight": (2, 3), "a.v_proj.weight": (2, 3),
    "a.down_proj.weight": (3, 3), "other.weight": (1,),
}  # fmt: skip


def test_places_of_tensors_that_keep_their_bytes():
    assert {name: place_of(name, SHAPES, PARAMETERS) for name in SHAPES} == {
        "norm.weight": ("norm.weight", 0, 4), "a.q_proj.weight": ("a.qkv_proj.weight", 0, 4),
        "a.k_proj.weight": ("a.qkv_proj.weight", 4, 2), "a.v_proj.weight": ("a.qkv_proj.weight", 6, 2),
        "a.down_proj.weight": None, "other.weight": None,
    }  # fmt: skip


def test_every_place_comes_round():
    places = {f"{n:02}": (f"{n}", 0, 1) for n in range(40)}
    turns = [set(sample_for(places, turn)) for turn in range(5)]
    assert set().union(*turns) == places.keys() and all(len(turn) == 16 for turn in turns)


def test_names_are_compared_both_ways():
    def handed(**weights):
        shapes = {"a": (2,), "b": (3,), "lm_head.weight": (1,)}
        hand_over = HandOver(weights=weights.items(), shapes=shapes, renamed=lambda name: f"x.{name.lower()}")
        return [name for name, _ in hand_over], hand_over.drift()

    assert handed(A=torch.ones(2), b=torch.ones(3)) == (["a", "b"], "")
    # What is not expected is not handed on.
    assert handed(a=torch.ones(2), c=torch.ones(3)) == (["a"], "missing: b [3]; not expected: c [3]")
