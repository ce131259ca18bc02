"""The user's reward functions, `path/file.py:name`: loading, signatures, return values.

The names of the parameters determine how a function is called: by the first row of FORMS that fits.
So reward files of TRL, R1-V, LMM-R1, EasyR1 and verl work unchanged.

    >>> form_of(lambda sample, bonus=0.0: 1.0).known_by
    ('sample',)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import DEADLINE_OPTION, DEFAULT_NAME, split_name
from saccade.types import Score
from saccade.user_code import user_module

TOTALS = ("overall", "value", "score")  # keys that may hold the reward in a dict


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a function is called: with one sample, or with several at once (`batch`)."""

    known_by: tuple[str, ...]  # parameter names
    arguments: Callable[[Any], Any]  # sample(s) → arguments by name; with `first`, the first argument
    batch: bool = False
    first: bool = False  # identified by its first parameter; the others are args of the term


_loaded = cache(user_module)


def load(verifier: str) -> Callable[..., Any]:
    """Import the function from its file. Exceptions of the file propagate."""
    path, name = split_name(verifier) or (verifier, DEFAULT_NAME)
    module = _loaded(Path(path).resolve())
    if not callable(function := getattr(module, name, None)):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(functions)}")
    return function


# -- calling ---------------------------------------------------------------------------------------


def _columns(samples: Sequence[RewardSample]) -> Mapping[str, Any]:
    extra = {name for sample in samples for name in sample.extra}
    columns = {name: [sample.extra.get(name) for sample in samples] for name in extra}
    return columns | {
        "prompts": [sample.messages for sample in samples],
        "completions": [[{"role": "assistant", "content": s.response}] for s in samples],
        "completion_ids": [sample.token_ids for sample in samples],
        "solution": [sample.answer for sample in samples],
        "answer": [sample.answer for sample in samples],
        "id": [sample.id for sample in samples],
        "data_source": [sample.data_source for sample in samples],
    }


def _queries(samples: Sequence[RewardSample]) -> Mapping[str, Any]:
    queries = [sample.prompt + sample.response for sample in samples]
    return {"queries": queries, "prompts": [s.prompt for s in samples], "labels": [s.answer for s in samples]}


def _solution(sample: RewardSample) -> Mapping[str, Any]:
    extra = sample.extra.get("extra_info")
    return {
        "data_source": sample.data_source,
        "solution_str": sample.response,
        "ground_truth": sample.answer,
        "extra_info": dict(extra if isinstance(extra, Mapping) else sample.extra),
    }


def _predicted(name: str) -> Callable[[RewardSample], Mapping[str, Any]]:
    return lambda sample: {name: sample.response, "ground_truth": sample.answer}


def _reward_input(sample: RewardSample) -> dict[str, Any]:
    return {"response": sample.response, "response_length": sample.length, "ground_truth": sample.answer}


def _lists(single: Callable[[RewardSample], Mapping[str, Any]]) -> Callable[[Sequence[RewardSample]], Any]:
    """The batch version: lists, under the names with an s appended."""

    def plural(samples: Sequence[RewardSample]) -> Mapping[str, Any]:
        rows = list(map(single, samples))
        return {f"{name}s": [row[name] for row in rows] for name in rows[0]}

    return plural


SAMPLE = Form(known_by=("sample",), first=True, arguments=lambda sample: sample)
FORMS = (
    # TRL, R1-V
    Form(known_by=("completions",), batch=True, arguments=_columns),
    Form(known_by=("completion_ids",), batch=True, arguments=_columns),
    # OpenRLHF, LMM-R1
    Form(known_by=("queries", "prompts"), batch=True, arguments=_queries),
    # verl, Mini-o3
    Form(known_by=("solution_strs",), batch=True, arguments=_lists(_solution)),
    Form(known_by=("solution_str",), arguments=_solution),
    # EasyR1, newest first
    Form(known_by=("reward_inputs",), first=True, batch=True, arguments=lambda rows: list(map(_reward_input, rows))),
    Form(known_by=("reward_input",), first=True, arguments=_reward_input),
    Form(known_by=("predicts", "ground_truths"), batch=True, arguments=_lists(_predicted("predict"))),
    Form(known_by=("predict", "ground_truth"), arguments=_predicted("predict")),
    Form(known_by=("predict_str", "ground_truth"), arguments=_predicted("predict_str")),
    # ours
    Form(known_by=("samples",), first=True, batch=True, arguments=list),
    SAMPLE,
)


