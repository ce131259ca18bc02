"""The controller's trainer of a model that the ranks hold. This process holds no weights: its `model` has names and
shapes only.

    policy = start_policy(config, "rl", family, folder, logs=run.path)
    policy.train_step(batches, PolicyLoss(algorithm, scoring), lr=1e-6)
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.config import ADAPTED, Config, load
from saccade.forest import interface
from saccade.forest.batch import Batch
from saccade.forest.packing import deal
from saccade.models import lora
from saccade.models.families import Family
from saccade.models.heads import attach_score
from saccade.models.load import freeze, pick_device, pick_dtype
from saccade.plugins.engines.weight_transfer import opened
from saccade.plugins.engines.weights import Mapped
from saccade.plugins.estimate.batch_plan import empty_model
from saccade.plugins.estimate.layout_choice import choose_layout
from saccade.plugins.ranks.layouts import require_heads
from saccade.plugins.ranks.loss_codec import encode_loss
from saccade.plugins.ranks.starts import start_team
from saccade.plugins.ranks.team import Team
from saccade.plugins.reward_models.reward_card import RewardCard
from saccade.system.codec import decode
from saccade.system.contents import File
from saccade.trainer import Loss, Scoring, Update
from saccade.types import Metrics

log = logging.getLogger(__name__)


class RankTrainer:
    """One model of the ranks, by its name (`part`): policy, reference, critic, teacher or ema."""

    def __init__(self, config: Config, team: Team, family: Family, part: str = "policy") -> None:
        self.config, self.engine, self.family, self.part = config, team, family, part
        self.together = config.train.sequence_parallel  # ranks that compute one forest
        self.dp_size, self.device = team.size // self.together, pick_device(config.run.device)
        self.dtype = pick_dtype(config.model.dtype, self.device)
        self.model = outline(config, family, self.dtype, critic=part == "critic")
        self.changes = 0

    def beside(self, part: str) -> "RankTrainer":
        """Load another model on the same ranks; returns its trainer."""
        self.engine.ask_all("add_part", [{"part": part}] * self.engine.size)
        return RankTrainer(self.config, self.engine, self.family, part)

    # -- forests --

    def logprobs(self, batches: Sequence[Batch], scoring: Scoring) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._read("logprobs", batches, scoring=asdict(scoring))

    def values(self, batches: Sequence[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._read("values", batches)

    def _read(self, call: str, batches: Sequence[Batch], **more: Any) -> list[Any]:
        dealt = self._dealt(batches)
        forests = [Batch(forest=batch.forest) for batch in batches]
        replies = self._ask(call, [{"batches": [forests[i] for i in mine], **more} for mine in dealt])
        found: dict[int, Any] = {}
        for mine, reply in zip(dealt, replies[:: self.together], strict=True):
            outputs = decode(tuple[tuple[np.ndarray, ...], ...], reply.row["result"], reply.arrays)
            found |= zip(mine, outputs, strict=True)
        return [found[index] for index in range(len(batches))]

    def train_step(self, batches: Sequence[Batch], loss: Loss, *, lr: float, moves: bool = True) -> Update:
        """One optimizer step on all batches together."""
        self.changes += 1  # at most: what ranks have done is not known if one of them fails
        options = {"loss": encode_loss(loss), "lr": lr, "moves": moves}
        rows = self._report("train_step", batches, options)
        skipped = {row["skipped"] for row in rows}
        assert len(skipped) == 1, "some ranks skipped the update, others did not"
        metrics = _merged(rows)
        tokens = [row["tokens"] for row in rows[:: self.together]]  # counting here would build the tree of every forest
        metrics.add_max("perf/imbalance", max(tokens) / fmean(tokens))
        return Update(metrics=metrics, skipped=skipped.pop())

    def measure(self, batches: Sequence[Batch], loss: Loss) -> Metrics:
        return _merged(self._report("measure", batches, {"loss": encode_loss(loss)}))

    def _report(self, call: str, batches: Sequence[Batch], options: Mapping[str, Any]) -> list[Any]:
        dealt = self._dealt(batches)
        replies = self._ask(call, [{"batches": [batches[i] for i in mine], **options} for mine in dealt])
        return [reply.row["result"] for reply in replies]

    def blend(self, source: Any, share: float) -> None:
        """Follow the policy. `source` is unused: the policy is on the same ranks."""
        self._ask("blend", [{"share": share}] * self.dp_size)

    def recomputed_share(self) -> float:
        return self.engine.ask_first("recomputed_share", part=self.part)

    # -- weights and files --

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.shared(turn=0) as (offer, _), opened(offer) as paths:
            yield from Mapped(paths).weights()

    @contextmanager
    def shared(self, *, turn: int, direct: bool = False) -> Iterator[tuple[dict[str, Any], Mapping[str, int]]]:
        """Like `weights.shared`: a copy in the memory of the first rank, from which other machines read it."""
        how = {"turn": turn, "direct": direct}
        offer, checksums = self.engine.ask_all("share", [how] * self.engine.size)[0].row["result"]
        try:
            yield offer | {"address": self.engine.first_address()}, checksums
        finally:
            self.engine.ask_first("unshare")

    @contextmanager
    def negated(self, tower: str) -> Iterator[str]:
        """Context manager that negates one weight of a tower, for probes, and restores it. Yields its name."""
        name = self._ask("negate", [{"tower": tower}] * self.dp_size)[0].row["result"]
        try:
            yield name
        finally:
            self._ask("restore", [{}] * self.dp_size)

    def write_card(self, card: RewardCard) -> None:
        """Set the reward card that is saved with the policy."""
        self._ask("write_card", [{"card": asdict(card)}] * self.dp_size)

    @cached_property
    def _shapes(self) -> list[tuple[str, tuple[int, ...], int]]:
        found = self.engine.ask_first("weight_shapes", part=self.part)
        return [(name, tuple(shape), size) for name, shape, size in found]

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], int]]:
        return self._shapes

    def spare_bytes(self) -> int:
        return sum(reply.row["result"] for reply in self._ask("spare_bytes", [{}] * self.dp_size))

    def saved_bytes(self) -> int:
        return sum(reply.row["result"] for reply in self._ask("saved_bytes", [{}] * self.dp_size))

    def model_files(self, *, copy: bool = False) -> list[File]:
        return self._files("model", copy)

    def state_files(self, *, copy: bool = False) -> list[File]:
        return self._files("state", copy)

    def _files(self, kind: str, copy: bool) -> list[File]:
        """One entry, whose writer lets every rank write its share."""
        self._ask("collect", [{"kind": kind, "copy": copy}] * self.dp_size)
        return [("", partial(self._write, kind))]

    def _write(self, kind: str, folder: Path) -> None:
        self.engine.write({"part": self.part, "kind": kind, "folder": str(folder)})

    def load_state(self, folder: Path) -> None:
        self._ask("load_state", [{"folder": str(folder)}] * self.dp_size)

    def close(self) -> None:
        """Free the memory of this model. The policy must be closed last, because it ends the ranks."""
        if self.part == "policy":
            self.engine.close()
        else:
            self._ask("drop_part", [{}] * self.dp_size)

    def _dealt(self, batches: Sequence[Batch]) -> list[list[int]]:
        """The indices of the batches for each group of ranks: those packed for it, and its share of the others."""
        free = [index for index, batch in enumerate(batches) if batch.dp_rank is None]
        dealt = [[free[i] for i in mine] for mine in deal([batches[i].tokens for i in free], self.dp_size)]
        for index, batch in enumerate(batches):
            if batch.dp_rank is not None:
                dealt[batch.dp_rank].append(index)
        return dealt

    def _ask(self, call: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Call all ranks; returns their answers. `arguments`: one per group of ranks."""
        each = [given for given in arguments for _ in range(self.together)]
        return self.engine.ask_all(call, [{"part": self.part, **given} for given in each])


