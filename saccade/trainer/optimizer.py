"""AdamW with fp32 masters, or on bf16 weights with Kahan compensation, its moments in bf16 or 8 bits; state is keyed by
parameter name.

A large gradient is added to its fp32 sum as soon as backward has computed it, and then freed, so no
second set of gradients exists besides the sums. If a micro-batch runs out of memory half-way, the
gradients that it has already added are known by name, and its retry skips them.

    optimizer = Optimizer(model.named_parameters(), TrainConfig(), lr_scale=lambda name: 1.0)
"""

import functools
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.config import TrainConfig
from saccade.registry import HOOKS

# Elements. Smaller gradients are added at the end of the backward: adding each separately would cost
# more than the little memory is worth.
LARGE = 8_000_000
COUNTS = ("step", "steps")  # prefixes of the keys in `state` that count updates


class Optimizer:
    """The optimizer of one process. If several hold the same weights, each updates a part of them
    (`plugins/ranks/divided.py`).
    """

    rank, world = 0, 1

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig, *, lr_scale: Callable[[str], float]
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.config = config
        self.gradients: dict[str, Tensor] = {}  # the sums
        self._room: dict[str, Tensor] = {}  # allocated sums of half-precision gradients, not used yet
        self._added: set[str] = set()  # names whose gradient of this micro-batch is in the sums
        # Hooks with a strong reference to the optimizer would close a cycle that Python's garbage collector
        # cannot see: the model's memory would never be freed.
        myself = weakref.WeakMethod(self._add)
        for name, parameter in self.parameters.items():
            if parameter.numel() >= LARGE:
                parameter.register_post_accumulate_grad_hook(functools.partial(_hook, myself, name))
        self.lr_scale = {name: lr_scale(name) for name in self.parameters}
        # Biases and norms are vectors; decay would only shrink what they have learned.
        self.decay = {name: config.weight_decay * (p.ndim > 1) for name, p in self.parameters.items()}
        kind: Any = _MasterAdamW if config.optimizer == "adamw" else _KahanAdamW
        self._rule: _MasterAdamW | _KahanAdamW = kind(self, self.state_maker())

    def state_maker(self) -> Callable[..., "OptimizerState"]:
        """The class that allocates the state: on the device or in main memory, and in 8 bits if configured."""
        kind = HOOKS["state_in_main_memory"] if self.config.offload else OptimizerState
        return functools.partial(HOOKS["eight_bits"], kind) if self.config.optimizer == "adamw_8bit" else kind

    def owned(self) -> Mapping[str, nn.Parameter]:
        """What this process updates: the parameters, or flat parts of them."""
        return self.parameters

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The range [start, end) of each flattened parameter that this process updates."""
        return {name: (0, p.numel()) for name, p in self.parameters.items()}

    def total(self, counts: Counter[str]) -> Counter[str]:
        """The counts summed over all processes."""
        return counts

    def updates(self) -> int:
        """Number of updates so far, of the parameter with the most."""
        counts = [t for key, t in self.state().items() if key.partition("/")[0] in COUNTS]
        return int(torch.stack(counts).max()) if counts else 0

    def begin(self) -> None:
        """Start a step. Allocates all sums at once: between activations they would fragment the memory."""
        self.clear()
        self._room = {
            name: torch.empty_like(p, dtype=torch.float32)
            for name, p in self.parameters.items()
            if torch.promote_types(p.dtype, torch.float32) != p.dtype
        }

    def start_micro_batch(self, added: frozenset[str] = frozenset()) -> None:
        """`added` names parameters whose gradient of this micro-batch is in the sums already."""
        self._added = set(added)

    def drop_micro_batch(self) -> frozenset[str]:
        """Drop the gradients that are not in the sums; return the names of those that are."""
        for parameter in self.parameters.values():
            parameter.grad = None
        return frozenset(self._added)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient that backward left in this process, or None."""
        return parameter.grad

    def _add(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = self.gradient(parameter), None
        if gradient is None or name in self._added:
            return
        if name in self.gradients:
            self.gradients[name] += gradient
        elif name in self._room:
            self.gradients[name] = self._room.pop(name).copy_(gradient)
        else:
            self.gradients[name] = gradient
        self._added.add(name)

    def end_micro_batch(self) -> None:
        """After the backward: add the remaining gradients, in one call for those that have a sum already."""
        waiting = {n: g for n, p in self.parameters.items() if (g := self.gradient(p)) is not None}
        ready = [n for n in waiting if n in self.gradients and n not in self._added]
        if ready:
            torch._foreach_add_([self.gradients[n] for n in ready], [waiting[n] for n in ready])
            self._added |= set(ready)
        for name in waiting:
            self._add(name, self.parameters[name])

    def reduce(self, *, finite: bool) -> bool:
        """After all micro-batches: sum `gradients` over all processes, keeping the owned parts. Returns whether
        the losses of all processes were finite.
        """
        return finite

    def clear(self) -> None:
        self.drop_micro_batch()
        self.gradients, self._room, self._added = {}, {}, set()

    def norm(self, names: Iterable[str] | None = None) -> Tensor:
        """Global L2 norm of the sums, over all or some parameters."""
        chosen = self.gradients if names is None else [n for n in names if n in self.gradients]
        gradients = [self.gradients[name] for name in chosen]
        if not gradients:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))

    def step(self, lr: float, *, norm: Tensor) -> None:
        """Clip by the global norm, update the weights, drop the gradients. Without gradients nothing changes."""
        if self.gradients:
            factor = (self.config.grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(self.gradients.values()), factor)
            self._rule.step(self.gradients, lr)
        self.clear()

    def state(self) -> dict[str, Tensor]:
        return self._rule.state()


