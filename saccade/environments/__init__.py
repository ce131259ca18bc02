"""Environments by name: built in, from a plugin, or the user's class or functions.

An environment exchanges messages, never tokens. `rollout/env_setup.py` decides in which process it runs. Only
`load_user_code` imports the user's code, and the training process never calls it.

    class Guess:
        def reset(self, sample, seed): return sample.messages
        def step(self, message): return (), None, True, {}
        def close(self): pass
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from saccade.config import EnvConfig
from saccade.errors import ConfigError
from saccade.registry import Table
from saccade.types import Message, Sample
from saccade.user_code import user_symbol


class Step(NamedTuple):
    """An environment's reply to one assistant message."""

    messages: Sequence[Message]
    reward: float | None
    done: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        """The conversation that the policy continues."""

    def step(self, message: Message) -> Step | tuple[Sequence[Message], float | None, bool, Mapping[str, Any]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EnvContext:
    """Properties of the model and of the response format that environments need."""

    answer: Callable[[str], str | None]  # the answer in a turn, if it holds one
    role: Literal["user", "tool"] = "user"  # role of messages with tool results
    unit: int = 28  # side in pixels of the square behind one token


class SingleTurn:
    """One question, one answer."""

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        return sample.messages

    def step(self, message: Message) -> Step:
        return Step((), None, True, {"end_reason": "answered"})

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """The environment class or the tools that the user's files define."""

    environment: Callable[..., Environment] | None = None
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def descriptions(self) -> dict[str, str]:
        """One line about each tool, from its signature and the first line of its docstring."""
        found = {}
        for name, function in self.tools.items():
            parameters = [str(p) for p in inspect.signature(function).parameters.values() if p.name != "images"]
            what = (inspect.getdoc(function) or "has no description").strip().splitlines()[0].rstrip(".")
            found[name] = f"{name}: {what}; arguments {', '.join(parameters) or 'none'}."
        return found


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table: a named environment."""

    calls: tuple[str, ...] = ()  # call syntaxes that it accepts, the default first
    tools: tuple[str, ...] = ()
    explain: Callable[[EnvConfig, Mapping[str, str]], str] = lambda env, user_tools: ""
    rewards: bool = False  # whether it gives rewards
    make: Callable[[EnvConfig, EnvContext, UserCode], Environment] | None = None
    installed: Callable[..., Environment] | None = None  # a class of an installed package
    check_row: Callable[[Sample], None] | None = None  # raises ValueError for an unusable row


# A class of an installed package runs in the same processes as the user's.
KINDS: Table[Kind] = Table(
    "environments",
    {"single_turn": Kind(make=lambda *_: SingleTurn())},
    lambda name, found: found if isinstance(found, Kind) else Kind(installed=found, rewards=True),
)


def _kind(env: EnvConfig) -> Kind:
    """The row of an environment. The user's class has none: it is imported only in the process that runs it."""
    return KINDS[env.name] if env.name in KINDS else Kind(rewards=True)


def runs_user_code(env: EnvConfig) -> bool:
    """Whether the environment runs code of the user or of an installed package."""
    return _kind(env).make is None or bool(env.tools)


def gives_rewards(env: EnvConfig) -> bool:
    return _kind(env).rewards


def _resolved(env: EnvConfig) -> EnvConfig:
    """Fill in the call syntax if none is chosen. The user's tools and parallel calls need names; grounding has none."""
    usual = _kind(env).calls
    if env.call or not usual:
        return env
    named = env.tools or env.parallel_calls > 1
    return env.model_copy(update={"call": "tool_call" if named else usual[0]})


def stop_strings(env: EnvConfig) -> tuple[str, ...]:
    """Strings that end a turn; none if a turn may hold several calls."""
    call = _resolved(env).call
    return (f"</{call}>",) if call in ("grounding", "tool_call") and env.parallel_calls == 1 else ()


def instruction(env: EnvConfig, user_tools: Mapping[str, str]) -> str:
    """The prompt's text about the environment; `user_tools` describes the user's tools."""
    if env.instruction is not None:
        return env.instruction
    return _kind(env).explain(_resolved(env), user_tools)


def problems(env: EnvConfig) -> Iterator[str]:
    """Problems of the environment that the options alone show."""
    kind, call = _kind(env), _resolved(env).call
    if env.name not in KINDS and not env.name.rpartition(":")[0].endswith(".py"):
        yield f"env.name={env.name!r}: no such environment; use {', '.join(KINDS)} or file.py:Class"
    if env.call and env.name in KINDS and env.call not in kind.calls:
        usual = f"try env.call={kind.calls[0]}" if kind.calls else "remove it"
        yield f"env.call: {env.name} does not read {env.call} calls; {usual}"
    for name, used in (("tools", bool(env.tools)), ("parallel_calls", env.parallel_calls > 1)):
        if used and (kind.make is None or call != "tool_call"):
            yield f"env.{name}: has no effect without named calls; try env.name=tools"
    if env.name == "tools" and not env.tools:
        yield "env.tools: env.name=tools needs some; try env.tools=[my_tools.py:search]"
    if env.args and kind.make:
        yield f"env.args: has no effect with env.name={env.name}; remove it"
    if env.min_pixels > env.max_pixels:
        yield f"env.min_pixels: is above env.max_pixels; try env.min_pixels={env.max_pixels}"


def sweep_problems(env: EnvConfig, turns: Sequence[int]) -> Iterator[str]:
    """Problems of `val.turns`."""
    most = max(turns, default=0)
    if turns and min(turns) < 1:
        yield "val.turns: a limit is at least one turn; try val.turns=[1,2,4,6,8,12]"
    if most > 1 and env.name == "single_turn":
        yield "val.turns: has no effect with env.name=single_turn; remove it"
    shown = env.limits(evaluation=True)["max_images"]
    if most > 1 and env.name == "crop" and shown is not None and shown < most:
        hint = f"try env.eval.max_images={2 * most}"
        yield f"env.eval.max_images: {shown} images end an episode before the {most} turns of val.turns; {hint}"


def load_user_code(env: EnvConfig) -> UserCode:
    """Import the user's files; raises a ConfigError if they fail or lack a method."""
    kind = _kind(env)
    if kind.make is None:
        found = kind.installed or user_symbol(env.name, f"env.name={env.name!r}")
        if not all(hasattr(found, method) for method in ("reset", "step", "close")):
            raise ConfigError(f"env.name={env.name!r}: it needs reset, step and close")
        return UserCode(environment=found)
    functions = {name.rpartition(":")[2]: user_symbol(name, f"env.tools={name!r}") for name in env.tools}
    taken = sorted(functions.keys() & set(kind.tools))
    if taken or len(functions) < len(env.tools):
        raise ConfigError(f"env.tools: two tools are called {', '.join(taken) or 'alike'}")
    return UserCode(tools=functions)


def build(env: EnvConfig, context: EnvContext, user: UserCode | None = None) -> Environment:
    """An environment for one episode."""
    user = user or UserCode()
    if user.environment is not None:
        return user.environment(**env.args)
    make = KINDS[env.name].make
    assert make is not None, env.name
    return make(_resolved(env), context, user)
