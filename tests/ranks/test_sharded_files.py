"""What FSDP has sharded over two processes, in both ways to write it, becomes a model folder that answers alike; and a
folder becomes what FSDP reads.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.export.export import _compare, export, export_for
from saccade.plugins.export.sharded_weights import sharded_weights
from tests.ranks.processes import on_ranks


def write(rank: int, folder: Path, path: str) -> None:
    """With the moments of a step, which are no weights."""
    model = load_model(load_family(path), dtype=torch.float32, device=torch.device("cpu"))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    sum(each.sum() for each in model.parameters()).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(7)}, checkpoint_id=folder / "dcp")
    torch.save(model.state_dict(), folder / "verl" / f"model_world_size_2_rank_{rank}.pt")


def test_weights_of_two_ranks_are_joined_and_go_back(tmp_path: Path, family_of: Any) -> None:
    path = Path(family_of("qwen2_5_vl").path)
    (tmp_path / "verl").mkdir()
    on_ranks(write, tmp_path, str(path))
    with pytest.raises(ConfigError, match=r"dcp has no config\.json; give --like MODEL"):
        export(tmp_path / "dcp", tmp_path / "out")
    for name in ("dcp", "verl"):
        _compare(path, export(tmp_path / name, tmp_path / f"{name}-out", like=path), exact=True)
    back = sharded_weights(export_for(path, tmp_path / "back", zero=False))
    there = sharded_weights(tmp_path / "dcp")
    assert back.keys() == there.keys() and all(torch.equal(back[name], there[name]) for name in there)
    (tmp_path / "verl" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(EnvironmentProblem, match=r"1 files model_world_size_\*_rank_\*\.pt of 2 ranks"):
        sharded_weights(tmp_path / "verl")


def test_code_inside_a_description_does_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(exec))
    with pytest.raises(EnvironmentProblem, match=r"asks for builtins\.exec, which no such file needs"):
        sharded_weights(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"cut off")
    with pytest.raises(EnvironmentProblem, match=r"no sharded checkpoint, or not whole"):
        sharded_weights(tmp_path)
