"""Sequence parallelism: ranks compute one forest together, for contexts whose activations do not fit on one GPU.

Each rank of a group runs all layers on a stretch of the tokens. Around attention, one all-to-all gives it all tokens of
its share of the heads instead, so that the attention plan of the whole forest runs unchanged, and another one reverses
this (Ulysses): any tree is divided evenly. Log-probs and values are read on the rank that holds their token and
exchanged, so that a loss sees whole groups. Its gradient reaches only this rank's rows: gradients are sums over
stretches, which the optimizer adds up over all ranks like those of different forests.

Towers run on the ranks whose stretch holds a token of the medium. A medium across a border is computed on both sides,
each with the gradient of its own tokens: nothing is exchanged, and no rank waits for a tower.

    trainer = SequenceTrainer(model, family, TrainConfig(), optimizer=DividedOptimizer, size=2)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.algorithms.objective import LossSums
from saccade.config import TrainConfig
from saccade.errors import ConfigError
from saccade.forest.attention import AttentionPlan, Window
from saccade.forest.batch import Batch
from saccade.forest.device_ops import to_device
from saccade.models.families import Family
from saccade.models.heads import blocks_of
from saccade.plugins.ranks.layouts import key_repeats
from saccade.plugins.ranks.machines import agreed
from saccade.plugins.ranks.sharded import HybridTrainer, ShardedTrainer, reach_towers
from saccade.trainer import Scoring
from saccade.trainer.forward_inputs import InputPrefetcher, Inputs
from saccade.trainer.local import LocalTrainer
from saccade.types import MediaSpan, Metrics


def trainer_class(train: TrainConfig) -> Callable[..., LocalTrainer]:
    """The trainer class for a model on a rank."""
    alone, together = TRAINERS[train.layout]
    return alone if train.sequence_parallel == 1 else partial(together, size=train.sequence_parallel)


@cache
def group_of(size: int) -> Any:
    """The process group of this rank: `size` consecutive ranks. Collective: all ranks must call it."""
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group([*range(start, start + size)]) for start in starts]
    return groups[dist.get_rank() // size]


# -- a stretch of a forest --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive tokens of a forest with their targets, used in place of a batch. Nodes and parents are those of the
    whole forest. Media spans may reach over the ends.
    """

    whole: Batch
    bounds: tuple[int, int]
    ids: np.ndarray
    node_starts: np.ndarray
    parents: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    media: tuple[MediaSpan, ...]
    support: tuple[np.ndarray, ...] | None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def target_count(self) -> int:
        return len(self.predictors)

    def positions(self, rule: Any) -> np.ndarray:
        whole = self.whole.positions(rule)
        return np.pad(whole, ((0, 0), (0, max(0, self.bounds[1] - whole.shape[1]))))[:, slice(*self.bounds)]


def bounds_of(batch: Batch, size: int) -> np.ndarray:
    """[size + 1]: where each stretch begins. Their lengths differ by at most one token, and none is empty."""
    return np.arange(size + 1) * max(size, len(batch.ids)) // size


def stretch(batch: Batch, place: int, size: int) -> Stretch:
    """The stretch of the rank at this place in its group. A forest with fewer tokens than ranks is padded with one more
    tree, which has no targets.
    """
    start, end = bounds_of(batch, size)[place : place + 2].tolist()
    mine = (start <= batch.predictors) & (batch.predictors < end)
    ids, node_starts, parents = batch.ids, batch.node_starts, batch.parents
    if (more := size - len(ids)) > 0:
        ids, node_starts, parents = np.pad(ids, (0, more)), np.append(node_starts, size), np.append(parents, -1)
    return Stretch(
        whole=batch,
        bounds=(start, end),
        ids=ids[start:end],
        node_starts=node_starts,
        parents=parents,
        predictors=batch.predictors[mine] - start,
        targets=batch.targets[mine],
        media=tuple(span.moved(-start) for span in batch.media if span.start < end and span.end > start),
        support=batch.support and tuple(batch.support[read] for read in np.flatnonzero(mine)),
    )


def _inside(part: Stretch) -> np.ndarray:
    """Indices of the media tokens that lie in the stretch, among all tokens of its media."""
    places = np.concatenate([np.arange(span.start, span.end) for span in part.media])
    return np.flatnonzero((places >= 0) & (places < part.tokens))


