"""How values are written in config files and overrides, and the names in `other_names.yaml`.

YAML, with two differences from its version 1.1: only true and false are truth values (`off` and
`no` are words), and 1e-6 is a number. Dates, octal and base-60 numbers stay text.

    >>> parse("{a: off, b: 1e-6, c: 2024-01-01}")
    {'a': 'off', 'b': 1e-06, 'c': '2024-01-01'}
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
FLOAT = re.compile(
    r"""(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
TRUTH = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
OURS = (("bool", TRUTH, "tTfF"), ("int", INTEGER, "-+0123456789"), ("float", FLOAT, "-+.0123456789"))
REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp")}


class Reader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the fast C loader, if built
    """The YAML loader of all config text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML looks it up on the class)
        first: [(tag, pattern) for tag, pattern in rules if tag not in REPLACED]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Refuse duplicate keys: plain YAML silently keeps the last one."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            problem = f"{', '.join(twice)} is there twice; put all of it in one place"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep=deep)


class Writer(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes text that this reader or a plain YAML 1.1 reader would parse as another type."""


for _name, _pattern, _first in OURS:
    Reader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))
    Writer.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))


def parse(text: str) -> Any:
    return yaml.load(text, Reader)


def write(tree: Any, *, flow: bool = False) -> str:
    """Dump as YAML; `flow`: on one line."""
    how = {"default_flow_style": True, "width": 1 << 30} if flow else {}
    return yaml.dump(tree, Dumper=Writer, sort_keys=False, allow_unicode=True, **how)


# -- names from elsewhere --------------------------------------------------------------------------


@cache
def other_names() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Returns (name in another system or older version → our option, part of a key without a counterpart here → what
    to write instead, OPTION=VALUE of another system → our value).
    """
    tables = parse(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
    elsewhere = {name: option for option, names in tables["names"].items() for name in names.split()}
    nowhere = dict.fromkeys(tables["nowhere"].split(), "nothing here corresponds to it, remove it")
    values = {
        f"{option}={value}": ours
        for option, table in tables["values"].items()
        for ours, names in table.items()
        for value in names.split()
    }
    return elsewhere, nowhere | tables["instead"], values
