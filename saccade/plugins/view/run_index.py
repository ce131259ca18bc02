"""The runs in a folder, and an index of their stored rollouts.

The index holds in memory the file and position of a rollout's line, its values for filters, and its words;
the line itself is read on demand. A file is read again when it has changed.

    Runs(Path("runs")).rollouts(Path("runs/first"))[0].row
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from saccade.plugins.reports.episodes import Record, episode_of, question_of, shortened, verdict_of
from saccade.plugins.reports.trajectories import steps_of
from saccade.run.folder import CHECKPOINTS, CONFIG, METRICS, RESULTS, TRAJECTORIES

PASSED_OVER = {TRAJECTORIES, CHECKPOINTS, "tensorboard", "bad-batches"}  # folders that hold no runs
SAMPLES = "samples.jsonl"  # every answer of an evaluation; trajectories/ has some of them, with tokens and images
# The values by which stored rollouts are filtered and sorted.
COLUMNS = ("set", "step", "id", "sample", "source", "status", "verdict", "outcome", "reward", "length", "turns")


# Lists with a number for each token: most of a line, but not needed by the index. Without them a line is parsed three
# times as fast. Texts do not match, as the quotes in them are escaped.
BY_TOKEN = re.compile(rb'"(ids|logp|sizes|trainer_logp|entropy|advantage)": \[[-+0-9., enul]*\]')


class Stored(NamedTuple):
    """A rollout on disk."""

    file: Path
    start: int  # byte at which its line begins
    size: int
    row: tuple[Any, ...]  # by COLUMNS
    words: str  # searched text, in lower case


class Indexed(NamedTuple):
    """The rollouts of a file, and its stamp when they were read."""

    stamp: tuple[int, int] = (0, 0)
    rollouts: Sequence[Stored] = ()
    left_out: Sequence[str] = ()  # messages about lines that are no rollouts


class Runs:
    """The runs below a folder. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[Path, Indexed] = {}
        # run -> (files with numbers of their rollouts, as they appeared; how many of each file were seen)
        self._order: dict[Path, tuple[list[tuple[Path, Sequence[int]]], dict[Path, int]]] = {}
        self._lock = Lock()

    def folders(self) -> dict[str, Path]:
        """Name -> folder of every run and evaluation; a name is the path from the root."""
        found = {}
        for path, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if name not in PASSED_OVER and not name.startswith("."))
            if CONFIG in files or RESULTS in files:
                found[os.path.relpath(path, self.root)] = Path(path)
        if "." in found:  # the root itself is one
            found = {self.root.resolve().name: found.pop("."), **found}
        return found

    def state(self, folder: Path) -> tuple[list[tuple[int, int]], int]:
        """Returns stamps that differ once the run has written something, and the number of files not yet read."""
        stamps = {file: stamp_of(file) for file in _rollout_files(folder)}
        unread = sum(self._files.get(file, Indexed()).stamp != stamp for file, stamp in stamps.items())
        return [stamp_of(folder / METRICS), stamp_of(folder / RESULTS), *stamps.values()], unread

    def rollouts(self, folder: Path, enough: Callable[[Sequence[Stored]], bool] = lambda found: False) -> list[Stored]:
        """All rollouts of a run by step, training before validation, then samples.jsonl. What is written later comes
        behind all of these, so an index stays valid. Once `enough(found)` is true, no further file is read.
        """
        files, found, read = _rollout_files(folder), list[Stored](), dict[Path, Sequence[Stored]]()
        for file in files:
            if not self._is_read(file) and enough(found):
                break
            read[file] = self._of_file(file).rollouts
            found += read[file]
        else:  # of a set that ended meanwhile: whole rollouts are written before those of samples.jsonl
            later = [file for file in _rollout_files(folder) if file not in read and file.name != SAMPLES]
            read |= {file: self._of_file(file).rollouts for file in later}
        with self._lock:
            order, placed = self._order.setdefault(folder, ([], {}))
            for file, stored in read.items():
                new: Sequence[int] = range(placed.get(file, 0), len(stored))
                if new and file.name == SAMPLES:
                    whole = {one.row[:4] for other in read if other != file for one in read[other]}
                    new = [number for number in new if stored[number].row[:4] not in whole]
                if new:
                    order.append((file, new))
                placed[file] = max(placed.get(file, 0), len(stored))
            known = {file: self._files.get(file, Indexed()).rollouts for file in files} | read
            return [known[file][n] for file, new in order if file in known for n in new if n < len(known[file])]

    def left_out(self, folder: Path) -> list[str]:
        """Messages about lines that are no rollouts, in the files read so far."""
        return [text for file in _rollout_files(folder) for text in self._files.get(file, Indexed()).left_out]

    def _is_read(self, file: Path) -> bool:
        return self._files.get(file, Indexed()).stamp == stamp_of(file)

    def records(self, stored: Sequence[Stored]) -> Iterator[Record]:
        for one in stored:
            with one.file.open("rb") as file:
                file.seek(one.start)
                yield _record(one.file, file.read(one.size))

    def _of_file(self, file: Path) -> Indexed:
        with self._lock:  # so that simultaneous requests do not read a file twice
            if not self._is_read(file):
                left_out: list[str] = []
                try:
                    self._files[file] = Indexed(stamp_of(file), [*_read(file, left_out.append)], left_out)
                except FileNotFoundError:  # deleted, as when a run is resumed from an earlier step
                    self._files[file] = Indexed()
            return self._files.get(file, Indexed())


