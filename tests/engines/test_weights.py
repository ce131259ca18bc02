"""Weights in shared memory and in folders: written once, read by name, compared on both sides."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from saccade.errors import EnvironmentProblem
from saccade.plugins.engines import weight_transfer, weights


@pytest.fixture
def changed(load):
    """A trainer whose weights are no longer those of the folder."""
    model = load("qwen2_5_vl")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return SimpleNamespace(weights=lambda: iter(model.named_parameters()))


def test_pieces_hold_every_tensor_bit_by_bit_and_leave_nothing(monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 64)
    tensors = {
        "odd": torch.randn(3).bfloat16(), "wide": torch.randn(5, 2), "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5), "turned": torch.randn(4, 6).T, "large": torch.randn(100, dtype=torch.float64),
    }  # fmt: skip
    source = SimpleNamespace(weights=lambda: iter(tensors.items()))
    before = len(os.listdir("/proc/self/fd"))
    with weights.shared(source, turn=1) as (offer, checksums):
        paths = offer["paths"]
        assert len(paths) > 2 and checksums.keys() == {"wide"}
        found = {n: t.clone() for n, t in weights.Mapped(paths).weights()}
        weights.require_checksums(found.items(), checksums)
    assert len(os.listdir("/proc/self/fd")) == before
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with pytest.raises(EnvironmentProblem, match="wide"):
        weights.require_checksums((tensors | {"wide": found["wide"] + 1}).items(), checksums)


def test_another_machine_reads_the_pieces_over_the_network(changed, monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 1 << 16)
    with weights.shared(changed, turn=0) as (here, _), weight_transfer.served(here["paths"]) as offer:
        with weight_transfer.opened(offer, "127.0.0.1") as paths:
            assert paths == list(here["paths"])  # on the same machine nothing travels
        monkeypatch.setenv("SACCADE_HOST", "another-machine")
        with weight_transfer.opened(offer, "127.0.0.1") as paths:
            assert len(paths) > 4 and not {*paths} & {*here["paths"]}
            found = {name: tensor.clone() for name, tensor in weights.Mapped(paths).weights()}
        stranger = offer | {"token": "0" * weight_transfer.TOKEN}
        with pytest.raises(ConnectionError, match="weights ended after 0 of"), weight_transfer.opened(stranger):
            pass
    assert all(torch.equal(found.pop(name), tensor) for name, tensor in changed.weights()) and not found


def test_all_tensors_are_compared_in_turn(changed):
    compared: list[str] = []
    for turn in range(weights.SAMPLED):
        with weights.shared(changed, turn=turn) as (_, checksums):
            compared += checksums
    assert sorted(compared) == sorted(name for name, _ in changed.weights())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_checksum_is_of_the_bits_in_their_order(monkeypatch, dtype):
    x = torch.randn(5, 7, dtype=dtype)
    whole = weights.checksum(x)
    monkeypatch.setattr(weights, "CHUNK", 8)
    assert weights.checksum(x) == weights.checksum(x.T.contiguous().T) == whole
    assert weights.checksum(x.flip(0)) != whole != weights.checksum(x.T)
    y = x.clone()
    y[0, 0] = -y[0, 0]
    assert weights.checksum(y) != whole


def test_shapes_come_from_the_headers_of_a_folder(family_of, load, tmp_path):
    shapes = weights.folder_shapes(family_of("qwen3").path)
    assert shapes == {name: tuple(p.shape) for name, p in load("qwen3").named_parameters()}
    with pytest.raises(EnvironmentProblem, match="safetensors"):
        weights.folder_shapes(str(tmp_path))


def test_what_the_index_does_not_name_is_not_of_the_model(tmp_path):
    """Adapters, or the same weights under the names of another library."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"lora": torch.ones(3)}, tmp_path / "adapter_model.safetensors")
    assert weights.folder_shapes(str(tmp_path)) == {"a": (2,)}
    save_file({"b": torch.ones(4)}, tmp_path / "model-2.safetensors")
    save_file({"tok": torch.ones(5)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights.folder_shapes(str(tmp_path)) == {"a": (2,), "b": (4,)}
