"""Stored rollouts as episodes of a report: question, turns, images, tool calls and rewards.

Every image is in the report once. Episodes are not selected by score.

    stored_episodes(Path("runs/first"))["items"][0]["question"]
"""

import base64
import io
import logging
from collections.abc import Callable, Mapping
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.plugins.reports.trajectories import read_trajectories, stored_steps
from saccade.run.folder import CONFIG, METRICS, RESULTS, TRAJECTORIES
from saccade.run.metrics import RIGHT, WRONG

log = logging.getLogger(__name__)

Record = Mapping[str, Any]

MOST = 2000  # episodes of one page
MOST_BYTES = 24 << 20  # limit for the images of one page, and for its texts
LONGEST = 20_000  # characters of one text
STRIP = 200  # most advantages drawn for one episode
COPIED = ("step", "sample", "outcome", "status", "reward", "parts", "turn_rewards", "tokens")
CALL = ("name", "ok", "reason", "source", "box", "pixels", "lineage", "observation")


def stored_episodes(folder: Path, say: Callable[[str], object] = log.warning) -> dict[str, Any]:
    """`items`, `pictures` (file → data URL) and a `note` about what is left out: episodes of the
    first and the last stored step of each set and of training, in stored order; answers to one
    question follow each other. `say` gets a message for each line that is no rollout.
    """
    stored = sorted(stored_steps(folder).items(), key=lambda item: item[0] == "train")
    steps = [(kind, step) for kind, of in stored for step in sorted({of[0], of[-1]})]
    most = MOST // max(1, len(steps))
    cut = False
    by_question: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kind, step in steps:
        records = list(islice(read_trajectories(folder, kind, step, say), most + 1))
        cut |= len(records) > most
        for record in records[:most]:
            by_question.setdefault((kind, record["id"]), []).append(record)
    notes = [f"The page holds the first {most:,} episodes of each set and step."] * cut
    album: dict[str, str] = {}
    items, size, no_step = [], 0, steps_beside(folder)
    for record in chain.from_iterable(by_question.values()):
        try:
            items.append(episode_of(record, folder / TRAJECTORIES, album) | no_step)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            say(f"{folder}: rollout {record['id']} cannot be shown and is left out ({type(error).__name__}: {error})")
            continue
        size += sum(len(said.get("text", "")) for turn in items[-1]["turns"] for said in turn["said"])
        if size > MOST_BYTES:
            notes = [f"The page holds the first {len(items):,} episodes: the others are too long."]
            break
    if _is_full(album):
        notes.append("Some images are left out: the page would be too large.")
    return {"items": items, "pictures": album, "note": " ".join(notes)}


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is that of an evaluation, not of a run: it has results, or a config without metrics."""
    return (folder / RESULTS).exists() or ((folder / CONFIG).exists() and not (folder / METRICS).exists())


def steps_beside(folder: Path) -> dict[str, Any]:
    """What replaces the step in the records of a folder: those of an evaluation are stored under 0, but have none."""
    return {"step": None} if is_evaluation(folder) else {}


def episode_of(record: Record, folder: Path, album: dict[str, str], *, tokens: bool = False) -> dict[str, Any]:
    """An episode from a record of `trajectories`; its images are read from `folder` into `album` (file → data URL).
    `tokens`: include the values of each token.
    """
    images = sorted(record["images"], key=lambda image: image["start"])
    prompt, turns = _turns(record, tokens)
    gold, extracted = record["gold"], record["extracted"]
    return {name: record[name] for name in COPIED} | {
        "set": record["kind"],
        "id": shortened(record["id"]),
        "question": shortened(question_of(record)),
        "gold": shortened(" or ".join(gold) if isinstance(gold, list) else str(gold or "")),
        "extracted": None if extracted is None else shortened(extracted),
        "verdict": verdict_of(record),
        "end": record["end_reason"],
        "advantage": _strip(record["advantage"]),
        "views": [_view(image, folder, album) for image in images],
        "asked": sum("view" in part for part in prompt),  # how many of the views are in the prompt
        "prompt": [part for part in prompt if tokens and "text" in part],
        "turns": turns,
        "reason": shortened(record["reason"]),
    }


def shortened(text: str) -> str:
    rest = len(text) - LONGEST
    return text if rest <= 0 else f"{text[:LONGEST]} … ({rest:,} more characters)"


def verdict_of(record: Record) -> str:
    """right, wrong, or empty for anything between, a score, or no outcome."""
    outcome = record["outcome"]
    if outcome is None or record.get("outcome_is_score"):
        return ""
    return "right" if RIGHT <= outcome <= 1 else "wrong" if 0 <= outcome <= WRONG else ""


def question_of(record: Record) -> str:
    """The text before the first message of the assistant."""
    asked = takewhile(lambda message: message["role"] != "assistant", record["messages"])
    return "\n".join(part["text"] for m in asked for part in m["content"] if part["type"] == "text").strip()


def _turns(record: Record, tokens: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the parts before the first turn, and the turns; a turn begins where the policy begins to write."""
    said: list[list[dict[str, Any]]] = [[]]
    before, view, written = "", 0, 0
    for segment in record["segments"]:
        source = segment["source"]
        if source == "policy" != before:
            said.append([])
        before = source
        if "image" in segment:
            said[-1].append({"view": view})
            view += 1
        elif source == "policy" or segment["text"].strip():
            said[-1].append({"source": source, "text": shortened(segment["text"])})
        if tokens and source == "policy":
            said[-1][-1] |= _known(segment, record, written)
            written += len(segment["ids"])
    calls = record["info"].get("tool_calls") or ()
    turns = [
        {"said": parts, "calls": [{k: call.get(k) for k in CALL} for call in calls if call["turn"] == number]}
        for number, parts in enumerate(said[1:], 1)
    ]
    return said[0], turns


