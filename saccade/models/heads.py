"""Heads: the language head with any scaling or capping of its logits, and heads that output scores. A critic's head
(one score per token) replaces the language head; a `SavedHead` is added next to it and has its own file in the
model's folder. What scores are trained to mean is decided elsewhere.

    logits = language_head(model)(hidden)
    attach_score(model, seed=0)
    values = read_scores(model.score, hidden[predictors])

Legend: R positions that are read, E hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import EnvironmentProblem
from saccade.forest.interface import decoder_of
from saccade.system.contents import File, on_host, tensor_file

# Changes that models make to the logits of their head, in this order, by the config key that holds the amount.
LOGIT_CHANGES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "output_multiplier": lambda logits, factor: logits * factor,
    "logit_scale": lambda logits, factor: logits * factor,
    "logits_scaling": lambda logits, divisor: logits / divisor,
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
}


def language_head(model: Any) -> Any:
    """Returns a callable hidden → logits that equals the model's own forward and has `out_features`."""
    own = model.get_output_embeddings()
    return _ChangedHead(model, own) if getattr(model, "logit_changes", ()) else own


def change_logits(model: Any, logits: Tensor) -> Tensor:
    """Apply what the model's own forward does to the logits of its head; usually nothing."""
    return _changed(model, logits, getattr(model, "logit_changes", ()))


def _changed(model: Any, logits: Tensor, keys: Sequence[str]) -> Tensor:
    for key in keys:
        logits = LOGIT_CHANGES[key](logits, getattr(_text(model), key))
    return logits


class _ChangedHead:
    def __init__(self, model: Any, own: Any) -> None:
        self.model, self.own, self.out_features = model, own, own.out_features

    def __call__(self, hidden: Tensor) -> Tensor:
        return change_logits(self.model, self.own(hidden))


@torch.no_grad()
def find_logit_changes(model: Any) -> Sequence[str]:
    """The keys of LOGIT_CHANGES that a model applies: none, one, or all that its config has. Found by running its own
    forward with random states in place of its decoder; the head's output is cast to float32, as rounding would hide
    small changes. Other changes are refused: engine and trainer would agree on a policy that is not the deployed one.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    kind = type("Output", (BaseModelOutputWithPast,), {"__getattr__": lambda self, name: None})
    own, decoder = model.get_output_embeddings(), decoder_of(model)
    states = torch.randn((1, 4, _size(model)), generator=torch.Generator().manual_seed(0))
    states = states.to(model.device, model.dtype)
    states *= 100 / own(states).abs().max()  # so large that a soft cap shows
    wide = own.register_forward_hook(lambda head, given, logits: logits.float())
    decoder.forward, training = lambda *args, **options: kind(last_hidden_state=states), model.training
    model.eval()  # in training mode some models need more inputs than ids
    try:
        ids = torch.zeros((1, 4), dtype=torch.int64, device=model.device)
        theirs, plain = model(input_ids=ids, use_cache=False).logits, own(states)
    finally:
        wide.remove()
        del decoder.forward
        model.train(training)
    named = [key for key in LOGIT_CHANGES if getattr(_text(model), key, None)]
    tried = [(), *((key,) for key in named), tuple(named)]
    gaps = [float((_changed(model, plain, keys) - theirs).norm()) for keys in tried]
    best = gaps.index(min(gaps))
    if not gaps[best] <= 8 * torch.finfo(theirs.dtype).eps * float(theirs.float().norm()):
        supported = ", ".join(LOGIT_CHANGES)
        why = f"changes its logits behind the head in an unsupported way (supported: {supported})"
        raise EnvironmentProblem(f"{type(model).__name__} {why}; use another model")
    return tried[best]


def attach_score(model: nn.Module, *, seed: int) -> None:
    """Replace the language head by `score`: linear, no bias, initialised from a normal of std 1 / (E + 1).

    A tied embedding stays; otherwise the head's memory is freed.
    """
    assert not hasattr(model, "score"), "the model has a score head already"
    score = nn.Linear(_size(model), 1, bias=False, device="meta")
    score.weight = random_weight(model, 1, seed)
    old = model.get_output_embeddings()  # type: ignore[operator]
    for owner in [*model.modules()]:  # the head may belong to a submodule
        for name in [name for name, part in owner.named_children() if part is old]:
            setattr(owner, name, None)
    model.score = score


def read_scores(score: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """hidden [R, E] → [R], in fp32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return score(hidden.to(wide)).squeeze(-1)


class SavedHead(nn.Module):
    """`model.score`, saved apart from the model. `above`: the layers after the one it reads, saved with the model."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.above = file, list[nn.Module]()


@contextmanager
def without_head(model: nn.Module) -> Iterator[SavedHead | None]:
    """Context manager: the model with all its layers and without its SavedHead. Yields that head, or None."""
    head = getattr(model, "score", None)
    if not isinstance(head, SavedHead):
        yield None
        return
    del model.score
    blocks = blocks_of(model)
    blocks.extend(head.above)
    try:
        yield head
    finally:
        model.score = head
        del blocks[len(blocks) - len(head.above) :]


def head_file(head: SavedHead, *, copy: bool = False) -> File:
    tensors = {f"score.{n}": on_host(p, copy=copy) for n, p in head.named_parameters()}
    return head.file, tensor_file(tensors, {"format": "pt"})


def blocks_of(model: Any) -> nn.ModuleList:
    """The layers of the language model."""
    return getattr(decoder_of(model), "layers", None) or nn.ModuleList()


def _size(model: nn.Module) -> int:
    return _text(model).hidden_size


def _text(model: Any) -> Any:
    return model.config.get_text_config()


def random_weight(model: nn.Module, count: int, seed: int) -> nn.Parameter:
    """A random head weight [count, E]. In fp32 even on a bf16 model: it costs nothing, and a score is a sum of
    thousands of products. Drawn on the CPU, so a seed gives the same head on every device.
    """
    like, size = next(model.parameters()), _size(model)
    values = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) / (size + 1)
    return nn.Parameter(values.to(like.device, torch.promote_types(like.dtype, torch.float32)))
