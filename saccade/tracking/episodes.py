"""episodes.html: episodes with several turns, one turn at a time, boxes drawn over the pictures.

Reads the records of `trajectories`. Every picture is in the page once, text is escaped, and the
page allows its own script alone. Without scripts it shows everything at once.

    write_episodes(Path("runs/search/episodes.html"), records, Path("runs/search/trajectories"))
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from saccade.tracking.cards import Record, golds, question, shortened, tone_of
from saccade.tracking.markup import escape

TEMPLATE = Path(__file__).with_name("episodes.html")
MOST = 64  # episodes of one page
MOST_BYTES = 24 << 20  # of pictures in it

Box = Sequence[float]  # x0, y0, x1, y1 as fractions


class _Album:
    """Pictures of a page: each is stored once and shown by its id."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes = folder, 0
        self.ids: dict[str, str] = {}
        self.images: list[str] = []

    def id(self, image: Record) -> str | None:
        """None where the picture was not stored, or the page is full."""
        file = image.get("seen_file") or image.get("file")
        if file is None:
            return None
        if file not in self.ids:
            path = self.folder / file
            if not path.is_file() or self.bytes > MOST_BYTES:
                return None
            data = path.read_bytes()
            self.bytes += len(data)
            self.ids[file] = f"p{len(self.ids)}"
            kind = "png" if path.suffix == ".png" else "jpeg"
            width, height = image["size"]
            self.images.append(
                f'<image id="{self.ids[file]}" width="{width}" height="{height}" '
                'preserveAspectRatio="none" '
                f'href="data:image/{kind};base64,{base64.b64encode(data).decode()}"/>'
            )
        return self.ids[file]


def write_episodes(path: Path, records: Iterable[Record], pictures: Path) -> Path | None:
    """The page of those records that have several turns; None when there are none."""
    found = [record for record in records if record["turns"] > 1]
    if not found:
        return None
    album = _Album(pictures)
    body = "\n".join(_episode(record, album) for record in found[:MOST])
    text = TEMPLATE.read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    more = f"The first {MOST} of {len(found)} episodes." if len(found) > MOST else ""
    if album.bytes > MOST_BYTES:
        more += " Pictures of the last ones are left out: the page would be too large."
    images = "".join(album.images)
    page = Template(text).substitute(
        hash=f"sha256-{digest}",
        title="Episodes turn by turn",
        note=more,
        pictures=f'<svg class="album" width="0" height="0"><defs>{images}</defs></svg>',
        body=body,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _episode(record: Record, album: _Album) -> str:
    views = {image.get("view", image["name"]): image for image in record["images"]}
    calls = record["info"].get("tool_calls") or []
    turns = "".join(
        _turn(number, messages, calls, views, album)
        for number, messages in enumerate(_turns(record), 1)
    )
    expected = golds(record)
    gold = f'<p class="dim">expected {escape(expected)}</p>' if expected else ""
    return (
        f'<article class="episode"><p>{_chips(record)}</p>'
        f'<div class="question">{escape(question(record))}</div>{gold}{turns}</article>'
    )


def _chips(record: Record) -> str:
    outcome = record["outcome"]
    chips = [f"{record['kind']} · step {record['step']}", f"{record['id']}", record["end_reason"]]
    tone = tone_of(record)
    if outcome is not None:
        chips.append(tone or f"outcome {outcome:.2f}")
    if record["extracted"] is not None:
        chips.append(f"read as {shortened(record['extracted'], 60)}")
    return "".join(
        f'<span class="chip {tone if chip == tone else ""}">{escape(str(chip))}</span>'
        for chip in chips
    )


def _turns(record: Record) -> list[list[Record]]:
    """What was said, turn by turn: each begins with words of the policy."""
    turns: list[list[Record]] = []
    messages = record["messages"]
    sampled = sum(message["role"] == "assistant" for message in messages) - record["turns"]
    for message in messages:
        if message["role"] == "assistant":
            sampled -= 1  # what a row says for the assistant is no turn
            if sampled < 0:
                turns.append([])
        if turns:
            turns[-1].append(message)
    return turns


def _turn(
    number: int,
    messages: Sequence[Record],
    calls: Sequence[Mapping[str, Any]],
    views: Mapping[str, Record],
    album: _Album,
) -> str:
    earlier = [call for call in calls if call["turn"] < number and call["ok"]]
    looks = "".join(_look(call, earlier, views, album) for call in calls if call["turn"] == number)
    if not looks:  # pictures that nobody asked for, such as frames of a game
        named = {image["name"]: image for image in views.values()}
        parts = [part for message in messages for part in message["content"]]
        shown_here = [named[p["image"]] for p in parts if p.get("image") in named]
        looks = "".join(_figure(image, image.get("view", "picture"), album) for image in shown_here)
    said = "".join(
        f'<div class="said {"policy" if message["role"] == "assistant" else "observation"}">'
        f"{escape(shortened(_text(message)))}</div>"
        for message in messages
    )
    shown = f'<div class="looks">{looks}</div>' if looks else ""
    return f'<section class="turn"><h3>Turn {number}</h3>{shown}{said}</section>'


def _text(message: Record) -> str:
    parts = message["content"]
    return "".join(p["text"] if p["type"] == "text" else f"[{p['type']}]" for p in parts)


def _look(
    call: Mapping[str, Any],
    earlier: Sequence[Mapping[str, Any]],
    views: Mapping[str, Record],
    album: _Album,
) -> str:
    """The picture that was looked at, its box, and what came of it; in a crop of a crop also where
    that lies in the original.
    """
    if not call["ok"]:
        return f'<span class="chip wrong">failed: {escape(call["reason"])}</span>'
    source, box = str(call.get("source")), call.get("box")
    if source not in views or box is None:
        return ""
    before = [one["box"] for one in earlier if one.get("source") == source and one.get("box")]
    figures = [_figure(views[source], source, album, box=box, before=before)]
    lineage = list(call.get("lineage") or ())
    if len(lineage) > 1 and lineage[0] in views:
        root = views[lineage[0]]
        width, height = root["size"]
        x0, y0, x1, y1 = call["pixels"]
        inside = (x0 / width, y0 / height, x1 / width, y1 / height)
        figures.insert(0, _figure(root, f"{lineage[0]}, all of it", album, box=inside))
    made = f"observation_{call['observation']}"
    if made in views:
        path = " ← ".join([made, *reversed(lineage)])
        figures.append(_figure(views[made], path, album))
    else:
        figures.append('<p class="dim">A limit ended the episode before this was shown.</p>')
    return "".join(figures)


def _figure(
    image: Record,
    caption: str,
    album: _Album,
    *,
    box: Box | None = None,
    before: Sequence[Box] = (),
) -> str:
    width, height = image["size"]
    seen = f", seen at {image['seen'][0]}x{image['seen'][1]}" if image.get("seen") else ""
    text = escape(f"{caption}: {width}x{height} pixels{seen}")
    id = album.id(image)
    picture = "" if id is None else f'<use href="#{id}"/>'
    drawn = "".join(_rect(one, width, height, "earlier") for one in before)
    drawn += _rect(box, width, height, "box") if box is not None else ""
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{text}">'
        f"{picture}{drawn}</svg><figcaption>{text}</figcaption></figure>"
    )


def _rect(box: Box, width: int, height: int, kind: str) -> str:
    x0, y0, x1, y1 = box[0] * width, box[1] * height, box[2] * width, box[3] * height
    return (
        f'<rect class="{kind}" x="{x0:.2f}" y="{y0:.2f}" '
        f'width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"/>'
    )
