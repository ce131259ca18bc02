"""Scores the answers of an earlier evaluation (`samples.jsonl`) again; no model is loaded.

rows = read_samples(Path("runs/run-eval/samples.jsonl"))
result = rescored("val", rows, scorer)  # the rows get their new scores
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import RewardConfig
from saccade.errors import ConfigError
from saccade.plugins.evaluation.breakdown import tables_of
from saccade.plugins.evaluation.results import VERDICT, read_lines
from saccade.plugins.reports.report import read_options
from saccade.plugins.reports.rollout_record import rollout_row
from saccade.plugins.suites.suites import source_of
from saccade.recipes.accuracy import items_of, score_terms
from saccade.recipes.evaluator import Result, verdict_metrics
from saccade.recipes.to_trajectory import written
from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from saccade.rollout.scoring import dropped_together, with_score
from saccade.run.folder import CONFIG
from saccade.system.codec import decode
from saccade.types import STATUS_OF_END, Group, Media, Rendered, Sample, Trajectory

# Columns of a stored row that a reward reads under the same name.
NEEDED = ["id", "response", "data_source", "prompt", "choices", "extra", "end_reason", "think_prefilled"]


def read_samples(file: Path) -> list[dict[str, Any]]:
    rows = read_lines(file)
    for number, row in enumerate(rows or [{}], 1):
        there = row.keys() if isinstance(row, dict) else ()
        if missing := {*NEEDED, "set", "gold", "media", "tokens", "status"}.difference(there):
            lacks = f"line {number} has no {', '.join(sorted(missing))}" if rows else "no such file, or it is empty"
            raise ConfigError(f"--rescore {file}: {lacks}; give the samples.jsonl of an evaluation")
    return rows


def suites_among(rows: Iterable[Mapping[str, Any]], file: Path, named: Sequence[str]) -> list[str]:
    """The sets of a file that are suites: those in eval.suites of its evaluation, or `named` now. For an evaluation
    without a config, those with the name of a suite.
    """
    sets = dict.fromkeys(row["set"] for row in rows if source_of(row["set"]) == row["data_source"])
    if (file.parent / CONFIG).is_file():
        asked = read_options(file.parent, lambda text: None).get("eval", {}).get("suites") or ()
        return [name for name in sets if name in {*asked, *named}]
    return [*sets]


def rescored(name: str, rows: Sequence[dict[str, Any]], scorer: Scorer) -> Result:
    """The result that an evaluation would have given, without `by_limit`; updates the verdicts in `rows` in place."""
    answers: dict[tuple[str, str], list[tuple[dict[str, Any], Future[Scored]]]] = {}
    for row in rows:
        pending = scorer.submit(_reward_sample(row))
        answers.setdefault((row["data_source"], row["id"]), []).append((row, pending))
    groups = []
    for (source, id), members in answers.items():
        episodes = [with_score(_episode(row, n), pending) for n, (row, pending) in enumerate(members)]
        sample = Sample(id=id, messages=(), data_source=source, extra=members[0][0]["extra"])
        group = dropped_together(Group(sample=sample, trajectories=tuple(episodes)))
        for (row, _), episode in zip(members, group.trajectories, strict=True):
            row |= rollout_row(VERDICT, group, episode)
        groups.append(group)
    scores = score_terms(scorer, items_of(groups))
    metrics = verdict_metrics(groups, scores) | {"response_mean": float(np.mean([row["tokens"] for row in rows]))}
    tables = tables_of(groups, scores, several_turns=any(row.get("turns", 1) > 1 for row in rows))
    return Result(name=name, groups=tuple(groups), metrics=metrics | scorer.metrics(), tables=tables, scores=scores)


def _episode(row: Mapping[str, Any], repeat: int) -> Trajectory:
    """An episode without its tokens, which are not stored: how it ended, and its turns."""
    ended, none = row["end_reason"], np.empty(0, int)
    empty = written(row["id"], repeat, Rendered(ids=none, sources=none), none, ())
    about = {"status": STATUS_OF_END.get(ended, "ok"), "reason": row.get("reason", ""), "turns": row.get("turns", 1)}
    return replace(empty, end_reason=ended, **about)


def _reward_sample(row: Mapping[str, Any]) -> RewardSample:
    return RewardSample(
        **{name: row[name] for name in NEEDED},
        answer=row["gold"],
        images=row["media"],
        media=tuple(_media(record) for record in row["media"] if _has_files(record)),
        turns=row.get("said") or (row["response"],),
        tool_calls=row.get("tool_calls", ()),
        length=row["tokens"],
        truncated=STATUS_OF_END.get(row["end_reason"]) == "truncated",
    )


def _media(record: Mapping[str, Any]) -> Media:
    """The medium of a row, which lists its size and pixel budget once more."""
    return decode(Media, {name: record[name] for name in record.keys() - {"size", "pixels"}})


def _has_files(record: Mapping[str, Any]) -> bool:
    """Whether the file of a medium, or of each image of a video, is still there."""
    return all(image.get("path") and Path(image["path"]).is_file() for image in record.get("pictures") or [record])


def require_pictures(reward: RewardConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a judge or a service is to be sent images, and the file of one is gone."""
    if reward.judge.send_images or reward.remote.send_images:
        records = [record for row in rows for record in row["media"]]
        gone = [r for r in records if not _has_files(r)]
        if gone:
            first = gone[0]["path"] or gone[0]["hash"][:12]
            missing = f"{len(gone)} of {len(records)} images have no file, such as {first}"
            raise ConfigError(f"reward.judge.send_images: {missing}; restore them, or try send_images=false")
