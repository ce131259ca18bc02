"""State in main memory against state beside the parameters: the same bits, in the same files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from saccade.config import TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.plugins.offload import host_state
from saccade.plugins.offload.host_state import SLOTS
from saccade.system.contents import write_files
from saccade.trainer.optimizer import Optimizer
from saccade.trainer.optimizer_files import load_optimizer, optimizer_file

CHUNK = 128
SHAPES = {"matrix": (37, 23), "bias": (7,), "tower": (5, 3, 11), "head": (200,)}  # 851 numbers are in eight chunks
KINDS = pytest.mark.parametrize("kind", ["adamw", "adamw_bf16"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "CHUNK", CHUNK)


def made(kind: str, dtype: torch.dtype, *, offload: bool) -> Optimizer:
    draw = torch.Generator().manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in SHAPES.items()}
    config = TrainConfig.model_validate({"optimizer": kind, "weight_decay": 0.1, "offload": offload})
    return Optimizer(named.items(), config, lr_scale=lambda name: 0.1 if name == "tower" else 1.0)


def train(optimizer: Optimizer, *steps: int) -> None:
    """Every other step has no gradient for the tower, as one without images."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        optimizer.begin()
        optimizer.start_micro_batch()
        used = [p for name, p in optimizer.parameters.items() if name != "tower" or step % 2]
        torch.stack([(p * torch.randn(p.shape, generator=draw).to(p.dtype)).sum() for p in used]).sum().backward()
        optimizer.end_micro_batch()
        optimizer.step(1e-2, norm=optimizer.norm())


def require_equal(one: Optimizer, other: Optimizer) -> None:
    pairs = ((one.parameters, other.parameters), (one.state(), other.state()))
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]) and tensor.shape == theirs[name].shape, name


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_updates_are_equal_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    beside, away = (made(kind, dtype, offload=offload) for offload in (False, True))
    start = away.parameters["matrix"].detach().clone()
    for step in range(5):
        train(beside, step)
        train(away, step)
        require_equal(beside, away)
    assert not torch.equal(start, away.parameters["matrix"])


@KINDS
def test_a_run_goes_on_with_its_state_elsewhere_and_a_copy_stays_as_it_was(kind: str, tmp_path: Path) -> None:
    for offload in (False, True):
        first, second = (made(kind, torch.bfloat16, offload=one) for one in (offload, not offload))
        train(first, 0, 1)
        folder = tmp_path / str(offload)
        now = {name: tensor.clone() for name, tensor in first.state().items()}
        later = [optimizer_file(first, copy=True)]
        write_files(folder, [optimizer_file(first, copy=False)])
        with torch.no_grad():
            for name, parameter in second.parameters.items():
                parameter.copy_(first.parameters[name])
        load_optimizer(second, folder)
        train(first, 2, 3)
        train(second, 2, 3)
        require_equal(first, second)
        write_files(folder / "later", later)
        stored = load_file(folder / "later" / "optimizer.safetensors")
        assert stored.keys() == now.keys() and all(torch.equal(stored[name], now[name]) for name in now)


@KINDS
def test_an_update_has_few_chunks_at_once(kind: str) -> None:
    away = made(kind, torch.bfloat16, offload=True)
    held, gradients = away._rule.held, {name: torch.ones(shape) for name, shape in SHAPES.items()}
    tensors = [state for pieces in held.pieces(gradients) for piece in pieces for state in piece.state.values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert len(storages) == SLOTS * 3 and max(storages.values()) == CHUNK * tensors[0].itemsize
    assert storages.keys().isdisjoint(t.untyped_storage().data_ptr() for t in away.state().values())


def test_too_little_main_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "free_host_bytes", lambda: 1000)
    with pytest.raises(EnvironmentProblem, match=r"takes 16\.9 kB of main memory, and 1\.0 kB are free; try"):
        made("adamw", torch.bfloat16, offload=True)
