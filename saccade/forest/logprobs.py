"""Log-probs and entropies at the targets of a forest, in chunks, to avoid a whole
[tokens, vocabulary] tensor.

The distribution is the one that was sampled from: fp32 logits over the temperature, banned ids
removed and, where sampling was truncated, only the kept ids. Knows nothing of forests or
algorithms.

    logprobs, entropies = read_logprobs(hidden[predictors], model.lm_head, targets, temperature=1.0,
    banned=mask)

Legend: R targets, V vocabulary, E hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saccade.forest.device_ops import KERNELS, has_kernels, to_device

# Largest chunk of logits: in fp32 about 600 MB, so that a few copies of it fit beside a model.
CHUNK_ELEMENTS = 150_000_000
# Factor for kernels, which work in place: with fewer chunks the head's gradient is accumulated less often.
KERNEL_CHUNK = 4


def read_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    *,
    temperature: float,
    banned: Tensor | None = None,
    support: Sequence[np.ndarray] | None = None,
    entropy_gradient: bool = False,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """hidden [R, E], targets [R] → log-probs [R] and true entropies [R], both fp32.

    Under autograd the logits of several chunks are recomputed in backward, unless `keep_logits`. The
    entropy has a gradient only with `entropy_gradient`: most losses only report it.
    """
    elements = CHUNK_ELEMENTS * (KERNEL_CHUNK if _in_place(hidden) else 1)
    rows = max(1, elements // head.out_features)
    results = []

    def chunk(hidden: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        return _Read.apply(head(hidden), entropy_gradient, *how)

    for start in range(0, max(1, len(targets)), rows):
        part = slice(start, start + rows)
        kept = None if support is None else _support_mask(support[part], head.out_features, hidden.device)
        how = (targets[part], temperature, banned, kept)
        if torch.is_grad_enabled() and len(targets) > rows and not keep_logits:
            results.append(checkpoint(chunk, hidden[part], *how, use_reentrant=False))
        else:
            results.append(chunk(hidden[part], *how))
    if len(results) == 1:
        return results[0]
    logprobs, entropies = map(torch.cat, zip(*results, strict=True))
    return logprobs, entropies


def sampling_logits(logits: Tensor, temperature: float | Tensor, banned: Tensor | None) -> Tensor:
    """fp32 (or wider) logits of the distribution that is sampled from. One definition for engine
    and trainer.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits / temperature
    return logits if banned is None else logits.masked_fill(banned, -torch.inf)


class _Read(torch.autograd.Function):
    """Saves only the logits for backward. Kernels overwrite them with their gradient, because nothing
    else uses the output of a head.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, entropy_gradient: bool, *how: Any) -> tuple[Tensor, Tensor]:
        """`how`: targets, temperature, banned and kept."""
        targets, temperature, banned, kept = how
        read = KERNELS["read_logits"] if _in_place(logits) else _read
        logprobs, *found = read(logits, *how)
        ctx.save_for_backward(logits, targets, banned, kept, *found)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(found[0])
        return logprobs, found[0]

    @staticmethod
    def backward(ctx: Any, to_logprobs: Tensor, to_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, banned, kept, *found = ctx.saved_tensors
        write = KERNELS["write_gradient"] if _in_place(logits) else _gradient
        asked = to_entropies.contiguous() if ctx.entropy_gradient else None
        how = (targets, ctx.temperature, banned, kept)
        return write(logits, how, found, to_logprobs.contiguous(), asked), None, None, None, None, None


def _in_place(tensor: Tensor) -> bool:
    return has_kernels(tensor.device) and tensor.dtype != torch.float64


def _scores(logits: Tensor, temperature: float, banned: Tensor | None, kept: Tensor | None) -> Tensor:
    scores = sampling_logits(logits, temperature, banned)
    return scores if kept is None else scores.masked_fill(~kept, -torch.inf)


def _read(
    logits: Tensor, targets: Tensor, temperature: float, banned: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and normalisers."""
    scores = _scores(logits, temperature, banned, kept)
    normalisers = scores.logsumexp(-1)
    logprobs = scores.gather(-1, targets[:, None]).squeeze(-1) - normalisers
    # H = logsumexp(z) - Σ p z, with the banned terms left out of the sum: 0 · -inf is not 0.
    shares = (scores - normalisers[:, None]).exp_()
    shares *= scores.masked_fill_(scores == -torch.inf, 0.0)
    return logprobs, normalisers - shares.sum(-1), normalisers


def _gradient(
    logits: Tensor, how: Sequence[Any], found: Sequence[Tensor], to_logprobs: Tensor, to_entropies: Tensor | None
) -> Tensor:
    """d logp(y) / dz = 1[y] - p, dH / dz = -p (log p + H)."""
    targets, temperature, banned, kept = how
    entropies, normalisers = found
    surprise = _scores(logits, temperature, banned, kept).sub_(normalisers[:, None])
    gone = surprise == -torch.inf
    shares = surprise.exp()
    gradient = shares * -to_logprobs[:, None]
    gradient.scatter_add_(-1, targets[:, None], to_logprobs[:, None])
    if to_entropies is not None:
        surprise.masked_fill_(gone, 0.0)
        gradient -= to_entropies[:, None] * shares * (surprise + entropies[:, None])
    return gradient.masked_fill_(gone, 0.0).div_(temperature).to(logits.dtype)


def _support_mask(support: Sequence[np.ndarray], vocabulary: int, device: torch.device) -> Tensor:
    """[R, V] bool: ids that truncated sampling kept; an empty entry means all."""
    lengths = np.array([len(ids) for ids in support])
    mask = to_device(lengths == 0, device)[:, None].repeat(1, vocabulary)
    rows = np.repeat(np.arange(len(support)), lengths)
    ids = np.concatenate(support).astype(np.int64) if len(rows) else rows
    return mask.index_put_((to_device(rows, device), to_device(ids, device)), mask.new_ones(()))
