"""Log-probs and entropies at the read positions of a forest, chunk by chunk: [tokens, vocabulary]
never exists.

The distribution is the one that was sampled from: fp32 logits over the temperature, banned ids
removed and, where sampling was truncated, only the kept ids. Knows nothing of forests or
algorithms.

    logprobs, entropies = read_logprobs(hidden[reads], model.lm_head, targets, temperature=1.0,
    banned=mask)

Legend: R reads, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Largest chunk of fp32 logits: about 600 MB, so that a few copies of it fit beside a model.
CHUNK_ELEMENTS = 150_000_000


def read_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float,
    banned: Tensor | None = None,
    support: Sequence[np.ndarray] | None = None,
    vocabulary: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """hidden [R, E], targets [R] → log-probs [R] and true entropies [R], both fp32.

    Under autograd the logits of a chunk are computed again in backward instead of being kept. The
    entropy carries a gradient only when asked: most losses only report it, and its graph holds
    several more chunks of logits.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    results = []
    for start in range(0, max(1, len(targets)), rows):
        part = slice(start, start + rows)
        kept = None if support is None else _kept_mask(support[part], vocabulary, hidden.device)
        arguments = (hidden[part], targets[part], head, temperature, banned, kept, entropy_gradient)
        if torch.is_grad_enabled() and len(targets) > rows:
            results.append(checkpoint(_chunk, *arguments, use_reentrant=False))
        else:
            results.append(_chunk(*arguments))
    if len(results) == 1:
        return results[0]
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])


def sampling_logits(logits: Tensor, temperature: float | Tensor, banned: Tensor | None) -> Tensor:
    """fp32 (or wider) logits of the distribution that is sampled from. One definition for engine
    and trainer.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits / temperature
    return logits if banned is None else logits.masked_fill(banned, -torch.inf)


def _chunk(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    banned: Tensor | None,
    kept: Tensor | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits = sampling_logits(head(hidden), temperature, banned)
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # H = logsumexp(z) - Σ p z, with the banned terms left out of the sum: 0 · -inf is not 0.
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        probabilities = (logits - normaliser[:, None]).exp()
        entropy = normaliser - (probabilities * finite).sum(-1)
    return chosen, entropy


def _kept_mask(support: Sequence[np.ndarray], vocabulary: int, device: torch.device) -> Tensor:
    """[R, V]; an empty entry means that nothing was cut away."""
    mask = np.zeros((len(support), vocabulary), dtype=bool)
    for row, ids in enumerate(support):
        mask[row, ids if len(ids) else slice(None)] = True
    return torch.from_numpy(mask).to(device)
