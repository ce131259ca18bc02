"""How far a run is: a record that its loop replaces once per step and a checkpoint stores as JSON.

progress = replace(progress, step=progress.step + 1, stream=stream.state())
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.run.metrics import MEASURE


@dataclass(frozen=True, kw_only=True)
class Progress:
    step: int = 0  # the last finished one
    updates: int = 0  # optimizer steps of the policy, as the schedule counts them
    stream: Mapping[str, Any] | None = None  # position in the training rows
    demonstrations: Mapping[str, Any] | None = None  # position in the demonstrations
    algorithm: tuple[str, ...] = ()  # its resolved options
    algorithm_state: Mapping[str, Any] | None = None
    scores: tuple[str, ...] = ()  # data sources whose outcome is a score, neither right nor wrong
    bad_updates: Mapping[str, int] = field(default_factory=dict)  # skipped updates in a row, of policy and critic
    validation_sets: Mapping[str, str] | None = None  # name and hash
    unvalidated: bool = False  # the validation of this step is due and not finished
    best_step: int | None = None
    best_score: float | None = None
    best_metric: str | None = None
    since_best: int = 0  # validations since the best one

    def with_scores(self, sources: Iterable[str]) -> Progress:
        return replace(self, scores=(*self.scores, *sorted(set(sources) - set(self.scores))))

    def with_sets(self, sets: Mapping[str, str]) -> tuple[Progress, list[str]]:
        """Returns the progress with these validation sets, and the names of those that changed since the last start:
        their scores cannot be compared with earlier ones.
        """
        before = self.validation_sets if self.validation_sets is not None else sets
        changed = [name for name in sets if before.get(name, sets[name]) != sets[name]]
        now = replace(self, validation_sets=sets)
        if (self.best_metric or "").startswith(tuple(f"val/{name}/" for name in changed)):
            now = replace(now, best_score=None, best_step=None, since_best=0)
        return now, changed

    def with_best(self, metrics: Mapping[str, float], step: int, wanted: str | None) -> tuple[Progress, str]:
        """Returns the progress with the best step so far by the metric `wanted`, and a warning if the set of that
        metric was measured, but not the metric.
        """
        name = wanted or _default_metric(metrics, self.best_metric)
        if name is None or name not in metrics:
            there = [k for k in metrics if wanted and wanted.startswith(k.rpartition("/")[0] + "/")]
            lacking = f"save.best_metric: {wanted} was not measured, so no checkpoint counts as the best"
            return self, f"{lacking}; there are {', '.join(there)}" if there else ""
        now = replace(self, best_metric=name)
        if name != (self.best_metric or name):  # scores by different metrics cannot be compared
            now = replace(now, best_score=None, best_step=None, since_best=0)
        if step > 0 and (now.best_score is None or metrics[name] > now.best_score):
            return replace(now, best_score=metrics[name], best_step=step, since_best=0), ""
        return replace(now, since_best=now.since_best + (step > 0)), ""

    def enough(self, patience: int | None, target: float | None) -> str:
        """Returns why the run stops here, or an empty string."""
        best = f"{self.best_metric} {self.best_score} of step {self.best_step}"
        if target is not None and self.best_score is not None and self.best_score >= target:
            return f"run.stop.target={target:g} is reached: {best}"
        beaten = patience is None or self.since_best < patience
        return "" if beaten else f"run.stop.patience={patience}: {self.since_best} validations have not beaten {best}"


def from_json(stored: Mapping[str, Any]) -> Progress:
    return Progress(**dict(stored) | {name: tuple(stored.get(name, ())) for name in ("algorithm", "scores")})


def _default_metric(metrics: Mapping[str, float], before: str | None) -> str | None:
    """The name of the first set's accuracy, or of its score if no set has an accuracy; None if the set of the metric
    used so far was not measured.
    """
    of_set = f"{before.rpartition('/')[0]}/" if before else ""
    if not any(key.startswith(of_set) for key in metrics):
        return None
    measures = [key for key in metrics if MEASURE.fullmatch(key)]
    accuracies = [key for key in measures if key.endswith("/accuracy")]
    return next(iter(accuracies or measures), None)
