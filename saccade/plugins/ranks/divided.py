"""ZeRO-1: whole weights on every rank, the optimizer state divided among the ranks, on torch's default process group
(gloo for tensors on the CPU, nccl for those on GPUs).

The trained parameters of a dtype are views of one flat tensor, of which each rank updates one stretch. Forward and
backward need no other rank, so each may have any micro-batches, and repeat or split them. A step is one
reduce-scatter of the gradient sums and one all-gather of the weights, which never move in memory.

Bit-identical: the weights of all ranks; the update of an element to that of one process, given its gradient and the
clip factor; state that was saved and loaded by different numbers of ranks. Not bit-identical: the gradient sums, which
several micro-batches per rank add up in another order than one process does (1e-7), and the norm, which is summed in
float64 here and may differ as much, and with it a clipped update.

    trainer = LocalTrainer(model, family, TrainConfig(), optimizer=DividedOptimizer)

Parameters that are sharded already (`sharded.py`), whose gradients arrive summed, are updated in place. If each machine
has all of them (hybrid), the ranks that hold the same shard divide its state among them, as for whole parameters.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from saccade.config import TrainConfig
from saccade.plugins.offload.host_state import aligned
from saccade.plugins.ranks.machines import agreed, grid, sum_of_machine
from saccade.trainer.optimizer import Optimizer, OptimizerState

# Renamed in torch 2.13, which warns about the old names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """Parameters of one dtype, end to end, of which each rank of a group updates one stretch."""

    parts: Mapping[str, Tensor]  # what a rank holds of each parameter
    starts: Mapping[str, int]
    piece: int  # elements of a stretch
    group: Any = None  # of ranks that hold the same parts; None: all
    weights: Tensor | None = None  # [ranks * piece], of which the parts are views; None: FSDP holds them

    @property
    def low(self) -> int:
        """Where the stretch of this rank begins."""
        return dist.get_rank(self.group) * self.piece

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) * self.piece


def _laid(parts: Mapping[str, Tensor], group: Any = None) -> _Flat:
    starts, end = dict[str, int](), 0
    for name, part in parts.items():
        starts[name] = end
        end += aligned(part.numel())
    return _Flat(parts=parts, starts=starts, piece=aligned(-(-end // dist.get_world_size(group))), group=group)


def _flatten(parameters: Mapping[str, nn.Parameter]) -> _Flat:
    """Copy the parameters into one flat tensor, of which they become views."""
    flat, first = _laid(parameters), next(iter(parameters.values()))
    weights = torch.zeros(flat.size, dtype=first.dtype, device=first.device)
    for name, parameter in parameters.items():
        view = weights[flat.starts[name] :][: parameter.numel()].view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
    return replace(flat, weights=weights)


class DividedOptimizer(Optimizer):
    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig, *, lr_scale: Callable[[str], float]
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        named = {name: p for name, p in parameters if p.requires_grad}
        sharded: dict[str, Any] = {name: p for name, p in named.items() if isinstance(p, DTensor)}
        held = {name: p.to_local().detach() for name, p in sharded.items()}
        hybrid = any(p.device_mesh.size() < self.world for p in sharded.values())
        self._alone = {} if hybrid else held  # shards that no other rank holds
        self._flats = [_flatten(parts) for parts in _by_dtype({n: p for n, p in named.items() if n not in sharded})]
        for parts in _by_dtype(held) if hybrid else ():
            group = grid(next(iter(parts.values())).device.type)["machines"].get_group()
            self._flats.append(_laid(parts, group))
        self._ranges: dict[str, tuple[int, int]] = {}
        self._owned: dict[str, nn.Parameter] = {}
        stretches = [(n, part, 0, part.numel()) for n, part in self._alone.items()]
        for flat in self._flats:
            stretches += [
                (n, p, flat.low - flat.starts[n], flat.low - flat.starts[n] + flat.piece) for n, p in flat.parts.items()
            ]
        for name, part, low, high in stretches:
            first, end = max(low, 0), min(high, part.numel())
            if first < end:
                self._owned[name] = nn.Parameter(part.detach().view(-1)[first:end])
                begin = _begin(sharded[name]) if name in sharded else 0
                self._ranges[name] = begin + first, begin + end
        self._sums: list[Tensor] = []  # gradient sums of this step, one tensor per flat
        self._stepped = False  # whether any rank has a gradient
        super().__init__(named.items(), config, lr_scale=lr_scale)

    def state_maker(self) -> Callable[..., OptimizerState]:
        return partial(super().state_maker(), total=sum_of_machine) if self.config.offload else super().state_maker()

    def owned(self) -> Mapping[str, nn.Parameter]:
        return self._owned

    def ranges(self) -> dict[str, tuple[int, int]]:
        return self._ranges

    def total(self, counts: Counter[str]) -> Counter[str]:
        text = json.dumps(counts).encode()
        longest = int(agreed([len(text)], dist.ReduceOp.MAX)[0])
        mine = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return sum((Counter(json.loads(bytes(part.tolist()))) for part in everyone), Counter[str]())

    def updates(self) -> int:
        return int(agreed([super().updates()], dist.ReduceOp.MAX)[0])

    def same_everywhere(self) -> bool:
        """Whether the trained weights are bit-identical on all ranks that hold the same ones, by their checksum."""
        same = True
        for flat in self._flats:
            parts = flat.parts.values() if flat.weights is None else [flat.weights]
            bits = sum(int(part.view(-1).view(torch.int16).sum(dtype=torch.int64)) for part in parts)
            largest, smallest = agreed([bits, -bits], dist.ReduceOp.MAX, flat.group)
            same &= bool(largest == -smallest)
        return same

    def begin(self) -> None:
        self.clear()
        for flat in self._flats:
            some = next(iter(flat.parts.values()))
            sums = torch.zeros(flat.size, dtype=torch.promote_types(some.dtype, torch.float32), device=some.device)
            self._sums.append(sums)
            for name, start in flat.starts.items():
                self._room[name] = sums[start:][: flat.parts[name].numel()].view_as(flat.parts[name])
        for name, part in self._alone.items():
            if torch.promote_types(part.dtype, torch.float32) != part.dtype:
                self._room[name] = torch.empty_like(part, dtype=torch.float32)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        found = parameter.grad
        return found.to_local() if isinstance(found, DTensor) else found

    def clear(self) -> None:
        super().clear()
        self._sums = []

    @torch.no_grad()
    def reduce(self, *, finite: bool) -> bool:
        flags = [*(name in self.gradients for name in self.parameters), not finite]
        *seen, bad = agreed(flags, dist.ReduceOp.MAX).tolist()
        anywhere = {name for name, one in zip(self.parameters, seen, strict=True) if one}
        everything, self._stepped = self._sums, bool(anywhere)
        summed = {name: g.view(-1) for name, g in self.gradients.items() if name in self._alone and name in self._owned}
        self.clear()
        self.gradients = summed
        for flat, sums in zip(self._flats, everything, strict=True):
            mine = sums.new_empty(flat.piece)
            _reduce_scatter(mine, sums, group=flat.group)
            for name in anywhere & flat.starts.keys() & self._owned.keys():
                self.gradients[name] = self._stretch(flat, name, mine)
        return not bad

    def _stretch(self, flat: _Flat, name: str, mine: Tensor) -> Tensor:
        """The elements of a parameter within `mine`, this rank's stretch."""
        begins = max(flat.starts[name] - flat.low, 0)
        return mine[begins:][: self._owned[name].numel()]

    def norm(self, names: Iterable[str] | None = None) -> Tensor:
        chosen = self.gradients if names is None else [n for n in names if n in self.gradients]
        gradients = [self.gradients[name] for name in chosen]
        norms = torch._foreach_norm(gradients, 2, torch.float64) if gradients else ()
        square = torch.stack(norms).square().sum().item() if norms else 0.0
        device = next(iter(self.parameters.values())).device
        return agreed([square], dist.ReduceOp.SUM)[0].sqrt().to(device, torch.float32)

    @torch.no_grad()
    def step(self, lr: float, *, norm: Tensor) -> None:
        if self._stepped and not self.gradients:
            self._rule.step({}, lr)  # counts the update, as on the other ranks
        super().step(lr, norm=norm)
        for flat in self._flats:
            if flat.weights is not None:
                mine = flat.weights[flat.low :][: flat.piece]
                all_gather(flat.weights, mine.clone())
                continue
            some = next(iter(flat.parts.values()))
            mine, everything = some.new_empty(flat.piece), some.new_empty(flat.size)
            for name in flat.starts.keys() & self._owned.keys():
                self._stretch(flat, name, mine).copy_(self._owned[name])
            all_gather(everything, mine, group=flat.group)
            for name, part in flat.parts.items():
                part.copy_(everything[flat.starts[name] :][: part.numel()].view_as(part))


def _by_dtype(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(part.dtype for part in parts.values())
    return [{name: part for name, part in parts.items() if part.dtype == kind} for kind in kinds]


def _begin(sharded: DTensor) -> int:
    """The index of the first element of a sharded parameter that this rank holds."""
    rows = -(-len(sharded) // sharded.device_mesh.size())
    return sharded.device_mesh.get_local_rank() * rows * (sharded.numel() // len(sharded))