def _merged(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    metrics = Metrics()
    for row in rows:
        one = Metrics()
        one.sums, one.maxima = row["sums"], row["maxima"]
        metrics.merge(one)
    return metrics


def start_policy(config: Config, command: str, family: Family, folder: str | None, *, logs: Path) -> RankTrainer:
    """Start the ranks, which log into `logs`. `folder`: the checkpoint to continue from."""
    require_heads(config, family)
    layout, reason = choose_layout(config, command, family)
    config = load(config, [f"train.layout={layout}"], command)
    team = start_team(config, command, model=family.path, folder=folder, logs=logs)
    log.info(f"{team.size} processes share the run, and log to {logs}/rank-N.log")
    log.info(f"train.layout={layout}: {reason}")
    return RankTrainer(config, team, family)


def outline(config: Config, family: Family, dtype: torch.dtype, *, critic: bool = False) -> Any:
    """The policy, or its critic, without weights."""
    adapted = config.model.train in ADAPTED
    model = empty_model(family, trust_remote_code=config.model.trust_remote_code).to(dtype)
    with torch.device("meta"):
        interface.use_in(model, segments=family.spec.segments)
        if critic:
            attach_score(model, seed=0)
        if adapted and not critic:
            lora.add(model, family, config.model.lora, seed=0)
        elif not adapted:
            freeze(model, family, config.model.train)
    return model
