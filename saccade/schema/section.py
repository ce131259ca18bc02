"""What every section of the config is made of. Knows no option."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

WORDS = (tuple[str, ...], tuple[str, ...] | None)  # types of lists of words


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,  # either would reach the weights
    )

    @model_validator(mode="before")
    @classmethod
    def _as_given(cls, values: Any) -> Any:
        """Nothing stands for the default, one word for a list of one, ~/ for the home folder."""
        if not isinstance(values, dict):
            return values
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        values = {k: v for k, v in values.items() if v is not None or k not in kinds}
        words = {k: v for k, v in values.items() if isinstance(v, str) and kinds.get(k) in WORDS}
        values |= {key: (word,) for key, word in words.items()}
        paths = [k for k in values.keys() & kinds if cls.model_fields[k].json_schema_extra]
        return values | {key: _at_home(values[key]) for key in paths}


def _at_home(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_at_home, value)]
    return os.path.expanduser(value) if isinstance(value, str) else value


def option(default: Any, description: str, *, path: bool = False, **limits: Any) -> Any:
    """`path`: it may name a file or folder, then ~/ at its beginning is the home folder."""
    extra: dict[str, Any] = {"path": True} if path else {}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def is_name(text: str) -> bool:
    """Whether it names one file or folder, inside of the folder that it is joined to."""
    return text not in ("", ".", "..") and not any(mark in text for mark in "/\\\0")


def section(kind: type[Section], description: str) -> Any:
    return Field(default_factory=kind, description=description)


def entries(value: Any, main: str) -> Any:
    """A list of records; one entry stands for a list of one, a text for its main field."""
    rows = value if isinstance(value, list | tuple) else [value]
    return [{main: row} if isinstance(row, str) else row for row in rows]