def _hook(add: weakref.WeakMethod[Any], name: str, parameter: Tensor) -> None:
    if (still := add()) is not None:
        still(name, parameter)


# -- state, and the rules that update it -----------------------------------------------------------


class Piece(NamedTuple):
    """Elements of a parameter in an update: all of them, or a flat range."""

    name: str
    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class OptimizerState:
    """State on the device of the parameters; an update processes all of them at once. `keys`: state tensors of each
    parameter, of its shape; `kinds`: for some keys another dtype, and how many elements share one value.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        keys: Mapping[str, Sequence[str]],
        dtype: torch.dtype,
        kinds: Mapping[str, tuple[torch.dtype, int]] = MappingProxyType({}),
    ) -> None:
        def zeros(parameter: Tensor, key: str) -> Tensor:
            kind, each = kinds.get(key, (dtype, 1))
            like = parameter if each == 1 else parameter.new_empty(-(-parameter.numel() // each))
            return torch.zeros_like(like, dtype=kind)

        self.parameters = parameters
        self.tensors = {n: {key: zeros(parameters[n], key) for key in kept} for n, kept in keys.items()}

    def pieces(self, gradients: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        yield [Piece(name, self.parameters[name], g, self.tensors[name]) for name, g in gradients.items()]


class _MasterAdamW:
    """torch's fused AdamW on fp32 masters. An fp32 parameter is its own master."""

    def __init__(self, optimizer: Optimizer, make: Callable[..., OptimizerState]) -> None:
        parameters, moments = optimizer.owned(), ("exp_avg", "exp_avg_sq")
        keys = {n: moments if p.dtype == torch.float32 else ("master", *moments) for n, p in parameters.items()}
        self.stored = make(parameters, keys, torch.float32)
        for name, state in self.stored.tensors.items():
            if "master" in state:  # non-blocking: the GPU converts to float32, not the CPU
                state["master"].copy_(parameters[name].detach(), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.steps = {name: torch.zeros((), device=p.device) for name, p in parameters.items()}
        self.config = optimizer.config
        self.settings = {name: (optimizer.lr_scale[name], optimizer.decay[name]) for name in parameters}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        if gradients:
            torch._foreach_add_([self.steps[name] for name in gradients], 1)
        for pieces in self.stored.pieces(gradients):
            groups = defaultdict(list)
            for piece in pieces:
                groups[self.settings[piece.name]].append(piece)
            for (scale, decay), group in groups.items():
                torch._fused_adamw_(
                    [piece.state.get("master", piece.parameter) for piece in group],
                    [piece.gradient for piece in group],
                    [piece.state["exp_avg"] for piece in group],
                    [piece.state["exp_avg_sq"] for piece in group],
                    [],
                    [self.steps[piece.name] for piece in group],
                    lr=lr * scale,
                    beta1=self.config.betas[0],
                    beta2=self.config.betas[1],
                    weight_decay=decay,
                    eps=self.config.eps,
                    amsgrad=False,
                    maximize=False,
                )
            if halves := [piece for piece in pieces if "master" in piece.state]:
                torch._foreach_copy_([p.parameter for p in halves], [p.state["master"] for p in halves])

    def state(self) -> dict[str, Tensor]:
        tensors = {f"{key}/{n}": t for n, state in self.stored.tensors.items() for key, t in state.items()}
        return tensors | {f"step/{name}": step for name, step in self.steps.items()}


class _KahanAdamW:
    """Weights and moments in bf16. The part of an update that rounding would lose is carried to the
    next step.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[..., OptimizerState]) -> None:
        parameters, self.config = optimizer.owned(), optimizer.config
        self.lr_scale, self.decay = optimizer.lr_scale, optimizer.decay
        self.stored = make(parameters, dict.fromkeys(parameters, ("exp_avg", "exp_avg_sq", "lost")), torch.bfloat16)
        self.steps = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        self.steps += 1
        first, second = self.config.betas
        bias1, bias2 = 1 - first ** self.steps.item(), 1 - second ** self.steps.item()
        for name, parameter, gradient, state in chain.from_iterable(self.stored.pieces(gradients)):
            mean = state["exp_avg"].float().lerp_(gradient, 1 - first)
            square = state["exp_avg_sq"].float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            direction = (mean / bias1) / ((square / bias2).sqrt_() + self.config.eps)
            direction += self.decay[name] * parameter.float()
            change = state["lost"].float() - lr * self.lr_scale[name] * direction
            before = parameter.to(torch.float32, copy=True)  # else a float32 parameter is returned itself
            parameter.copy_(before + change)
            state["lost"].copy_(change - (parameter.float() - before))

    def state(self) -> dict[str, Tensor]:
        tensors = {f"{key}/{n}": t for n, state in self.stored.tensors.items() for key, t in state.items()}
        return tensors | {"steps": self.steps}


# -- the learning rate -----------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    **dict.fromkeys(("cosine", "cosine_with_min_lr"), lambda progress: 0.5 * (1 + math.cos(math.pi * progress))),
}
DEFAULT_FLOOR = {"cosine_with_min_lr": 0.1}


def lr_factor(update: int, total: int, train: TrainConfig, *, updates_per_step: int = 1) -> float:
    """Learning rate of an update as a share of the peak; there are `total` steps of `updates_per_step` updates.
    `train.warmup` counts steps, or is a share of all if below 1. The rate of the first update is above 0.

    >>> lr_factor(0, 10, TrainConfig(schedule="linear", warmup=2))
    0.5
    """
    total *= updates_per_step
    warm = train.warmup * (updates_per_step if train.warmup >= 1 else total)
    if update < warm:
        return min(1.0, (update + 1) / warm)
    progress = min(1.0, (update - warm) / max(1.0, total - warm))
    floor = train.min_lr or DEFAULT_FLOOR.get(train.schedule, 0.0)
    return floor + (1 - floor) * SCHEDULES[train.schedule](progress)
