"""Test sets by name: which file of which repository each reads, how its rows become ours, and which
verifier scores them. Downloads nothing.

Ours are public sets of questions about details of large images. Letters and options become
`choices`, so the prompt lists them and says how to answer as it does for any other row; what a set
itself says about that is left out.

    >>> suite_source("vstar", EvalConfig(folder="data")).path
    'data/vstar_bench/test_questions.jsonl'
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config import Config, DataSource, EvalConfig, RewardConfig
from saccade.data.chats import RowError
from saccade.data.dataset import ROTATION_OF, Dataset
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


# -- rows of each set -------------------------------------------------------------------------------

OPTION = re.compile(r"^\(([A-Z])\)[ \t]*(.*)$", re.MULTILINE)


def _value(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise RowError(f"no column {name!r}")
    return row[name]


def _vstar(row: Row) -> Row:
    text = str(_value(row, "text"))
    options = [option.strip() for _, option in OPTION.findall(text)]
    first = OPTION.search(text)
    if first is None or len(options) < 2:
        raise RowError("its text lists no options (A), (B) …")
    return {
        "id": str(_value(row, "question_id")),
        "problem": text[: first.start()].strip(),
        "images": [_value(row, "image")],
        "choices": options,
        "answer": _value(row, "label"),
        "category": row.get("category"),
    }


def _visual_probe(row: Row) -> Row:
    """Paths begin with the name of the folder that the file lies in."""
    pictures = [re.sub(r"^VisualProbe_\w+/", "", str(path)) for path in _value(row, "images")]
    return {**row, "images": pictures, "category": row.get("category")}


def _hr_bench(row: Row) -> Row:
    question, image = str(_value(row, "question")), _value(row, "image")
    picture = image.get("bytes") if isinstance(image, Mapping) else image
    known = picture.encode() if isinstance(picture, str) else picture
    if not isinstance(known, bytes):
        raise RowError("column 'image' holds neither base64 nor bytes")
    same = hashlib.sha256(question.encode(errors="surrogatepass") + b"\0" + known).hexdigest()[:16]
    return {
        "id": str(_value(row, "index")),
        "problem": question,
        "images": [picture],
        "choices": [str(_value(row, letter)) for letter in "ABCD"],
        "answer": _value(row, "answer"),
        "category": row.get("category"),
        ROTATION_OF: same,
    }


# -- the sets ---------------------------------------------------------------------------------------


def _visual_probe_set(level: str) -> Suite:
    return Suite(hub=f"Mini-o3/VisualProbe_{level}", file="val.json", row=_visual_probe, verifier="exact", judged=True)


def _hr_bench_set(size: str) -> Suite:
    return Suite(hub="DreamMr/HR-Bench", file=f"hr_bench_{size}.parquet", row=_hr_bench, verifier="choice")


SUITES: Table[Suite] = Table(
    "suites",
    {
        "vstar": Suite(hub="craigwu/vstar_bench", file="test_questions.jsonl", row=_vstar, verifier="choice"),
        **{f"visualprobe_{level.lower()}": _visual_probe_set(level) for level in ("Easy", "Medium", "Hard")},
        **{f"hrbench{size}": _hr_bench_set(size) for size in ("4k", "8k")},
    },
)


def problems(config: EvalConfig) -> Iterator[str]:
    """Suites that do not exist, and files that are missing, with the line that fetches them."""
    for name in config.suites:
        if name not in SUITES:
            yield f"eval.suites: no suite {name!r}; expected one of {', '.join(SUITES)}"
        elif not (place := SUITES[name].place(config.folder)).is_file():
            fetch = f"hf download {SUITES[name].hub} --repo-type dataset --local-dir {place.parent}"
            yield f"eval.suites: {name} reads {place}, which is missing; fetch it with `{fetch}`, or set eval.folder"


def suite_source(name: str, config: EvalConfig) -> DataSource:
    """Where its rows are; they carry its name as their data_source."""
    return DataSource(path=str(SUITES[name].place(config.folder)), name=name, data_source=name)


def with_rewards(reward: RewardConfig, config: EvalConfig) -> RewardConfig:
    """Suites are scored as their authors score them, unless reward.by_source names them."""
    suites = {name: SUITES[name] for name in config.suites}
    own = {name: "hybrid" if one.judged and reward.judge.url else one.verifier for name, one in suites.items()}
    return reward.model_copy(update={"by_source": own | reward.by_source}) if own else reward


def suite_sets(config: Config, family: Family) -> dict[str, Dataset]:
    """The sets of `eval.suites`, whatever the config says about columns of the user's rows."""
    plain: dict[str, Any] = {"format": "auto", "keys": {}}
    config = config.model_copy(update={"data": config.data.model_copy(update=plain)})
    sets = {}
    for name in config.eval.suites:
        source, change = suite_source(name, config.eval), SUITES[name].row
        loaded = load_prompts(config, [source], family, change)
        sets[name] = require_rows(loaded, f"eval.suites: {source.path}")
    return sets
