"""Test sets by name: the table `suites.yaml` lists the public set, its file, its columns and the verifier of each.
Downloads nothing.

Lettered options become `choices`, so the prompt lists them and says how to answer as for any other row; the set's own
instructions about that are dropped (`suite_rows.py`).

    >>> suite_sources("vstar", EvalConfig(folder="data"))[0].path
    'data/vstar_bench/test_questions.jsonl'
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from saccade.config import Config, DataSource, EvalConfig, RewardConfig
from saccade.config.schema.presets import unknown
from saccade.data.dataset import Dataset
from saccade.errors import ConfigError, DataError
from saccade.models.families import Family
from saccade.plugins.suites.rotations import rotated
from saccade.plugins.suites.suite_rows import Row, category_of, read_suite_row
from saccade.recipes.questions import load_prompts, map_samples, require_rows
from saccade.registry import Table
from saccade.types import Sample

FETCH = "hf download {hub} --repo-type dataset --local-dir {folder}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A row of suites.yaml, which explains the fields."""

    hub: str
    file: str
    columns: Mapping[str, Any]
    verifier: Any
    rules: str = ""
    fetch: str = FETCH
    unpack: str = ""
    rows: int | None = None
    mapping: str = "none"  # reader of pairs, as in data.mapping; none: the set has no pairs
    media: str = ""
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    judged: bool = False
    circular: bool = False  # ask each question once per option, with the options rotated
    rotated: int = False  # rows repeat a question with its options in another order; above 1: ids are equal modulo this
    shuffled: bool = False  # the first option of a row is correct, and is moved
    numbered: bool = False  # the answer is the number of an option, from 0
    protocol: str = "greedy"
    metric: str = "accuracy"
    unsure: str = ""
    units: str = ""  # pattern of units at the end of answers, which verifiers cannot tell from variables

    def home(self, folder: str) -> Path:
        return Path(folder, self.hub.rpartition("/")[2])

    def command(self, folder: str) -> str:
        """The shell command that fetches the set: only `file` if that holds the pictures, too."""
        beside = self.unpack or (not self.file.endswith(".parquet") and {"images", "audios"} & {*self.columns})
        only = "" if beside or self.fetch != FETCH else f" --include '{self.file}'"
        return self.fetch.format(hub=self.hub, folder=quote(str(self.home(folder)))) + only

    def row(self, row: Row) -> Row:
        """Convert a row of the set to a canonical row; raises RowError if a part is missing."""
        needs_options = self.verifier == "choice" and "choices" in self.columns  # no column: pictures show the options
        how: Any = {name: getattr(self, name) for name in ("rotated", "shuffled", "numbered")}
        found = read_suite_row(row, self.columns, folder=self.home("").name, needs_options=needs_options, **how)
        return {**found, "answer": re.sub(self.units, r"\\text{\1}", found["answer"])} if self.units else found


def _table() -> dict[str, Suite]:
    rows = yaml.safe_load(Path(__file__).with_name("suites.yaml").read_text(encoding="utf-8"))
    for name, row in rows.items():
        rows[name] = {**rows.get(row.pop("like", None), {}), **row}
    return {name: Suite(**row) for name, row in rows.items()}


SUITES: Table[Suite] = Table("suites", _table())


CIRCULAR = ":circular"  # suffix of a suite's name


def suite_of(name: str) -> Suite:
    """The suite of that name; NAME:circular asks its questions with every rotation of their options."""
    suite = SUITES[name.removesuffix(CIRCULAR)]
    return replace(suite, circular=True, protocol="circular") if name.endswith(CIRCULAR) else suite


def source_of(name: str) -> str | None:
    """The data_source of the rows of a suite; None if there is no such suite."""
    source = name.removesuffix(CIRCULAR)
    return source if source in SUITES else None


def problems(config: EvalConfig) -> Iterator[str]:
    """Yields errors for unknown suites, and for missing files with the command that fetches them."""
    for name in dict.fromkeys(config.suites):
        if "," in name:
            yield f"eval.suites: several names stand in brackets, eval.suites=[{name}]"
        elif name.removesuffix(CIRCULAR) not in SUITES:
            yield str(unknown("eval.suites", name, SUITES))
        elif (suite := suite_of(name)).circular and (suite.rotated or "choices" not in suite.columns):
            why = "has its rotations in its file" if suite.rotated else "has no options to turn"
            yield f"eval.suites: {name}: the set {why}; try {name.removesuffix(CIRCULAR)}"
        elif not suite_files(suite, config.folder):
            home = suite.home(config.folder)
            then = f", then in that folder {suite.unpack}" if suite.unpack else ""
            reads = f"{name} is the public set {suite.hub} and reads {home}/{suite.file}, which is missing"
            yield f"eval.suites: {reads}; fetch it with `{suite.command(config.folder)}`{then}, or set eval.folder"


