"""A checkpoint of DeepSpeed's ZeRO, written here as its stages lay it out for two ranks, becomes a model folder."""

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from saccade.cli import app
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.export.export import _compare, export, export_for
from saccade.plugins.export.zero_weights import zero_weights

RANKS = 2


def write(folder: Path, stage: int, weights: dict[str, Tensor], frozen: set[str]) -> None:
    """Two groups of trained weights; ranks pad what they have to equal lengths."""
    trained = {name: tensor for name, tensor in weights.items() if name not in frozen}
    groups = [{n: t for n, t in trained.items() if (t.ndim > 1) == matrices} for matrices in (True, False)]
    if stage == 3:
        cut = {name: parts(tensor, RANKS) for name, tensor in weights.items()}
        masters = [[torch.cat([cut[name][rank] for name in group]) for group in groups] for rank in range(RANKS)]
        fragments = [{name: cut[name][rank] for name in frozen} for rank in range(RANKS)]
    else:
        flat = [parts(torch.cat([t.view(-1) for t in group.values()]), RANKS, 2 * RANKS) for group in groups]
        masters, fragments = (
            [[group[rank] for group in flat] for rank in range(RANKS)],
            [{n: weights[n] for n in frozen}],
        )
    for rank, mine in enumerate(fragments):
        described = {
            "module": {n: t if n in frozen else t.bfloat16() for n, t in weights.items()}
            | {"tied": weights["model.norm.weight"]},
            "buffer_names": [],
            "param_shapes": [OrderedDict((n, t.shape) for n, t in group.items()) for group in groups],
            "frozen_param_shapes": mine and {name: weights[name].shape for name in frozen},
            "frozen_param_fragments": mine,
            "shared_params": {"tied": "model.norm.weight"},
        }
        torch.save(described, folder / f"{f'zero_pp_rank_{rank}_' * (stage == 3)}mp_rank_00_model_states.pt")
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank, held in enumerate(masters):
        state = {"zero_stage": stage, "partition_count": RANKS if stage == 3 else [RANKS] * 2, name: held}
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def parts(tensor: Tensor, count: int, multiple: int = RANKS) -> list[Tensor]:
    flat = tensor.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % multiple)])
    return [part.clone() for part in padded.chunk(count)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_of_every_stage_are_joined(tmp_path: Path, family_of: Any, tensors: Any, stage: int) -> None:
    path = Path(family_of("qwen3").path)
    given = tensors(path)
    frozen = {name for name in given if "layers.0.mlp" in name}
    (zero := tmp_path / "checkpoint" / "global_step7").mkdir(parents=True)
    (zero.parent / "latest").write_text("global_step7")
    write(zero, stage, given, frozen)
    with pytest.raises(ConfigError, match=r"has no config\.json; give --like MODEL"):
        export(zero.parent, tmp_path / "out")
    written = tensors(export(zero.parent, tmp_path / "out", like=path))
    assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)
    (zero / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(EnvironmentProblem, match=r"1 files \*_optim_states\.pt of 2 ranks"):
        zero_weights(zero)


DEEPSPEED = """
import saccade.models, sys, torch, deepspeed, transformers
path, folder, stage, half = sys.argv[1], sys.argv[2], int(sys.argv[3]), torch.bfloat16
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=half)
given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
torch.nn.init.zeros_(model.model.norm.weight)
options = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options, dist_init_required=True)
assert engine.load_checkpoint(folder, load_module_only=True)[0]
for _ in range(2):  # after a step the weights are those of the optimizer
    assert all(torch.equal(tensor, given[name]) for name, tensor in engine.module.state_dict().items())
    engine.backward(engine(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
    engine.step()
engine.save_checkpoint(folder + "/again")
"""


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio"])
def test_a_model_goes_to_deepspeed_and_comes_back(tmp_path: Path, family_of: Any, stock: Any, name: str) -> None:
    path, there = Path(family_of(name).path), tmp_path / "there"
    command = ["export", str(path), "--out", str(there), "--zero"]
    assert CliRunner().invoke(app, [*command, "--dcp"]).exit_code == 2
    refused = CliRunner().invoke(app, [*command, "--like", str(path), "--no-verify"])
    assert refused.exit_code == 2 and "leave out --like and --no-verify" in refused.output and not there.exists()
    assert CliRunner().invoke(app, command).exit_code == 0
    state = torch.load(there / (there / "latest").read_text() / "mp_rank_00_model_states.pt", weights_only=True)
    assert state["dp_world_size"] == 1  # this and `module` are what `load_checkpoint(…, load_module_only=True)` reads
    given = stock(name).state_dict()
    assert state["module"].keys() == given.keys() and all(torch.equal(state["module"][n], given[n]) for n in given)
    _compare(path, export(there, tmp_path / "back"), exact=True)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_loads_what_was_written_for_it(tmp_path: Path, family_of: Any, stage: int) -> None:
    pytest.importorskip("deepspeed")
    path = family_of("qwen3").path
    folder = export_for(path, tmp_path / "zero", zero=True, dtype="bfloat16")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | alone | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    run = [sys.executable, "-c", DEEPSPEED, str(path), str(folder), str(stage)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    _compare(
        export(path, tmp_path / "half", "bfloat16"), export(folder / "again", tmp_path / "back", like=path), exact=True
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_of_a_pipeline_are_refused(tmp_path: Path, stage: int) -> None:
    """Their weights are in files of layers, and the model's file has none."""
    shapes = [{"weight": torch.Size([2])}] if stage else None
    torch.save({"module": None, "param_shapes": shapes}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(EnvironmentProblem, match=r"pipeline stages are not read; use DeepSpeed's ds_to_universal"):
        zero_weights(tmp_path)


def test_code_inside_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    for kind in ("model", "optim"):
        torch.save({"optimizer_state_dict": Path("x")}, tmp_path / f"mp_rank_00_{kind}_states.pt")
    with pytest.raises(EnvironmentProblem, match=r"mp_rank_00_model_states\.pt: .* no file of ZeRO"):
        zero_weights(tmp_path)
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"cut off")
    with pytest.raises(EnvironmentProblem, match=r"mp_rank_00_model_states\.pt: .* no file of ZeRO"):
        zero_weights(tmp_path)
    (tmp_path / "layer_0_expert_3_mp_rank_00_model_states.pt").touch()
    with pytest.raises(EnvironmentProblem, match="experts of single ranks are not read"):
        zero_weights(tmp_path)