def stamp_of(file: Path) -> tuple[int, int]:
    """(modification time in ns, size): another value when the file has changed; zeros without a file."""
    try:
        about = file.stat()
    except FileNotFoundError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


def _rollout_files(folder: Path) -> list[Path]:
    """The files of a run by step, samples.jsonl last."""
    root, samples = folder / TRAJECTORIES, folder / SAMPLES
    steps = steps_of([*root.glob("step-*.jsonl"), *root.glob("val/*/step-*.jsonl")])
    files = sorted(steps, key=lambda file: (steps[file], len(file.parts), file))
    return [*files, samples] if samples.exists() else files


def _read(file: Path, say: Callable[[str], object]) -> Iterator[Stored]:
    start = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = _record(file, BY_TOKEN.sub(rb'"\1": []', line))
                images = [{**image, "file": None, "seen_file": None} for image in record["images"]]
                episode_of({**record, "images": images}, file.parent, {})  # raises if it cannot be shown
                yield Stored(file, start, len(line), _row(record), _words(record))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                say(f"{file}, line {number} is no rollout and is left out ({type(error).__name__}: {error})")
            start += len(line)


def _record(file: Path, line: bytes) -> Record:
    """A stored rollout; from a line of samples.jsonl the same fields, without tokens and images."""
    found = json.loads(line)
    if file.name != SAMPLES:
        return found
    asked = {"role": "user", "content": [{"type": "text", "text": found["prompt"]}]}
    between = {"source": "observation", "text": ""}
    turns = [({"source": "policy", "text": text, "ids": ()}, between) for text in found["said"]]
    about = {"kind": f"val/{found['set']}", "step": 0, "sample": found["repeat"], "outcome": found["score"]}
    empty = {"turn_rewards": (), "advantage": None, "images": ()}
    info = {"tool_calls": found["tool_calls"]}
    return {
        **found, **about, **empty, "info": info, "tokens": {"response": found["tokens"]},
        "messages": [asked], "segments": [part for turn in turns for part in turn],
    }  # fmt: skip


def _row(record: Record) -> tuple[Any, ...]:
    tokens, turns, score = record["tokens"]["response"], record["turns"], (record["outcome"], record["reward"])
    about = (record["kind"], record["step"], record["id"], record["sample"], record["data_source"], record["status"])
    return (*about, verdict_of(record), *score, tokens, turns)


def _words(record: Record) -> str:
    said = [part["text"] for part in record["segments"] if part["source"] != "prompt" and "text" in part]
    about = (record["id"], record["gold"], record["extracted"], record["reason"], record["end_reason"])
    texts = (question_of(record), *said, *(str(one) for one in about if one is not None))
    return shortened("\n".join(texts)).lower()
