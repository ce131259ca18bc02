"""AdamW moments in 8 bits, with one scale per block of 64 numbers: 2.1 bytes for both moments instead of 4 or 8.

A code is a root of a number divided by the largest of its block: the third root of a first moment, with its sign, the
sixth root of a second one. So a hundredth of the largest is exact to 6 % and 3 %, and if all of a block shrink alike,
only its scale changes. An update decodes them to fp32, one chunk at a time.

    held = EightBits(OptimizerState, parameters, {"weight": ("exp_avg", "exp_avg_sq", "lost")}, torch.bfloat16)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.plugins.offload import host_state
from saccade.trainer.optimizer import OptimizerState, Piece

BLOCK = 64  # numbers; chunks and parameters begin at a block
CODES = {"exp_avg": (torch.int8, 127, 3), "exp_avg_sq": (torch.uint8, 255, 6)}  # largest code, power


class EightBits(OptimizerState):
    """Stores codes and scales in another kind of state (`make`), which needs to know nothing of them."""

    def __init__(
        self,
        make: Callable[..., OptimizerState],
        parameters: Mapping[str, Tensor],
        keys: Mapping[str, Sequence[str]],
        dtype: torch.dtype,
        **more: Any,
    ) -> None:
        scaled = {name: (*kept, *(_scale(key) for key in CODES)) for name, kept in keys.items()}
        kinds = {key: (kind, 1) for key, (kind, *_) in CODES.items()}
        kinds |= {_scale(key): (torch.float32, BLOCK) for key in CODES}
        self._held = make(parameters, scaled, dtype, kinds, **more)
        self.tensors = self._held.tensors

    def pieces(self, gradients: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        for piece in (part for pieces in self._held.pieces(gradients) for whole in pieces for part in _parts(whole)):
            moments = {key: decode(key, piece.state[key], piece.state[_scale(key)]) for key in CODES}
            yield [piece._replace(state={**piece.state, **moments})]
            for key, moment in moments.items():
                for there, here in zip((piece.state[key], piece.state[_scale(key)]), encode(key, moment), strict=True):
                    there.copy_(here)


def _scale(key: str) -> str:
    return f"{key}_scale"


def _parts(piece: Piece) -> Iterator[Piece]:
    """Split a piece into flat ones of at most CHUNK numbers."""
    parameter, gradient = (tensor.detach().view(-1) for tensor in (piece.parameter, piece.gradient))
    for low in range(0, len(parameter), host_state.CHUNK):
        high = min(low + host_state.CHUNK, len(parameter))
        cut = {key: tensor.view(-1)[low:high] for key, tensor in piece.state.items()}
        cut |= {s: piece.state[s][low // BLOCK : -(-high // BLOCK)] for s in map(_scale, CODES)}
        yield Piece(piece.name, parameter[low:high], gradient[low:high], cut)


def decode(key: str, codes: Tensor, scales: Tensor) -> Tensor:
    _, largest, power = CODES[key]
    shares = codes.float().div_(largest).pow_(power)
    return _blocks(shares).mul_(scales[:, None]).view(-1)[: len(codes)]


def encode(key: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, and the scales of their blocks. A second moment that is not 0 never gets code 0, because a
    first moment would be divided by it.
    """
    kind, largest, power = CODES[key]
    blocks = _blocks(numbers)
    scales = blocks.abs().amax(1)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = shares.abs_().pow_(1 / power).mul_(largest).round_()
    codes = codes.clamp_(min=1).mul_(blocks > 0) if key == "exp_avg_sq" else codes.copysign_(blocks)
    return codes.view(-1)[: len(numbers)].to(kind), scales


def _blocks(numbers: Tensor) -> Tensor:
    return pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
