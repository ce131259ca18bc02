"""Named algorithms: the rows of `presets.yaml`, and the options that they set.

Options that the user gives win over them. An add-on is a row that is merged into another one:
`algorithm.preset=[grpo, tis]`.

    >>> cells_of({"preset": ["dapo"]})["algorithm"]["args"]
    {'clip_high': 0.28}
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from saccade.config.notation import other_names
from saccade.errors import ConfigError
from saccade.registry import Table

Row = dict[str, Any]
_TABLES = yaml.load(  # the fast C loader, if built
    Path(__file__).with_name("presets.yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)
PRESETS: Table[Row] = Table("presets", _TABLES["presets"])
ADD_ONS: dict[str, Row] = _TABLES["add_ons"]
# Arguments that apply only while the row's own function is used.
ARGS_OF = {"advantage_args": "advantage", "loss_args": "policy_loss"}
ELSEWHERE = {
    "samples_per_prompt": ("train", "samples_per_prompt"),
    "updates_per_step": ("train", "updates_per_step"),
    "reward_clip": ("reward", "clip"),
}
NOT_OPTIONS = ("about", "paper", "on_policy", "longest_share", *ARGS_OF)


def row_of(preset: Iterable[str]) -> Row:
    """The row of a preset with its add-ons: `args` are merged, lists are joined, other keys replaced."""
    name, *add_ons = preset
    if name in ADD_ONS:
        raise ConfigError(f"algorithm.preset={name}: is added to a row, as in [grpo, {name}]")
    if name not in PRESETS:
        raise unknown("algorithm.preset", name, PRESETS)
    row = dict(PRESETS[name])
    for add_on in add_ons:
        if add_on not in ADD_ONS:
            raise unknown("algorithm.preset", add_on, ADD_ONS)
        for key, value in ADD_ONS[add_on].items():
            if key == "paper":
                row["paper"] = ", ".join(filter(None, [row["paper"], value]))
            elif key in ("correct", "exclude_status"):
                row[key] = (*row.get(key, ()), *(v for v in value if v not in row.get(key, ())))
            elif key == "args":
                row[key] = row.get(key, {}) | value
            elif key != "about":
                row[key] = value
    return row


def cells_of(given: Row) -> dict[str, dict[str, Any]]:
    """The options that a preset sets, by section; `given` is the user's `algorithm` section with the preset."""
    row = row_of(given["preset"])
    cells: dict[str, Any] = {name: value for name, value in row.items() if name not in NOT_OPTIONS}
    of_functions = [row.get(a, {}) for a, axis in ARGS_OF.items() if given.get(axis) in (None, row.get(axis, "clip"))]
    cells["args"] = {n: v for args in (*of_functions, row.get("args", {})) for n, v in args.items()}
    if isinstance(kl := cells.get("kl"), Mapping) and given.get("kl", {}).get("place") not in (None, kl.get("place")):
        cells["kl"] = {name: value for name, value in kl.items() if name != "kind"}
    found: dict[str, dict[str, Any]] = {"algorithm": {}}
    for name, value in cells.items():
        section, leaf = ELSEWHERE.get(name, ("algorithm", name))
        found.setdefault(section, {})[leaf] = value
    return found


def args_beside(given: Row) -> dict[str, Any]:
    """The section's `args` that differ from those of its preset."""
    preset = cells_of(given)["algorithm"]["args"]
    return {name: value for name, value in given.get("args", {}).items() if preset.get(name) != value}


def unknown(field: str, name: str, expected: Iterable[str]) -> ConfigError:
    """The error about an unknown name, with the nearest known one."""
    names = list(expected)
    if not names:
        return ConfigError(f"{field}={name}: no such function; write file.py:name")
    ours = other_names()[2].get(f"{field}={name}".lower())
    near = [ours] if ours else get_close_matches(name.lower().replace(" ", ""), names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? Expected" if near else "expected"
    return ConfigError(f"{field}={name}: no such name; {guess} one of {', '.join(names)}")
