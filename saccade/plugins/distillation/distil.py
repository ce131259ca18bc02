"""A student beside its teacher. Losses are read chunk by chunk: no [tokens, vocabulary] is kept.

update = backend.train_step(batches, DistillationLoss(teacher, kd_coef=0.4), lr=1e-5)

Legend: R reads, V vocabulary of the student, E hidden sizes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from saccade.algorithms.objective import imitation_objective
from saccade.forest.device_ops import to_device
from saccade.forest.logprobs import CHUNK_ELEMENTS
from saccade.trainer import Objective, Reader
from saccade.trainer.forward_inputs import column
from saccade.trainer.local import LocalBackend
from saccade.types import Batch


@dataclass(frozen=True)
class DistillationLoss:
    """Demonstrations, and what the teacher thinks of every token."""

    teacher: LocalBackend
    kd_coef: float
    role: ClassVar[str] = "policy"
    whole: ClassVar[bool] = False

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        self.teacher.model.eval()
        with torch.no_grad():
            taught = self.teacher.hidden_at(batch, batch.reads)
        hidden, targets = trainer.hidden_at(batch, batch.reads), to_device(batch.targets, trainer.device)
        head: Any = trainer.model.lm_head
        their_head: Any = self.teacher.model.lm_head

        def chunk(hidden: Tensor, taught: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = head(hidden)
            with torch.no_grad():
                # Embeddings of one tokenizer are padded to different sizes; no token stands there.
                theirs = their_head(taught)[:, : logits.shape[1]]
                theirs = pad(theirs, (0, logits.shape[1] - theirs.shape[1]), value=-torch.inf)
            return kd(logits, theirs, targets, kd_coef=self.kd_coef)

        # The logits of a chunk are computed again in backward.
        rows = max(1, CHUNK_ELEMENTS // trainer.family.vocabulary)
        parts = zip(hidden.split(rows), taught.split(rows), targets.split(rows), strict=True)
        results = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
        losses, written, teacher = (torch.cat(found) for found in zip(*results, strict=True))
        shown, scales = {"sft/ce": written, "sft/teacher": teacher}, column(batch.scales, losses)
        return partial(imitation_objective, losses, shown, scales, term="policy/loss")


def kd(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, *, kd_coef: float = 0.4
) -> tuple[Tensor, Tensor, Tensor]:
    """(1 - kd_coef) CE + kd_coef (-sum over v of p_teacher log p_student), and both terms.

    logits [R, V], with a gradient; teacher_logits [R, V]; targets [R]. Ids that are banned (-inf)
    for the student are banned for the teacher.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    banned = logits == -torch.inf
    student = logits.to(wide).log_softmax(-1)
    teacher = teacher_logits.to(wide).detach().masked_fill(banned, -torch.inf).softmax(-1)
    written = -student.gather(-1, targets[:, None]).squeeze(-1)
    taught = -(teacher * student.masked_fill(banned, 0.0)).sum(-1)  # 0 times -inf is not 0
    return (1 - kd_coef) * written + kd_coef * taught, written.detach(), taught.detach()
