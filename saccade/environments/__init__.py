"""What a policy talks to, by name: built in, or a class or functions of the user.

Knows nothing of processes: `rollout/env_process.py` decides where an environment lives. Code of the
user is imported by `load_own` alone, which the training process never calls.

    build(EnvConfig(name="crop"), Setting(answer=find_answer))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import calls
from saccade.environments.protocol import Environment, Setting, SingleTurn, Step
from saccade.environments.texts import texts_hash, words
from saccade.environments.tools import Tool, ToolEnvironment, calculate_tool, describe, explain, own_tool, zoom_tool
from saccade.errors import ConfigError
from saccade.registry import Table
from saccade.types import Sample
from saccade.user_code import own_module

__all__ = [
    "KINDS",
    "Environment",
    "Own",
    "Setting",
    "SingleTurn",
    "Step",
    "build",
    "gives_rewards",
    "instruction",
    "is_own",
    "load_own",
    "problems",
    "stop_strings",
    "sweep_problems",
    "texts_hash",
]

TOOLS: Mapping[str, Tool] = {"zoom": zoom_tool, "calculate": calculate_tool}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A built-in environment."""

    calls: tuple[str, ...] = ()  # syntaxes, the usual one first
    tools: tuple[str, ...] = ()
    text: str = ""  # name of its explanation, where that is no list of tools
    rewards: bool = False  # gives rewards of its own
    make: Callable[[EnvConfig, Setting], Environment] | None = None  # else it is its tools
    installed: Callable[..., Environment] | None = None  # a class of an installed package
    check_row: Callable[[Sample], None] | None = None  # raises ValueError for a row of no use


def _adapted(name: str, found: Kind | Callable[..., Environment]) -> Kind:
    """A row of a plugin; a class of an installed package runs where those of users run."""
    return found if isinstance(found, Kind) else Kind(installed=found, rewards=True)


KINDS: Table[Kind] = Table(
    "environments",
    {
        "single_turn": Kind(make=lambda env, setting: SingleTurn()),
        "crop": Kind(calls=("grounding", "tool_call"), tools=("zoom",)),
        "calculator": Kind(calls=("tool_call",), tools=("calculate",)),
        "tools": Kind(calls=("tool_call",)),
    },
    _adapted,
)


@dataclass(frozen=True, kw_only=True)
class Own:
    """What the files of the user hold."""

    environment: Callable[..., Environment] | None = None
    tools: Mapping[str, Callable[..., Any]] | None = None

    @property
    def descriptions(self) -> dict[str, str]:
        return {name: describe(name, function) for name, function in (self.tools or {}).items()}


def is_own(env: EnvConfig) -> bool:
    """Whether code of the user takes part."""
    return _is_class(env) or bool(env.tools)


def _is_class(env: EnvConfig) -> bool:
    """Whether it is a class of the user or of an installed package."""
    return env.name not in KINDS or KINDS[env.name].installed is not None


def gives_rewards(env: EnvConfig) -> bool:
    return env.name not in KINDS or KINDS[env.name].rewards


def _resolved(env: EnvConfig) -> EnvConfig:
    """The usual syntax of calls where none is chosen; grounding has no room for a name."""
    usual = KINDS[env.name].calls if env.name in KINDS else ()
    if env.call or not usual:
        return env
    named = env.tools or env.parallel_calls > 1
    return env.model_copy(update={"call": "tool_call" if named else usual[0]})


def stop_strings(env: EnvConfig) -> tuple[str, ...]:
    return calls.stop_strings(_resolved(env).call, env.parallel_calls)


def instruction(env: EnvConfig, own: Mapping[str, str]) -> str:
    """What the prompt says about the environment; `own` describes tools of the user."""
    if env.instruction is not None:
        return env.instruction
    kind, env = KINDS.get(env.name, Kind()), _resolved(env)
    if kind.text:
        return words(kind.text)
    return explain(env, (*kind.tools, *own), own) if kind.calls else ""


def problems(env: EnvConfig) -> Iterator[str]:
    """What the options alone can say against an environment."""
    kind, call = KINDS.get(env.name), _resolved(env).call
    if kind is None and not env.name.rpartition(":")[0].endswith(".py"):
        known = ", ".join(KINDS)
        yield f"env.name={env.name!r}: no such environment; use {known} or file.py:Class"
    if env.call and kind and env.call not in kind.calls:
        usual = f"try env.call={kind.calls[0]}" if kind.calls else "remove it"
        yield f"env.call: {env.name} does not read {env.call} calls; {usual}"
    for name, used in (("tools", bool(env.tools)), ("parallel_calls", env.parallel_calls > 1)):
        if used and (kind is None or call != "tool_call"):
            yield f"env.{name}: has no effect without named calls; try env.name=tools"
    if env.name == "tools" and not env.tools:
        yield "env.tools: env.name=tools needs some; try env.tools=[my_tools.py:search]"
    if env.args and not _is_class(env):
        yield f"env.args: has no effect with env.name={env.name}; remove it"
    if env.min_pixels > env.max_pixels:
        yield f"env.min_pixels: is above env.max_pixels; try env.min_pixels={env.max_pixels}"


def sweep_problems(env: EnvConfig, turns: Sequence[int]) -> Iterator[str]:
    """What speaks against `val.turns`."""
    most = max(turns, default=0)
    if turns and min(turns) < 1:
        yield "val.turns: a limit is at least one turn; try val.turns=[1,2,4,6,8,12]"
    if most > 1 and env.name == "single_turn":
        yield "val.turns: has no effect with env.name=single_turn; remove it"
    shown = env.limits(evaluation=True)["max_images"]
    if most > 1 and env.name == "crop" and shown is not None and shown < most:
        yield (
            f"env.eval.max_images: {shown} pictures end an episode before the {most} turns of "
            f"val.turns; try env.eval.max_images={2 * most}"
        )


def load_own(env: EnvConfig) -> Own:
    """Imports the user's files. Raises what they raise, ConfigError for what they lack."""
    if _is_class(env):
        installed = KINDS[env.name].installed if env.name in KINDS else None
        found = installed or _symbol("name", env.name)
        if not all(hasattr(found, method) for method in ("reset", "step", "close")):
            raise ConfigError(f"env.name={env.name!r}: it needs reset, step and close")
        return Own(environment=found)
    functions = {name.rpartition(":")[2]: _symbol("tools", name) for name in env.tools}
    taken = sorted(functions.keys() & set(KINDS[env.name].tools))
    if taken or len(functions) < len(env.tools):
        raise ConfigError(f"env.tools: two tools are called {', '.join(taken) or 'alike'}")
    return Own(tools=functions)


def _symbol(field: str, name: str) -> Callable[..., Any]:
    path, _, symbol = name.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"env.{field}={name!r}: no such environment or tool; {path} is no file")
    found = getattr(own_module(path), symbol, None)
    if not callable(found):
        raise ConfigError(f"env.{field}={name!r}: {path} has no {symbol}")
    return found


def build(env: EnvConfig, setting: Setting, own: Own | None = None) -> Environment:
    """An environment for one episode."""
    own = own or Own()
    if own.environment is not None:
        return own.environment(**env.args)
    kind, env = KINDS[env.name], _resolved(env)
    if kind.make is not None:
        return kind.make(env, setting)
    tools = {name: TOOLS[name] for name in kind.tools}
    tools |= {name: own_tool(function) for name, function in (own.tools or {}).items()}
    return ToolEnvironment(env, setting, tools)
