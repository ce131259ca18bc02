"""Heads. The language head with what a model does to its logits; and heads that give numbers, as the
trainer sees them: that of a critic, one number per token, stands where the language head stood; a
`SavedHead` stands beside it and has a file in the model's folder.

Knows nothing of what the numbers are trained to mean.

    logits = language_head(model)(hidden)
    attach_score(model, seed=0)
    values = read_scores(model.score, hidden[reads])

Legend: R reads, E hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import EnvironmentProblem
from saccade.forest.interface import decoder_of
from saccade.system.contents import File, on_host, tensor_file

# What models do to the logits of their head, by the key of their config that says how much; in this order.
LOGIT_CHANGES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "output_multiplier": lambda logits, factor: logits * factor,
    "logit_scale": lambda logits, factor: logits * factor,
    "logits_scaling": lambda logits, divisor: logits / divisor,
    "final_logit_softcapping": lambda logits, cap: torch.tanh(logits / cap) * cap,
}


def language_head(model: Any) -> Any:
    """hidden → logits, as the model's own forward makes them. It has `out_features`."""
    own = model.get_output_embeddings()
    return _ChangedHead(model, own) if getattr(model, "logit_changes", ()) else own


def change_logits(model: Any, logits: Tensor) -> Tensor:
    """What the model's own forward does to logits of its head: nothing, mostly."""
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
    """The keys of LOGIT_CHANGES that a model applies: none, one, or all that its config has. Found by
    handing states to its own forward in the place of its decoder; behind its head in float32, for
    rounding would hide small changes. A change that is no row of the
    table is refused: engine and trainer would agree on another policy than the one that is deployed.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    kind = type("Output", (BaseModelOutputWithPast,), {"__getattr__": lambda self, name: None})
    own, decoder = model.get_output_embeddings(), decoder_of(model)
    states = torch.randn((1, 4, _size(model)), generator=torch.Generator().manual_seed(0))
    states = states.to(model.device, model.dtype)
    states *= 100 / own(states).abs().max()  # far beyond a soft cap
    wide = own.register_forward_hook(lambda head, given, logits: logits.float())
    decoder.forward, training = lambda *args, **options: kind(last_hidden_state=states), model.training
    model.eval()  # in training some ask for more than ids
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
    """Replace the language head by `score`, linear without a bias, from a normal of std 1 / (E + 1).

    An embedding that was tied to it stays; otherwise its memory is free.
    """
    assert not hasattr(model, "score"), "the model has a score head already"
    score = nn.Linear(_size(model), 1, bias=False, device="meta")
    score.weight = drawn(model, 1, seed)
    old = model.get_output_embeddings()  # type: ignore[operator]
    for owner in [*model.modules()]:  # it may be inside of a part
        for name in [name for name, part in owner.named_children() if part is old]:
            setattr(owner, name, None)
    model.score = score


def read_scores(score: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """hidden [R, E] → [R], in fp32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return score(hidden.to(wide)).squeeze(-1)


class SavedHead(nn.Module):
    """`model.score` of a model that is saved without it, and with the blocks above the one it reads."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.above = file, list[nn.Module]()


@contextmanager
def without_head(model: nn.Module) -> Iterator[SavedHead | None]:
    """Inside, the model is whole and has no such head; yields it, or None where there was none."""
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


def drawn(model: nn.Module, count: int, seed: int) -> nn.Parameter:
    """[count, E]. In fp32 even on a bf16 model: it costs nothing, and a value is a sum of thousands
    of products. Drawn on the CPU: a seed is the same head on every device.
    """
    like, size = next(model.parameters()), _size(model)
    drawn = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) / (size + 1)
    return nn.Parameter(drawn.to(like.device, torch.promote_types(like.dtype, torch.float32)))