def form_of(function: Callable[..., Any]) -> Form:
    """The first form that fits a function's parameters; SAMPLE if none does."""
    names = list(inspect.signature(function).parameters)
    fitting = (f for f in FORMS if set(f.known_by) <= set(names[:1] if f.first else names))
    return next(fitting, SAMPLE)


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that the function does not accept, and for missing required ones."""
    form, signature = form_of(function), inspect.signature(function)
    sample = RewardSample(id="", response="")
    given = {} if form.first else form.arguments([sample] if form.batch else sample)
    named = _accepted(signature, given)
    # With `completions`, further required parameters are columns of the data.
    bind = signature.bind_partial if form.arguments is _columns else signature.bind
    try:
        bind(*[sample] * form.first, **{**named, **args})
    except TypeError as error:
        own = [name for name in list(signature.parameters)[form.first :] if name not in named]
        name = getattr(function, "__name__", "f")
        shapes = ", ".join(f"f({', '.join(form.known_by)})" for form in reversed(FORMS))
        other = f"any other is called by one: def mine(sample): return {name}(sample.response, sample.answer)"
        further = f"Further parameters are the args of the term (here: {', '.join(own) or 'none'})"
        raise TypeError(f"{name}{signature}: {error}; a reward is {shapes}, and {other}. {further}") from None


def call(function: Callable[..., Any], form: Form, given: Any, args: Mapping[str, Any]) -> Any:
    """Call a function with a sample, or a list of them; the result may be a coroutine."""
    if form.first:
        return function(form.arguments(given), **args)
    return function(**{**_accepted(inspect.signature(function), form.arguments(given)), **args})


def _accepted(signature: inspect.Signature, named: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = signature.parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in named.items() if anything or name in parameters}


def late(deadline: float, *, own: bool = False) -> str:
    """The reason of a timeout. `own`: a built-in verifier's deadline, which no option can raise."""
    return f"no result after {deadline:g} s" + ("" if own else f" ({DEADLINE_OPTION})")


# -- results ---------------------------------------------------------------------------------------


class BadLength(ValueError):
    """A batch function did not return one result per sample."""


def to_scores(result: Any, count: int) -> list[Score]:
    """The scores in a batch function's result."""
    if isinstance(result, Mapping) and "rewards" in result:
        result = result["rewards"]
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)) or len(result) != count:
        size = len(result) if hasattr(result, "__len__") else type(result).__name__
        raise BadLength(f"{size} results for {count} samples")
    return [to_score(entry) for entry in result]


def to_score(result: Any) -> Score:
    """The score of a float, a mapping with `overall`, `value` or `score`, or a Score; else an error score."""
    if isinstance(result, Score):
        broken = (part for part in map(_finite, result.parts.values()) if part.kind == "error")
        return next(broken, result)
    if not isinstance(result, Mapping):
        return _finite(result)
    key = next((key for key in TOTALS if key in result), None)
    if key is None:
        return _error("bad_type", f"a dict needs one of {TOTALS}, this one has {', '.join(map(str, result))}")
    given = {"accuracy" if name == "acc" else name: v for name, v in result.items() if name not in (key, "parts")}
    given |= result.get("parts") or {}
    value = _finite(result[key])
    parts = {str(name): _finite(part) for name, part in given.items() if _is_number(part)}
    broken = (score for score in (value, *parts.values()) if score.kind == "error")
    return next(broken, replace(value, parts={name: score.value for name, score in parts.items()}))


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


def _finite(value: Any) -> Score:
    if value is None:
        return _error("none", "the function returned None")
    if not _is_number(value):
        return _error("bad_type", f"a reward is a number, a dict or a Score, not {type(value).__name__}")
    number = float(value)
    if not isfinite(number):
        return _error("nan" if number != number else "infinite", f"the function returned {number}")
    return Score(kind="value", value=number)


def _error(kind: str, detail: str) -> Score:
    return Score(kind="error", reason=f"{kind}: {detail}")
