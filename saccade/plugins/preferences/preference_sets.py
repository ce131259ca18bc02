"""How public preference sets say which candidate is better: one function per set.

Media paths start from the folder of the file, or from image_dir of the source. A missing column is
None, and `mapped` sets a row aside whose prompt, candidate or label is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade.data.chats import RowError
from saccade.errors import DataError
from saccade.plugins.preferences.mappings import MAIN, Pair, Rated, better, number_of

Row = Mapping[str, Any]


def _pair(kind: str, row: Row, a: str, b: str, labels: Mapping[str, str | None]) -> Pair:
    """Of a row with a column `prompt`, and one for each candidate."""
    return Pair(kind=kind, prompt=row.get("prompt"), a=row.get(a), b=row.get(b), labels=labels)


def hpdv3(row: Row) -> Pair | None:
    """The first image is the better one; rows of low confidence are left out."""
    if not (number_of(row.get("confidence")) or 0) >= 0.95:
        return None
    return _pair("image", row, "path1", "path2", {MAIN: "A"})


def imagerewarddb(row: Row) -> Rated:
    rank = number_of(row.get("rank"))
    return Rated(
        kind="image",
        prompt=row.get("prompt"),
        media=row.get("image_path"),
        group=row.get("prompt_id"),
        ratings={
            "alignment": row.get("image_text_alignment_rating"),
            "fidelity": row.get("fidelity_rating"),
            MAIN: None if rank is None else -rank,
        },
    )


def imagegen_cot(row: Row) -> Pair:
    """The answer alone is the label: a thought may say the same words of the other image."""
    turns = [turn.get("value") for turn in row.get("conversations") or [{}]]
    verdicts = ("Image 1 is better", "Image 2 is better", "Both images are equally good")
    sides = [s for s, v in zip("ABC", verdicts, strict=True) if f"<answer>{v}" in str(turns[-1])]
    label = sides[0] if len(sides) == 1 else None
    images: list[Any] = row.get("images") or []
    a, b, *_ = [*images, None, None]
    return Pair(kind="image", prompt=turns[0], a=a, b=b, labels={MAIN: label}, critique=turns[-1])


def rapidata_t2v(row: Row) -> Pair:
    """Three heads, each won by the higher share of votes."""
    votes = {
        head: [row.get(f"weighted_results{n}_{head.capitalize()}") for n in (1, 2)]
        for head in (MAIN, "coherence", "alignment")
    }
    labels = {head: better(*pair) for head, pair in votes.items()}
    return _pair("video", row, "file_name1", "file_name2", labels)


def rapidata_i2v(row: Row) -> Pair:
    if row.get("prompt_asset") is None:
        raise RowError("the row has no prompt_asset, the image of its prompt")
    return replace(rapidata_t2v(row), image=row["prompt_asset"])


def _omnireward(row: Row, kind: str, column: str) -> Pair:
    """Everything but a preference for one of the two is a tie."""
    side = {"response1": "A", "response2": "B", "None": None}
    labels = {MAIN: side.get(str(row.get("criteria_preference")), "C")}
    return replace(_pair(kind, row, f"response1{column}", f"response2{column}", labels), criteria=row.get("criteria"))


def omnireward_t2i(row: Row) -> Pair:
    return _omnireward(row, "image", "_path")


def omnireward_t2v(row: Row) -> Pair:
    return _omnireward(row, "video", "")


def omnireward_t2a(row: Row) -> Pair:
    return _omnireward(row, "audio", "_path")


def _rated_models(ratings: Any) -> dict[str, Any]:
    return {n: v for n, v in (ratings or {}).items() if v not in (None, "", [])}


def genai_bench(row: Row) -> list[Rated]:
    """A row holds the images of several models, each in the column of its name."""
    prompt, kind = row.get("Prompt"), "image"
    return [
        Rated(kind=kind, prompt=prompt, media=row.get(n), group=prompt, ratings={MAIN: v}, name=n)
        for n, v in _rated_models(row.get("HumanRatings")).items()
    ]


def genai_bench_video(row: Row) -> list[Rated]:
    """A row holds ratings of several models, whose videos are MODEL/ID.mp4."""
    prompt, id = row.get("prompt"), row.get("id")
    media = {n: None if id is None else f"{n}/{id}.mp4" for n in row.get("models") or {}}
    return [
        Rated(kind="video", prompt=prompt, media=media[n], group=id, ratings={MAIN: v}, name=n)
        for n, v in _rated_models(row.get("models")).items()
    ]


def videodpo(row: Row, folder: Path) -> Pair:
    """The first clip is the better one; metadata.json beside the rows says where clips are."""
    path = folder / "metadata.json"
    if not path.is_file():
        raise DataError(f"mapping videodpo: {path} does not exist; it holds clips")
    clips = _table(path, path.stat().st_mtime_ns)
    a, b = (clips[row[name]]["basic"]["clip_path"] for name in ("video1", "video2"))
    return Pair(kind="video", prompt=row.get("frame_caption"), a=a, b=b, labels={MAIN: "A"})


@lru_cache(maxsize=2)
def _table(path: Path, changed: int) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def videogen_rewardbench(row: Row) -> Pair | None:
    """Four heads that name the better side; rows without an overall verdict are left out."""
    if row.get("Overall") in (None, ""):
        return None
    heads = {MAIN: "Overall", "visual_quality": "VQ", "motion_quality": "MQ", "alignment": "TA"}
    sides = {"A": "A", "B": "B", "same": "C"}
    labels = {head: sides.get(str(row.get(column))) for head, column in heads.items()}
    return _pair("video", row, "path_A", "path_B", labels)


def audio_alpaca(row: Row) -> Pair:
    """The chosen sound is the better one."""
    return _pair("audio", row, "chosen", "rejected", {MAIN: "A"})
