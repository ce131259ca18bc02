"""Small sets in the layout of the public ones: V*, VisualProbe, HR-Bench."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

INSTRUCTION = "Answer with the option's letter from the given choices directly."


def write_all(root: Path, image: Any) -> Path:
    write_vstar(root, image)
    write_probe(root, image)
    write_hr_bench(root, image)
    return root


def write_vstar(root: Path, image: Any) -> None:
    asked = [
        ("direct_attributes", "What is the material of the glove?", ["rubber", "cotton"], "B"),
        ("relative_position", "Is the dog left or right of the car?", ["left", "right"], "A"),
    ]
    rows = []
    for number, (category, question, options, label) in enumerate(asked):
        file = root / "vstar_bench" / category / f"sa_{number}.jpg"
        file.parent.mkdir(parents=True)
        file.write_bytes(image(200, 100, number).data)
        about = {"target_object": ["glove"], "bbox": [[1, 2, 3, 4]], "question": question}
        file.with_suffix(".json").write_text(json.dumps(about))
        lines = [question, *(f"({'AB'[n]}) {o}" for n, o in enumerate(options)), INSTRUCTION]
        row = {"image": f"{category}/{file.name}", "text": "\n".join(lines), "label": label}
        rows.append(row | {"category": category, "question_id": str(number)})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "vstar_bench" / "test_questions.jsonl").write_text(text)


def write_probe(root: Path, image: Any) -> None:
    for level in ("Easy", "Medium", "Hard"):
        home = root / f"VisualProbe_{level}"
        (home / "images").mkdir(parents=True)
        (home / "images" / "1.jpg").write_bytes(image(150, 90, 7).data)
        row = {
            "images": [f"VisualProbe_{level}/images/1.jpg"], "doc_id": f"{level}-1",
            "problem": "<image>\nWhat number is on the bus?", "solution": "<answer>42</answer>",
            "data_source": "visual_probe",
        }  # fmt: skip
        (home / "val.json").write_text(json.dumps([row]))


def write_hr_bench(root: Path, image: Any) -> None:
    """Two questions, each asked with its options in four orders."""
    options, rows = ["red", "blue", "green", "white"], []
    for number, category in enumerate(("single", "cross")):
        data = base64.b64encode(image(300, 200, number).data).decode()
        for turn in range(4):
            shifted = options[turn:] + options[:turn]
            row = {"index": len(rows), "question": "What colour is the hat?", "answer": "ABCD"[shifted.index("red")]}
            row |= {"category": category, "cycle_category": str(turn), "image": data}
            rows.append(row | dict(zip("ABCD", shifted, strict=True)))
    (root / "HR-Bench").mkdir()
    for size in ("4k", "8k"):
        file = root / "HR-Bench" / f"hr_bench_{size}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
