"""Rollouts that run ahead of training by k steps (`rollout.ahead`): while the last, long answers of a step are
generated, those of the next steps are under way.

Prompts are drawn and trained in the order of the data, so speed never changes which prompts a step trains on. Those of
step s may start once the weights are those after step s - 1 - k, so no token is older than k steps when it is trained.
A step that draws again (dynamic sampling) uses the draw that was started for the next one. Before weights change,
unfinished sequences are aborted and their tokens stored; they continue with the new weights. An engine with separate
memory samples until then; one that shares the trainer's stops when the step's groups are complete.

    ahead = RolloutsAhead(pool=Pool(engine), steps=1, total=100, sample_of=data.sample)
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_type_hints

from saccade.errors import ConfigError
from saccade.rollout.collect import NOTHING, Generated, Pool, Started
from saccade.rollout.scoring import RewardStream
from saccade.rollout.stored import load_records, record_files
from saccade.system.codec import Arrays, decode, encode
from saccade.system.contents import File, write_files
from saccade.types import Sample

log = logging.getLogger(__name__)


class Draw(NamedTuple):
    """Prompts that are submitted together."""

    name: str  # seeds their noise
    step: int  # that they were drawn for; passed to rewards
    samples: Sequence[Sample]
    generated: Mapping[str, Generated] = NOTHING  # completions from a checkpoint, or from the run that is repeated


class Begun(NamedTuple):
    draw: Draw
    started: Started
    rewards: RewardStream


@dataclass(kw_only=True)
class RolloutsAhead:
    """Draws that were started. Checkpoints store them as of the last finished step; on loading, environments and
    rewards are called again, and the stored completions replace the engine's.
    """

    pool: Pool
    steps: int  # how far ahead, k above
    total: int
    sample_of: Callable[[str], Sample]
    record: Path | None = None  # folder to store the completions of each draw in
    replay: Path | None = None  # that folder of the run that is repeated
    begun: list[Begun] = field(default_factory=list)
    stored: list[Draw] = field(default_factory=list)  # from a checkpoint, to be started before new ones
    _saved: Sequence[Draw] = ()
    _named: tuple[int, int] = (0, 0)  # the last step that drew, and its number of draws so far

    @property
    def side_by_side(self) -> bool:
        """Whether rollouts continue while the trainer trains, until weights change."""
        return self.steps > 0 and self.pool.engine.capabilities().separate_memory

    def polled(self) -> AbstractContextManager[None]:
        """While the trainer trains: episodes beside it go on, with the next turn as soon as one ends."""
        return self.pool.polled() if self.side_by_side else nullcontext()

    def last(self, step: int) -> int:
        """The last step whose rollouts may start while `step` is sampled."""
        return min(step + self.steps, self.total)

    def next_name(self, step: int) -> str:
        """The name of the next draw: the step in which it is drawn, and its number there."""
        self._named = (step, self._named[1] + 1 if self._named[0] == step else 1)
        return "{}/{}".format(*self._named)

    def before_update(self, how: str, *, saved: bool) -> None:
        """The engine's weights will change. If a checkpoint is `saved` after that, it has the tokens sampled so far."""
        if how == "drain":
            self.pool.drain()
        elif how == "interrupt" or saved:
            self.pool.interrupt()

    def snapshot(self) -> None:
        """At the end of a step: take the snapshot of started draws that a checkpoint stores."""
        self._saved = [*(draw._replace(generated=started.generated()) for draw, started, _ in self.begun), *self.stored]

    def saved_bytes(self) -> int:
        return 0  # negligible next to a model

    def state_files(self, *, copy: bool = False) -> list[File]:
        return _draw_files("ahead", self._saved)

    def load_state(self, folder: Path) -> None:
        if folder.is_dir():  # else the run had no rollouts ahead
            self._saved = self._load(folder, "ahead")
            self.stored = [*self._saved]

    # -- a run that can be repeated --

    def delete_records_after(self, step: int) -> None:
        """The run resumes from the checkpoint of this step: delete what it recorded later."""
        if self.record is not None:
            for folder in [folder for folder in self.record.glob("*") if int(folder.name) > step]:
                shutil.rmtree(folder)
            for file in [file for draw in self.stored for file in self.record.glob(f"{draw.name}.*")]:
                file.unlink()

    def write_record(self, begun: Begun) -> None:
        """Save the completions of a finished draw."""
        if self.record is not None:
            draw = begun.draw._replace(generated=begun.started.generated())
            files = _draw_files(draw.name, [draw])
            write_files(self.record, [(f"{path}.unfinished", writer) for path, writer in files])
            for path, _ in files:  # last the .json file, whose existence marks a complete record
                (self.record / f"{path}.unfinished").replace(self.record / path)

    def from_record(self, draw: Draw) -> Draw:
        """Add the completions that the draw got in the run that is repeated."""
        if self.replay is None:
            return draw
        if not (self.replay / f"{draw.name}.json").is_file():
            log.warning(f"rollout.record: {self.replay} ends before draw {draw.name}; the engine is asked from here on")
            self.replay = None
            return draw
        [found] = self._load(self.replay, draw.name)
        theirs, ours = ([sample.id for sample in one.samples] for one in (found, draw))
        if theirs != ours:
            differ = f"draw {draw.name} asked {', '.join(theirs)}, here it asks {', '.join(ours)}"
            raise ConfigError(f"rollout.record={self.replay}: {differ}; use the config.yaml of that run")
        return draw._replace(generated=found.generated)

    def _load(self, folder: Path, name: str) -> list[Draw]:
        rows, arrays = load_records(folder, name)
        kinds, draws = get_type_hints(Generated).values(), []
        for row in rows:
            generated = {
                key: Generated(*(decode(kind, some, arrays) for kind, some in zip(kinds, told, strict=True)))
                for key, told in row["generated"].items()
            }
            samples = [self.sample_of(name) for name in row["samples"]]
            draws.append(Draw(**row | {"samples": samples, "generated": generated}))
        return draws


def _draw_files(name: str, draws: Sequence[Draw]) -> list[File]:
    arrays: Arrays = {}
    rows = []
    for draw in draws:
        said = {}
        for number, (key, told) in enumerate(draw.generated.items()):
            columns = zip(told._fields, told, strict=True)
            said[key] = [encode(some, arrays, name=f"{draw.name}/{number}/{column}") for column, some in columns]
        rows.append(draw._asdict() | {"samples": [sample.id for sample in draw.samples], "generated": said})
    return record_files(name, rows, arrays)