# -- exchanges --------------------------------------------------------------------------------------


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Returns the rows that the ranks of the group sent to this one, in rank order. `sent`: how many go to each rank,
    `received`: how many come from each.
    """
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, *ctx.back), None, None, None


def divided_plan(plan: AttentionPlan, lengths: Sequence[int], place: int, group: Any) -> AttentionPlan:
    """Attention over a whole forest, called with the tokens of the stretch at `place`. `lengths`: of all stretches."""
    size = len(lengths)
    own = [lengths[place]] * size

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window) -> Tensor:
        if (repeats := key_repeats(k.shape[1], size)) > 1:
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        if (width := v.shape[-1]) < q.shape[-1]:
            v = pad(v, (0, q.shape[-1] - width))  # q, k and v are exchanged as one tensor
        shares = [x.shape[1] // size for x in (q, k, v)]
        of_ranks = [x.unflatten(1, (size, n)).transpose(0, 1) for x, n in zip((q, k, v), shares, strict=True)]
        rows = torch.cat(of_ranks, 2).flatten(0, 1)  # grouped by receiving rank
        found = _Exchange.apply(rows, own, lengths, group)
        q, k, v = found.split(shares, 1)
        out = plan(layer, q, k, v[..., :width], scale, window)
        rows = _Exchange.apply(out, lengths, own, group)
        return rows.unflatten(0, (size, own[0])).transpose(0, 1).flatten(1, 2)

    return attend


# -- the trainer ------------------------------------------------------------------------------------


class _OfForests(InputPrefetcher):
    """Prefetched inputs of stretches, stored under their whole forest."""

    def get(self, batch: Any) -> Inputs:
        assert isinstance(batch, Stretch)
        return super().get(batch.whole)


class SequenceTrainer(LocalTrainer):
    """Every method that reads the model is called on all ranks of a group at once, with the same forests."""

    retries_on_oom = False

    def __init__(
        self, model: nn.Module, family: Family, train: TrainConfig | None = None, *, size: int, **options: Any
    ) -> None:
        super().__init__(model, family, train, **options)
        self.group, self.size, self.place = group_of(size), size, dist.get_rank() % size
        reach_towers(model, family)
        make = self._inputs.make

        def inputs(batch: Batch) -> Inputs:
            part = self._mine(batch)
            found = make(part)
            places = None if found.places is None else found.places[to_device(_inside(part), self.device)]
            lengths = np.diff(bounds_of(batch, size)).tolist()
            return replace(found, places=places, plan=divided_plan(found.plan, lengths, self.place, self.group))

        self._inputs = _OfForests(inputs)

    def _mine(self, batch: Batch) -> Any:
        return stretch(batch, self.place, self.size)

    def score(self, batch: Batch, scoring: Scoring, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        score = super().score
        new, entropy = self.at_targets(batch, lambda part: score(part, scoring, entropy_gradient=entropy_gradient))
        return new, entropy

    def at_targets(self, batch: Batch, compute: Callable[[Any], Sequence[Tensor]]) -> list[Tensor]:
        self._agree()
        return [self._completed(batch, batch.predictors, rows) for rows in compute(self._mine(batch))]

    def values_at(self, batch: Batch, places: np.ndarray) -> Tensor:
        self._agree()
        start, end = bounds_of(batch, self.size)[self.place : self.place + 2]
        mine = places[(start <= places) & (places < end)]
        return self._completed(batch, places, super().values_at(self._mine(batch), mine - start))

    def _completed(self, batch: Batch, places: np.ndarray, rows: Tensor) -> Tensor:
        """Gather what all ranks read, in the order of `places`; only this rank's rows carry a gradient."""
        owners = np.searchsorted(bounds_of(batch, self.size), places, side="right") - 1
        counts = np.bincount(owners, minlength=self.size).tolist()
        everyone = all_to_all(rows.detach().repeat(self.size), [len(rows)] * self.size, counts, self.group)
        order, mine = np.argsort(owners, kind="stable"), np.flatnonzero(owners == self.place)
        whole = torch.empty_like(everyone).index_copy(0, to_device(order, self.device), everyone)
        return whole.index_copy(0, to_device(mine, self.device), rows)

    def _features(self, batch: Any, inputs: Inputs) -> Tensor | None:
        found = super()._features(batch, inputs)
        return None if found is None else found.index_select(0, to_device(_inside(batch), self.device))

    def _agree(self) -> None:
        """If one rank recomputes a layer in backward to save memory, all ranks of the group must: the recomputation
        repeats the exchanges inside the layer.
        """
        if torch.is_grad_enabled() and self.recompute.planned:
            layers: list[Any] = [*blocks_of(self.model)]
            again = agreed([layer.gradient_checkpointing for layer in layers], dist.ReduceOp.MAX, self.group)
            for layer, one in zip(layers, again.tolist(), strict=True):
                layer.gradient_checkpointing = bool(one)

    def prefetch(self, batches: Sequence[Batch]) -> None:
        super().prefetch([self._mine(batch) for batch in batches])

    def token_counts(self, batch: Batch) -> tuple[int, int]:
        return super().token_counts(self._mine(batch))

    def metrics_of(self, sums: Sequence[LossSums]) -> Metrics:
        """All ranks of a group have equal sums, so only the first reports them."""
        return super().metrics_of([] if self.place else sums)


class ShardedSequence(ShardedTrainer, SequenceTrainer):
    """Weights are sharded over all ranks, the tokens of a forest over the ranks of a group."""


class HybridSequence(HybridTrainer, SequenceTrainer):
    def __init__(self, *arguments: Any, size: int, **options: Any) -> None:
        super().__init__(*arguments, size=size, **options)
        if not set(dist.get_process_group_ranks(self.group)) <= set(self.mesh.mesh.tolist()):
            where = "are on several machines, each of which fills up with forests for itself"
            raise ConfigError(
                f"train.sequence_parallel: with train.layout=hybrid, {size} GPUs {where}; try train.layout=sharded"
            )


TRAINERS: Mapping[str, tuple[type[LocalTrainer], type[SequenceTrainer]]] = {  # by layout; single, sequence parallel
    "whole": (LocalTrainer, SequenceTrainer),
    "sharded": (ShardedTrainer, ShardedSequence),
    "hybrid": (HybridTrainer, HybridSequence),
}
