"""What an environment is: it speaks messages, tokens never leak in.

class Guess:
    def reset(self, sample, seed): return sample.messages
    def step(self, message): return (), None, True, {}
    def close(self): pass
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from saccade.types import Message, Sample


class Step(NamedTuple):
    """What an environment answers to one assistant message."""

    messages: Sequence[Message]
    reward: float | None
    done: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        """The conversation that the policy continues."""
        ...

    def step(self, message: Message) -> Step | tuple[Sequence[Message], float | None, bool, Mapping[str, Any]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an environment must know of the model and of the format of responses."""

    answer: Callable[[str], str | None]  # the answer in a turn, if it holds one
    role: Literal["user", "tool"] = "user"  # in which the model reads what a tool says
    unit: int = 28  # pixels of a side that the model sees as one token


class SingleTurn:
    """A question, one answer."""

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        return sample.messages

    def step(self, message: Message) -> Step:
        return Step((), None, True, {"end_reason": "answered"})

    def close(self) -> None:
        pass
