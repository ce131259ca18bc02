"""Imitation: demonstrations added to RL updates, and for sft reward-tagged answers and distillation from a teacher.

    loss of an update + train.sft_coef * mean of -log p over the tokens of its demonstrations

demonstrations = Demonstrations(config, family, quarantine, updates=algorithm.updates_per_step)
trainer.train_step([*batches, *demonstrations.batches()], PolicyLoss(algorithm, scoring), lr=lr)
update = trainer.train_step(batches, DistillationLoss(teacher, kd_coef=0.4), lr=1e-5)

>>> reward_tagged(sample, "<reward {reward:.1f}>").messages[0].text
'What is 1 + 1?<reward 1.0>'

Legend: R targets, V vocabulary of the student, E hidden sizes.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from saccade.algorithms.objective import LossSums, imitation_objective, mean_of
from saccade.config import Config
from saccade.data.chats import RowError
from saccade.data.datasets import Dataset, Stream
from saccade.errors import ConfigError
from saccade.forest.batch import Batch
from saccade.forest.device_ops import to_device
from saccade.forest.logprobs import CHUNK_ELEMENTS
from saccade.forest.packing import pack
from saccade.models.families import Family, load_family
from saccade.models.files import SERIES_FILE
from saccade.models.heads import language_head
from saccade.models.load import pick_dtype
from saccade.plugins.ranks.layouts import numbers_in, require_heads
from saccade.plugins.ranks.preflight import require_room
from saccade.recipes import model_setup, questions
from saccade.recipes.to_trajectory import dialogue
from saccade.registry import HOOKS
from saccade.run.quarantine import Quarantine
from saccade.trainer import ForwardModel, Objective
from saccade.trainer.forward_inputs import column
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Sample

# -- demonstrations --------------------------------------------------------------------------------


class Demonstrations:
    def __init__(self, config: Config, family: Family, quarantine: Quarantine, *, updates: int) -> None:
        self.config, self.family, self.quarantine = config, family, quarantine
        self.rows = math.ceil(config.train.prompts_per_step / updates)
        data = questions.load_dialogues(config, config.data.demonstrations, family)
        self.stream = Stream(data, seed=config.run.seed, config=config.data)

    def batches(self) -> list[Batch]:
        """Batches of the next rows. They have no advantages, which marks them for the imitation loss."""
        rows = self.quarantine.take(self.stream, self.rows, self.family)
        groups = [dialogue(row, self.family, "assistant") for row in rows]
        train = self.config.train
        batches = pack(groups, micro_tokens=train.micro_tokens)
        scale = train.sft_coef / sum(batch.target_count for batch in batches)
        return [replace(b, scales=np.full(b.target_count, scale, np.float32)) for b in batches]


# -- reward-tagged answers: `sft.reward_tag` is appended to the question -----------------------------


def reward_tagged(sample: Sample, tag: str, reward: float | None = None) -> Sample:
    """Append the tag with `reward`, or the row's reward, to the last user message."""
    messages = list(sample.messages)
    last = max(index for index, message in enumerate(messages) if message.role == "user")
    text = tag.format(reward=reward_of(sample) if reward is None else reward)
    messages[last] = replace(messages[last], parts=(*messages[last].parts, text))
    return replace(sample, messages=tuple(messages))


def asking_for_the_best(tag: str, data: Dataset, sets: dict[str, Dataset]) -> dict[str, Dataset]:
    """Validation sets whose questions are tagged with the highest reward in the training data."""
    best = max(reward_of(sample) for sample in data.samples)
    return {name: questions.map_samples(part, lambda s: reward_tagged(s, tag, best)) for name, part in sets.items()}


def reward_of(sample: Sample) -> float:
    """The reward of the row's answer: its label, or the column reward or label."""
    value = sample.desirable
    for name in ("reward", "label"):
        value = sample.extra.get(name) if value is None else value
    if not isinstance(value, bool | int | float):
        raise RowError("no number in the column reward or label, which sft.reward_tag shows")
    return float(value)


# -- the loss of sft -------------------------------------------------------------------------------


class SupervisedLoss(PolicyLoss):
    """Reports sft/token_accuracy beside the loss: how often the model finds the trained token the likeliest."""

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        likeliest = list[Tensor]()  # of the chunks in which logits are computed

        def note(head: Any, inputs: Any, logits: Tensor) -> None:
            likeliest.append(logits.detach().argmax(-1))

        head = cast(Any, trainer.model).get_output_embeddings()  # what models do to its logits leaves their order alone
        with head.register_forward_hook(note):
            compute = super().forward(trainer, batch)
        (hits,) = trainer.at_targets(batch, lambda part: [hits_of(torch.cat(likeliest), part, trainer)])
        return partial(with_accuracy, compute, hits)


