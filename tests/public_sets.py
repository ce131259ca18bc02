"""Small sets in the layout of the public ones: for every suite a few rows, in the files and columns that it reads."""

from __future__ import annotations

import base64
import csv
import io
import json
import wave
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow
import yaml
from PIL import Image
from pyarrow import parquet

from saccade.plugins.suites.suites import SUITES

ROWS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("public_rows.yaml").read_text(encoding="utf-8"))


def write_all(root: Path, image: Any, names: Collection[str] = ROWS) -> Path:
    """Write every suite, or those in `names`, with the pictures and sounds that their rows name."""
    sound = io.BytesIO()
    with wave.open(sound, "wb") as heard:
        heard.setparams((1, 2, 16000, 0, "NONE", ""))
        heard.writeframes(b"\0\1" * 1600)
    for name in names:
        rows, suite = ROWS[name], SUITES[name]
        pattern = suite.file.replace("**/", "data/").replace("-*", "-00000-of-00001").replace("*", "")
        place = suite.home(str(root)) / pattern
        place.parent.mkdir(parents=True, exist_ok=True)
        found = _filled(rows, image)
        if place.suffix == ".parquet":
            columns = dict.fromkeys(column for row in found for column in row)
            parquet.write_table(
                pyarrow.table({column: [row.get(column) for row in found] for column in columns}), place
            )
        elif place.suffix == ".csv":
            with place.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(found[0]))
                writer.writeheader()
                writer.writerows(found)
        else:
            lines = "".join(json.dumps(row) + "\n" for row in found) if place.suffix == ".jsonl" else json.dumps(found)
            place.write_text(lines)
        for index, path in enumerate(sorted(_paths(rows, name))):
            path = (suite.home(str(root)) / suite.media if suite.media else place.parent) / path.removeprefix(
                "./"
            ).removeprefix(f"{suite.home('').name}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            shown = [image(*SIZES.get(name, (56, 56)), index + n).data for n in range(4)]
            if path.suffix == ".gif":
                first, *others = (Image.open(io.BytesIO(one)) for one in shown)
                first.save(path, save_all=True, append_images=others)
            else:
                path.write_bytes(sound.getvalue() if path.suffix == ".wav" else shown[0])
    return root


PICTURES = {"PICTURE": 3, "BLUE": 4}
SIZES = {"vstar": (200, 100), **{f"visualprobe_{level}": (150, 90) for level in ("easy", "medium", "hard")}}


def _filled(value: Any, image: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, image) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, image) for item in value]
    if isinstance(value, str) and value.startswith("BASE64"):
        return base64.b64encode(image(300, 200, int(value[-1])).data).decode()
    return image(56, 56, PICTURES[value]).data if value in ("PICTURE", "BLUE") else value


def _paths(rows: Any, name: str) -> set[str]:
    where = SUITES[name].columns.get("images")
    if isinstance(where, str) and "{" in where:
        listed = [{"id": id, **row} for id, row in rows.items()] if isinstance(rows, dict) else rows
        return {where.format(**row) for row in listed}
    texts = [text for row in rows for value in row.values() for text in (value if isinstance(value, list) else [value])]
    return {
        text
        for text in texts
        if isinstance(text, str) and text.endswith((".png", ".jpg", ".gif", ".wav")) and "/" in text
    }
