"""What every axis is made of: a table of entries, and the way to an entry from its name.

A name is a key of the table or `file.py:name`; the latter is the user's function, or an `Entry`
around one. What such a function raises, and a result of the wrong kind or shape, becomes an error
with the field, the file and the form that works. Knows nothing of what the functions compute.
Imports no torch.

    >>> find("aggregation", AGGREGATIONS, "token_mean").formula
    'sum(l) / N'
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from saccade.config import explain
from saccade.config.schema.presets import unknown
from saccade.errors import ConfigError, SaccadeError
from saccade.registry import Table
from saccade.user_code import user_symbol

# Types of options: what `algorithm.args` may hold.
Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]
Width: TypeAlias = NotNegative  # of a clip
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
PositiveShare: TypeAlias = Annotated[float, Gt(0), Le(1)]
Smoothing: TypeAlias = Annotated[float, Ge(0), Lt(0.5)]
ShareBelowOne: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A function of an axis, its options, and what the builder must know of it.

    Its options are the keyword-only parameters of its functions; `given` holds the ones that do not
    have their defaults.
    """

    function: Callable[..., Any]
    formula: str
    name: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    # advantage
    group: bool = False  # compares the members of a group, so the group rules hold
    by_member: bool = False  # one number for each member, at all of its tokens
    whiten: Callable[..., Any] | None = None  # over the live tokens of the step, with an option to leave it out
    components: bool = False  # compares the terms of the reward one by one
    critic: bool = False  # reads values
    turns: bool = False  # reads what an environment gave for each turn
    greedy: bool = False  # reads the reward of a greedy rollout
    positive: bool = False  # needs rewards that are never negative
    # of domains: what a step says about them is noted, and a group weighs by what was noted so far
    observe: Callable[..., Any] | None = None
    weigh: Callable[..., float] | None = None
    # policy loss
    own_aggregation: str | None = None  # the one that it was made for
    applies_weights: bool = False  # correction weights are part of it, so they do not multiply it
    select: Callable[..., Any] | None = None  # tokens of an optimizer step that it treats apart
    by_advantage: bool = True  # without one it pulls back at most; not so a function of the user
    # KL
    in_loss: bool = True  # its gradient is that of a distance
    # correction
    weighs: bool = False  # gives weights, not only a mask
    masks: bool = False  # gives a mask beside its weights
    by_sequence: bool = False  # the weight is that of the whole sequence, at each of its tokens
    each_update: bool = False  # looks at the current log-probs, so it is no column of the batch

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function with its options."""
        return self.bound("function")

    def bound(self, name: str) -> Callable[..., Any]:
        """One of its other functions, with its options."""
        function = getattr(self, name)
        assert function is not None, f"{self.name} has no {name}"
        return partial(function, **{n: v for n, v in self.given.items() if n in _keywords(function)})

    @property
    def functions(self) -> list[Callable[..., Any]]:
        found = (self.function, self.select, self.whiten, self.observe, self.weigh)
        return [function for function in found if function is not None]

    def having(self, options: Mapping[str, Any]) -> Entry:
        """The entry with those of the options that it reads."""
        return replace(self, given={**self.given, **{n: v for n, v in options.items() if self.reads(n)}})

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return {name: found for function in self.functions for name, found in _keywords(function).items()}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Names and values; None where there is none."""
        defaults = {name: None if p.default is p.empty else p.default for name, p in self.parameters.items()}
        return {**defaults, **self.given}

    def reads(self, option: str) -> bool:
        return option in self.parameters

    def annotation(self, option: str) -> Any:
        """What the value must be, as far as its parameter says so."""
        annotation: Any = self.parameters[option].annotation
        if isinstance(annotation, str):  # names of a file with `from __future__ import annotations`
            function = next(function for function in self.functions if option in _keywords(function))
            try:
                annotation = eval(annotation, inspect.unwrap(function).__globals__)
            except NameError:
                annotation = Any
        return Any if annotation is inspect.Parameter.empty else annotation


@cache
def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def add(
    table: MutableMapping[str, Entry], formula: str, *, name: str = "", **about: Any
) -> Callable[[Function], Function]:
    """Adds the function below to a table, under its own name unless another is given."""

    def put(function: Function) -> Function:
        key = name or function.__name__
        table[key] = Entry(function=function, formula=formula, name=key, **about)
        return function

    return put


