"""Functions of users, held to what their axis promises: a mistake names the function, not a line of
ours.

What such a function raises, and a result of the wrong kind or shape, becomes an error with the
field, the file and what was expected. Knows nothing of what is computed. Imports no torch.

    >>> checked("kl.kind", "mine.py:far", far)(new, ref)
    Traceback (most recent call last):
    saccade.errors.ConfigError: algorithm.kl.kind=mine.py:far returned a tensor of [], not [6] …
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from saccade.errors import ConfigError, SaccadeError


def checked(axis: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its results checked; its signature stays."""
    field = f"algorithm.{axis}={name}"
    promised = PROMISES[axis]

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            result = function(*arguments, **options)
        except SaccadeError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{field} raised {what}; its form is {promised.__doc__}") from error
        problem = promised(arguments, result)
        if problem:
            raise ConfigError(f"{field} returned {problem}; its form is {promised.__doc__}")
        return result

    return call


def _advantage(arguments: Any, result: Any) -> str:
    """f(inputs) -> [tokens] of finite numbers, as long as inputs.sequence"""
    problem = _shape(result, arguments[0].sequence)
    if not problem and not bool(result.isfinite().all()):
        return "numbers that are not finite"
    return problem


def _loss(arguments: Any, result: Any) -> str:
    """f(new, inputs) -> (loss [tokens], {name: [tokens] bool})"""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        return f"{_kind(result)} instead of a pair of losses and a dict"
    new, (loss, indicators) = arguments[0], result
    if problem := _shape(loss, new):
        return problem
    if new.requires_grad and not loss.requires_grad:
        return "losses without a gradient to the log-probs"
    wrong = [name for name, flags in indicators.items() if _shape(flags, new)]
    return f"indicators {wrong} that are not [tokens]" if wrong else ""


def _aggregation(arguments: Any, result: Any) -> str:
    """f(lengths, trajectory, group) -> [sequences]"""
    return _shape(result, arguments[0])


def _divergence(arguments: Any, result: Any) -> str:
    """f(new, ref) -> [tokens]"""
    return _shape(result, arguments[0])


def _correction(arguments: Any, result: Any) -> str:
    """f(mismatch) -> Correction(weights=[tokens] or None, keep=[tokens] bool or None)"""
    mismatch = arguments[0]
    if not hasattr(mismatch, "delta"):  # one that looks at the current log-probs gives a mask
        return _shape(result, mismatch)
    if not (hasattr(result, "weights") and hasattr(result, "keep")):
        return f"{_kind(result)} instead of a Correction"
    columns = [column for column in (result.weights, result.keep) if column is not None]
    return next(filter(None, (_shape(column, mismatch.delta) for column in columns)), "")


def _filter(arguments: Any, result: Any) -> str:
    """f(groups) -> some of them, as a list"""
    if isinstance(result, list | tuple) and all(hasattr(group, "uid") for group in result):
        return ""
    return f"{_kind(result)} instead of a list of groups"


def _shape(result: Any, like: Any) -> str:
    if not hasattr(result, "isfinite"):
        return f"{_kind(result)} instead of a tensor"
    if result.shape != like.shape:
        return f"a tensor of {list(result.shape)}, not {list(like.shape)}"
    return ""


def _kind(result: Any) -> str:
    return f"a {type(result).__name__}"


PROMISES: dict[str, Callable[[Any, Any], str]] = {
    "advantage": _advantage,
    "policy_loss": _loss,
    "aggregation": _aggregation,
    "kl.kind": _divergence,
    "correct": _correction,
    "filter.function": _filter,
}
