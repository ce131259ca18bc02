"""The base of every section of the config, and how options are declared."""

import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Groups of commands that read the same options; reward-model samples nothing, so it is not in ANSWERING.
ANSWERING = ("rl", "sft", "dpo", "eval", "generate", "chat", "serve-reward", "check-data")
TRAINING = ("rl", "sft", "dpo", "reward-model")
VALIDATING = ("rl", "sft", "dpo", "eval")
SCORING = tuple(command for command in ANSWERING if command != "chat")
WORDS = (tuple[str, ...], tuple[str, ...] | None)  # types of lists of words
NUMBERS = (int, float, int | None, float | None)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,  # infinity or NaN would reach the weights
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_given(cls, values: Any) -> Any:
        """Normalise input: None means the default, one word or record a list of one, ~/ the home folder; booleans are
        not numbers.
        """
        if not isinstance(values, dict) or not values:
            return values
        kinds, paths = _kinds(cls)
        values = {k: v for k, v in values.items() if v is not None or k not in kinds}
        values |= {k: str(v).lower() for k, v in values.items() if isinstance(v, bool) and kinds.get(k) in NUMBERS}
        values |= {k: (v,) for k, v in values.items() if isinstance(v, str) and kinds.get(k) in WORDS}
        values = {key: _entries(value, kinds.get(key)) for key, value in values.items()}
        return values | {key: _at_home(values[key]) for key in values.keys() & paths}


@cache
def _kinds(of: type[Section]) -> tuple[dict[str, Any], set[str]]:
    """The types of the options of a section, and those that are paths."""
    fields = of.model_fields
    return {k: field.annotation for k, field in fields.items()}, {k for k in fields if extra(fields[k]).get("path")}


def _without_nothing(args: Any) -> Any:
    return {name: value for name, value in args.items() if value is not None} if isinstance(args, Mapping) else args


# Options of a function by parameter name; None means its default.
Arguments: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_without_nothing)]


def _entries(value: Any, kind: Any) -> Any:
    """Normalise an option that lists records: one entry is a list of one, a text is the first field of a record."""
    entry = next(iter(get_args(kind)), None)
    if not (isinstance(entry, type) and issubclass(entry, Section)):
        return value
    main = next(iter(entry.model_fields))
    rows = value if isinstance(value, list | tuple) else [value]
    return [{main: row} if isinstance(row, str) else row for row in rows]


def _at_home(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_at_home, value)]
    return os.path.expanduser(value) if isinstance(value, str) else value


class When(NamedTuple):
    """A condition under which an option has an effect: a Python expression over the sections of a config, overrides
    that make it true ({section.option} is replaced by its value), and a description if the expression is not clear.
    """

    test: str
    remedy: str
    words: str = ""

    def holds(self, scope: Mapping[str, Any]) -> bool:
        """Evaluates the test, which is written in our schema and never comes from a user."""
        return bool(eval(self.test, dict(scope)))


def option(
    default: Any,
    description: str,
    *,
    path: bool = False,
    when: When | tuple[When, ...] = (),
    commands: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """Declare an option. `path`: may name a file or folder, so a leading ~/ is expanded. `commands`: those that read
    it; empty: those of its section, or all.
    """
    conditions = (when,) if isinstance(when, When) else when
    extra: dict[str, Any] = {"path": path, "when": conditions, "commands": commands}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def section(kind: type[Section], description: str, *, commands: tuple[str, ...] = (), mapping: bool = False) -> Any:
    """Declare a section. `mapping`: one option that is set as a whole, or key by key with dots."""
    extra: dict[str, Any] = {"when": (), "commands": commands} | ({"mapping": True} if mapping else {})
    return Field(default_factory=kind, description=description, json_schema_extra=extra)


mapping = partial(section, mapping=True)


def extra(field: Any) -> Mapping[str, Any]:
    """The other arguments that a field's `option`, `section` or `mapping` was declared with."""
    return field.json_schema_extra or {}


def given_options(part: Section, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, field, value) of the options that were set, not left at their defaults."""
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if name in part.model_fields_set and isinstance(value, Section):
            yield from given_options(value, f"{prefix}{name}.")
        elif name in part.model_fields_set:
            yield prefix + name, field, value


def without_effect(part: Section, prefix: str, scope: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each option that was set although its conditions do not hold. Setting False where that is
    the default is no problem.
    """
    for name, field, value in given_options(part, prefix):
        for condition in extra(field).get("when", ()):
            off = value is False and field.default is False
            if value is not None and not off and not condition.holds(scope):
                needed = condition.words or condition.test
                yield f"{name}: has no effect without {needed}; remove it, or use {condition.remedy.format(**scope)}"
                break


def is_name(text: str) -> bool:
    """Whether the text is a single file or folder name, which cannot lead out of the folder that it is joined to."""
    return text not in ("", ".", "..") and not any(mark in text for mark in "/\\\0")
