"""Write docs/configuration.md from the schema, or check that it is current.

python scripts/config_reference.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the source tree is enough, no install needed

from saccade.config import Config, DataSource, RewardTerm, Section, options  # noqa: E402
from saccade.config.schema import CorrectionConfig  # noqa: E402
from saccade.config.schema.section import extra  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

Every option of a run, made from the schema by `make docs`.

A run is described by a YAML file with the sections below. Any option can be overridden on the
command line: `saccade rl run.yaml train.lr=2e-6 run.resume=auto`. Of several files the later ones
override the first, key by key: `saccade rl configs/r1v_clevr.yaml site.yaml` is a recipe with the paths, GPUs and
engine of a site. All behind the first `=` is the
value, spaces and `#` too; `train.lr=` takes the option of the file back. A name that only one
section has needs no section: `resume=auto`. In options that name a file or folder, `~/` is the home
folder, in the YAML file too. An unknown option is refused with the nearest known one; refused are
also a value of the wrong type and a combination that cannot run. An option that is set where it
does not count is refused, with what makes it count. One file serves all commands: an
option of another command is refused only on the command line. `--dry-run` shows what was chosen and
the batch arithmetic, `--dry-run --full` every option with the value it has, `saccade init MODEL
DATA` writes a first file. An empty default means: decided as the description says. An option of
type `mapping` takes the keys of the table that has its name; write it as a whole,
`'model.series={encoder: patches, channels: 8}'`, or key by key, `model.series.channels=8`.
"""
ITEMS = {
    "data": ("data.train[]", "One entry of `data.train` or `data.val`.", DataSource),
    "reward": ("reward.terms[]", "One entry of `reward.terms`.", RewardTerm),
    "algorithm": ("algorithm.correct[]", "One entry of `algorithm.correct`.", CorrectionConfig),
}
LIMITS = {"Ge": ("ge", "≥"), "Gt": ("gt", ">"), "Le": ("le", "≤"), "Lt": ("lt", "<")}


def main() -> None:
    text = "\n".join(lines())
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.relative_to(ROOT)} is out of date; run: make docs")
        return
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def lines() -> Iterator[str]:
    yield HEAD
    for name, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, Section)
        yield f"## {name}\n\n{' '.join([field.description, *conditions(field)])}\n"
        yield from table(options(kind, f"{name}.", keys=False))
        for option, inside in options(kind, f"{name}.", keys=False):
            if is_mapping(inside):
                yield f"### {option}\n\nKeys of `{option}`. {inside.description}\n"
                yield from table(declared(inside.annotation))
        if name in ITEMS:
            title, text, item = ITEMS[name]
            yield f"### {title}\n\n{text}\n"
            yield from table(options(item))


def is_mapping(field: Any) -> bool:
    return "mapping" in extra(field)


def declared(kind: type[Section]) -> Iterator[tuple[str, Any]]:
    """The options of a section without those that it inherits."""
    return ((name, field) for name, field in options(kind) if name in kind.__annotations__)


def table(rows: Iterable[tuple[str, Any]]) -> Iterator[str]:
    yield "| option | type | default | what it does |\n|---|---|---|---|"
    for name, field in rows:
        text = " ".join([field.description, *named_keys(field), *conditions(field)])
        text = text.replace("<", "&lt;")  # Markdown would take <image> for HTML
        cells = (f"`{name}`", f"`{written_type(field)}`", default(field), text)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def named_keys(field: Any) -> Iterator[str]:
    if is_mapping(field):
        yield f"Keys: {', '.join(name for name, _ in declared(field.annotation))}."


def conditions(field: Any) -> Iterator[str]:
    """When the option counts, and which commands read it."""
    if when := extra(field)["when"]:
        yield f"Counts only with {', '.join(each.words or f'`{each.test}`' for each in when)}."
    if commands := extra(field)["commands"]:
        yield f"Read by {', '.join(commands)}."


def written_type(field: Any) -> str:
    """The type without its None, and the limits of its values."""
    if is_mapping(field):
        return "mapping"
    text = type_name(field.annotation).replace(" | None", "")
    if text.startswith("Literal["):
        text = text.removeprefix("Literal[").removesuffix("]").replace("'", "").replace(", ", " | ")
    if text.startswith("Optional["):
        text = text.removeprefix("Optional[").removesuffix("]")
    limits = [
        f"{sign} {getattr(rule, attribute):g}"
        for rule in field.metadata
        for attribute, sign in [LIMITS.get(type(rule).__name__, ("", ""))]
        if sign
    ]
    return " ".join([text, ", ".join(limits)]).strip()


def default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = {} if is_mapping(field) else field.default
    return "" if value is None or value == "" else f"`{json.dumps(value, ensure_ascii=False)}`"


def type_name(annotation: Any) -> str:
    """A type as text, without module names."""
    named = getattr(annotation, "__name__", str(annotation))
    text = str(annotation) if get_args(annotation) else named
    return re.sub(r"\b[a-z_]+\.", "", text).replace("NoneType", "None")


if __name__ == "__main__":
    main()
