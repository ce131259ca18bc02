"""A config is a YAML file plus dotted overrides, checked against the schema.

An unknown key is refused with the nearest known one; a value of the wrong type is refused with the
field and what would work. The options themselves are in `schema`. Knows nothing of models,
engines or torch.

    >>> load(None, ["train.lr=2e-6", "algorithm.preset=rloo"]).train.lr
    2e-06
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from saccade.config.notation import other_names, parse, write
from saccade.config.schema import *  # noqa: F403 (sections can be imported from here, too)
from saccade.config.schema import Config, DataSource, RewardTerm, Section, options
from saccade.config.schema.presets import args_beside, cells_of, row_of
from saccade.config.schema.section import WORDS
from saccade.errors import ConfigError

# -- defaults of the commands ----------------------------------------------------------------------

FALLING = {"train.schedule": "cosine_with_min_lr", "train.warmup": 0.03}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"train.epochs": 2.0, "train.lr": 5e-6, **FALLING},
    "dpo": {"train.lr": 1e-5, "dpo.max_tokens": 512, **FALLING},
    "dpo kto": {"dpo.max_tokens": 2048},
    "reward-model": {"train.lr": 9e-6, "reward_model.max_tokens": 512, **FALLING},
    "reward-model process": {"train.lr": 1e-6, "reward_model.max_tokens": 2048},
    "chat": {"rollout.temperature": 0.7, "rollout.top_p": 0.95, "rollout.max_tokens": 4096},
}


# -- loading ---------------------------------------------------------------------------------------

ROWS = (".jsonl", ".csv", ".parquet", ".arrow", ".gz")  # suffixes of data files, which are no config
SOURCES = tuple[DataSource, ...]
TEXTS = (str | dict[str, str], str | dict[str, str] | None)  # types: a text, or one for each data_source
LISTS = (*WORDS, tuple[RewardTerm, ...])  # types for which one text means a list of one
# Options for which an empty text is a value; elsewhere it means: not given.
EMPTY_IS_A_VALUE = {"prompt.instruction", "env.instruction"}
# An override → options of a file that it removes, because both would contradict each other.
REPLACES = {
    "reward.preset": ("reward.terms", "reward.by_source.default"),
    "reward.terms": ("reward.preset", "reward.by_source.default"),
    "algorithm.args.clip": ("algorithm.args.clip_low", "algorithm.args.clip_high"),
}


def load(
    source: str | Path | Mapping[str, Any] | Config | None, overrides: Sequence[str] = (), command: str | None = None
) -> Config:
    """Load and check a YAML file, mapping or config plus `section.key=value` overrides; fills in the defaults of the
    command and of the preset. `key=` and `key=null` unset an option of the file. `model_fields_set` of a section holds
    only the options that were given.
    """
    given, changes = _read(source), dict(map(_override, overrides))
    for key, value in changes.items():
        for replaced in REPLACES.get(key, ()) if value else ():
            _remove(given, replaced)
    for key, value in changes.items():
        _set(given, key, value)
    first = _validated(given)
    tree: dict[str, Any] = {}
    kind = {"dpo": first.dpo.loss, "reward-model": first.reward_model.kind}.get(command or "", "")
    for name in (command or "", f"{command} {kind}"):  # the defaults of its kind come last
        for key, value in DEFAULTS.get(name, {}).items():
            _set(tree, key, value)
    tree = _merged(tree, _preset(first))
    config = _validated(_merged(tree, first.model_dump(exclude_unset=True)))
    _keep_given(config, first)
    return config


def on_one_gpu(config: Config) -> Config:
    """The config with run.gpus=1, for commands that start no ranks."""
    own = config.run
    return config if own.gpus == 1 else config.model_copy(update={"run": own.model_copy(update={"gpus": 1})})


def _validated(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item) for item in error.errors())) from None


def _preset(config: Config) -> dict[str, Any]:
    """The options that the algorithm's preset sets, limited to the sizes of this run."""
    algorithm = config.algorithm
    cells = cells_of(algorithm.model_dump(exclude_unset=True) | {"preset": algorithm.preset})
    row = row_of(algorithm.preset)
    longest = config.rollout.max_tokens * config.env.max_turns
    if "longest_share" in row:
        most = max(1, int(row["longest_share"] * longest))
        cells["algorithm"]["overlong"] = {"buffer": min(row["overlong"]["buffer"], most)}
    if "updates_per_step" in row:
        cells["train"]["updates_per_step"] = min(row["updates_per_step"], config.train.prompts_per_step)
    return cells


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees key by key; `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        lower = below.get(key)
        both = isinstance(lower, dict) and isinstance(value, Mapping)
        merged[key] = _merged(lower, value) if both else value  # type: ignore[arg-type]
    return merged


def _keep_given(section: Section, given: Section) -> None:
    section.model_fields_set.intersection_update(given.model_fields_set)
    for name in type(section).model_fields:
        inside = getattr(section, name)
        if isinstance(inside, Section):
            _keep_given(inside, getattr(given, name))


def _given_options(config: Config, **how: Any) -> dict[str, Any]:
    """The options that were given, without `algorithm.args` that equal the preset's."""
    tree = config.model_dump(exclude_unset=True, **how)
    if "args" in tree.get("algorithm", {}):
        tree["algorithm"]["args"] = args_beside(tree["algorithm"] | {"preset": config.algorithm.preset})
    return tree


def _read(source: str | Path | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    """The source as a new nested dict."""
    if source is None:
        return {}
    if isinstance(source, Config):
        return _given_options(source)
    if isinstance(source, Mapping):
        tree: dict[str, Any] = {}
        for key in sorted(source, key=lambda key: "." in str(key)):  # sections before their parts
            _set(tree, _full_key(str(key)), deepcopy(source[key]))
        return tree
    path = Path(source)
    if (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is a folder of a run; give {path / 'config.yaml'}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a config file; give a model as model.path={path}")
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; `saccade init` writes one, docs/recipes.md lists names")
    if path.name.endswith(ROWS):
        raise ConfigError(f"{path} holds rows, not options; give it as data.train={path}")
    try:
        written = parse(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(written, dict):
        raise ConfigError(f"{path} must hold sections such as 'model:'; rows are given as data.train={path}")
    return _read(written)


def merged(files: Sequence[str | Path]) -> dict[str, Any]:
    """Merge the options of several files, such as a recipe and site settings, key by key; the last one wins."""
    return reduce(_merged, map(_read, files), {})


def given(overrides: Sequence[str]) -> list[str]:
    """Names of the options and sections that overrides set, without those they unset."""
    return [key for key, value in map(_override, overrides) if value is not None]


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"override {text!r}: write section.key=value, for example train.lr=1e-6")
    key = _full_key(key.strip())
    return key, _value(key, value.strip())


def _value(key: str, text: str) -> Any:
    """Parse the text of an override by the type of its option. None: unset the option."""
    kind = _kind(key)
    if not text:
        # A key that is no option is an entry of a table.
        return "" if key in EMPTY_IS_A_VALUE or (kind is str and key not in dict(options())) else None
    if text not in ("null", "~") and _is_plain(kind, text):
        return text
    try:
        return parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={text}: not valid YAML: {error}") from None


def _is_plain(kind: Any, text: str) -> bool:
    """Whether the whole text is the value, such as a word or file name with any characters; else it is YAML."""
    if text[0] in "'\"":
        return text[-1] != text[0]
    if kind in (str, str | None):
        return True
    if kind in TEXTS:
        return text[0] != "{" or text[-1] != "}"
    if kind == SOURCES:
        return text[0] not in "[{" or text[-1] not in "]}"
    return text[0] not in "[{" and (kind in LISTS or "#" in text)


def _kind(key: str) -> Any:
    """Type of an option, or of an entry of one that is a table."""
    fields = dict(options())
    if key in fields:
        return fields[key].annotation
    table = fields.get(key.rpartition(".")[0])
    return None if table is None else get_args(table.annotation)[1]


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for name in parents:
        child = tree.get(name)
        if not isinstance(child, dict):
            child = tree[name] = {} if not isinstance(child, Section) else child.model_dump(exclude_unset=True)
        tree = child
    tree[leaf] = value


def _remove(tree: dict[str, Any], key: str) -> None:
    *parents, leaf = key.split(".")
    for name in parents:
        tree = tree.get(name) or {}
    tree.pop(leaf, None)


def _full_key(key: str) -> str:
    """The dotted name of an option: `train.lr` stays as it is; a bare leaf such as `resume` becomes `run.resume` if
    only one section has it.
    """
    above, fields = key, dict(options())
    while above := above.rpartition(".")[0]:
        if above in fields and getattr(fields[above].annotation, "__origin__", None) is not dict:
            raise ConfigError(f"{key}: {above} is set as a whole; write {above}=VALUE")
    if "." in key or key in Config.model_fields:
        return key
    # Only options directly in a section: `lr` is train.lr, although algorithm.critic has one, too.
    names = [name for name, _ in options(keys=False)]
    homes = [name for name in names if name.count(".") == 1 and name.endswith(f".{key}")]
    homes += [other_names()[0][key]] if homes and key in other_names()[0] else []
    if len(homes) > 1:
        raise ConfigError(f"{key}: several sections have it, write one of {', '.join(homes)}")
    return homes[0] if homes else key


LIKE = 0.75  # similarity of two names from which one is suggested for the other
FOREIGN = ("worker", "trainer", "actor_rollout_ref", "critic")  # sections of other systems, not typos of ours
WANTED = {
    **dict.fromkeys(("float_parsing", "float_type"), "expects a number"),
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "expects a whole number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "expects true or false"),
    "tuple_type": "expects a list such as [a, b]",
    "dict_type": "expects a table such as {{a: 1}}",
    "greater_than": "expects more than {gt:g}",
    "greater_than_equal": "expects at least {ge:g}",
    "less_than": "expects less than {lt:g}",
    "less_than_equal": "expects at most {le:g}",
    "literal_error": "expects {expected}",
}


def explain(error: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return "\n".join(map(unknown_key, _leaves(key, error.get("input"))))
    field, given = dict(options()).get(key), error.get("input")
    inside = [name for name, _ in options() if name.startswith(f"{key}.")]
    if error["type"] == "model_type" and inside:
        return f"{key}: a section, got {given!r}; set one of its options: {', '.join(inside)}"
    for entry in given if field is not None and isinstance(given, Mapping) else ():  # named like options beside it
        if ours := other_names()[0].get(f"{key.rpartition('.')[0]}.{entry}"):
            return f"unknown key '{key}.{entry}'; did you mean '{key}.{ours.rpartition('.')[2]}'?"
    hint = f" ({field.description})" if field is not None else ""
    wanted = WANTED.get(error["type"], "").format(**error.get("ctx", {})) or error["msg"].removeprefix("Value error, ")
    if (ours := other_names()[2].get(f"{key}={given}".lower())) is not None:
        wanted = f"write {ours!r}"
    return f"{key}: {wanted}, got {given!r}{hint}"


def _leaves(key: str, given: Any) -> list[str]:
    """The keys of an unknown section; only the section's name if it looks like a typo of one of ours."""
    if not isinstance(given, Mapping) or not given:
        return [key]
    if key not in (*FOREIGN, *other_names()[0]) and difflib.get_close_matches(key, Config.model_fields, 1, LIKE):
        return [key]
    return [leaf for below, value in given.items() for leaf in _leaves(f"{key}.{below}", value)]


def unknown_key(key: str) -> str:
    """The message about an unknown key, with a suggestion: by names of other systems, or by similarity."""
    above, _, leaf = key.rpartition(".")
    entry, _, part = re.sub(r"\.\d+\.", "\n", key, count=1).partition("\n")
    inside = get_args(_kind(entry)) if part else ()
    if inside and hasattr(inside[0], "model_fields"):  # an entry of a list
        keys, shared = inside[0].model_fields, f"{entry.rpartition('.')[0]}.{part}"
        meant = difflib.get_close_matches(part, keys, n=1)
        hint = f"did you mean {meant[0]!r}?" if meant else f"expected one of {', '.join(keys)}"
        hint = hint if _kind(shared) is None else f"write {shared}, which holds for all of {entry}"
    else:
        above = new if (new := other_names()[0].get(above)) and new not in dict(options()) else above  # a section
        instead, option = other_names()[1], meant_by(f"{above}.{leaf}".lstrip("."))
        hint = f"did you mean {option!r}?" if option else ""
        hint = hint or next((instead[part] for part in reversed(key.split(".")) if part in instead), "")
        siblings = [name for name, _ in options() if above and name.rpartition(".")[0] == above]
        hint = hint or ("expected one of " + ", ".join(siblings) if siblings else "")
    return f"unknown key {key!r}{hint and '; '}{hint}"


def meant_by(key: str) -> str:
    """The option that an unknown key probably means: by its name in other systems, else the one with the most similar
    name; of several, the one whose sections are in the key. Empty if none is similar.
    """
    parts = key.lower().split(".")
    for start in range(len(parts)):
        if (name := ".".join(parts[start:])) in other_names()[0]:
            return other_names()[0][name]
    if other_names()[1].keys() & set(parts):
        return ""

    def likeness(name: str) -> tuple[float, int, int]:
        *sections, leaf = name.split(".")
        like = difflib.SequenceMatcher(None, leaf, parts[-1]).ratio()
        return like, len(set(sections) & set(parts)), -len(sections)

    names = sorted([*(name for name, _ in options()), *Config.model_fields], key=likeness, reverse=True)
    best = likeness(names[0])
    # Several sections have args or name: on such a tie, one of another section is not suggested.
    another = parts[0] in Config.model_fields and not best[1] and likeness(names[2]) == best
    return names[0] if best[0] >= LIKE and not another else ""


def to_yaml(config: Config, *, full: bool = True) -> str:
    return write(config.model_dump(mode="json") if full else _given_options(config, mode="json"))
