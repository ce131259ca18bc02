"""`saccade eval`: evaluates a model on the sets of `data.val` and `eval.suites`.

saccade eval run.yaml model.path=runs/geo/checkpoints/step-100 data.val=test.jsonl
saccade eval run.yaml --rescore runs/run-eval/samples.jsonl
"""

import _thread
import hashlib
import logging
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import sleep
from typing import Any

from saccade import checks
from saccade.config import Config, load, on_one_gpu
from saccade.errors import ConfigError, Interrupted, RewardError
from saccade.plugins.check_data.row_warnings import unused_rewards, warn_of_rewards
from saccade.plugins.evaluation import results as stored
from saccade.plugins.evaluation.answering import answering_family, evaluator_of, model_name
from saccade.plugins.evaluation.checks_of_sets import BLIND, leak_metrics, leaked, sight_gain, with_blind
from saccade.plugins.evaluation.eval_folder import begin_folder, folders_of, locked_folder, missing
from saccade.plugins.evaluation.rescoring import read_samples, require_pictures, rescored, suites_among
from saccade.plugins.reports.diagnosis import diagnose_answers
from saccade.plugins.reports.eval_report import table_lines, write_eval_report
from saccade.plugins.reports.trajectories import TrajectoryWriter
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.reward_card import read_card
from saccade.plugins.suites.suite_metrics import suite_metrics
from saccade.plugins.suites.suites import suite_of, suite_sets, unusual, with_rewards
from saccade.recipes import model_setup, questions, run_parts
from saccade.recipes.accuracy import with_interval
from saccade.recipes.evaluator import Result, describe
from saccade.recipes.failures import check_errors
from saccade.rollout.scoring import missing_answer
from saccade.run.console import Console
from saccade.run.folder import QUARANTINE, RESULTS, read_manifest
from saccade.system import devices

log = logging.getLogger(__name__)

ALSO = ("blind", "leaks")
FILES = (RESULTS, stored.SAMPLE_ROWS, "report.html", QUARANTINE)
NOTHING: Mapping[str, float] = {}


def run(
    config: Any, *, out: Path | None = None, rescore: Path | None = None, also: Collection[str] = ()
) -> dict[str, Any]:
    """Evaluate every set of `data.val` and `eval.suites`; write results.json, samples.jsonl and report.html into `out`.
    `also` may hold `blind` (sets with pictures once more without them) and `leaks` (which items are in data.train).
    """
    config = load(config)
    judges = bool(rescore is None and config.model.path and read_card(config.model.path))
    for name in also:
        if name not in ALSO:
            raise ConfigError(f"--also {name}: expected one of {', '.join(ALSO)}")
        if rescore or judges:
            other = "--rescore, which asks nothing" if rescore else "a reward model, which judges pairs"
            raise ConfigError(f"--also {name}: has no effect with {other}; leave it out")
    checks.check(config, "eval" if rescore is None else "rescore")
    idle = checks.idle_gpus(config, "eval", devices.count(config.run.device))
    config = on_one_gpu(config)
    model_setup.quiet_libraries()
    asked: dict[str, Any] = {"command": "eval", "also": sorted(also)}
    rows = []
    if rescore is not None:
        rescore = rescore / stored.SAMPLE_ROWS if rescore.is_dir() else rescore
        rows, digest = read_samples(rescore), hashlib.sha256(rescore.read_bytes()).hexdigest()
        asked = {"command": "eval --rescore", "samples": str(rescore), "hash": digest}
        config = _with_suites(config, rows, rescore)
    folder, answers = folders_of(config, out, asked)
    summary = dict[str, Any]()
    with locked_folder(folder), _ended_by_signals(folder, summary):
        if rescore is not None:
            _rescore(config, folder, rows, asked, summary)
        elif judges:
            reward_training.evaluate(config, folder, asked, summary)
        else:
            _evaluate(config, folder, answers, asked, summary, idle)
    return summary


