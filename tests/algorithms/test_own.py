"""Mistakes in functions of users name the function, the reason and the form that works."""

from pathlib import Path

import pytest
import torch

from saccade.algorithms.advantages import compute
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

    def entry(axis: str, name: str):
        return find(axis, {}, f"{file}:{name}")

    return entry


@pytest.mark.parametrize(
    ("axis", "name", "reason"),
    [
        ("advantage", "members", r"returned a tensor of \[4\], not \[18\].*f\(inputs\)"),
        ("advantage", "number", "returned a float instead of a tensor"),
        ("advantage", "nan", "returned numbers that are not finite"),
        ("advantage", "fails", "raised KeyError: 'gone'"),
        ("policy_loss", "mean", r"returned a tensor of \[\], not \[18\]"),
        ("policy_loss", "bare", "returned a Tensor instead of a pair"),
        ("policy_loss", "detached", "returned losses without a gradient"),
        ("policy_loss", "flag", "returned a float instead of a tensor as half"),
        ("kl.kind", "scalar", r"returned a tensor of \[\]"),
        ("aggregation", "one", r"returned a tensor of \[\]"),
        ("correct", "mask", "returned a Tensor instead of a Correction"),
        ("correct", "short", r"returned a tensor of \[2\], not \[18\] as keep"),
    ],
)
def test_a_mistake(golden, mine, axis, name, reason):
    new = golden.new.clone().requires_grad_()
    arguments = {
        "advantage": (golden.members(),),
        "policy_loss": (new, golden.inputs()),
        "kl.kind": (new, golden.ref),
        "aggregation": (torch.tensor([6, 4, 5, 3]), None, None),
        "correct": (golden.mismatch,),
    }
    with pytest.raises(ConfigError, match=rf"algorithm.{axis}=\S+:{name} {reason}"):
        mine(axis, name)(*arguments[axis])
    assert compute(mine("advantage", "fine"), golden.members()).values[0] == 1.0  # left alone


def test_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("def loss(:\n")
    with pytest.raises(ConfigError, match=r"broken.py raised SyntaxError"):
        find("policy_loss", {}, f"{tmp_path}/broken.py:loss")


def test_an_argument_is_that_of_one_function(tmp_path, algorithm, refused):
    file = tmp_path / "kl.py"
    file.write_text("def far(new, ref, *, delta=0.5): return (new - ref) * delta\n")
    own = (f"kl.kind={file}:far", "kl.coef=0.01")
    assert algorithm(*own).divergence.options == {"delta": 0.5}
    assert f"algorithm.args.delta: policy_loss=clip and kl.kind={file}:far read it" in refused("args.delta=4", *own)
