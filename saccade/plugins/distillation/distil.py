"""A student beside its teacher. Losses are read chunk by chunk: no [tokens, vocabulary] is kept.

update = backend.train_step(batches, DistillationLoss(teacher, kd_coef=0.4), lr=1e-5)

Legend: R reads, V vocabulary of the student, E hidden sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from saccade.algorithms.objective import imitation_objective, kd
from saccade.forest.logprobs import CHUNK_ELEMENTS
from saccade.forest.to_device import to_device
from saccade.trainer import Objective, Reader
from saccade.trainer.forward_inputs import column
from saccade.trainer.local import LocalBackend
from saccade.types import Batch

Head = Callable[[Tensor], Tensor]


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
        losses, terms = read_taught(
            trainer.hidden_at(batch, batch.reads),
            trainer.model.lm_head,  # type: ignore[arg-type]
            taught,
            self.teacher.model.lm_head,  # type: ignore[arg-type]
            to_device(batch.targets, trainer.device),
            kd_coef=self.kd_coef,
            vocabulary=trainer.family.vocabulary,
        )
        shown = {f"sft/{name}": values for name, values in terms.items()}
        scales = column(batch.scales, losses)
        return partial(imitation_objective, losses, shown, scales, term="policy/loss")


def read_taught(
    hidden: Tensor, head: Head, taught: Tensor, teacher_head: Head, targets: Tensor, *, kd_coef: float, vocabulary: int
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