def hits_of(likeliest: Tensor, batch: Any, trainer: ForwardModel) -> Tensor:
    return (likeliest == to_device(batch.targets, trainer.device)).float()


def with_accuracy(compute: Objective, hits: Tensor) -> tuple[Tensor, LossSums]:
    loss, sums = compute()
    return loss, replace(sums, means={**sums.means, "sft/token_accuracy": mean_of(hits)})


# -- a teacher: losses are computed in chunks, so no [tokens, vocabulary] tensor is stored -----------


def teacher_of(config: Config, family: Family) -> LocalTrainer:
    """Load the teacher, which reads the same tokens and is never trained; refuses one with other tokens."""
    path = config.sft.teacher
    assert path is not None
    folder = model_setup.model_folder(config.run, path)
    theirs = load_family(folder, trust_remote_code=config.model.trust_remote_code)
    if family.series is not None and (Path(folder) / SERIES_FILE).is_file():
        theirs = HOOKS["plug_series"](theirs, family.series)
    vocabularies = [each.chat.tokenizer.get_vocab() for each in (family, theirs)]
    alike = theirs.spec.bind is family.spec.bind and theirs.series == family.series
    if not alike or vocabularies[0] != vocabularies[1]:
        helps = "give a model of the same family and tokenizer, with an encoder of time series if that has one"
        raise ConfigError(f"sft.teacher={path}: a {theirs.name} with other tokens than the {family.name}; {helps}")
    require_heads(config, theirs)
    device, gpus = model_setup.device_of(config.run), config.run.gpus
    by_rows = HOOKS["by_rows"](config.train, device) if gpus > 1 else None
    less = ", or train.offload=true" * (not config.train.offload)
    divided = ", or train.layout=sharded" * (gpus > 1 and by_rows is None)
    hint = f"sft.teacher lies beside the student: take a smaller one{less}{divided}"
    numbers = numbers_in(Path(folder), ranks=by_rows.group.size() if by_rows else 1, tower_of=theirs.tower_of)
    require_room(Path(folder), numbers * pick_dtype(config.model.dtype, device).itemsize, device, hint)
    model = model_setup.load_policy(config, theirs, train="full", divided=True)
    return model_setup.backend_of(config)(model, theirs)


@dataclass(frozen=True)
class DistillationLoss:
    """Cross-entropy with the demonstrations and with the teacher's distribution at every token."""

    teacher: LocalTrainer
    kd_coef: float
    role: ClassVar[str] = "policy"
    whole: ClassVar[bool] = False

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        self.teacher.model.eval()
        head, their_head = language_head(trainer.model), language_head(self.teacher.model)

        def chunk(hidden: Tensor, taught: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits = head(hidden)
            with torch.no_grad():
                # Models with one tokenizer may pad the vocabulary differently; the padding holds no tokens.
                theirs = their_head(taught)[:, : logits.shape[1]]
                theirs = pad(theirs, (0, logits.shape[1] - theirs.shape[1]), value=-torch.inf)
            hits = (logits.detach().argmax(-1) == targets).float()
            return *kd(logits, theirs, targets, kd_coef=self.kd_coef), hits

        def compared(part: Any) -> list[Tensor]:
            with torch.no_grad():
                taught = self.teacher.hidden_at(part, part.predictors)
            hidden, targets = trainer.hidden_at(part, part.predictors), to_device(part.targets, trainer.device)
            # Checkpointed: the logits of a chunk are recomputed in backward.
            rows = max(1, CHUNK_ELEMENTS // trainer.family.vocabulary)
            chunks = zip(hidden.split(rows), taught.split(rows), targets.split(rows), strict=True)
            results = [checkpoint(chunk, *each, use_reentrant=False) for each in chunks]
            return [torch.cat(found) for found in zip(*results, strict=True)]

        losses, written, teacher, hits = trainer.at_targets(batch, compared)
        shown = {"sft/ce": written, "sft/teacher": teacher, "sft/token_accuracy": hits}
        scales = column(batch.per_target("scales"), losses)
        return partial(imitation_objective, losses, shown, scales, term="policy/loss")


def kd(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, *, kd_coef: float = 0.4
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss (1 - kd_coef) CE + kd_coef (-sum over v of p_teacher log p_student), CE, the teacher's term), [R].

    logits [R, V], with a gradient; teacher_logits [R, V]; targets [R]. Ids that are banned (-inf)
    for the student are banned for the teacher, too.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    banned = logits == -torch.inf
    student = logits.to(wide).log_softmax(-1)
    teacher = teacher_logits.to(wide).detach().masked_fill(banned, -torch.inf).softmax(-1)
    written = -student.gather(-1, targets[:, None]).squeeze(-1)
    taught = -(teacher * student.masked_fill(banned, 0.0)).sum(-1)  # 0 times -inf is not 0
    return (1 - kd_coef) * written + kd_coef * taught, written.detach(), taught.detach()
