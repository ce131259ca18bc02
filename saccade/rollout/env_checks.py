"""Validates what an environment returned before it is used: a flaw ends only that episode. Entries of `info` that
rewards, metrics and reports read have a fixed shape; all others are free. Knows neither tokens nor processes.

    >>> step_flaw(Step((), None, True, {"end_reason": "bored"}), longest=100)
    "info['end_reason'] is 'bored'; use one of answered, env_done, …"
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from saccade.environments import Step
from saccade.types import STATUS_OF_END, Message

CHARACTERS = 16  # per token, at most: longer text could not fit, and tokenizing it takes long
CONVERSATION = ("system", "user", "assistant", "tool")
OBSERVATION = ("user", "tool")
ENDS = tuple(end for end in STATUS_OF_END if end not in ("token_budget_pending", "aborted"))

Place = Annotated[Sequence[float], Field(min_length=4, max_length=4)]


class Call(BaseModel, strict=True):
    """A tool call; the fields after `observation` are for crops."""

    turn: int
    ok: bool
    reason: str
    source: str | None = None
    lineage: Sequence[str] = ()
    observation: int | None = None
    box: Place | None = None
    pixels: Place | None = None
    area: float | None = None
    noop: bool = False


class Reserved(BaseModel, strict=True):
    """The entries of `info` that rewards, metrics and reports read."""

    tool_calls: Sequence[Call] = ()
    tool_counts: dict[Any, float] = {}


SHAPES = {
    "tool_calls": 'a list with {"turn": 1, "ok": True, "reason": ""} for each call; a crop has box, area and noop, too',
    "tool_counts": 'numbers by name, such as {"calls": 2, "failed": 1, "noop": 0}',
}


def messages_flaw(messages: Iterable[Message], roles: Collection[str], *, longest: int) -> str:
    """Returns what is wrong with the messages; empty if nothing is."""
    messages = list(messages)
    for message in messages:
        if message.role not in roles:
            return f"a message has the role {message.role!r}; use {' or '.join(roles)}"
    length = sum(len(message.text) for message in messages)
    if length > longest:
        return f"its messages have {length} characters, and {longest} are the most under env.max_total_tokens"
    return ""


def step_flaw(step: Step, *, longest: int) -> str:
    """Returns what is wrong with the step; empty if nothing is."""
    try:
        Reserved.model_validate(dict(step.info))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        return f"info[{name!r}] is {str(step.info[name])[:80]}; it must be {SHAPES[name]}"
    if not step.done:
        return messages_flaw(step.messages, OBSERVATION, longest=longest)
    end = step.info.get("end_reason", "env_done")
    return "" if end in ENDS else f"info['end_reason'] is {end!r}; use one of {', '.join(ENDS)}"
