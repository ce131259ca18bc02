"""A model whose weights are sharded over the ranks by torch's FSDP2, for models that do not fit whole on every GPU.

A layer is gathered for its forward and backward and freed afterwards; its gradient is reduce-scattered: each rank gets
the sum for its rows. `divided.py` has their masters and moments. Towers, projectors, adapters and score heads stay
whole on every rank, with divided optimizer state, because a forest without images runs no tower and must not keep other
ranks waiting; so do all weights of a 4-bit model. Embedding and language head stay gathered from a forward until its
backward, or until all forests have run, because losses read them.

Every forward and backward waits for all ranks. So all run equally many forests, a rank with fewer adds empty ones,
and none can repeat a forest that ran out of memory.

    trainer = ShardedTrainer(model, family, TrainConfig(), optimizer=DividedOptimizer)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from saccade.algorithms.objective import LossSums
from saccade.config import TrainConfig
from saccade.forest.batch import Batch, Forest
from saccade.models import lora
from saccade.models.families import Family
from saccade.models.files import require_same
from saccade.models.heads import SavedHead, blocks_of, without_head
from saccade.plugins.ranks.by_rows import joined_rows, make_whole, undivided
from saccade.plugins.ranks.machines import agreed, grid
from saccade.system.contents import File, on_host, tensor_file
from saccade.trainer import MODEL_SCORING, ForwardModel, Loss, Objective, model_state
from saccade.trainer.local import AVERAGE, WEIGHTS, Found, LocalTrainer
from saccade.trainer.optimizer_files import optimizer_file
from saccade.types import Metrics

# Share of the GPU's memory that is left unplanned, for blocks that FSDP's streams cannot reuse from each other: 8 % was
# the most seen on one GPU. It must suffice, because a forest that runs out of memory is not repeated.
FOR_STREAMS = 0.08


class _Root(nn.Module):
    """The root module for FSDP: the model is called in several ways, each of which runs inside this forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    def reshard(self) -> None:
        """Does nothing if no weight is sharded; otherwise FSDP's method takes its place."""


