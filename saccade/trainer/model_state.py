"""Save weights, blend them into those of another model, and set the mode and random state of a step.

write_files(folder, model_files(model, copy=False))
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from saccade.models import lora
from saccade.models.files import require_same
from saccade.models.heads import head_file, without_head
from saccade.registry import HOOKS
from saccade.system.contents import File, host_copies, pretrained


def model_files(model: nn.Module, *, copy: bool, sharded: bool = False) -> list[File]:
    """The files of a model. Its own head and series encoder have separate files, so that the rest is a
    standard model. Tensors of a `sharded` model are gathered one at a time.
    """
    with without_head(model) as head, HOOKS["without_series"](model) as encoder:
        if lora.is_adapted(model):
            files = lora.files(model, copy=copy)
        else:
            state = lora.whole_state(model, copy=copy) if sharded else host_copies(model.state_dict(), copy=copy)
            files = [("", pretrained(model, state))]
    if head is not None:
        files.append(head_file(head, copy=copy))
    if encoder is not None:
        files.append(HOOKS["series_file"](encoder, copy=copy))
    return files


def blend_into(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], share: float, averages: dict[str, Tensor]
) -> None:
    """mine = share * theirs + (1 - share) * mine. `averages` holds weights of lower precision in fp32:
    rounded to bf16 at every step, an average would stop moving. A copy (share 1) needs none.
    """
    require_same("the weights to follow", mine.items(), theirs.items())
    for name, weight in mine.items():
        target = theirs[name].detach().to(weight.device)
        if share == 1:
            weight.copy_(target)
            continue
        average = weight
        if torch.promote_types(weight.dtype, torch.float32) != weight.dtype:
            average = averages[name] if name in averages else averages.setdefault(name, weight.float())
        average.lerp_(target.to(average.dtype), share)
        weight.copy_(average)
    if share == 1:
        averages.clear()


def set_training(model: nn.Module) -> None:
    """Set the mode of a training step: train mode for layers that may recompute, which require it, and for dropout of
    adapters. All else stays in eval mode, because dropout and batch statistics would change the policy.
    """
    model.eval()
    for name, module in model.named_modules():
        module.training = name == "" or hasattr(module, "gradient_checkpointing") or ".lora_" in name


def modules_in_eval(model: nn.Module) -> list[str]:
    """Names of dropout and batch-norm modules whose output would change if they were not kept in eval mode."""
    kinds = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
    return [name for name, module in found if getattr(module, "p", 1) > 0 and ".lora_" not in name]


def draws(model: nn.Module) -> bool:
    """Whether a training step depends on torch's random numbers."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 and ".lora_" in name for name, m in model.named_modules())


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])