def table_of(name: str) -> Table[Entry]:
    """A table to add functions to; a plugin names a dict of entries."""
    return Table(name, {}, adapt=lambda key, row: row[key] if isinstance(row, dict) else row)


def parsed(entry: Entry, args: Mapping[str, Any], where: str = "algorithm.args") -> dict[str, Any]:
    """Those of `args` that the entry reads, as its annotations want them."""
    found = {}
    for name in (name for name in args if entry.reads(name)):
        kind = TypeAdapter(entry.annotation(name), config=OPTIONS)
        try:
            found[name] = kind.validate_python(args[name])
            if isinstance(args[name], bool) and isinstance(found[name], float | int) and found[name] is not args[name]:
                kind.validate_python(str(args[name]).lower())  # true is no number
        except ValidationError as error:
            [first, *_] = error.errors()
            default = entry.options[name]
            hint = "" if default is None else f" (its default is {default})"
            place = (*where.split("."), name, *first["loc"])
            raise ConfigError(explain({**first, "loc": place}) + hint) from None
    return found


def find(axis: str, table: Mapping[str, Entry], name: str) -> Entry:
    """The entry called `name`, or the user's function at `file.py:name`, whose name then means the
    same in any working directory.
    """
    if name in table:
        return replace(table[name], name=name)
    path, separator, symbol = name.rpartition(":")
    if not separator:
        raise unknown(f"algorithm.{axis}", name, table)
    return _users_entry(axis, Path(path).resolve(), symbol)


@cache
def _users_entry(axis: str, path: Path, symbol: str) -> Entry:
    field, name = f"algorithm.{axis}", f"{path}:{symbol}"
    found = user_symbol(name, field)
    if not isinstance(found, Entry):
        found = Entry(function=found, formula=(found.__doc__ or name).strip().splitlines()[0])
    return replace(found, name=name, function=checked(axis, name, found.function), by_advantage=False)


# -- functions of users ----------------------------------------------------------------------------

FORMS = {
    "advantage": "f(inputs) -> [tokens] of finite numbers, as long as inputs.sequence",
    "policy_loss": "f(new, inputs) -> (loss [tokens], {name: [tokens] bool})",
    "aggregation": "f(lengths, trajectory, group) -> [sequences]",
    "kl.kind": "f(new, ref) -> [tokens]",
    "correct": "f(mismatch) -> Correction(weights=[tokens] or None, keep=[tokens] bool or None)",
    "filter.function": "f(groups) -> some of them, as a list",
}


def checked(axis: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its results checked; its signature stays."""
    field = f"algorithm.{axis}={name}"

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            result = function(*arguments, **options)
        except SaccadeError:
            raise
        except Exception as error:
            raise ConfigError(f"{field} raised {type(error).__name__}: {error}; its form is {FORMS[axis]}") from error
        if flaw := _flaw(axis, arguments[0], result):
            raise ConfigError(f"{field} returned {flaw}; its form is {FORMS[axis]}")
        return result

    return call


def _flaw(axis: str, first: Any, result: Any) -> str:
    """What is wrong with a result; empty where nothing is. `first`: the first argument."""
    kind, columns, like = f"a {type(result).__name__}", {"": result}, first
    if axis == "filter.function":
        groups = isinstance(result, list | tuple) and all(hasattr(group, "uid") for group in result)
        return "" if groups else f"{kind} instead of a list of groups"
    if axis == "advantage":
        like = first.sequence
    elif axis == "policy_loss":
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            return f"{kind} instead of a pair of losses and a dict"
        columns = {"": result[0], **result[1]}
    elif axis == "correct" and hasattr(first, "delta"):  # else it gives a mask at each update
        if not (hasattr(result, "weights") and hasattr(result, "keep")):
            return f"{kind} instead of a Correction"
        columns, like = {"weights": result.weights, "keep": result.keep}, first.delta
    for name, column in columns.items():
        label = f" as {name}" if name else ""
        if axis == "correct" and column is None:
            continue
        if not hasattr(column, "isfinite"):
            return f"a {type(column).__name__} instead of a tensor{label}"
        if column.shape != like.shape:
            return f"a tensor of {list(column.shape)}, not {list(like.shape)}{label}"
    if axis == "advantage" and not bool(result.isfinite().all()):
        return "numbers that are not finite"
    if axis == "policy_loss" and first.requires_grad and not result[0].requires_grad:
        return "losses without a gradient to the log-probs"
    return ""