def _known(segment: Record, record: Record, start: int) -> dict[str, Any]:
    """Values of the tokens of a segment, the first of which is the policy's `start`th: `sizes` in characters, and the
    numbers by which the page colours them.
    """
    count = len(segment["ids"])
    found = {name: segment[name] for name in ("sizes", "logp") if name in segment}
    by_token = {name: record["info"].get(name) for name in ("trainer_logp", "entropy")}
    for name, values in {"advantage": record["advantage"], **by_token}.items():
        if values is not None:
            found[name] = values[start : start + count] if isinstance(values, list) else [values] * count
    if "trainer_logp" in found:
        pairs = zip(found.pop("trainer_logp"), found["logp"], strict=True)
        found["gap"] = [None if a is None or b is None else a - b for a, b in pairs]
    return found


def _view(image: Record, folder: Path, album: dict[str, str]) -> dict[str, Any]:
    file = image.get("seen_file") or image.get("file")
    if file and file not in album and not _is_full(album) and (path := inside(folder, file)):
        album[file] = data_url(file, path.read_bytes())
    return {
        "name": image.get("view") or image["name"][:12],
        "kind": image["kind"],
        "size": image["size"],
        "seen": image.get("seen"),  # the size at which the model saw it
        "lineage": image.get("lineage") or (),  # the views that it was cut from
        "picture": file if file in album else None,
    }


def inside(folder: Path, file: str) -> Path | None:
    """The path of a file that a record names; None if it is missing or outside the folder."""
    path = (folder / file).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None


def data_url(file: str, data: bytes) -> str:
    return f"data:image/{'png' if file.endswith('.png') else 'jpeg'};base64,{base64.b64encode(data).decode()}"


def thumbnail(path: Path, side: int) -> str | None:
    """Data URL of a picture, reduced to `side` pixels per side as JPEG; a smaller one stays lossless, as PNG. None if
    the file is no picture.
    """
    try:
        with Image.open(path) as picture:
            form = "PNG" if max(picture.size) <= side else "JPEG"
            picture.draft("RGB", (side, side))  # a JPEG is decoded at reduced size
            small = picture.convert("RGB")
    except Exception:  # Pillow raises almost anything for a broken file
        return None
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, form)
    return data_url(f"small.{form.lower()}", file.getvalue())


def _is_full(album: Mapping[str, str]) -> bool:
    return sum(map(len, album.values())) > MOST_BYTES


def _strip(advantage: Any) -> Any:
    """Advantages by token, at most STRIP of them: of each chunk the one farthest from 0."""
    if not isinstance(advantage, list):
        return advantage
    size = max(1, -(-len(advantage) // STRIP))  # the index reads no values by token
    chunks = (advantage[start : start + size] for start in range(0, len(advantage), size))
    return [max((value or 0.0 for value in chunk), key=abs) for chunk in chunks]
