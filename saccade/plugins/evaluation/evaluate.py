"""`saccade eval`: the sets of `data.val` and `eval.suites`, measured with a model as it is.

saccade eval run.yaml model.path=runs/geo/checkpoints/step-100 data.val=test.jsonl
"""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from saccade import checks
from saccade.config import Config, load
from saccade.plugins.check_data.row_warnings import warn_of_rewards
from saccade.plugins.evaluation import rescore as rescoring
from saccade.plugins.evaluation.answering import answering_engine, answering_family, expenses
from saccade.plugins.evaluation.results import kept_if_filled, places, write_results
from saccade.plugins.reports.report import table_lines, write_eval_report
from saccade.plugins.reports.trajectories import TrajectoryWriter
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.reward_card import read_card
from saccade.plugins.suites.suites import suite_sets, with_rewards
from saccade.recipes import model_setup, parts, questions
from saccade.recipes.evaluator import Evaluator, describe
from saccade.recipes.failures import check_errors
from saccade.run.console import Console
from saccade.run.folder import QUARANTINE, RESULTS
from saccade.run.quarantine import Quarantine

log = logging.getLogger(__name__)

FILES = (RESULTS, "samples.jsonl", "report.html", QUARANTINE)


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
            return rescoring.run(config, folder, Path(rescore))
        if config.model.path and read_card(config.model.path):
            return reward_training.evaluate(config, folder)
        return _evaluate(config, folder, answers)


def _evaluate(config: Config, folder: Path, answers: Path) -> dict[str, Any]:
    family = answering_family(config)
    sets = questions.validation_sets(config, family) | suite_sets(config, family)
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
        warn_of_rewards(scorer, sets.values(), shared=False)
        evaluator = Evaluator(
            engine=engine, family=family, scorer=scorer, config=config, quarantine=quarantine, progress=console.progress
        )
        results = []
        for name, dataset in sets.items():
            with console.phase(name):
                results.append(evaluator.evaluate(name, dataset))
            log.info(describe(results[-1]))
            for line in table_lines(name, results[-1].tables):
                log.info(line)
            stored, scores = results[-1].groups[: config.val.log_generations], results[-1].scores
            writer.write(0, stored, family, version=0, kind=f"val/{name}", scores=scores)
            if dataset.overlong or dataset.quarantined:  # a score of the rest is another score
                log.info(dataset.summary)
        for spent in expenses(engine, scorer):
            log.info(spent)
        summary = write_results(folder, results, family)
        for dataset in sets.values():
            quarantine.record(dataset.aside)
        writer.flush()
        write_eval_report(folder)
        made = [name for name in FILES if (folder / name).is_file()]
        log.info(f"{', '.join(made)} are in {folder}")
        for result in results:  # only now: no answer is lost
            check_errors(result.groups, config)
    return summary
