"""What a policy talks to, by name: built in, of a plugin, or a class or functions of the user.

An environment speaks messages; tokens never leak in. Knows nothing of processes:
`rollout/env_setup.py` decides where an environment lives. Code of the user is imported by
`load_user_code` alone, which the training process never calls.

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


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """The environment or the tools that files of the user define."""

    environment: Callable[..., Environment] | None = None
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def descriptions(self) -> dict[str, str]:
        """A line about each tool, from its signature and the first line of its text."""
        found = {}
        for name, function in self.tools.items():
            parameters = [str(p) for p in inspect.signature(function).parameters.values() if p.name != "images"]
            what = (inspect.getdoc(function) or "has no description").strip().splitlines()[0].rstrip(".")
            found[name] = f"{name}: {what}; arguments {', '.join(parameters) or 'none'}."
        return found


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An environment that has a name."""

    calls: tuple[str, ...] = ()  # syntaxes, the usual one first
    tools: tuple[str, ...] = ()
    explain: Callable[[EnvConfig, Mapping[str, str]], str] = lambda env, user_tools: ""
    rewards: bool = False  # gives rewards
    make: Callable[[EnvConfig, Setting, UserCode], Environment] | None = None
    installed: Callable[..., Environment] | None = None  # a class of an installed package
    check_row: Callable[[Sample], None] | None = None  # raises ValueError for a row of no use


# A class of an installed package runs where those of users run.
KINDS: Table[Kind] = Table(
    "environments",
    {"single_turn": Kind(make=lambda *_: SingleTurn())},
    lambda name, found: found if isinstance(found, Kind) else Kind(installed=found, rewards=True),
)


def _kind(env: EnvConfig) -> Kind:
    """A class of the user has no row: what `env.name` names is imported where it runs."""
    return KINDS[env.name] if env.name in KINDS else Kind(rewards=True)


def runs_user_code(env: EnvConfig) -> bool:
    """Whether code of the user or of an installed package takes part."""
    return _kind(env).make is None or bool(env.tools)


def gives_rewards(env: EnvConfig) -> bool:
    return _kind(env).rewards


def _resolved(env: EnvConfig) -> EnvConfig:
    """The usual syntax of calls where none is chosen; grounding has no room for a name."""
    usual = _kind(env).calls
    if env.call or not usual:
        return env
    named = env.tools or env.parallel_calls > 1
    return env.model_copy(update={"call": "tool_call" if named else usual[0]})


def stop_strings(env: EnvConfig) -> tuple[str, ...]:
    """Where a turn ends. Several calls in one turn end with the turn."""
    call = _resolved(env).call
    return (f"</{call}>",) if call in ("grounding", "tool_call") and env.parallel_calls == 1 else ()


def instruction(env: EnvConfig, user_tools: Mapping[str, str]) -> str:
    """What the prompt says about the environment; `user_tools` describes those of the user."""
    if env.instruction is not None:
        return env.instruction
    return _kind(env).explain(_resolved(env), user_tools)


def problems(env: EnvConfig) -> Iterator[str]:
    """What the options alone can say against an environment."""
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
    """What speaks against `val.turns`."""
    most = max(turns, default=0)
    if turns and min(turns) < 1:
        yield "val.turns: a limit is at least one turn; try val.turns=[1,2,4,6,8,12]"
    if most > 1 and env.name == "single_turn":
        yield "val.turns: has no effect with env.name=single_turn; remove it"
    shown = env.limits(evaluation=True)["max_images"]
    if most > 1 and env.name == "crop" and shown is not None and shown < most:
        yield (
            f"env.eval.max_images: {shown} images end an episode before the {most} turns of val.turns; "
            f"try env.eval.max_images={2 * most}"
        )


def load_user_code(env: EnvConfig) -> UserCode:
    """Imports the user's files; a ConfigError says what they raise, or lack."""
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


def build(env: EnvConfig, setting: Setting, user: UserCode | None = None) -> Environment:
    """An environment for one episode."""
    user = user or UserCode()
    if user.environment is not None:
        return user.environment(**env.args)
    make = KINDS[env.name].make
    assert make is not None, env.name
    return make(_resolved(env), setting, user)
