"""Evaluation: one path for validation inside a run and for `saccade eval`.

Prompt, sampling, parser and verifier are the same in both, so a score in training is the score of
the exported folder.

    saccade eval run.yaml model.path=runs/geo/checkpoints/step-100 data.val=test.jsonl
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade import checks
from saccade.config import Config, load
from saccade.data.datasets import Dataset
from saccade.data.suites import with_rewards
from saccade.engines import Engine
from saccade.environments import gives_rewards
from saccade.media.pixel_cache import DECODED
from saccade.models.families import Family
from saccade.recipes import accuracy, model_setup, parts, questions
from saccade.recipes.engines import answering_engine, answering_family, expenses
from saccade.recipes.failures import check_errors
from saccade.recipes.results import Result, kept_if_filled, places, write_results
from saccade.registry import Table
from saccade.rewards.scorer import Scorer
from saccade.rollout.collect import collect
from saccade.rollout.episode import Limits
from saccade.rollout.scoring import RewardStream, free_memory_for_rewards, parsed, report_slow_rewards, thinks
from saccade.run import REPORTS
from saccade.run.console import Console, unscored
from saccade.run.folder import QUARANTINE, RESULTS
from saccade.run.metrics import episode_metrics, without_scores
from saccade.run.quarantine import Quarantine
from saccade.run.trajectories import Decoders, TrajectoryWriter
from saccade.types import ALWAYS_EXCLUDED, Group

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
FILES = (RESULTS, "samples.jsonl", "report.html", QUARANTINE)
EVALUATIONS: Table[Any] = Table("evaluations", {})  # of other things than a model that answers


def run(config: Any, *, out: Path | None = None, rescore: Path | None = None) -> dict[str, Any]:
    """Every set of `data.val` and `eval.suites`; writes results.json, samples.jsonl and report.html
    into `out`.
    """
    config = load(config)
    checks.check(config, "eval" if rescore is None else "rescore")
    config = config.model_copy(update={"reward": with_rewards(config.reward, config.eval)})
    model_setup.quiet_libraries()
    folder, answers = places(config, out)
    with kept_if_filled(folder):
        if rescore is not None:
            return EVALUATIONS["rescore"](config, folder, Path(rescore))
        if config.model.path and model_setup.REWARD_MODELS["card"](config.model.path):
            return EVALUATIONS["reward_model"](config, folder)
        return _evaluate(config, folder, answers)


def _evaluate(config: Config, folder: Path, answers: Path) -> dict[str, Any]:
    family = answering_family(config)
    sets = questions.validation_sets(config, family) | questions.suite_sets(config, family)
    scorer = parts.make_scorer(config)
    engine = answering_engine(config, family, logs=folder, answers=answers)
    with (
        scorer or nullcontext(),
        closing(engine),
        TrajectoryWriter(folder) as writer,
        Console(None, "eval", name=folder.name) as console,
    ):
        quarantine = Quarantine(folder, config.data)
        for dataset in sets.values():
            parts.test_rewards(config, scorer, dataset.samples)
        parts.WARNINGS["rewards"](scorer, sets.values(), shared=False)
        evaluator = Evaluator(
            engine=engine, family=family, scorer=scorer, config=config, quarantine=quarantine, progress=console.progress
        )
        results = []
        for name, dataset in sets.items():
            with console.phase(name):
                results.append(evaluator.evaluate(name, dataset))
            log.info(describe(results[-1]))
            for line in REPORTS["evaluation_lines"](name, results[-1].tables):
                log.info(line)
            _store(writer, results[-1], config, family)
            if dataset.overlong or dataset.quarantined:  # a score of the rest is another score
                log.info(dataset.summary)
        for spent in expenses(engine, scorer):
            log.info(spent)
        summary = write_results(folder, results, family)
        for dataset in sets.values():
            quarantine.record(dataset.aside)
        writer.flush()
        REPORTS["evaluation_page"](folder)
        made = [name for name in FILES if (folder / name).is_file()]
        log.info(f"{', '.join(made)} are in {folder}")
        for result in results:  # only now: no answer is lost
            check_errors(result.groups, config)
    return summary


def _store(writer: TrajectoryWriter, result: Result, config: Config, family: Family) -> None:
    writer.write(
        0,
        result.groups[: config.val.log_generations],
        Decoders(text=family.decode, image=DECODED.get, unit=family.size_unit),
        version=0,
        kind=f"val/{result.name}",
        scores=result.scores,
    )


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """What answers the questions of a set and scores the answers."""

    engine: Engine
    family: Family
    scorer: Scorer | None
    config: Config
    quarantine: Quarantine
    progress: Progress

    def evaluate(self, name: str, dataset: Dataset, known: Collection[str] = ()) -> Result:
        """`known`: sources whose outcome is a score."""
        family, scorer, config = self.family, self.scorer, self.config
        stream = RewardStream(scorer, family)
        limits = parts.limits_of(config, evaluation=True)
        cuts = accuracy.Cuts(sorted(limits.marks), lambda: RewardStream(scorer, family))
        groups = collect(
            self.engine,
            self.quarantine.whole(dataset, family),
            repeats=config.val.n,
            environment=parts.environments_of(config, family),
            family=family,
            sampling=parts.validation_sampling(config),
            limits=limits,
            seed=f"{config.run.seed}/val",
            on_finish=stream.submit,
            on_mark=cuts.submit,
            progress=self.progress,
        )
        tables: dict[str, accuracy.Table] = {}
        free_memory_for_rewards(self.engine, scorer)
        judged = scorer is not None or gives_rewards(config.env)
        if judged:
            groups = stream.attach(groups, report_slow_rewards(self.progress, scorer, config.reward))
        scores = accuracy.score_terms(scorer, accuracy.items_of(groups), known)
        if judged:
            tables = _tables(groups, cuts, limits, scores)
        metrics = set_metrics(groups, family, scores) | (scorer.metrics() if scorer else {})
        metrics["left_out"] = self.quarantine.left_out(dataset)
        for limit, row in tables.get("by_limit", {}).items():
            if "accuracy" in row:
                metrics[f"accuracy_within_{limit}_turns"] = row["accuracy"]
        return Result(name=name, groups=tuple(groups), metrics=metrics, tables=tables, scores=scores)


def _tables(
    groups: Sequence[Group], cuts: accuracy.Cuts, limits: Limits, scores: accuracy.Scores
) -> dict[str, accuracy.Table]:
    tables = {"by_category": accuracy.by_category(groups, scores), "by_source": accuracy.by_source(groups, scores)}
    if limits.max_turns > 1:
        tables["by_turns"] = accuracy.by_turns(groups, scores)
    if limits.marks:
        tables["by_limit"] = accuracy.by_limit({**cuts.attach(groups), limits.max_turns: groups}, scores)
    return {name: table for name, table in tables.items() if table}


def set_metrics(
    groups: Sequence[Group], family: Family, scores: accuracy.Scores = accuracy.NO_SCORES
) -> dict[str, float]:
    """Accuracy with its interval, and beside it what a gain could hide behind: parsing, thinking,
    cut-off answers.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    metrics = accuracy.group_accuracy(groups, scores)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if rewards:
        metrics["reward"] = float(np.mean(rewards))
    formats = [v for t in trajectories for k, v in t.parts.items() if k.startswith("format")]
    if formats:
        metrics["format"] = float(np.mean(formats))
    judged = [t for t in trajectories if t.status not in ALWAYS_EXCLUDED]
    if any(t.reward is not None or t.reason for t in judged):  # else nobody has read them
        metrics["parse_rate"] = float(np.mean([parsed(t.extracted, t.reason) for t in judged]))
    metrics |= {
        "think_rate": float(np.mean([thinks(t, family) for t in trajectories])),
        "truncated_frac": float(np.mean([t.status == "truncated" for t in trajectories])),
        "response_mean": float(np.mean([t.response_length for t in trajectories])),
        "error_rate": float(np.mean([t.status == "error" for t in trajectories])),
        "abstain_rate": float(np.mean([t.status == "abstain" for t in trajectories])),
    }
    plain = [t for group in without_scores(groups, scores) for t in group.trajectories]
    return metrics | episode_metrics(plain)


def describe(result: Result) -> str:
    m = result.metrics
    rates = (("abstain", "abstain_rate"), ("error", "error_rate"))
    lost = [f"{label} {share}" for label, share in unscored(m, rates)]
    found = accuracy.measures(m) or [
        "nothing could be scored"
        if lost
        else "no outcome"
        if "parse_rate" in m
        else "nothing scored, for want of reward.terms"
    ]
    beside = [f"{key} {m[key]:.2f}" for key in ("parse_rate", "think_rate", "truncated_frac") if key in m]
    left_out = [f"rows left out {m['left_out']:.0f}"] if m.get("left_out") else []
    items = f"items {m['items']:.0f}"
    return f"{result.name}: " + "  ".join([*found, *lost, *beside, items, *left_out])
