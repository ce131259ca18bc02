"""Makes environments: built-in ones in this process, the user's in the processes of the hook `environment_host`, with
calls that do not block.

    make = environments(config.env, order=("answer_tag",), think_prefilled=False)
    environment = make()
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import EnvContext, Environment, build, instruction, problems, runs_user_code
from saccade.errors import ConfigError
from saccade.registry import HOOKS


class Failed(Exception):
    """An environment raised, or its process ended; the text says what and where."""


class EnvironmentCall:
    """A call in another process. Its time limit `seconds` may be set until it starts."""

    seconds = 60.0
    took = 0.0  # seconds in that process, without the time until it was polled
    outcome: Any = None  # the result, or an exception if the call failed

    def done(self) -> bool:
        """Poll without waiting. The call starts at the first poll that finds a free process."""
        raise NotImplementedError


def environments(
    env: EnvConfig, *, order: Sequence[str], think_prefilled: bool = False, role: str = "user", unit: int = 28
) -> Callable[[], Environment]:
    """Returns the function that makes the environment of each episode. `order`: places where answers are looked for;
    `role`: the role of tool messages; `unit`: side in pixels of what the model sees as one token.
    """
    require(env)
    plain = {"order": tuple(order), "think_prefilled": think_prefilled, "role": role, "unit": unit}
    if runs_user_code(env):
        host = HOOKS["environment_host"](env)
        return lambda: host.environment(plain)
    context = context_of(plain)
    return lambda: build(env, context)


def require(env: EnvConfig) -> None:
    if found := list(problems(env)):
        raise ConfigError("\n".join(found))


def explanation(env: EnvConfig) -> str:
    """The text of the prompt about the environment and its tools."""
    require(env)
    return instruction(env, HOOKS["environment_host"](env).tools if env.tools else {})


def context_of(plain: Mapping[str, Any]) -> EnvContext:
    """The EnvContext, with the function that extracts answers."""
    order, prefilled = plain["order"], plain["think_prefilled"]
    answer = lambda text: HOOKS["extract_answer"](text, order, think_prefilled=prefilled) or None  # noqa: E731
    return EnvContext(answer=answer, role=plain["role"], unit=plain["unit"])
