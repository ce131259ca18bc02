"""Rollouts that run ahead of training by some steps: while the last, long answers of a step are written, those of the
next steps are under way.

Questions are drawn and trained in the order of the data, so which a step has never depends on who is fast. Those of
step s may begin when the weights are those after step s - 1 - k, so no token is older than k steps when it is trained.
A step that draws again takes what was meant for the next one.
Before weights change, what is unfinished is taken back with its tokens; it goes on from them with the new weights. An
engine beside the trainer samples until then; one in the trainer's memory stops when the groups of a step are complete.

    ahead = RolloutsAhead(pool=Pool(engine), steps=1, total=100, sample_of=data.sample)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_type_hints

from saccade.rollout.collect import NOTHING, Heard, Pool, Started
from saccade.rollout.scoring import RewardStream
from saccade.rollout.stored import load_records, record_files
from saccade.system.codec import Arrays, decode, encode
from saccade.system.contents import File
from saccade.types import Sample


class Draw(NamedTuple):
    """Questions that are asked together."""

    name: str  # of their noise
    step: int  # that they were drawn for, as rewards are told
    samples: Sequence[Sample]
    heard: Mapping[str, Heard] = NOTHING  # before a checkpoint


class Begun(NamedTuple):
    draw: Draw
    started: Started
    rewards: RewardStream


@dataclass(kw_only=True)
class RolloutsAhead:
    """Draws that have begun. They are part of a checkpoint, as they were after the last finished step: environments
    and rewards are asked again when it is loaded, the engine is not.
    """

    pool: Pool
    steps: int  # how far ahead
    total: int
    sample_of: Callable[[str], Sample]
    begun: list[Begun] = field(default_factory=list)
    stored: list[Draw] = field(default_factory=list)  # to be begun again, before others
    _kept: Sequence[Draw] = ()
    _named: tuple[int, int] = (0, 0)  # the last step that drew, and how often by now

    @property
    def side_by_side(self) -> bool:
        """Rollouts go on while the trainer trains, until weights change."""
        return self.steps > 0 and self.pool.engine.capabilities().own_process

    def last(self, step: int) -> int:
        """The last step that may have begun while `step` is sampled."""
        return min(step + self.steps, self.total)

    def name(self, step: int) -> str:
        """Of the next draw: the step that it is made in, and its number there."""
        self._named = (step, self._named[1] + 1 if self._named[0] == step else 1)
        return "{}/{}".format(*self._named)

    def keep(self) -> None:
        """A step is finished: a checkpoint holds what has begun by now."""
        self._kept = [*(draw._replace(heard=started.heard()) for draw, started, _ in self.begun), *self.stored]

    def saved_bytes(self) -> int:
        return 0  # nothing beside a model

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        arrays: Arrays = {}
        rows = []
        for draw in self._kept:
            said = {}
            for number, (key, told) in enumerate(draw.heard.items()):
                columns = zip(told._fields, told, strict=True)
                said[key] = [encode(some, arrays, name=f"{draw.name}/{number}/{name}") for name, some in columns]
            rows.append(draw._asdict() | {"samples": [sample.id for sample in draw.samples], "heard": said})
        yield from record_files("ahead", rows, arrays)

    def load_state(self, folder: Path) -> None:
        if not folder.is_dir():  # of a run without
            return
        rows, arrays = load_records(folder, "ahead")
        kinds = get_type_hints(Heard).values()
        for row in rows:
            heard = {
                key: Heard(*(decode(kind, some, arrays) for kind, some in zip(kinds, told, strict=True)))
                for key, told in row["heard"].items()
            }
            samples = [self.sample_of(name) for name in row["samples"]]
            self.stored.append(Draw(**row | {"samples": samples, "heard": heard}))
        self._kept = [*self.stored]
