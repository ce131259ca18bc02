"""What a policy talks to, in message space: tokens never leak in.

class Guess:
    def reset(self, sample, seed): return sample.messages
    def step(self, message): return (), None, True, {}
    def close(self): pass
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from saccade.errors import ConfigError
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

    def step(
        self, message: Message
    ) -> Step | tuple[Sequence[Message], float | None, bool, Mapping[str, Any]]: ...

    def close(self) -> None: ...


class SingleTurn:
    """A question, one answer."""

    blocking = False  # a step costs nothing: it needs no thread of its own

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        return sample.messages

    def step(self, message: Message) -> Step:
        return Step((), None, True, {"end_reason": "answered"})

    def close(self) -> None:
        pass


ENVIRONMENTS: Mapping[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def environment_factory(name: str) -> Callable[[], Environment]:
    """A built-in name, or `file.py:Class` of your own; each episode gets an instance."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    path, separator, symbol = name.rpartition(":")
    if not separator or not Path(path).is_file():
        raise ConfigError(
            f"env.name={name!r}: no such environment; "
            f"use {', '.join(ENVIRONMENTS)} or file.py:Class"
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, symbol, None)
    if factory is None or not all(
        hasattr(factory, method) for method in ("reset", "step", "close")
    ):
        raise ConfigError(f"env.name={name!r}: {symbol} needs reset, step and close")
    return factory
