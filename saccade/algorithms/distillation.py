"""Learning from the whole distribution of a teacher beside the token that was written.

One row per token and no sum over rows, so a caller works chunk by chunk and the logits of a batch
never exist together. Knows nothing of models, masks or denominators. Axes: R tokens, V vocabulary.

    >>> losses, metrics = kd(logits, teacher_logits, targets, kd_coef=0.4)   # [R]
"""

from __future__ import annotations

import torch
from torch import Tensor


def kd(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, *, kd_coef: float = 0.4
) -> tuple[Tensor, dict[str, Tensor]]:
    """(1 - kd_coef) CE + kd_coef (-sum over v of p_teacher log p_student), and both terms.

    logits [R, V], with a gradient; teacher_logits [R, V]; targets [R]. Ids that are banned (-inf)
    for the student are banned for the teacher.
    """
    banned = logits == -torch.inf
    student = _wide(logits).log_softmax(-1)
    teacher = _wide(teacher_logits).detach().masked_fill(banned, -torch.inf).softmax(-1)
    written = -student.gather(-1, targets[:, None]).squeeze(-1)
    taught = -(teacher * student.masked_fill(banned, 0.0)).sum(-1)  # 0 times -inf is not 0
    mix = (1 - kd_coef) * written + kd_coef * taught
    return mix, {"ce": written.detach(), "teacher": taught.detach()}


def _wide(logits: Tensor) -> Tensor:
    """fp32, or as wide as they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
