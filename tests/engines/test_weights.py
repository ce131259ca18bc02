"""Weights in shared memory and in folders: written once, read by name, compared; what of vLLM needs no vLLM."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from saccade.engines import Settings
from saccade.engines.builders import build
from saccade.errors import EnvironmentProblem, TrainingError
from saccade.plugins.engines import weight_transfer, weights
from saccade.plugins.engines.copy_engine import require_finite
from saccade.plugins.engines.vllm.vllm_probe import probe
from saccade.plugins.engines.vllm.vllm_weights import place_of, sample_for
from saccade.plugins.engines.weights import HandOver


@pytest.fixture
def changed(load):
    """A trainer whose weights are no longer those of the folder."""
    model = load("qwen2_5_vl")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return SimpleNamespace(weights=lambda: iter(model.named_parameters()))


def test_pieces_hold_every_tensor_bit_by_bit_and_are_used_again(monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 64)
    first = {
        "odd": torch.randn(3).bfloat16(), "wide": torch.randn(5, 2), "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5), "turned": torch.randn(4, 6).T, "large": torch.randn(100, dtype=torch.float64),
    }  # fmt: skip
    places = []
    for tensors in (first, {name: tensor + 1 for name, tensor in first.items()}):
        source = SimpleNamespace(weights=tensors.items)
        with weights.shared(source, turn=1) as (offer, checksums), weights.shared(source, turn=1) as (another, _):
            assert len(offer["paths"]) > 2 and checksums.keys() == {"wide"}
            assert not {*offer["paths"]} & {*another["paths"]}  # each has its own as long as it is needed
            found = {n: t.clone() for n, t in weights.Mapped(offer["paths"]).weights()}
        weights.require_checksums(found.items(), checksums)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        with pytest.raises(EnvironmentProblem, match="wide"):
            weights.require_checksums((tensors | {"wide": found["wide"] + 1}).items(), checksums)
        places.append({*offer["paths"], *another["paths"]})
    assert places[0] == places[1]


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
    compared = []
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
    assert weights.checksum(x[1:]) == weights.checksum(x[1:].clone())  # in the middle of a word
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
