"""Public sets of questions about details of large pictures, read as they are downloaded.

A suite says which file of which repository it reads, how a row of it becomes a row of ours, and
which verifier knows right from wrong there. Downloads nothing. Letters and options become
`choices`, so the prompt lists them and says how to answer as it does for any other row; what a set
itself says about that is left out.

    >>> suite_source("vstar", EvalConfig(folder="data")).path
    'data/vstar_bench/test_questions.jsonl'
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.config import DataSource, EvalConfig, RewardConfig
from saccade.data.chats import RowError

Row = Mapping[str, Any]
ROTATION_OF = "rotation_of"  # rows that ask the same with their options in another order
OPTION = re.compile(r"^\(([A-Z])\)[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Suite:
    hub: str  # repository on the hub; the last part of its name is the folder
    file: str
    row: Callable[[Row], Row]
    verifier: str
    judged: bool = False  # free answers: with an endpoint in reward.judge, `hybrid` asks it

    def place(self, folder: str) -> Path:
        return Path(folder, self.hub.rpartition("/")[2], self.file)


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


def _probe(level: str) -> Suite:
    hub = f"Mini-o3/VisualProbe_{level}"
    return Suite(hub=hub, file="val.json", row=_visual_probe, verifier="exact", judged=True)


def _hr(size: str) -> Suite:
    file = f"hr_bench_{size}.parquet"
    return Suite(hub="DreamMr/HR-Bench", file=file, row=_hr_bench, verifier="choice")


SUITES: Mapping[str, Suite] = {
    "vstar": Suite(hub="craigwu/vstar_bench", file="test_questions.jsonl", row=_vstar, verifier="choice"),
    "visualprobe_easy": _probe("Easy"),
    "visualprobe_medium": _probe("Medium"),
    "visualprobe_hard": _probe("Hard"),
    "hrbench4k": _hr("4k"),
    "hrbench8k": _hr("8k"),
}


def problems(config: EvalConfig) -> Iterator[str]:
    """Suites that there are not, and files that are missing, with the line that fetches them."""
    for name in config.suites:
        suite = SUITES.get(name)
        if suite is None:
            yield f"eval.suites: there is no suite {name!r}; there are {', '.join(SUITES)}"
        elif not (place := suite.place(config.folder)).is_file():
            yield (
                f"eval.suites: {name} reads {place} and the pictures beside it, and it is not "
                f"there; fetch it with `hf download {suite.hub} --repo-type dataset --local-dir "
                f"{place.parent}`, or name the folder that holds {place.parent.name}/ in "
                "eval.folder"
            )


def suite_source(name: str, config: EvalConfig) -> DataSource:
    """Where its rows are; they carry its name as their data_source."""
    return DataSource(path=str(SUITES[name].place(config.folder)), name=name, data_source=name)


def with_rewards(reward: RewardConfig, config: EvalConfig) -> RewardConfig:
    """Suites are scored as their authors score them, unless reward.by_source names them."""
    own = {
        name: "hybrid" if SUITES[name].judged and reward.judge.url else SUITES[name].verifier for name in config.suites
    }
    return reward.model_copy(update={"by_source": own | reward.by_source}) if own else reward
