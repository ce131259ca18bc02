"""`saccade eval`: the sets of `data.val` and `eval.suites`, measured with a model as it is.

saccade eval run.yaml model.path=runs/geo/checkpoints/step-100 data.val=test.jsonl
saccade eval run.yaml --rescore runs/run-eval/samples.jsonl
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade import checks
from saccade.config import Config, load, on_one_gpu
from saccade.errors import ConfigError
from saccade.plugins.check_data.row_warnings import unused_rewards, warn_of_rewards
from saccade.plugins.evaluation.answering import answering_family, evaluator_of
from saccade.plugins.evaluation.checks_of_sets import BLIND, leak_metrics, leaked, sight_gain, with_blind
from saccade.plugins.evaluation.results import VERDICT, places, read_lines, remove_if_empty, write_files, write_results
from saccade.plugins.reports.report import table_lines, write_eval_report
from saccade.plugins.reports.rollout_record import rollout_row
from saccade.plugins.reports.trajectories import TrajectoryWriter
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.reward_card import read_card
from saccade.plugins.suites.suite_metrics import suite_metrics
from saccade.plugins.suites.suites import suite_of, suite_sets, unusual, with_pairs, with_rewards
from saccade.recipes import model_setup, parts, questions
from saccade.recipes.accuracy import items_of, score_terms, with_interval
from saccade.recipes.evaluator import Result, describe, verdict_metrics
from saccade.recipes.failures import check_errors
from saccade.recipes.to_trajectory import written
from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from saccade.rollout.scoring import dropped_together, with_score
from saccade.run.console import Console
from saccade.run.folder import QUARANTINE, RESULTS
from saccade.system.codec import decode
from saccade.types import STATUS_OF_END, Group, Media, Rendered, Sample, Trajectory

log = logging.getLogger(__name__)

ALSO = ("blind", "leaks")
FILES = (RESULTS, "samples.jsonl", "report.html", QUARANTINE)
# Of a stored row, what a reward reads under the same name.
NEEDED = ["id", "response", "data_source", "prompt", "choices", "extra", "end_reason", "think_prefilled"]


def run(
    config: Any, *, out: Path | None = None, rescore: Path | None = None, also: Collection[str] = ()
) -> dict[str, Any]:
    """Every set of `data.val` and `eval.suites`; writes results.json, samples.jsonl and report.html
    into `out`. Also `blind`: sets with pictures without them; `leaks`: which items data.train has, too.
    """
    config = load(config)
    judges = bool(config.model.path and read_card(config.model.path))
    for name in also:
        if name not in ALSO:
            raise ConfigError(f"--also {name}: expected one of {', '.join(ALSO)}")
        if rescore or judges:
            other = "--rescore, which asks nothing" if rescore else "a reward model, which judges pairs"
            raise ConfigError(f"--also {name}: has no effect with {other}; leave it out")
    checks.check(config, "eval" if rescore is None else "rescore")
    config = on_one_gpu(config).model_copy(update={"reward": with_rewards(config.reward, config.eval)})
    model_setup.quiet_libraries()
    folder, answers = places(config, out)
    with remove_if_empty(folder):
        if rescore is not None:
            return _rescore(config, folder, Path(rescore))
        if judges:
            return reward_training.evaluate(with_pairs(config), folder)
        return _evaluate(config, folder, answers, also)


def _evaluate(config: Config, folder: Path, answers: Path, also: Collection[str]) -> dict[str, Any]:
    family = answering_family(config)
    if others := checks.not_counted(config, "eval"):
        log.info(others)
    sets = questions.validation_sets(config, family) | suite_sets(config, family)
    if "leaks" in also and not config.data.train:
        raise ConfigError(
            "--also leaks: there are no training rows to compare with; name them in data.train of the file"
        )
    seen = leaked(sets, questions.load_prompts(config, config.data.train, family).samples) if "leaks" in also else {}
    sets = with_blind(sets) if "blind" in also else sets
    opened = evaluator_of(config, family, folder, answers=answers, command="eval", name=folder.name)
    with closing(TrajectoryWriter(folder)) as writer, opened as (evaluator, console):
        for dataset in sets.values():
            parts.test_rewards(config, evaluator.scorer, dataset.samples)
        warn_of_rewards(evaluator.scorer, sets.values(), shared=False)
        results = []
        for name, dataset in sets.items():
            with console.phase(name):
                results.append(evaluator.evaluate(name, dataset))
            log.info(describe(results[-1]))
            if name in seen:
                results[-1] = _noted(results[-1], leak_metrics(results[-1], seen[name], results[-1].scores))
            if name.endswith(BLIND) and name.removesuffix(BLIND) == results[-2].name:
                results[-2] = _noted(results[-2], sight_gain(results[-2], results[-1]))
            if name in config.eval.suites:
                if note := unusual(name, config.val.n):
                    log.info(note)
                more = suite_metrics(suite_of(name), results[-1].groups, results[-1].tables)
                results[-1] = _noted(results[-1], more)
            for line in table_lines(name, results[-1].tables):
                log.info(line)
            stored, scores = results[-1].groups[: config.val.log_generations], results[-1].scores
            writer.write(0, stored, family, version=0, kind=f"val/{name}", scores=scores)
            if dataset.overlong or dataset.quarantined or dataset.renamed:  # a score of other rows is another score
                log.info(dataset.summary)
        summary = write_results(folder, results, family)
        for dataset in sets.values():
            evaluator.quarantine.record(dataset.aside)
        writer.flush()
        write_eval_report(folder)
        made = [name for name in FILES if (folder / name).is_file()]
        log.info(f"{', '.join(made)} are in {folder}")
    for result in results:  # only now: no answer is lost
        check_errors(result.groups, config.reward, config.env)
    return summary


def _noted(result: Result, found: Mapping[str, float]) -> Result:
    """With further metrics, which are shown."""
    if not found:
        return result
    log.info(f"{result.name}: " + "  ".join(with_interval(found, name) for name in found if "_ci_" not in name))
    return replace(result, metrics={**result.metrics, **found})


# -- answers that are scored again ------------------------------------------------------------------


def _rescore(config: Config, folder: Path, samples: Path) -> dict[str, Any]:
    """Answers of an earlier evaluation, scored again; no model is loaded. Writes the rows with their new
    scores; returns the metrics of each set. The rewards are not tested on known answers before: what
    they say of these can be read.
    """
    rows = read_lines(samples)
    for number, row in enumerate(rows or [{}], 1):
        if (
            missing := {*NEEDED, "set", "gold", "media", "tokens", "status"}
            - (row if isinstance(row, dict) else {}).keys()
        ):
            lacks = f"line {number} has no {', '.join(sorted(missing))}" if rows else "no such file, or it is empty"
            raise ConfigError(f"--rescore {samples}: {lacks}; give the samples.jsonl of an evaluation")
    scorer = parts.make_scorer(config)
    if scorer is None:
        raise ConfigError("reward.terms: nothing scores a response; try reward.terms=[math]")
    if scorer.learned is not None:
        raise ConfigError("reward.terms: --rescore has no conversation for a reward model to read; remove `model`")
    with Console("eval", folder.name), scorer:
        log.info(f"answers of {samples} are scored again; data.val and eval.suites do not count")
        _require_pictures(config, rows)
        for warning in unused_rewards(scorer, {row["data_source"] for row in rows}, shared=False):
            log.warning(warning)
        sets = {name: [r for r in rows if r["set"] == name] for name in dict.fromkeys(r["set"] for r in rows)}
        results = [_rescored(name, own, scorer) for name, own in sets.items()]
        for result in results:
            log.info(describe(result))
        summary = {result.name: dict(result.metrics) for result in results}
        write_files(folder, summary, rows)
        log.info(f"{RESULTS}, samples.jsonl are in {folder}")
        for result in results:
            check_errors(result.groups, config.reward, config.env)
    return summary


def _rescored(name: str, rows: Sequence[dict[str, Any]], scorer: Scorer) -> Result:
    """The set as an evaluation would have found it; the rows get what that would have stored."""
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
    metrics = verdict_metrics(groups, score_terms(scorer, items_of(groups))) | scorer.metrics()
    return Result(name=name, groups=tuple(groups), metrics=metrics)


def _episode(row: Mapping[str, Any], repeat: int) -> Trajectory:
    """How it ended; its tokens are not stored."""
    ended, none = row["end_reason"], np.empty(0, int)
    empty = written(row["id"], repeat, Rendered(ids=none, sources=none), none, ())
    return replace(empty, end_reason=ended, status=STATUS_OF_END.get(ended, "ok"), reason=row.get("reason", ""))


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
    """Rows of earlier versions hold size and pixels, but no other field than hash and path."""
    (width, height), (least, most) = record["size"], record["pixels"]
    stored = {name: record[name] for name in record.keys() - {"size", "pixels"}}
    sizes = {"width": width, "height": height, "min_pixels": least, "max_pixels": most}
    return decode(Media, {**sizes, **stored})


def _has_files(record: Mapping[str, Any]) -> bool:
    """Whether the file of a medium, or of each image of a video, is still there."""
    return all(image.get("path") and Path(image["path"]).is_file() for image in record.get("pictures") or [record])


def _require_pictures(config: Config, rows: Sequence[Mapping[str, Any]]) -> None:
    """Where a judge or a service looks at them, each must still be where it was."""
    if config.reward.judge.send_images or config.reward.remote.send_images:
        records = [record for row in rows for record in row["media"]]
        gone = [r for r in records if not _has_files(r)]
        if gone:
            first = gone[0]["path"] or gone[0]["hash"][:12]
            missing = f"{len(gone)} of {len(records)} images have no file, such as {first}"
            raise ConfigError(f"reward.judge.send_images: {missing}; restore them, or try send_images=false")
