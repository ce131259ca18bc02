"""A checkpoint of DeepSpeed's ZeRO, written here as its stages lay it out for two ranks, becomes a model folder."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.export.export import export
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
