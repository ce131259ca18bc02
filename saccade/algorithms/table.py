"""What every axis is made of: a table of entries, and the way to an entry from its name.

A name is a key of the table or `file.py:name`; the latter is a function of your own, or an `Entry`
around one. Knows nothing of what the functions compute.

    >>> find("aggregation", AGGREGATIONS, "token_mean").formula
    'sum(l) / N'
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from saccade.algorithms.own import checked
from saccade.config import explain
from saccade.errors import ConfigError
from saccade.user_code import own_module

# Types of options: what `algorithm.args` may hold.
Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
PositiveShare: TypeAlias = Annotated[float, Gt(0), Le(1)]
Smoothing: TypeAlias = Annotated[float, Ge(0), Lt(0.5)]
ShareBelowOne: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
OPTIONS = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A function of an axis and what the builder must know of it.

    Its options are its keyword-only parameters, with their defaults.
    """

    function: Callable[..., Any]
    formula: str
    # advantage
    group: bool = False  # compares the members of a group, so the group rules hold
    whiten: bool | None = None  # over the live tokens of the step; None: never
    components: bool = False  # compares the terms of the reward one by one
    critic: bool = False  # reads values
    greedy: bool = False  # reads the reward of a greedy rollout
    positive: bool = False  # needs rewards that are never negative
    domains: bool = False  # reads how often and how well each domain was answered so far
    # policy loss
    own_aggregation: str | None = None  # the one that it was made for
    applies_weights: bool = False  # correction weights are part of it, so they do not multiply it
    select: Callable[..., Any] | None = None  # tokens of an optimizer step that it treats apart
    by_advantage: bool = True  # without one it pulls back at most; not so a function of the user
    # KL
    in_loss: bool = True  # its gradient is that of a distance
    # correction
    weighs: bool = False  # gives weights, not only a mask
    by_sequence: bool = False  # the weight is that of the whole sequence, at each of its tokens
    each_update: bool = False  # looks at the current log-probs, so it is no column of the batch

    @cached_property
    def options(self) -> dict[str, Any]:
        """Names and defaults; None where there is no default."""
        return {name: None if p.default is p.empty else p.default for name, p in self._parameters()}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """Options without a default."""
        return tuple(name for name, p in self._parameters() if p.default is p.empty)

    def _parameters(self) -> list[tuple[str, inspect.Parameter]]:
        return [pair for function in self._functions for pair in _keywords(function).items()]

    @property
    def _functions(self) -> list[Callable[..., Any]]:
        return [self.function] + ([self.select] if self.select else [])

    def parse(self, option: str, value: Any) -> Any:
        """The value as the annotation of that parameter wants it; raises ValidationError."""
        function = next(f for f in self._functions if option in _keywords(f))
        annotation: Any = _keywords(function)[option].annotation
        if isinstance(annotation, str):  # names of a file with `from __future__ import annotations`
            try:
                annotation = eval(annotation, inspect.unwrap(function).__globals__)
            except NameError:
                annotation = Any
        if annotation is inspect.Parameter.empty:
            return value
        return TypeAdapter(annotation, config=OPTIONS).validate_python(value)

    def reads(self, option: str) -> bool:
        return option in self.options


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def parsed(entry: Entry, args: Mapping[str, Any], where: str = "algorithm.args") -> dict[str, Any]:
    """Those of `args` that the entry reads, as its annotations want them."""
    found = {}
    for name in (name for name in args if entry.reads(name)):
        try:
            found[name] = entry.parse(name, args[name])
        except ValidationError as error:
            [first, *_] = error.errors()
            default = entry.options[name]
            hint = "" if default is None else f" (its default is {default})"
            place = (*where.split("."), name, *first["loc"])
            raise ConfigError(explain({**first, "loc": place}) + hint) from None
    return found


def bound(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with those of the options that it has parameters for."""
    return partial(function, **{n: options[n] for n in _keywords(function) if n in options})


def find(axis: str, table: Mapping[str, Entry], name: str) -> Entry:
    """The entry called `name`, or the user's function at `file.py:name`."""
    if name in table:
        return table[name]
    path, separator, symbol = name.rpartition(":")
    if not separator:
        raise unknown(f"algorithm.{axis}", name, table)
    return _own_entry(axis, name, load_symbol(f"algorithm.{axis}", path, symbol))


@cache
def _own_entry(axis: str, name: str, found: Any) -> Entry:
    if isinstance(found, Entry):
        return replace(found, function=checked(axis, name, found.function), by_advantage=False)
    summary = (found.__doc__ or name).strip().splitlines()[0]
    return Entry(function=checked(axis, name, found), formula=summary, by_advantage=False)


def canonical(table: Mapping[str, Entry], name: str) -> str:
    """A name that means the same in any working directory."""
    path, separator, symbol = name.rpartition(":")
    return name if name in table or not separator else f"{Path(path).resolve()}:{symbol}"


def unknown(field_name: str, name: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    if not names:
        return ConfigError(f"{field_name}={name}: no such function; write file.py:name")
    near = difflib.get_close_matches(name.lower().replace(" ", ""), names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"{field_name}={name}: no such name; {guess}Expected one of {', '.join(names)}")


@cache
def load_symbol(field_name: str, path: str, symbol: str) -> Any:
    """A function or an `Entry` from a Python file of the user."""
    if not Path(path).is_file():
        raise ConfigError(f"{field_name}: file {path} does not exist; write file.py:name")
    if Path(path).suffix != ".py":
        raise ConfigError(f"{field_name}: {path} is not a Python file; write file.py:name")
    try:
        module = own_module(path)
    except Exception as error:
        raise ConfigError(f"{field_name}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, symbol, None)
    if found is None:
        raise unknown(field_name, symbol, [n for n in vars(module) if not n.startswith("_")])
    if not (isinstance(found, Entry) or callable(found)):
        raise ConfigError(f"{field_name}: {symbol} in {path} is neither a function nor an Entry")
    return found
