"""Mistakes in functions of users name the function, the reason and the form that works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from saccade.algorithms.advantages import ADVANTAGES, compute
from saccade.algorithms.aggregation import token_scales
from saccade.algorithms.corrections import CORRECTIONS, apply, measure
from saccade.algorithms.policy_losses import KINDS, LOSSES
from saccade.algorithms.table import find
from saccade.errors import ConfigError

MINE = """
import torch
from saccade.algorithms.corrections import Correction

def members(inputs): return inputs.scores
def number(inputs): return 1.0
def nan(inputs): return inputs.per_token(inputs.scores) * float("nan")
def fails(inputs): raise KeyError("gone")
def fine(inputs): return inputs.per_token(inputs.scores)

def mean(new, inputs): return (-inputs.advantages * new).mean(), {}
def bare(new, inputs): return -inputs.advantages * new
def detached(new, inputs): return (-inputs.advantages * new).detach(), {}
def flag(new, inputs): return -inputs.advantages * new, {"half": 0.5}

def one(lengths, trajectory, group): return torch.ones(())
def scalar(new, ref): return (new - ref).mean()
def mask(mismatch): return mismatch.live
def short(mismatch): return Correction(keep=mismatch.live[:2])
"""


@pytest.fixture
def mine(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)

    def entry(axis: str, name: str, table):
        return find(axis, table, f"{file}:{name}")

    return entry


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("members", r"returned a tensor of \[4\], not \[18\]"),
        ("number", "returned a float instead of a tensor"),
        ("nan", "returned numbers that are not finite"),
        ("fails", "raised KeyError: 'gone'"),
    ],
)
def test_an_advantage(golden, mine, name, reason):
    with pytest.raises(ConfigError, match=rf"algorithm.advantage=\S+:{name} {reason}.*f\(inputs\)"):
        compute(mine("advantage", name, ADVANTAGES), golden.members())


def test_one_that_keeps_its_promise_is_left_alone(golden, mine):
    result = compute(mine("advantage", "fine", ADVANTAGES), golden.members())
    assert result.values[0] == 1.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mean", r"a tensor of \[\], not \[18\]"),
        ("bare", "a Tensor instead of a pair"),
        ("detached", "losses without a gradient"),
        ("flag", "a float instead of a tensor as half"),
    ],
)
def test_a_loss(golden, mine, name, reason):
    new = golden.new.clone().requires_grad_()
    with pytest.raises(ConfigError, match=rf"algorithm.policy_loss=\S+:{name} returned {reason}"):
        mine("policy_loss", name, LOSSES).function(new, golden.inputs())


def test_the_other_axes(golden, mine):
    with pytest.raises(ConfigError, match=r"algorithm.kl.kind=\S+ returned a tensor of \[\]"):
        mine("kl.kind", "scalar", KINDS).function(golden.new, golden.ref)
    with pytest.raises(ConfigError, match=r"algorithm.aggregation=\S+ returned a tensor of \[\]"):
        entry = mine("aggregation", "one", {})
        token_scales(entry.function, golden.sequence, live=torch.ones(4, dtype=torch.bool))
    live = torch.ones(18, dtype=torch.bool)
    mismatch = measure(golden.old, golden.rollout, live=live, sequence=golden.sequence)
    for name, reason in (("mask", "instead of a Correction"), ("short", r"\[2\], not \[18\]")):
        with pytest.raises(ConfigError, match=rf"algorithm.correct=\S+:{name} returned.*{reason}"):
            apply([(mine("correct", name, CORRECTIONS), {})], mismatch)


def test_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("def loss(:\n")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported: SyntaxError"):
        find("policy_loss", LOSSES, f"{tmp_path}/broken.py:loss")
