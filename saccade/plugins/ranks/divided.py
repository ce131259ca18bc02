"""Weights whole on every rank, the optimizer's state divided among the ranks (ZeRO-1), on torch's default process
group: gloo for tensors on the CPU, nccl for those on GPUs.

The trained parameters of a dtype are views of one flat tensor, of which each rank steps one stretch. Forward and
backward need no other rank, so each may have any micro-batches, and repeat or split them. A step is one
reduce-scatter of the sums and one all-gather of the weights, which never move in memory.

Equal to the bit: the weights of all ranks; an element's update and that of one process, given its gradient and the
clip factor; state that was written and read by any numbers of ranks. Not so: the sums, which more than one
micro-batch per rank adds up in another order than one process does (1e-7), and the norm, which is summed in
float64 here and may differ as much, so that a clipped update does.

    backend = LocalBackend(model, family, TrainConfig(), optimizer=DividedOptimizer)

Parameters that are sharded already (`sharded.py`), whose gradients come summed, are stepped where they lie.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from saccade.config import TrainConfig
from saccade.trainer.optimizer import Optimizer

ALIGN = 64  # elements; kernels read several at once, and a stretch begins where no such read is cut
# New names since torch 2.13, which warns of the old ones.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """Parameters of one dtype, end to end."""

    weights: Tensor  # [world * piece]
    starts: Mapping[str, int]
    piece: int


def _flatten(parameters: Mapping[str, nn.Parameter], world: int) -> _Flat:
    """Their numbers in one tensor, of which they become views."""
    starts, end = dict[str, int](), 0
    for name, parameter in parameters.items():
        starts[name] = end
        end += _aligned(parameter.numel())
    first, piece = next(iter(parameters.values())), _aligned(-(-end // world))
    weights = torch.zeros(world * piece, dtype=first.dtype, device=first.device)
    for name, parameter in parameters.items():
        view = weights[starts[name] :][: parameter.numel()].view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
    return _Flat(weights=weights, starts=starts, piece=piece)


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class DividedOptimizer(Optimizer):
    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig, *, lr_scale: Callable[[str], float]
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        named = {name: p for name, p in parameters if p.requires_grad}
        self._sharded: dict[str, Any] = {name: p for name, p in named.items() if isinstance(p, DTensor)}
        whole = {name: p for name, p in named.items() if name not in self._sharded}
        kinds = dict.fromkeys(p.dtype for p in whole.values())
        self._flats = [_flatten({n: p for n, p in whole.items() if p.dtype == kind}, self.world) for kind in kinds]
        self._ranges: dict[str, tuple[int, int]] = {}
        self._owned: dict[str, nn.Parameter] = {}
        for flat in self._flats:
            low, high = self.rank * flat.piece, (self.rank + 1) * flat.piece
            for name, start in flat.starts.items():
                first, end = max(low - start, 0), min(high - start, named[name].numel())
                if first < end:
                    self._ranges[name] = first, end
                    self._owned[name] = nn.Parameter(flat.weights[start + first : start + end])
        for name, sharded in self._sharded.items():
            local, rows = sharded.to_local().detach(), -(-len(sharded) // self.world)
            if local.numel():
                first = self.rank * rows * (sharded.numel() // len(sharded))
                self._ranges[name] = first, first + local.numel()
                self._owned[name] = nn.Parameter(local)
        self._sums: list[Tensor] = []  # as the flats, of one step
        self._stepped = False  # whether any rank has a gradient
        super().__init__(named.items(), config, lr_scale=lr_scale)

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
        """Whether the trained weights of all ranks have equal bits, by their checksum."""
        bits = sum(int(flat.weights.view(torch.int16).sum(dtype=torch.int64)) for flat in self._flats)
        largest, smallest = agreed([bits, -bits], dist.ReduceOp.MAX)
        return bool(largest == -smallest)

    def begin(self) -> None:
        self.clear()
        for flat in self._flats:
            wide = torch.promote_types(flat.weights.dtype, torch.float32)
            sums = torch.zeros_like(flat.weights, dtype=wide)
            self._sums.append(sums)
            for name, start in flat.starts.items():
                self._room[name] = sums[start:][: self.parameters[name].numel()].view_as(self.parameters[name])
        for name, sharded in self._sharded.items():
            if torch.promote_types(sharded.dtype, torch.float32) != sharded.dtype:
                self._room[name] = torch.empty_like(sharded.to_local(), dtype=torch.float32)

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
        summed = {name: g for name, g in self.gradients.items() if name in self._sharded and name in self._owned}
        self.clear()
        self.gradients = summed
        for flat, sums in zip(self._flats, everything, strict=True):
            mine, low = sums.new_empty(flat.piece), self.rank * flat.piece
            _reduce_scatter(mine, sums)
            for name, start in flat.starts.items():
                if name in anywhere and name in self._ranges:
                    first, end = (start + place - low for place in self._ranges[name])
                    self.gradients[name] = mine[first:end]
        return not bad

    def norm(self, names: Iterable[str] | None = None) -> Tensor:
        chosen = self.gradients if names is None else [n for n in names if n in self.gradients]
        gradients = [self.gradients[name] for name in chosen]
        norms = torch._foreach_norm(gradients, 2, torch.float64) if gradients else ()
        square = torch.stack(norms).square().sum().item() if norms else 0.0
        device = next(iter(self.parameters.values())).device
        return agreed([square], dist.ReduceOp.SUM)[0].sqrt().to(device, torch.float32)

    def step(self, lr: float, *, norm: Tensor) -> None:
        if self._stepped and not self.gradients:
            self._rule.step({}, lr)  # which counts the updates of all ranks
        super().step(lr, norm=norm)
        for flat in self._flats:
            mine = flat.weights[self.rank * flat.piece :][: flat.piece]
            _all_gather(flat.weights, mine.clone())


def agreed(numbers: Iterable[float], how: Any) -> Tensor:
    """One answer from the numbers of all ranks."""
    answer = torch.tensor([*numbers], dtype=torch.float64)
    dist.all_reduce(answer, op=how)
    return answer
