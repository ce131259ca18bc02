"""Rollouts on disk: one JSON record per trajectory, each picture once.

A thread does the work, so a step never waits; what goes wrong there is reported once and costs
records, not the run.

    writer = TrajectoryWriter(Path("runs/first"))
    writer.write(10, groups, family, version=10)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from saccade.media.pixel_cache import DECODED
from saccade.models.families import Family
from saccade.plugins.reports.stored_pictures import StoredPictures, picture_name, safe_name
from saccade.run.folder import TRAJECTORIES, write_whole
from saccade.types import ALWAYS_EXCLUDED, Group, Media, Message, Source, Trajectory

log = logging.getLogger(__name__)


class TrajectoryWriter:
    """Writes groups in the background until it is closed. `image` decodes a picture: upright RGB."""

    def __init__(self, folder: Path, image: Callable[[Media], np.ndarray] = DECODED.get) -> None:
        self._run, self._root = folder.name, folder / TRAJECTORIES
        self._said = False
        self._pictures = StoredPictures(self._root, image, self._report)
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
        groups, scores = tuple(groups), frozenset(scores)

        def job() -> None:
            lines = []
            for group, trajectory in ((g, t) for g in groups for t in g.trajectories):
                record = {"run": self._run, "step": step, "version": version, "kind": kind}
                record |= record_of(group, trajectory, family.decode)
                record["outcome_is_score"] = record["data_source"] in scores
                record["images"] = self._pictures.records(trajectory, family.size_unit)
                lines.append(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            write_whole(_file_of(self._root, kind, step), "".join(lines))

        self._thread.submit(self._try, job)

    def flush(self) -> None:
        """Wait until all that was queued is on disk."""
        self._thread.submit(lambda: None).result()

    def truncate_after(self, step: int) -> None:
        """Forget what a killed run stored after the checkpoint that is resumed from."""
        for file in self._root.rglob("step-*.jsonl"):
            if _step_of(file) > step:
                file.unlink()

    def close(self) -> None:
        self._thread.shutdown()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self._report(f"rollouts could not be stored: {type(error).__name__}: {error}")

    def _report(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.warning(text)


# -- reading ---------------------------------------------------------------------------------------


def read_trajectories(run: Path, kind: str, step: int) -> Iterator[dict[str, Any]]:
    """Records of one step of a run folder."""
    with _file_of(run / TRAJECTORIES, kind, step).open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def stored_steps(run: Path) -> dict[str, list[int]]:
    """kind -> steps with records, in order."""
    root = run / TRAJECTORIES
    steps: dict[str, list[int]] = {}
    for file in root.rglob("step-*.jsonl"):
        kind = file.parent.relative_to(root).as_posix()
        steps.setdefault("train" if kind == "." else kind, []).append(_step_of(file))
    return {kind: sorted(of_kind) for kind, of_kind in sorted(steps.items())}


def _file_of(root: Path, kind: str, step: int) -> Path:
    parts = [] if kind == "train" else [safe_name(part) for part in kind.split("/", 1)]
    return root.joinpath(*parts, f"step-{step}.jsonl")


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


# -- records ---------------------------------------------------------------------------------------


def record_of(group: Group, trajectory: Trajectory, decode_text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """All of a trajectory that is known without its pictures, ready for JSON."""
    sample, status = group.sample, trajectory.status
    prompt = trajectory.ids[: trajectory.prompt_length]
    return {
        "id": sample.id,
        "data_source": sample.data_source,
        "group": group.uid or sample.id,
        "sample": trajectory.repeat,
        "messages": [_message(message) for message in trajectory.messages or sample.messages],
        "prompt_ids_hash": hashlib.sha256(prompt.astype("<i8").tobytes()).hexdigest()[:16],
        "segments": list(_segments(trajectory, decode_text)),
        "extracted": trajectory.extracted,
        "gold": sample.answer,
        "reward": _number(trajectory.reward),
        "outcome": _number(trajectory.outcome),
        "parts": {name: _number(value) for name, value in trajectory.parts.items()},
        "turn_rewards": [_number(value) for value in trajectory.turn_rewards],
        "advantage": _advantage(trajectory),
        "end_reason": trajectory.end_reason,
        "status": status,
        "reason": trajectory.reason,
        "overturn": status == "overturn",
        "void": status == "void",
        "masked": status in ALWAYS_EXCLUDED or not trajectory.trained,
        "tokens": {
            "prompt": trajectory.prompt_length,
            "response": trajectory.response_length,
            "vision": sum(span.length for span in trajectory.media),
            "total": len(trajectory.ids),
        },
        "turns": trajectory.turns,
        "info": _plain(trajectory.info),
    }


def _segments(trajectory: Trajectory, decode_text: Callable[[Sequence[int]], str]) -> Iterator[dict[str, Any]]:
    """Runs of one source, cut around pictures; the placeholders of a picture are one entry."""
    spans = {span.start: span for span in trajectory.media}
    inside = np.zeros(len(trajectory.ids), bool)
    for span in trajectory.media:
        inside[span.start : span.end] = True
    changes = np.flatnonzero((np.diff(trajectory.sources) != 0) | np.diff(inside)) + 1
    # Two pictures can touch: each start is a cut of its own.
    cuts = sorted({0, *changes.tolist(), *spans, len(trajectory.ids)})
    for start, end in pairwise(cuts):
        ids = trajectory.ids[start:end].tolist()
        source = Source(int(trajectory.sources[start])).name.lower()
        if start in spans:
            name = picture_name(spans[start].media)
            yield {"source": source, "image": name, "id": ids[0], "tokens": end - start}
            continue
        segment = {"source": source, "text": decode_text(ids), "ids": ids}
        if source == "policy":
            segment["logp"] = [_number(value) for value in trajectory.logprobs[start:end].tolist()]
        yield segment


def _message(message: Message) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind, part.kind: picture_name(part)}
        for part in message.parts
    ]
    return {"role": message.role, "content": content}


def _advantage(trajectory: Trajectory) -> float | list[float | None] | None:
    """One number when it is the same on every token, as outcome estimators give it."""
    values = trajectory.advantages
    if values is None or len(values) == 0:
        return None
    if (values == values[0]).all():
        return _number(float(values[0]))
    return [_number(value) for value in values.tolist()]


def _number(value: float | None) -> float | None:
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Whatever a reward or an environment noted, as JSON can hold it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str | None):
        return value
    return _number(value) if isinstance(value, float) else str(value)
