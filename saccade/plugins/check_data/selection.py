"""Rows to train on, chosen from scored responses: the best, the best and the worst, all good ones.

A function of the file of responses and the samples, so it can be made again at any time. Only whole
responses with a reward take part. A prompt is written as it was asked and says so: no recipe words
it a second time.

    write_selected("best_worst", Path("runs/run/generations.jsonl"), samples, threshold=None)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from saccade.data.prompts import WORDED
from saccade.plugins.check_data.check_rows import convert
from saccade.types import STATUS_OF_END, Message, Sample, replace

Response = Mapping[str, Any]


def write_selected(
    select: str, responses: Path, samples: Sequence[Sample], threshold: float | None
) -> tuple[Path, int]:
    """Beside the responses, as NAME.SELECT.jsonl; returns the file and its number of rows."""
    path = responses.with_suffix(f".{select}.jsonl")
    known = {sample.id: sample for sample in samples}
    chosen: list[Sample] = []
    for line in responses.read_bytes().split(b"\n"):
        row = json.loads(line) if line else {}
        if row.get("id") in known:
            whole = sorted(filter(_is_whole, row["responses"]), key=_reward, reverse=True)
            good = [r for r in whole if threshold is None or r["reward"] >= threshold]
            if good:
                chosen += SELECT[select](known[row["id"]], good, whole)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    convert(chosen, temporary)
    temporary.replace(path)
    return path, len(chosen)


def _is_whole(response: Response) -> bool:
    """One that was cut off would teach to stop there."""
    ended = STATUS_OF_END.get(response["end_reason"]) in ("ok", "void")
    return ended and response["reward"] is not None and bool(response["text"])


def _reward(response: Response) -> float:
    return response["reward"]


def _best(sample: Sample, good: Sequence[Response], whole: Sequence[Response]) -> list[Sample]:
    return [_demonstration(sample, good[0])]


def _best_worst(sample: Sample, good: Sequence[Response], whole: Sequence[Response]) -> list[Sample]:
    best, worst = good[0], whole[-1]
    if best["reward"] == worst["reward"]:
        return []
    extra = {**sample.extra, WORDED: True, "rewards": [best["reward"], worst["reward"]]}
    return [replace(sample, candidates=((_turn(best),), (_turn(worst),)), extra=extra)]


def _all_good(sample: Sample, good: Sequence[Response], whole: Sequence[Response]) -> list[Sample]:
    texts = {response["text"]: response for response in good}  # each once
    return [
        replace(_demonstration(sample, response), id=f"{sample.id}/{number}")
        for number, response in enumerate(texts.values())
    ]


def _demonstration(sample: Sample, response: Response) -> Sample:
    extra = {**sample.extra, WORDED: True, "reward": response["reward"]}
    return replace(sample, messages=(*sample.messages, _turn(response)), extra=extra)


def _turn(response: Response) -> Message:
    return Message(role="assistant", parts=(response["text"],))


SELECT: dict[str, Callable[..., list[Sample]]] = {"best": _best, "best_worst": _best_worst, "threshold": _all_good}
best, best_worst, threshold = (partial(write_selected, name) for name in SELECT)
