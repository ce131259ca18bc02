"""Test sets by name: which file of which repository each reads, how its rows become ours, and which
verifier scores them. Downloads nothing.

    >>> suite_source("vstar", EvalConfig(folder="data")).path
    'data/vstar_bench/test_questions.jsonl'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config import Config, DataSource, EvalConfig, RewardConfig
from saccade.data.dataset import Dataset
from saccade.models.families import Family
from saccade.recipes.questions import load_prompts, require_rows
from saccade.registry import Table

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Suite:
    hub: str  # repository on the hub; the last part of its name is the folder
    file: str
    row: Callable[[Row], Row]
    verifier: str
    judged: bool = False  # free answers: with an endpoint in reward.judge, `hybrid` asks it

    def place(self, folder: str) -> Path:
        return Path(folder, self.hub.rpartition("/")[2], self.file)


SUITES: Table[Suite] = Table("suites", {})


def problems(config: EvalConfig) -> Iterator[str]:
    """Suites that do not exist, and files that are missing, with the line that fetches them."""
    for name in config.suites:
        if name not in SUITES:
            yield f"eval.suites: there is no suite {name!r}; there are {', '.join(SUITES)}"
        elif not (place := SUITES[name].place(config.folder)).is_file():
            yield (
                f"eval.suites: {name} reads {place} and the pictures beside it, and it is not there; fetch it with "
                f"`hf download {SUITES[name].hub} --repo-type dataset --local-dir {place.parent}`, or name the "
                f"folder that holds {place.parent.name}/ in eval.folder"
            )


def suite_source(name: str, config: EvalConfig) -> DataSource:
    """Where its rows are; they carry its name as their data_source."""
    return DataSource(path=str(SUITES[name].place(config.folder)), name=name, data_source=name)


def with_rewards(reward: RewardConfig, config: EvalConfig) -> RewardConfig:
    """Suites are scored as their authors score them, unless reward.by_source names them."""
    suites = {name: SUITES[name] for name in config.suites}
    own = {name: "hybrid" if one.judged and reward.judge.url else one.verifier for name, one in suites.items()}
    return reward.model_copy(update={"by_source": own | reward.by_source}) if own else reward


def suite_sets(config: Config, family: Family) -> dict[str, Dataset]:
    """The sets of `eval.suites`, whatever the config says about columns of its own rows."""
    plain: dict[str, Any] = {"format": "auto", "keys": {}}
    config = config.model_copy(update={"data": config.data.model_copy(update=plain)})
    sets = {}
    for name in config.eval.suites:
        source, change = suite_source(name, config.eval), SUITES[name].row
        loaded = load_prompts(config, [source], family, change)
        sets[name] = require_rows(loaded, f"eval.suites: {source.path}")
    return sets
