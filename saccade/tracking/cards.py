"""Rollouts as cards: pictures, question, answers with what they earned. All text is escaped.

Reads the records of `trajectories`; knows nothing of metrics.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from saccade.tracking.markup import escape
from saccade.tracking.metrics import RIGHT, WRONG

Record = Mapping[str, Any]

LONGEST_TEXT = 4000  # characters of one segment that are shown
PIXEL_ART = 128  # pictures up to this size are enlarged without blur


def rollout_cards(rollouts: Iterable[Record], pictures: Path | None) -> str:
    """One card per sample; its records stand side by side when they follow each other."""
    by_sample = groupby(rollouts, key=lambda record: (record["kind"], record["id"]))
    return "".join(_card(list(records), pictures) for _, records in by_sample)


def _card(records: list[Record], pictures: Path | None) -> str:
    first = records[0]
    files = {image["name"]: image for record in records for image in record["images"]}
    prompt = [one["image"] for one in _prompt_segments(first) if "image" in one]
    shown = "".join(_picture(files[name], pictures) for name in dict.fromkeys(prompt))
    gold = golds(first)
    expected = (
        f"<p class='small'><span class='dim'>expected</span> {escape(gold)}</p>" if gold else ""
    )
    answers = "".join(_answer(record, files, pictures) for record in records)
    return (
        f'<article class="card rollout{"" if shown else " text"}">'
        + (f'<div class="pictures">{shown}</div>' if shown else "")
        + f'<div><div class="question">{escape(question(first))}</div>{expected}'
        f'<div class="answers">{answers}</div></div></article>'
    )


def _prompt_segments(record: Record) -> list[Record]:
    return record["segments"][: _first_policy(record)]


def _first_policy(record: Record) -> int:
    segments = record["segments"]
    return next((i for i, one in enumerate(segments) if one["source"] == "policy"), len(segments))


def question(record: Record) -> str:
    texts = []
    for message in record["messages"]:
        if message["role"] == "assistant":
            break
        texts += [part["text"] for part in message["content"] if part["type"] == "text"]
    return shortened("\n".join(texts).strip())


def golds(record: Record) -> str:
    """Every answer that counts as right."""
    gold = record["gold"]
    return " or ".join(gold) if isinstance(gold, list) else str(gold or "")


def _answer(record: Record, files: Record, pictures: Path | None) -> str:
    said = "".join(
        _picture(files[one["image"]], pictures)
        if "image" in one
        else f'<span class="{escape(one["source"])}">{_marked(one["text"])}</span>'
        for one in record["segments"][_first_policy(record) :]
    )
    return (
        f'<div class="answer"><div class="chips">{_chips(record)}</div>'
        f'<div class="said">{said}</div>{_parts(record)}</div>'
    )


def tone_of(record: Record) -> str:
    """Right or wrong; empty where it is between, or a score and neither."""
    outcome = record["outcome"]
    if outcome is None or record.get("outcome_is_score"):
        return ""
    return "right" if RIGHT <= outcome <= 1 else "wrong" if 0 <= outcome <= WRONG else ""


def _chips(record: Record) -> str:
    outcome, status = record["outcome"], record["status"]
    label = f"step {record['step']}" + (
        f" · sample {record['sample']}" if record["kind"] == "train" else ""
    )
    chips = [f'<span class="chip">{escape(label)}</span>']
    if outcome is not None:
        tone = tone_of(record)
        chips.append(f'<span class="chip {tone}">{tone or f"outcome {outcome:.2f}"}</span>')
    if record["extracted"] is not None:
        chips.append(
            f'<span class="chip">read as {escape(shortened(record["extracted"], 60))}</span>'
        )
    if status != "ok":
        chips.append(
            f'<span class="chip wrong" title="{escape(record["reason"])}">{escape(status)}</span>'
        )
    if isinstance(record["advantage"], float | int):
        chips.append(f'<span class="chip">advantage {record["advantage"]:+.2f}</span>')
    return "".join(chips)


def _parts(record: Record) -> str:
    values = {name: value for name, value in record["parts"].items() if value is not None}
    if record["reward"] is not None:
        values = {"reward": record["reward"]} | values
    scale = max([1.0, *(abs(value) for value in values.values())])
    bars = "".join(_bar(name, value, scale) for name, value in values.items())
    return f'<div class="parts">{bars}</div>' if bars else ""


def _bar(name: str, value: float, scale: float) -> str:
    tone = ' class="negative"' if value < 0 else ""
    width = 100 * abs(value) / scale
    shown = round(value, 2) + 0.0  # no -0.00
    bar = f'<span class="bar"><i{tone} style="width:{width:.0f}%"></i></span>'
    return f"<span>{escape(name)}</span>{bar}<span>{shown:.2f}</span>"


def _picture(image: Record, pictures: Path | None) -> str:
    file = image.get("file")
    if pictures is None or file is None or not (pictures / file).is_file():
        return (
            f'<span class="dim small">[{escape(image["kind"])} {escape(image["name"][:12])}]</span>'
        )
    width, height = image["size"]
    kind = "png" if file.endswith(".png") else "jpeg"
    data = base64.b64encode((pictures / file).read_bytes()).decode()
    style = ' class="pixels"' if max(width, height) <= PIXEL_ART else ""
    alt = f"{escape(image['kind'])}, {width} by {height} pixels"
    return f'<img{style} alt="{alt}" src="data:image/{kind};base64,{data}">'


def _marked(text: str) -> str:
    """Escaped text with its tags set apart."""
    return re.sub(r"(&lt;/?\|?\w+\|?&gt;)", r'<span class="tag">\1</span>', escape(shortened(text)))


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    return (
        text
        if len(text) <= longest
        else f"{text[:longest]} … ({len(text) - longest} more characters)"
    )
