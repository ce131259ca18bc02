"""Public sets of questions about details of large pictures, read as they are downloaded.

Letters and options become `choices`, so the prompt lists them and says how to answer as it does for
any other row; what a set itself says about that is left out.

    saccade eval model.path=MODEL eval.suites=[vstar,hrbench4k] eval.folder=data
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from saccade.data.chats import RowError
from saccade.data.dataset import ROTATION_OF
from saccade.plugins.suites.suites import Row, Suite

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


VSTAR = Suite(hub="craigwu/vstar_bench", file="test_questions.jsonl", row=_vstar, verifier="choice")
VISUALPROBE_EASY, VISUALPROBE_MEDIUM, VISUALPROBE_HARD = (
    Suite(hub=f"Mini-o3/VisualProbe_{level}", file="val.json", row=_visual_probe, verifier="exact", judged=True)
    for level in ("Easy", "Medium", "Hard")
)
HRBENCH4K, HRBENCH8K = (
    Suite(hub="DreamMr/HR-Bench", file=f"hr_bench_{size}.parquet", row=_hr_bench, verifier="choice")
    for size in ("4k", "8k")
)
