"""Optimizer state in main memory, pinned if there is a GPU. An update streams it in chunks: one is copied to the GPU
while an earlier one is updated there and one before that is copied back, each on its own stream, so that both
directions of the link and the GPU are busy. Each number goes through the same operations as with state on the GPU, so
the results are bit-identical.

    held = HostState(parameters, keys={"weight": ("exp_avg", "exp_avg_sq")}, dtype=torch.float32)
    for pieces in held.pieces(gradients):
        ...  # update them
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from rich.filesize import decimal as size
from torch import Tensor

from saccade.errors import EnvironmentProblem
from saccade.system.contents import new_block
from saccade.system.devices import free_host_bytes
from saccade.trainer.optimizer import OptimizerState, Piece

CHUNK = 1 << 24  # numbers
SLOTS = 3  # chunks on the GPU: one is copied in, one is updated, one is copied out


def aligned(count: int) -> int:
    """Round up to a multiple of 64, so that the vectorized reads of kernels stay aligned."""
    return -(-count // 64) * 64


class HostState(OptimizerState):
    """One flat tensor per key holds the state of all parameters; `tensors` are views of it. `total` sums bytes over the
    processes of this machine.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        keys: Mapping[str, Sequence[str]],
        dtype: torch.dtype,
        kinds: Mapping[str, tuple[torch.dtype, int]] = MappingProxyType({}),
        *,
        total: Callable[[float], float] = float,
    ) -> None:
        self.parameters = parameters
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._starts, self._length = dict[str, int](), 0
        for name, parameter in parameters.items():
            self._starts[name] = self._length
            self._length += aligned(parameter.numel())
        every = {key: kinds.get(key, (dtype, 1)) for kept in keys.values() for key in kept}
        self._each = {key: each for key, (_, each) in every.items()}  # key → numbers of a parameter per element
        needed = sum(self._length // each * kind.itemsize for kind, each in every.values())
        fix = "train.optimizer=adamw_bf16, " * (dtype != torch.bfloat16) + "train.offload=false or more machines"
        require_host_bytes(needed, "train.offload: the optimizer's state", fix, total)
        self._flat = {key: host_zeros(self._length // each, kind, self.device) for key, (kind, each) in every.items()}
        self.tensors = {name: {key: self._view(name, key) for key in keys[name]} for name in parameters}

    def _view(self, name: str, key: str) -> Tensor:
        parameter, each = self.parameters[name], self._each[key]
        found = self._flat[key][self._starts[name] // each :][: -(-parameter.numel() // each)]
        return found.view(parameter.shape) if each == 1 else found

    def pieces(self, gradients: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        """Yields one list per chunk, to be updated on the current stream before the next is asked for."""
        cuts = defaultdict[int, list[tuple[str, int, int]]](list)  # per chunk: names, and ranges of their numbers
        for name in gradients:
            start, count = self._starts[name], self.parameters[name].numel()
            for low in range(start // CHUNK * CHUNK, start + count, CHUNK):
                cuts[low].append((name, max(low - start, 0), min(low + CHUNK - start, count)))
        device = torch.get_device_module(self.device)
        now, coming, going = device.current_stream(), device.Stream(), device.Stream()
        width, each = min(CHUNK, self._length), self._each
        slots = [
            {key: flat.new_empty(width // each[key], device=self.device) for key, flat in self._flat.items()}
            for _ in range(min(SLOTS, len(cuts)))
        ]
        emptied = [now.record_event() for _ in slots]  # the memory may have been in use until now
        for number, (low, cut) in enumerate(sorted(cuts.items())):
            turn, high = number % SLOTS, min(low + CHUNK, self._length)
            slot = slots[turn]
            pairs = [(slot[key][: (high - low) // n], self._flat[key][low // n : high // n]) for key, n in each.items()]
            coming.wait_event(emptied[turn])
            with device.stream(coming):
                for there, here in pairs:
                    there.copy_(here, non_blocking=True)
            now.wait_stream(coming)
            pieces = []
            for name, first, end in cut:
                start, stop = self._starts[name] + first - low, self._starts[name] + end - low
                parameter, gradient = (t.detach().view(-1)[first:end] for t in (self.parameters[name], gradients[name]))
                state = {key: slot[key][start // each[key] : -(-stop // each[key])] for key in self.tensors[name]}
                pieces.append(Piece(name, parameter, gradient, state))
            yield pieces
            going.wait_stream(now)
            with device.stream(going):
                for there, here in pairs:
                    here.copy_(there, non_blocking=True)
            emptied[turn] = going.record_event()
        device.synchronize()  # the state may be read from now on


def require_host_bytes(needed: float, what: str, fix: str, total: Callable[[float], float]) -> None:
    free = free_host_bytes()
    needed = int(total(needed))  # of all processes: each has read `free` before any of them allocates
    if needed > free:
        raise EnvironmentProblem(f"{what} takes {size(needed)} of main memory, and {size(free)} are free; try {fix}")


def host_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in main memory, pinned if the device is a GPU; torch would round pinned memory up to powers of two."""
    block = new_block(max(count, 1) * dtype.itemsize)  # none is empty
    view = memoryview(block)  # referenced by the tensor and all its views
    tensor = torch.frombuffer(view, dtype=dtype)
    if device.type == "cuda":
        runtime, start = torch.cuda.cudart(), tensor.zero_().data_ptr()  # all cores fault in the pages
        if error := int(runtime.cudaHostRegister(start, tensor.nbytes, 0)):
            asked = f"{size(tensor.nbytes)} of main memory cannot be pinned (CUDA error {error})"
            raise EnvironmentProblem(f"train.offload: {asked}; try train.offload=false reward.offload=false")
        weakref.finalize(view, _unpin, start, block).atexit = False
    return tensor[:count]


def _unpin(start: int, block: object) -> None:
    """`block` is an argument so that it lives until then."""
    torch.cuda.cudart().cudaHostUnregister(start)
