"""Weights in shared memory: written once, read by name, compared on both sides."""

import os
from types import SimpleNamespace

import pytest
import torch

from saccade.engines.remote import weights
from saccade.errors import EnvironmentProblem


def test_pieces_hold_every_tensor_bit_by_bit_and_leave_nothing(monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 64)
    tensors = {
        "odd": torch.randn(3).bfloat16(),
        "wide": torch.randn(5, 2),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5),
        "turned": torch.randn(4, 6).T,
        "large": torch.randn(100, dtype=torch.float64),
    }
    source = SimpleNamespace(weights=lambda: iter(tensors.items()))
    before = len(os.listdir("/proc/self/fd"))
    with weights.shared(source, turn=1) as copy:
        assert len(copy.paths) > 2 and copy.checksums.keys() == {"wide"}
        found = {n: t.clone() for n, t in weights.Mapped(copy.paths).weights()}
        weights.require_checksums(found.items(), copy.checksums)
    assert len(os.listdir("/proc/self/fd")) == before
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with pytest.raises(EnvironmentProblem, match="wide"):
        weights.require_checksums((tensors | {"wide": found["wide"] + 1}).items(), copy.checksums)


def test_all_tensors_are_compared_in_turn(changed):
    compared: list[str] = []
    for turn in range(weights.SAMPLED):
        with weights.shared(changed, turn=turn) as copy:
            compared += copy.checksums
    assert sorted(compared) == sorted(name for name, _ in changed.weights())


def test_a_renamed_weight_is_refused_before_anything_moves(load, changed):
    model = load()
    before = {name: p.clone() for name, p in model.named_parameters()}
    names = [name for name, _ in changed.weights()]
    told = {names[3]: "model.drifted.weight"}
    renamed = SimpleNamespace(weights=lambda: ((told.get(n, n), t) for n, t in changed.weights()))
    with pytest.raises(EnvironmentProblem) as error:
        weights.load_by_name(model, renamed)
    assert f"missing: {names[3]};" in str(error.value)
    assert "unexpected: model.drifted.weight" in str(error.value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    weights.load_by_name(model, changed)
    assert all(torch.equal(p, dict(changed.weights())[n]) for n, p in model.named_parameters())
