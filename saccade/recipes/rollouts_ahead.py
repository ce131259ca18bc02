"""Rollouts that run ahead of training by some steps: while the last, long answers of a step are written, those of the
next steps are under way.

Steps begin and are trained in the order of the data, so which questions a step has never depends on who is fast. Step
s may begin when the weights are those after step s - 1 - k, so no token is older than k steps when it is trained.
Before weights change, what is unfinished is taken back with its tokens; it goes on from them with the new weights. An
engine beside the trainer samples until then; one in the trainer's memory stops when the groups of a step are complete.

    ahead = RolloutsAhead(pool=Pool(engine), steps=1, total=100, sample_of=data.sample)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from saccade.rollout.collect import Heard, Pool, Started
from saccade.rollout.stored import load_records, record_files
from saccade.system.codec import Arrays, decode, encode
from saccade.system.contents import File
from saccade.types import Sample


class Stored(NamedTuple):
    """A step that had begun, to be begun again."""

    samples: Sequence[Sample]
    heard: Mapping[str, Heard]


@dataclass(kw_only=True)
class RolloutsAhead:
    """Steps that have begun. They are part of a checkpoint, as they were after the last finished step: environments
    and rewards are asked again when it is loaded, the engine is not.
    """

    pool: Pool
    steps: int  # how far ahead
    total: int
    sample_of: Callable[[str], Sample]
    begun: dict[int, tuple[Started, Any]] = field(default_factory=dict)  # with the rewards of each
    stored: dict[int, Stored] = field(default_factory=dict)
    _kept: Mapping[int, Stored] = field(default_factory=dict)

    @property
    def side_by_side(self) -> bool:
        """Rollouts go on while the trainer trains, until weights change."""
        return self.steps > 0 and self.pool.engine.capabilities().own_process

    def last(self, step: int) -> int:
        """The last step that may have begun while `step` is sampled."""
        return min(step + self.steps, self.total)

    def keep(self) -> None:
        """A step is finished: a checkpoint holds what has begun by now."""
        begun = {step: Stored(started.samples, started.heard()) for step, (started, _) in self.begun.items()}
        self._kept = {**self.stored, **begun}

    def saved_bytes(self) -> int:
        return 0  # nothing beside a model

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        arrays: Arrays = {}
        rows = []
        for step, (samples, heard) in self._kept.items():
            said = {}
            for number, (key, told) in enumerate(heard.items()):
                columns = zip(told._fields, told, strict=True)
                said[key] = [encode(some, arrays, name=f"{step}/{number}/{name}") for name, some in columns]
            rows.append({"step": step, "samples": [sample.id for sample in samples], "heard": said})
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
            self.stored[row["step"]] = Stored([self.sample_of(name) for name in row["samples"]], heard)
        self._kept = dict(self.stored)
