"""Row formats of other frameworks. A `Format` says which columns hold what; `data.formats` reads the rows.

data.train=rows.jsonl data.format=minio3
"""

import re
from dataclasses import replace

from saccade.data.formats import Format


def _inside_answer_tag(text: str) -> str:
    """The text in the last pair of <answer> tags, or the whole text."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else text


R1V = Format(
    name="r1v",
    matches=lambda columns: {"problem", "solution"} <= set(columns) and "images" not in columns,
    prompt=("problem",),
    answer=("solution",),
    gold=_inside_answer_tag,
    thinking=("thinking",),
)
MINIO3 = replace(R1V, name="minio3", matches={"problem", "solution", "images"}.issubset, thinking=())
LIGHTRFT = Format(
    name="lightrft",
    matches=lambda columns: "prompt" in columns and "chosen" not in columns,
    prompt=("prompt",),
    answer=("reference", "reward_model.ground_truth", "ground_truth", "answer"),
    data_source=("label", "extra_info.label", "data_source"),
)
SHAREGPT = Format(
    name="sharegpt", matches={"conversations"}.issubset, prompt=("conversations",), answer=("answer", "solution")
)
