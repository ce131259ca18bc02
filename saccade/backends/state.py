"""Tensors in files, and what a training step depends on beside its weights.

save_tensors(folder / "optimizer.safetensors", optimizer.state())
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from saccade.errors import EnvironmentProblem


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)


def require_same(what: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Names and shapes, both ways: a tensor left out or stretched would train another model."""
    problems = {
        "missing": mine.keys() - theirs.keys(),
        "unexpected": theirs.keys() - mine.keys(),
        "of another shape": {
            n for n in mine.keys() & theirs.keys() if mine[n].shape != theirs[n].shape
        },
    }
    if any(problems.values()):
        listed = (f"{k}: {', '.join(sorted(names)[:3])}" for k, names in problems.items() if names)
        raise EnvironmentProblem(
            f"{what}: not those of this model ({'; '.join(listed)}); use the same model.path"
        )


def draws(model: nn.Module) -> bool:
    """Whether a training step depends on torch's random numbers."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])