def _evaluate(
    config: Config, folder: Path, answers: Path, asked: Mapping[str, Any], summary: dict[str, Any], idle: str | None
) -> None:
    """Adds the results of each finished set to `summary`, which the caller still has after a signal. `idle`: a line
    about GPUs that are not used.
    """
    also = asked["also"]
    given = config
    config = config.model_copy(update={"reward": with_rewards(config.reward, config.eval)})
    family = answering_family(config)
    sets = questions.validation_sets(config, family) | suite_sets(config, family)
    if "leaks" in also and not config.data.train:
        raise ConfigError("--also leaks: there are no training rows to compare with; try data.train=train.jsonl")
    training = questions.load_prompts(config, config.data.train, family) if "leaks" in also else None
    seen = leaked(sets, training.samples) if training else {}
    sets = with_blind(sets) if "blind" in also else sets
    opened = evaluator_of(config, family, folder, answers=answers, command="eval", name=folder.name)
    mild = {"self_test": "off" if config.reward.self_test == "off" else "warn"}
    warned = config.model_copy(update={"reward": config.reward.model_copy(update=mild)})
    results = list[Result]()
    with closing(TrajectoryWriter(folder)) as writer, opened as (evaluator, console):
        for line in filter(None, (checks.ignored_options(config, "eval", ("data.train",) if training else ()), idle)):
            log.info(line)
        for name, dataset in sets.items():
            public = name.removesuffix(BLIND) in config.eval.suites  # its rows are as published, with their mistakes
            run_parts.test_rewards(warned if public else config, evaluator.scorer, dataset.samples)
        warn_of_rewards(evaluator.scorer, sets.values(), shared=False)
        facts = {**asked, **run_parts.manifest(family, training, config.data)}
        facts["sets"] = [{"name": n, "rows": len(data.samples), "hash": data.hash} for n, data in sets.items()]
        facts["answers"] = stored.what_answers(config, model_name(config.model, evaluator.engine))
        summary |= (done := begin_folder(folder, given, facts))
        for name in missing(sets, done, folder):
            dataset = sets[name]
            with console.phase(name):
                result = evaluator.evaluate(name, dataset)
            results.append(result)
            kept = result.groups[: config.val.log_generations]
            writer.write(0, kept, family, version=0, kind=f"val/{name}", scores=result.scores)
            writer.flush()
            leaks = leak_metrics(result, seen[name], result.scores) if name in seen else {}
            _finish_set(folder, summary, result, stored.sample_rows(result, family), config.eval.suites, leaks)
            shown_answers = missing_answer(result.groups, evaluator.scorer, family)
            for advice in diagnose_answers(result.metrics, shown_answers).values():
                log.warning(f"{name}: {advice}")
            rows = None if config.data.max_samples else dataset.rows
            for level, note in unusual(name, config.val.n, rows) if name in config.eval.suites else ():
                log.log(level, note)
            if dataset.overlong or dataset.quarantined or dataset.renamed:  # other rows, so another score
                log.info(dataset.summary)
        for dataset in sets.values():
            evaluator.quarantine.record(dataset.excluded_rows)
        _finish(folder)
    _check_errors(config, results, {name: summary[name] for name in done})


