"""Tables of functions, one per axis of an algorithm, and lookup of an entry by name.

A name is a key of the table or `file.py:name`; the latter is the user's function, or an `Entry`
around one. If such a function raises, or returns the wrong type or shape, the error names the field,
the file and the expected signature. Knows nothing of what the functions compute. Imports no torch.

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
Width: TypeAlias = NotNegative  # of a clip range
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
PositiveShare: TypeAlias = Annotated[float, Gt(0), Le(1)]
Smoothing: TypeAlias = Annotated[float, Ge(0), Lt(0.5)]
ShareBelowOne: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A function of an axis, its options, and properties that the builder needs.

    Its options are the keyword-only parameters of its functions; `overrides` holds the values that were set.
    """

    function: Callable[..., Any]
    formula: str
    name: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    # advantage
    group: bool = False  # compares the members of a group, so the group rules hold
    by_member: bool = False  # one value per member, the same for all of its tokens
    whiten: Callable[..., Any] | None = None  # whitening over the live tokens of the step; an option turns it off
    components: bool = False  # compares the terms of the reward one by one
    critic: bool = False  # reads the critic's values
    turns: bool = False  # reads the environment's reward of each turn
    greedy: bool = False  # reads the reward of a greedy rollout
    positive: bool = False  # needs rewards that are never negative
    # statistics of domains: `observe` updates them with the groups of a step, `weigh` gives a group's weight
    observe: Callable[..., Any] | None = None
    weigh: Callable[..., float] | None = None
    # policy loss
    own_aggregation: str | None = None  # the aggregation that the loss was designed for
    applies_weights: bool = False  # uses the correction weights itself, so they are not multiplied in
    select: Callable[..., Any] | None = None  # chooses tokens of an optimizer step that the loss treats differently
    ratio: bool = True  # r multiplies its gradient, so old=rollout corrects tokens of older weights
    older: str = ""  # why the loss suits tokens of older weights without a correction; old=rollout is its default there
    by_advantage: bool = True  # zero advantages cannot move the policy from its old log-probs; False: unknown
    # KL
    in_loss: bool = True  # usable as a loss: its gradient leads to the reference
    # correction
    weighs: bool = False  # gives weights, not only a mask
    masks: bool = False  # gives a mask in addition to weights
    by_sequence: bool = False  # one weight per sequence, the same for all of its tokens
    each_update: bool = False  # uses the current log-probs: computed at each update, not stored in the batch

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function with its options bound."""
        return self.bound("function")

    def bound(self, name: str) -> Callable[..., Any]:
        """The function in the field `name`, with its options bound."""
        function = getattr(self, name)
        assert function is not None, f"{self.name} has no {name}"
        return partial(function, **{n: v for n, v in self.overrides.items() if n in _keywords(function)})

    @property
    def functions(self) -> list[Callable[..., Any]]:
        found = (self.function, self.select, self.whiten, self.observe, self.weigh)
        return [function for function in found if function is not None]

    def with_options(self, options: Mapping[str, Any]) -> Entry:
        """A copy with those of the options that its functions accept."""
        return replace(self, overrides={**self.overrides, **{n: v for n, v in options.items() if self.reads(n)}})

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return {name: found for function in self.functions for name, found in _keywords(function).items()}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Option names and values; None for an option that has no value."""
        defaults = {name: None if p.default is p.empty else p.default for name, p in self.parameters.items()}
        return {**defaults, **self.overrides}

    def reads(self, option: str) -> bool:
        return option in self.parameters

    def annotation(self, option: str) -> Any:
        """The type annotation of an option; Any if there is none."""
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
    """Decorator: adds the function to a table, under its own name unless `name` is given."""

    def put(function: Function) -> Function:
        key = name or function.__name__
        table[key] = Entry(function=function, formula=formula, name=key, **about)
        return function

    return put


def table_of(name: str) -> Table[Entry]:
    """A table to add functions to. A plugin may supply a dict that holds the entry under its name."""
    return Table(name, {}, adapt=lambda key, row: row[key] if isinstance(row, dict) else row)


def parsed(entry: Entry, args: Mapping[str, Any], where: str = "algorithm.args") -> dict[str, Any]:
    """Those of `args` that the entry accepts, validated against its annotations."""
    found = {}
    for name in (name for name in args if entry.reads(name)):
        kind = TypeAdapter(entry.annotation(name), config=OPTIONS)
        try:
            found[name] = kind.validate_python(args[name])
            if isinstance(args[name], bool) and isinstance(found[name], float | int) and found[name] is not args[name]:
                kind.validate_python(str(args[name]).lower())  # raises, as true is not a number
        except ValidationError as error:
            [first, *_] = error.errors()
            default = entry.options[name]
            hint = "" if default is None else f" (its default is {default})"
            place = (*where.split("."), name, *first["loc"])
            raise ConfigError(explain({**first, "loc": place}) + hint) from None
    return found


def find(axis: str, table: Mapping[str, Entry], name: str) -> Entry:
    """The entry called `name`, or the user's function at `file.py:name`, whose path becomes absolute so
    that the name is valid in any working directory.
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
    """Wrap a user's function so that exceptions and wrong results become ConfigErrors; keeps its signature."""
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
    """What is wrong with a result; empty if nothing is. `first`: the first argument of the function."""
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
    elif axis == "correct" and hasattr(first, "delta"):  # an `each_update` correction returns a mask instead
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