def suite_files(suite: Suite, folder: str) -> list[Path]:
    return sorted(path for path in suite.home(folder).glob(suite.file) if path.is_file())


def suite_sources(name: str, config: EvalConfig) -> list[DataSource]:
    """The files of a suite as data sources; data_source is its name, by which prompts and rewards are chosen."""
    suite = suite_of(name)
    own: dict[str, Any] = {"name": name, "data_source": name.removesuffix(CIRCULAR), "mapping": suite.mapping}
    own |= {"image_dir": str(suite.home(config.folder) / suite.media)} if suite.media else {}
    return [DataSource(path=str(path), **own) for path in suite_files(suite, config.folder)]


def with_rewards(reward: RewardConfig, config: EvalConfig) -> RewardConfig:
    """Add the verifiers of suites, which score as their authors do, however the run combines its terms; an entry of the
    user in reward.by_source takes precedence.
    """
    suites = {name.removesuffix(CIRCULAR): suite_of(name) for name in config.suites}
    own = {n: {"terms": ["hybrid" if s.judged and reward.judge.url else s.verifier]} for n, s in suites.items()}
    return reward.model_copy(update={"by_source": own | reward.by_source}) if own else reward


def suite_sets(config: Config, family: Family) -> dict[str, Dataset]:
    """Load the sets of `eval.suites`; options about the columns of the user's rows do not apply. A pair becomes a
    question: which of the two is better?
    """
    sets = {}
    for name in config.eval.suites:
        suite = suite_of(name)
        pairs = suite.mapping != "none"
        plain: dict[str, Any] = {"format": "auto", "keys": {}, "pair_view": "verdict" if pairs else "apart"}
        own = config.model_copy(update={"data": config.data.model_copy(update=plain)})
        try:
            loaded = load_prompts(own, suite_sources(name, config.eval), family, None if pairs else suite.row)
        except DataError as error:
            raise DataError(f"eval.suites: {name}: {error}\nIts rows are read as those of {suite.hub}.") from None
        sets[name] = require_rows(map_samples(loaded, in_category), f"eval.suites: {name}")
        if suite.circular:
            sets[name] = rotated(sets[name])
    return sets


def with_pairs(config: Config) -> Config:
    """The config for evaluating a reward model: the pairs of suites are added to data.val."""
    for name in config.eval.suites:
        if suite_of(name).mapping == "none":
            pairs = ", ".join(other for other, suite in SUITES.items() if suite.mapping != "none")
            raise ConfigError(f"eval.suites: a reward model compares pairs, and {name} has none; try one of {pairs}")
    more = [source for name in config.eval.suites for source in suite_sources(name, config.eval)]
    return config.model_copy(update={"data": config.data.model_copy(update={"val": (*config.data.val, *more)})})


def in_category(sample: Sample) -> Sample:
    """Add the category to a pair of a suite, as the mapping of pairs does not; other samples are unchanged."""
    suite = SUITES.get(sample.data_source)
    if suite is None or suite.mapping == "none":
        return sample
    id = sample.id.removeprefix(f"{sample.data_source}/")  # a prefix of pairs in data.val
    named = category_of({**sample.extra, "id": id}, suite.columns.get("category", "category~"))
    kinds = {value: kind for kind, values in suite.categories.items() for value in values}
    # The first part of an id may be the value, such as the set that a pair is from.
    known = next((value for value in (named, re.split(r"[-_]", named.lower())[0]) if value in kinds), None)
    return replace(sample, extra={**sample.extra, "category": kinds[known] if known else named})


def unusual(name: str, n: int, rows: int | None) -> list[tuple[int, str]]:
    """Notes, with their levels, if an evaluation samples another number of answers than the set's authors report, or
    read other rows. `rows`: None if it was to read a part.
    """
    suite = suite_of(name)
    wanted = re.fullmatch(r"avg@(\d+)", suite.protocol)
    sampled = f"{name}: usually reported as {suite.protocol}; this is val.n={n}"
    read = f"{name}: {rows} rows were read, {suite.hub} has {suite.rows}; see that its files are whole"
    other_n, other_rows = wanted and int(wanted[1]) != n, None not in (rows, suite.rows) and rows != suite.rows
    return [(logging.INFO, sampled)] * bool(other_n) + [(logging.WARNING, read)] * other_rows