def shard(model: Any, family: Family, mesh: DeviceMesh) -> Any:
    """Shard the language model's layers and other weights in place; returns the root to call the model through."""
    ignored = {*undivided(model, family), *lora.adapters(model).values()}
    if ignored.issuperset(model.parameters()):
        return _Root(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        "ignored_params": ignored,
    }
    reach_towers(model, family)
    for layer in (*blocks_of(model), *getattr(getattr(model, "score", None), "above", ())):
        make_whole(layer.parameters())
        fully_shard(layer, **options)
    make_whole(model.parameters())
    root: Any = fully_shard(_Root(model), **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # no mean over ranks: the scales hold the denominators
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    return root


def reach_towers(model: Any, family: Family) -> None:
    """If only towers train, let every backward pass through all layers, even without images: other ranks wait there."""
    embedding = model.get_input_embeddings()
    towers = [p for name, p in model.named_parameters() if family.tower_of(name) != "llm"]
    if any(p.requires_grad for p in towers) and not embedding.weight.requires_grad:
        embedding.register_forward_hook(lambda _, __, out: out.requires_grad_() if torch.is_grad_enabled() else out)


class _Empty(Batch):
    """A forest of two tokens that contributes nothing."""

    @property
    def tokens(self) -> int:
        return 0


def _empty() -> Batch:
    one = np.ones(1, np.int64)
    forest = Forest(
        rows=np.zeros(2, np.int64),
        row_lengths=one + 1,
        sampled_runs=np.array([[1, 2]]),
        lengths=one,
        keys=(("", 0),),
        groups=one - 1,
        media_lists=((),),
        media_index=one - 1,
        with_ends=True,
    )
    return _Empty(forest=forest)


@dataclass(frozen=True)
class _OrNothing:
    """Wraps a loss; on an empty forest it is 0, with zero gradients for all weights that have one on other ranks."""

    loss: Loss

    @property
    def role(self) -> str:
        return self.loss.role

    @property
    def whole(self) -> bool:
        return self.loss.whole

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        if not isinstance(batch, _Empty):
            return self.loss.forward(trainer, batch)
        if teacher := getattr(self.loss, "teacher", None):
            with torch.no_grad():
                _passed(teacher, batch)
        return partial(_zero, _passed(trainer, batch))


def _passed(trainer: ForwardModel, batch: Batch) -> Tensor:
    """Run the forward that other ranks wait for; returns its outputs."""
    head = getattr(trainer.model, "score", None)
    if isinstance(head, SavedHead):
        return trainer.hidden_at(batch, batch.predictors)
    return trainer.score(batch, MODEL_SCORING)[0] if head is None else trainer.values_at(batch, batch.predictors)


def _zero(outputs: Tensor) -> tuple[Tensor, LossSums]:
    loss = 0.0 * outputs.sum()
    return loss, LossSums(tokens=loss.detach(), terms={}, means={})


class ShardedTrainer(LocalTrainer):
    """Every method that reads the model or its weights is called on all ranks at once."""

    retries_on_oom = False
    hybrid = False  # sharded only within each machine

    def __init__(self, model: nn.Module, family: Family, train: TrainConfig | None = None, **options: Any) -> None:
        if train is None:
            model.requires_grad_(False)
        self.rank = dist.get_rank()
        kind, world = next(model.parameters()).device.type, dist.distributed_c10d._get_default_group()
        self.mesh = grid(kind)["gpus"] if self.hybrid else DeviceMesh.from_group(world, kind)
        self.root = shard(model, family, self.mesh)
        super().__init__(model, family, train, **options)
        if train is not None:
            self.recompute.margin += FOR_STREAMS

    # -- forests --

    @torch.no_grad()
    def map_batches(self, batches: Sequence[Batch], read: Callable[[Batch], Found]) -> list[Found]:
        more = self._filled(batches)[len(batches) :]
        found = super().map_batches(batches, read)
        for empty in more:
            _passed(self, empty)
        self.root.reshard()  # here and below: without a backward, gathered weights would stay and become stale
        return found

    def measure(self, batches: Sequence[Batch], loss: Loss) -> Metrics:
        return super().measure(self._filled(batches), _OrNothing(loss))

    def sum_gradients(self, batches: Sequence[Batch], loss: Loss) -> list[LossSums]:
        found = super().sum_gradients(self._filled(batches), _OrNothing(loss))[: len(batches)]
        self.root.reshard()
        return found

    def hidden_at(self, batch: Batch, places: np.ndarray) -> Tensor:
        return self.root(super().hidden_at, batch, places)

    def _filled(self, batches: Sequence[Batch]) -> list[Batch]:
        """Append empty forests, up to the largest number that a rank of the mesh has."""
        most = int(agreed([len(batches)], dist.ReduceOp.MAX, self.mesh.get_group())[0])
        return [*batches, *[_empty()] * (most - len(batches))]

    # -- weights and files --

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            weight = parameter.detach()
            yield name, weight.to_local() if isinstance(weight, DTensor) else weight

    @torch.no_grad()
    def fill(self, copy: nn.Module, *, frozen: bool = False) -> None:
        """Write the trained weights into a whole copy of the model; with `frozen`, the frozen ones, too."""
        mine = dict(self.model.named_parameters())
        for name, target in copy.named_parameters():
            if frozen or mine[name].requires_grad:
                target.copy_(gathered(mine[name]))

    def help_gather(self) -> None:
        """Take part in gathering all weights, while another rank reads `weights`."""
        for parameter in self.model.parameters():
            gathered(parameter)

    def saved_bytes(self) -> int:
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        missing = sum((sizes[name] - t.numel()) * t.itemsize for name, t in self.averages.items())
        return super().saved_bytes() + missing

    def model_files(self, *, copy: bool = False) -> list[File]:
        if self.rank == 0:
            return model_state.model_files(self.model, copy=copy, sharded=True)
        with without_head(self.model):
            self.help_gather()
        return []

    def weight_file(self, *, copy: bool = False) -> File:
        found: dict[str, Tensor] = {}
        parameters = dict(self.model.named_parameters())
        averages = {f"{AVERAGE}{name}": _like(average, parameters[name]) for name, average in self.averages.items()}
        for name, part in (*parameters.items(), *averages.items()):
            whole = gathered(part)
            if self.rank == 0:
                found[name] = on_host(whole, copy=copy)
        return WEIGHTS, tensor_file(found)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        from safetensors.torch import load_file

        stored = load_file(folder / WEIGHTS)
        averages = {name: stored.pop(name) for name in list(stored) if name.startswith(AVERAGE)}
        require_same(str(folder / WEIGHTS), self.model.named_parameters(), stored.items())
        mine = self._cut(stored)
        for name, weight in self.local_weights():
            weight.copy_(mine[name])
        self.forget_features()
        cut = self._cut({name.removeprefix(AVERAGE): average for name, average in averages.items()})
        self.averages = {name: average.to(self.device, copy=True) for name, average in cut.items()}

    def _cut(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's rows of whole tensors."""
        place, size = self.mesh.get_local_rank(), self.mesh.size()
        rows = {n: -(-len(p) // size) for n, p in self.model.named_parameters() if isinstance(p, DTensor)}
        return {n: t[place * rows[n] :][: rows[n]] if n in rows else t for n, t in stored.items()}

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        if self._weights_are_state:
            file = self.weight_file(copy=copy)
            if self.rank == 0:
                yield file
        if self.optimizer is not None:
            yield optimizer_file(self.optimizer, copy=copy)


class HybridTrainer(ShardedTrainer):
    """Each machine has all weights, sharded over its GPUs: forward and backward wait for no other machine."""

    hybrid = True


def gathered(part: Tensor) -> Tensor:
    """All-gather a DTensor over its mesh; not by its own method, which cannot read GPU tensors with gloo."""
    part = part.detach()
    if not isinstance(part, DTensor):
        return part
    mesh = part.device_mesh
    return joined_rows(part.to_local(), part.shape, mesh.get_group(mesh.ndim - 1))


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """Local values for this rank's rows of a parameter, as a DTensor that is sharded like it."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride())
