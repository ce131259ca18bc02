"""What is wrong with something that an environment said, before anything is made of it: a flaw
costs that episode alone. Names in `info` that rewards, metrics and reports read have a fixed shape;
all others are the environment's own. Knows neither tokens nor processes.

    >>> step_flaw(Step((), None, True, {"end_reason": "bored"}), longest=100)
    "info['end_reason'] is 'bored'; use one of answered, env_done, …"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from saccade.environments import Step
from saccade.types import STATUS_OF_END, Message

CHARACTERS = 16  # of a token, at most: longer text could not fit, and making tokens of it takes long
CONVERSATION = ("system", "user", "assistant", "tool")
OBSERVATION = ("user", "tool")
ENDS = tuple(end for end in STATUS_OF_END if end not in ("token_budget_pending", "aborted"))

Check = Callable[[Any], bool]


def _is(*types: type) -> Check:
    return lambda value: type(value) in types


def _list_of(check: Check, length: int | None = None) -> Check:
    return lambda value: (
        isinstance(value, list | tuple) and length in (None, len(value)) and all(check(item) for item in value)
    )


_number, _place = _is(int, float), _list_of(_is(int, float), 4)
CALL: Mapping[str, Check] = {"turn": _is(int), "ok": _is(bool), "reason": _is(str)}
CROP: Mapping[str, Check] = {
    "observation": _is(int, type(None)),
    "box": _place,
    "pixels": _place,
    "area": _number,
    "noop": _is(bool),
}
OPTIONAL: Mapping[str, Check] = {
    "observation": _is(int, type(None)),
    "source": _is(str, type(None)),
    "lineage": _list_of(_is(str)),
}


def _call(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    crop = CROP if value.keys() & {"area", "box"} else {}
    optional = {name: check for name, check in OPTIONAL.items() if name in value}
    checks = {**CALL, **crop, **optional}
    return all(name in value and check(value[name]) for name, check in checks.items())


def _counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_number(count) for count in value.values())


RESERVED: Mapping[str, tuple[Check, str]] = {
    "tool_calls": (
        _list_of(_call),
        f'a list with {{"turn": 1, "ok": True, "reason": ""}} for each call; a crop has all of {", ".join(CROP)} too',
    ),
    "tool_counts": (_counts, 'numbers by name, such as {"calls": 2, "failed": 1, "noop": 0}'),
}


def messages_flaw(messages: Iterable[Message], roles: Collection[str], *, longest: int) -> str:
    """Empty where there is none."""
    messages = list(messages)
    for message in messages:
        if message.role not in roles:
            return f"a message has the role {message.role!r}; use {' or '.join(roles)}"
    length = sum(len(message.text) for message in messages)
    if length > longest:
        return f"its messages have {length} characters, and {longest} are the most under env.max_total_tokens"
    return ""


def step_flaw(step: Step, *, longest: int) -> str:
    """Empty where there is none."""
    for name, (check, shape) in RESERVED.items():
        if name in step.info and not check(step.info[name]):
            return f"info[{name!r}] is {str(step.info[name])[:80]}; it must be {shape}"
    if not step.done:
        return messages_flaw(step.messages, OBSERVATION, longest=longest)
    end = step.info.get("end_reason", "env_done")
    return "" if end in ENDS else f"info['end_reason'] is {end!r}; use one of {', '.join(ENDS)}"
