"""Rollouts on disk: one JSON record per trajectory, each image once.

A background thread does the work, so a step never waits. Errors there are logged once; they lose
records, but do not stop the run.

    writer = TrajectoryWriter(Path("runs/first"))
    writer.write(10, groups, family, version=10)
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.media.images import resized_size
from saccade.media.pixel_cache import DECODED
from saccade.models.families import Family
from saccade.plugins.reports.rollout_record import picture_name, rollout_row, safe_name, same
from saccade.run.folder import TRAJECTORIES, write_whole
from saccade.types import Group, Media, MediaSpan, Trajectory

log = logging.getLogger(__name__)

STORED = {
    **same("extracted", "reward", "outcome", "parts", "turn_rewards", "end_reason", "status", "reason", "turns"),
    **same("id", "data_source", "group", "messages", "prompt_ids_hash", "segments", "gold"),
    **same("advantage", "overturn", "void", "masked", "tokens", "info"),
    "sample": "repeat",
}
IMAGES = "images"
LARGEST_SIDE = 512
LARGEST_SEEN = 1024  # longest side of a copy at the size that the model saw
FEW_COLOURS = 256  # drawings with so few stay sharp as PNG; photographs are smaller as JPEG


class TrajectoryWriter:
    """Writes groups in a background thread until it is closed. `image` decodes an image to upright RGB."""

    def __init__(self, folder: Path, image: Callable[[Media], np.ndarray] = DECODED.get) -> None:
        self._run, self._root = folder.name, folder / TRAJECTORIES
        self._image, self._said = image, False
        self._files: dict[str, str | None] = {}  # name of an image -> its file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        family: Family,
        *,
        version: int,
        kind: str = "train",
        scores: Collection[str] = (),
    ) -> None:
        """Queue the groups of a step; `kind` is train or val/SET. The same step and kind replaces
        its file. `scores`: sources whose outcome is a score, neither right nor wrong.
        """
        about = {"run": self._run, "step": step, "version": version, "kind": kind}
        self._thread.submit(self._write, about, tuple(groups), family, frozenset(scores))

    def _write(self, about: dict[str, Any], groups: Sequence[Group], family: Family, scores: Collection[str]) -> None:
        try:
            lines = []
            for group, trajectory in ((g, t) for g in groups for t in g.trajectories):
                record = about | rollout_row(STORED, group, trajectory, family)
                record["outcome_is_score"] = record["data_source"] in scores
                shown = zip(trajectory.media, _views(trajectory), strict=True)
                several = trajectory.turns > 1
                record["images"] = [self._picture(span, family.size_unit, several) | view for span, view in shown]
                lines.append(json.dumps(_plain(record), ensure_ascii=False) + "\n")
            write_whole(_file_of(self._root, about["kind"], about["step"]), "".join(lines))
        except Exception as error:
            self._report(f"rollouts could not be stored: {type(error).__name__}: {error}")

    def flush(self) -> None:
        """Wait until all that was queued is on disk."""
        self._thread.submit(lambda: None).result()

    def truncate_after(self, step: int) -> None:
        """Delete what a killed run stored after `step`, from whose checkpoint it is resumed."""
        for file, written in steps_of(self._root.rglob("step-*.jsonl")).items():
            if written > step:
                file.unlink()

    def close(self) -> None:
        self._thread.shutdown()

    def _report(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.warning(text)

    def _picture(self, span: MediaSpan, unit: int | None, several: bool) -> dict[str, Any]:
        """The record of an image. `unit`: pixels per side of one image token, from which follows the size at which the
        model saw the image; with `several` turns a copy of that size is stored, too.
        """
        media = span.media
        record: dict[str, Any] = {
            "name": picture_name(media),
            **{name: getattr(media, name) for name in ("hash", "parent", "box", "path")},
            "kind": "crop" if media.box is not None else media.kind,
            "size": [media.width, media.height],
            "start": span.start,
            "tokens": span.length,
            "file": self._stored(media),
            "seen": None,
        }
        if unit is not None and media.kind == "image":
            budget = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
            height, width = resized_size(media.width, media.height, unit=unit, **budget)
            record["seen"] = [width, height]
            if several and max(width, height) <= LARGEST_SEEN:
                record["seen_file"] = self._stored(media, (width, height))
        return record

    def _stored(self, media: Media, size: tuple[int, int] | None = None) -> str | None:
        """File of an image relative to trajectories/, written when the image is first met; None if that
        fails.
        """
        name = picture_name(media) + ("" if size is None else f"-seen-{size[0]}x{size[1]}")
        if media.kind == "image" and name not in self._files:
            try:
                self._files[name] = _store(self._root, name, self._image(media), size)
            except Exception as error:
                self._files[name] = None
                self._report(f"image {name} could not be stored: {type(error).__name__}: {error}")
        return self._files.get(name)


# -- reading ---------------------------------------------------------------------------------------


def read_trajectories(
    run: Path, kind: str, step: int, say: Callable[[str], object] = log.warning
) -> Iterator[dict[str, Any]]:
    """Records of one step of a run folder; `say` gets a message for each line that is no record."""
    with _file_of(run / TRAJECTORIES, kind, step).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                _ = record["id"], record["segments"], record["images"]
            except (ValueError, LookupError, TypeError) as error:
                say(f"{file.name}, line {number} is no rollout and is left out ({type(error).__name__}: {error})")
            else:
                yield record


def stored_steps(run: Path) -> dict[str, list[int]]:
    """kind -> steps with records, in order."""
    root = run / TRAJECTORIES
    steps: dict[str, list[int]] = {}
    for file, step in steps_of(root.rglob("step-*.jsonl")).items():
        kind = file.parent.relative_to(root).as_posix()
        steps.setdefault("train" if kind == "." else kind, []).append(step)
    return {kind: sorted(of_kind) for kind, of_kind in sorted(steps.items())}


def _file_of(root: Path, kind: str, step: int) -> Path:
    parts = [] if kind == "train" else [safe_name(part) for part in kind.split("/", 1)]
    return root.joinpath(*parts, f"step-{step}.jsonl")


def steps_of(files: Iterable[Path]) -> dict[Path, int]:
    """File of rollouts -> its step; files with other names, such as copies made by hand, are left out."""
    named = {file: file.stem.removeprefix("step-") for file in files}
    return {file: int(number) for file, number in named.items() if number.isdecimal()}


def _plain(value: Any) -> Any:
    """A value that JSON can hold, from anything that a reward or an environment noted in `info`."""
    if value is None or isinstance(value, int | str):  # first, as most values are token ids
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


# -- images ---------------------------------------------------------------------------------------


def _views(trajectory: Trajectory) -> list[dict[str, Any]]:
    """For each image its name in the episode, the image it was cut from, and the box in that image."""
    calls = trajectory.info.get("tool_calls") or ()
    shown = {call.get("observation"): call for call in calls}
    asked = sum(span.start < trajectory.prompt_length for span in trajectory.media)
    views: list[dict[str, Any]] = []
    for number in range(1, len(trajectory.media) + 1):
        call = shown.get(number - asked, {}) if number > asked else {}
        name = f"observation_{number - asked}" if call else f"image_{number}"
        if number <= asked:
            name = "original_image" if asked == 1 else f"original_image_{number}"
        where = {"source": call.get("source"), "place": call.get("box")}
        views.append({"view": name, **where, "lineage": list(call.get("lineage") or ())})
    return views


def _store(root: Path, name: str, pixels: np.ndarray, size: tuple[int, int] | None) -> str:
    for suffix in (".png", ".jpg"):
        if (root / IMAGES / (name + suffix)).exists():
            return f"{IMAGES}/{name}{suffix}"
    picture = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8)).convert("RGB")
    drawing = picture.getcolors(FEW_COLOURS) is not None or max(picture.size) <= 128
    if size is None:
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    else:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    file = root / IMAGES / (name + (".png" if drawing else ".jpg"))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    picture.save(temporary, format="PNG" if drawing else "JPEG", quality=88)
    temporary.replace(file)
    return f"{IMAGES}/{file.name}"
