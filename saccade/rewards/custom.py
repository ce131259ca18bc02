"""Reward functions of the user, `path/file.py:name`: loading, signatures, return values.

The form follows from parameter names alone, first match in this order:

    … completions …                 f(prompts, completions, **columns)     lists in, list out
    queries, prompts, labels        reward_func(queries, prompts, labels)  lists in, list out
    samples, …                      f(samples, **args)                     a list of RewardSample
    reward_inputs, …                f(reward_inputs, **args)               a list of dicts (below)
    reward_input, …                 f(reward_input, **args)                {response, ground_truth,
                                                                            response_length}
    anything else                   f(sample, **args)                      one RewardSample

    >>> form_of(lambda sample, bonus=0.0: 1.0).name
    'sample'
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from saccade.own import own_module
from saccade.rewards.sample import RewardSample
from saccade.types import Score

DEFAULT_NAME = "compute_score"
LATE = "reward.deadline"  # names the option in the reason of a timeout
SHAPES = (
    "f(sample), f(samples), f(reward_input), f(reward_inputs), f(completions) or "
    "f(queries, prompts, labels)"
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a function is called: with the arguments for one sample, or for several at once."""

    name: str
    batch: bool
    arguments: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]


def split_name(verifier: str) -> tuple[str, str] | None:
    """`file.py:name` as (file, name); None when it is no file."""
    match = re.fullmatch(r"(.+\.py)(?::(\w+))?", verifier)
    return (match[1], match[2] or DEFAULT_NAME) if match else None


def load(verifier: str) -> Callable[..., Any]:
    """The function, from its file. Raises what the file raises."""
    parts = split_name(verifier)
    assert parts is not None, verifier
    module = _loaded(Path(parts[0]).resolve())
    function = getattr(module, parts[1], None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{parts[0]} has no function {parts[1]!r}; it has {', '.join(known)}")
    return function


_loaded = cache(own_module)


# -- calling ---------------------------------------------------------------------------------------


def _reward_input(sample: RewardSample) -> dict[str, Any]:
    return {
        "response": sample.response,
        "response_length": sample.length,
        "ground_truth": sample.answer,
    }


def _columns(samples: Sequence[RewardSample]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    extra = {name for sample in samples for name in sample.extra}
    columns = {name: [sample.extra.get(name) for sample in samples] for name in extra}
    return (), columns | {
        "prompts": [sample.messages for sample in samples],
        "completions": [[{"role": "assistant", "content": s.response}] for s in samples],
        "solution": [sample.answer for sample in samples],
        "answer": [sample.answer for sample in samples],
        "id": [sample.id for sample in samples],
        "data_source": [sample.data_source for sample in samples],
    }


def _queries(samples: Sequence[RewardSample]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    queries = [sample.prompt + sample.response for sample in samples]
    return (queries, [s.prompt for s in samples], [s.answer for s in samples]), {}


FORMS = {
    form.name: form
    for form in (
        Form(name="completions", batch=True, arguments=_columns),
        Form(name="queries", batch=True, arguments=_queries),
        Form(name="samples", batch=True, arguments=lambda samples: ((samples,), {})),
        Form(
            name="reward_inputs",
            batch=True,
            arguments=lambda samples: (([_reward_input(sample) for sample in samples],), {}),
        ),
        Form(
            name="reward_input",
            batch=False,
            arguments=lambda sample: ((_reward_input(sample),), {}),
        ),
        Form(name="sample", batch=False, arguments=lambda sample: ((sample,), {})),
    )
}


def form_of(function: Callable[..., Any]) -> Form:
    names = list(inspect.signature(function).parameters)
    if "completions" in names:
        return FORMS["completions"]
    if names[:3] == ["queries", "prompts", "labels"]:
        return FORMS["queries"]
    first = names[0] if names else ""
    return FORMS[first if first in ("samples", "reward_inputs", "reward_input") else "sample"]


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Refuse arguments that the function does not take, and required ones that are missing."""
    form, signature = form_of(function), inspect.signature(function)
    given = {"completions": 0, "queries": 3}.get(form.name, 1)
    # Of completions: what else it requires are columns of the data.
    bind = signature.bind if given else signature.bind_partial
    try:
        bind(*[None] * given, **args)
    except TypeError as error:
        own = ", ".join(list(signature.parameters)[given:]) or "none"
        raise TypeError(
            f"{getattr(function, '__name__', 'f')}{signature}: {error}; a reward is {SHAPES}, and "
            f"further parameters are the args of the term (here: {own})"
        ) from None


def call(function: Callable[..., Any], form: Form, given: Any, args: Mapping[str, Any]) -> Any:
    """One call, for a sample or for a list of them; the result may be a coroutine."""
    positional, named = form.arguments(given)
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepted = {parameter.name for parameter in parameters}
        named = {name: column for name, column in named.items() if name in accepted}
    return function(*positional, **{**named, **args})


def late(deadline: float, *, own: bool = False) -> str:
    """`own`: the deadline of a built-in verifier, which no option raises."""
    return f"no result after {deadline:g} s" + ("" if own else f" ({LATE})")


# -- results ---------------------------------------------------------------------------------------


def to_scores(result: Any, count: int) -> list[Score] | None:
    """A list result as scores; None when it is no list of that length."""
    if isinstance(result, Mapping) and "rewards" in result:
        result = result["rewards"]
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != count:
        return None
    return [to_score(entry) for entry in result]


def to_score(result: Any) -> Score:
    """A float, a mapping with `overall` or `value`, or a Score; all else is an error."""
    if isinstance(result, Score):
        broken = [part for part in map(_finite, result.parts.values()) if part.kind == "error"]
        return broken[0] if broken else result
    if not isinstance(result, Mapping):
        return _finite(result)
    key = next((key for key in ("overall", "value") if key in result), None)
    if key is None:
        found = ", ".join(map(str, result))
        return _error("bad_type", f"a dict needs 'overall' or 'value', this one has {found}")
    value = _finite(result[key])
    parts = {name: entry for name, entry in result.items() if name not in (key, "parts")}
    parts |= result.get("parts") or {}
    scores = {str(name): _finite(part) for name, part in parts.items() if _is_number(part)}
    broken = [score for score in (value, *scores.values()) if score.kind == "error"]
    if broken:
        return broken[0]
    named = {name: score.value for name, score in scores.items()}
    return Score(kind="value", value=value.value, parts=named)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


def _finite(value: Any) -> Score:
    if value is None:
        return _error("none", "the function returned None")
    if not _is_number(value):
        return _error(
            "bad_type", f"a reward is a number, a dict or a Score, not {type(value).__name__}"
        )
    number = float(value)
    if not isfinite(number):
        return _error("nan" if number != number else "infinite", f"the function returned {number}")
    return Score(kind="value", value=number)


def _error(kind: str, detail: str) -> Score:
    return Score(kind="error", reason=f"{kind}: {detail}")