@contextmanager
def _ended_by_signals(folder: Path, summary: Mapping[str, Any]) -> Iterator[None]:
    """SIGTERM ends an evaluation like Ctrl-C: with a message that names the finished sets. Python drops an exception in
    a callback of its own (of a weak reference, `__del__`); that of a signal is raised again a moment later.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    dropped = sys.unraisablehook

    def again() -> None:
        sleep(0.05)
        _thread.interrupt_main(signal.SIGTERM)

    def raised_again(about: Any) -> None:
        if issubclass(about.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, ())  # without the locks of `threading`, which may be held here
        else:
            dropped(about)

    if ours:
        sys.unraisablehook = raised_again
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        kept = f"the results of {', '.join(summary)} are in {folder}" if summary else "no set was done"
        raise Interrupted(f"stopped; {kept}. The same command goes on with what is missing") from None
    finally:
        if ours:
            sys.unraisablehook = dropped
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _with_suites(config: Config, rows: Sequence[Mapping[str, Any]], samples: Path) -> Config:
    """The config with those suites to which a file has answers."""
    if absent := set(config.eval.suites) - {row["set"] for row in rows}:
        there = ", ".join(dict.fromkeys(row["set"] for row in rows))
        raise ConfigError(f"eval.suites: {samples} has no answers to {', '.join(sorted(absent))}, only to {there}")
    suites = tuple(suites_among(rows, samples, config.eval.suites))
    return config.model_copy(update={"eval": config.eval.model_copy(update={"suites": suites})})


def _rescore(
    config: Config, folder: Path, rows: Sequence[dict[str, Any]], asked: Mapping[str, Any], summary: dict[str, Any]
) -> None:
    """Score the answers of an earlier evaluation again, like `_evaluate`. The rewards are not tested on known answers
    first, as their verdicts on these can be read.
    """
    given, suites, samples = config, config.eval.suites, asked["samples"]
    config = config.model_copy(update={"reward": with_rewards(config.reward, config.eval)})
    scorer = run_parts.make_scorer(config)
    if scorer is None:
        raise ConfigError("reward.terms: nothing scores a response; try reward.terms=[math]")
    if scorer.model_terms is not None:
        raise ConfigError("reward.terms: --rescore has no conversation for a reward model to read; remove `model`")
    sets: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sets.setdefault(row["set"], []).append(row)
    results = list[Result]()
    with Console("eval", folder.name), scorer:
        theirs = f"; {', '.join(suites)} as public sets" if suites else ""
        log.info(f"answers of {samples} are scored again{theirs}; data.val does not count")
        require_pictures(config.reward, rows)
        for warning in unused_rewards(scorer, {row["data_source"] for row in rows}, shared=False):
            log.warning(warning)
        listed = [{"name": name, "rows": len(own), "hash": asked["hash"]} for name, own in sets.items()]
        answered = read_manifest(Path(samples).parent).get("answers", {})
        summary |= (done := begin_folder(folder, given, {**asked, "sets": listed, "answers": answered}))
        for name in missing(sets, done, folder):
            results.append(rescored(name, sets[name], scorer))
            _finish_set(folder, summary, results[-1], sets[name], suites)
        _finish(folder)
    _check_errors(config, results, {name: summary[name] for name in done})


# -- results of both --------------------------------------------------------------------------------


def _finish_set(
    folder: Path,
    summary: dict[str, Any],
    result: Result,
    rows: Sequence[Mapping[str, Any]],
    suites: Collection[str],
    more: Mapping[str, float] = NOTHING,
) -> None:
    """Log and store the results of a set; the metrics in `more` are logged on a line of their own."""
    name, seeing = result.name, result.name.removesuffix(BLIND)
    log.info(describe(result))
    if name in suites:
        more = {**more, **suite_metrics(suite_of(name), result.groups, result.tables)}
    noted = {name: more}
    if name != seeing and seeing in summary:
        with_pictures = [row for row in stored.read_lines(folder / stored.SAMPLE_ROWS) if row["set"] == seeing]
        noted[seeing] = sight_gain(with_pictures, rows)
    summary[name] = {**result.metrics, **result.tables}
    for one, found in noted.items():
        if found:
            log.info(f"{one}: " + "  ".join(with_interval(found, key) for key in found if "_ci_" not in key))
            summary[one] |= found
    for line in table_lines(name, result.tables):
        log.info(line)
    stored.add_rows(folder, rows)
    stored.write_numbers(folder, summary)


def _check_errors(config: Config, results: Sequence[Result], done: Mapping[str, Mapping[str, Any]]) -> None:
    """At the end, when all answers are stored. `done`: the results of sets that were finished before."""
    for result in results:
        check_errors(result.groups, config.reward, config.env)
    for name, found in done.items():
        if (share := found.get("error_rate", 0.0)) > config.reward.max_error_rate:
            raise RewardError(f"{name}: {share:.1%} of its answers could not be scored; samples.jsonl says why")


def _finish(folder: Path) -> None:
    write_eval_report(folder)
    made = [name for name in FILES if (folder / name).is_file()]
    log.info(f"{', '.join(made)} are in {folder}")
