"""Losses of a student beside its teacher, chunk by chunk: no [tokens, vocabulary] is kept.

losses, terms = read_taught(hidden, student_head, taught, teacher_head, targets, kd_coef=0.4, ...)

Legend: R reads, V vocabulary of the student, E hidden sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from saccade.algorithms.distillation import kd
from saccade.logprobs import CHUNK_ELEMENTS

Head = Callable[[Tensor], Tensor]


def read_taught(
    hidden: Tensor,
    head: Head,
    taught: Tensor,
    teacher_head: Head,
    targets: Tensor,
    *,
    kd_coef: float,
    vocabulary: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """hidden, taught [R, E] → losses [R] and their terms; the logits of a chunk are computed again
    in backward.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    results = [
        checkpoint(
            _chunk,
            hidden[start : start + rows],
            head,
            taught[start : start + rows],
            teacher_head,
            targets[start : start + rows],
            kd_coef,
            use_reentrant=False,
        )
        for start in range(0, len(targets), rows)
    ]
    losses, written, teacher = (torch.cat(column) for column in zip(*results, strict=True))
    return losses, {"ce": written, "teacher": teacher}


def _chunk(
    hidden: Tensor, head: Head, taught: Tensor, teacher_head: Head, targets: Tensor, kd_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = head(hidden)
    with torch.no_grad():
        # Embeddings of one tokenizer are padded to different sizes; no token stands there.
        theirs = teacher_head(taught)[:, : logits.shape[1]]
        theirs = pad(theirs, (0, logits.shape[1] - theirs.shape[1]), value=-torch.inf)
    losses, terms = kd(logits, theirs, targets, kd_coef=kd_coef)
    return losses, terms["ce"], terms["teacher"]
