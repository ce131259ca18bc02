"""Answers on disk, so that nothing is asked, or paid for, twice.

A file per answer, named by everything that the answer depends on and written under another name
first: a run that is killed loses only what was under way. A file that cannot be read counts as
absent and is written again.

    cache = AnswerCache("answers")
    cache.get(key_of({"model": "m", "messages": []}))
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.plugins.judges.http_client.chat_api import Answer, Usage


def key_of(asked: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class AnswerCache:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def get(self, key: str) -> Answer | None:
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            stored = json.loads(path.read_bytes())["answer"]
            return Answer(**{**stored, "usage": Usage(**stored["usage"])})
        except (ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, asked: Mapping[str, Any], answer: Answer) -> None:
        """`asked` is for people who look into the file."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        record = {"answer": asdict(answer), "asked": asked}
        unfinished.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        unfinished.replace(path)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
