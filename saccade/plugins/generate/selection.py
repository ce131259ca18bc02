"""Chooses training rows from scored responses: the best, the best and the worst, or all good ones.

Depends only on the file of responses and the samples, so it can be repeated at any time. Uses only
complete responses with a reward. Prompts are written in their final wording and marked FINAL_PROMPT, so
that no recipe adds its instructions again.

    write_selected("best_worst", Path("runs/run/generations.jsonl"), samples, threshold=None)
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.data.prompts import FINAL_PROMPT
from saccade.plugins.check_data.canonical_rows import convert
from saccade.plugins.evaluation.results import read_lines
from saccade.types import STATUS_OF_END, Message, Sample, replace

Response = Mapping[str, Any]


def check(config: Config) -> Iterator[str]:
    """Yields errors of the options of a selection."""
    generate = config.generate
    if generate.select in ("all", "correct"):
        return
    if config.env.name != "single_turn":
        yield "generate.select: keeps single replies; try select=correct, or env.name=single_turn"
    if generate.select == "threshold" and generate.threshold is None:
        yield "generate.threshold: generate.select=threshold needs it; try generate.threshold=1"
    if generate.select in ("best", "best_worst") and generate.n < 2:
        yield f"generate.n: {generate.n} response has no better one; try generate.n=4"


def write_selected(
    select: str, responses: Path, samples: Sequence[Sample], threshold: float | None
) -> tuple[Path, int]:
    """Write the chosen rows to NAME.SELECT.jsonl next to the responses; returns the file and its number of rows."""
    path = responses.with_suffix(f".{select}.jsonl")
    by_id = {sample.id: sample for sample in samples}
    chosen: list[Sample] = []
    for row in read_lines(responses):
        if row["id"] in by_id:
            whole = sorted(filter(_is_whole, row["responses"]), key=lambda r: r["reward"], reverse=True)
            if good := [r for r in whole if threshold is None or r["reward"] >= threshold]:
                chosen += SELECT[select](by_id[row["id"]], good, whole)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    convert(chosen, temporary)
    temporary.replace(path)
    return path, len(chosen)


def _is_whole(response: Response) -> bool:
    """Whether a response is complete; a truncated one would teach the model to stop there."""
    ended = STATUS_OF_END.get(response["end_reason"]) in ("ok", "void")
    return ended and response["reward"] is not None and bool(response["text"])


def _best_worst(sample: Sample, good: Sequence[Response], whole: Sequence[Response]) -> list[Sample]:
    best, worst = good[0], whole[-1]
    if best["reward"] == worst["reward"]:
        return []
    extra = {**sample.extra, FINAL_PROMPT: True, "rewards": [best["reward"], worst["reward"]]}
    return [replace(sample, candidates=((_turn(best),), (_turn(worst),)), extra=extra)]


def _all_good(sample: Sample, good: Sequence[Response], whole: Sequence[Response]) -> list[Sample]:
    texts = {response["text"]: response for response in good}  # without duplicates
    shown = [_demonstration(sample, response) for response in texts.values()]
    return [replace(one, id=f"{sample.id}/{number}") for number, one in enumerate(shown)]


def _demonstration(sample: Sample, response: Response) -> Sample:
    extra = {**sample.extra, FINAL_PROMPT: True, "reward": response["reward"]}
    return replace(sample, messages=(*sample.messages, _turn(response)), extra=extra)


def _turn(response: Response) -> Message:
    return Message(role="assistant", parts=(response["text"],))


SELECT: dict[str, Callable[..., list[Sample]]] = {
    "best": lambda sample, good, whole: [_demonstration(sample, good[0])],
    "best_worst": _best_worst,
    "threshold": _all_good,
}
