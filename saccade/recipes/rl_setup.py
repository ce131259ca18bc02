"""Builds the parts of an RL run from a config or a checkpoint.

setup = set_up(config, algorithm, family, data, run)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from saccade.algorithms.describe import resolved_options
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.checks.steps import total_steps
from saccade.config import Config, RolloutConfig
from saccade.data.datasets import Dataset, Stream
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.recipes import model_setup, questions, run_parts
from saccade.recipes.engines import make_engine, require_capabilities
from saccade.recipes.rl_rollout import Sampler
from saccade.recipes.rl_update import Learners
from saccade.recipes.rollouts_ahead import RolloutsAhead
from saccade.recipes.validation import Validation, evaluator_of
from saccade.registry import HOOKS
from saccade.rollout.collect import Pool
from saccade.rollout.stored import group_files, load_groups
from saccade.run.folder import CONFIG, RECORD, TRAJECTORIES
from saccade.run.training_run import Run
from saccade.system.contents import File
from saccade.trainer import Scoring, Trainer
from saccade.trainer.reference import Reference
from saccade.types import Group, Sample


@dataclass(kw_only=True)
class CarriedGroups:
    """Surplus groups of the last finished step, which the next step uses. They are saved in checkpoints."""

    sample_of: Callable[[str], Sample]
    groups: list[Group] = field(default_factory=list)

    def saved_bytes(self) -> int:
        return 0  # negligible next to a model

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        yield from group_files(self.groups)

    def load_state(self, folder: Path) -> None:
        self.groups = load_groups(folder, self.sample_of)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run: the loop unpacks them, so no stage gets all of them."""

    sampler: Sampler
    learners: Learners
    reference: Reference | None
    surplus: CarriedGroups
    validation: Validation


def set_up(config: Config, algorithm: Algorithm, family: Family, data: Dataset, run: Run) -> Setup:
    run_parts.environments_of(config, family)  # raises here instead of in the first rollout
    record, replay = _record_folders(config.rollout, run)
    scorer = run_parts.make_scorer(config, algorithm)
    run.close_at_end(scorer)
    run_parts.test_rewards(config, scorer, data.samples)
    run_parts.check_algorithm(algorithm, scorer, data.samples, ahead=config.rollout.ahead)
    trainer = model_setup.start_policy(run, family)
    HOOKS["place_reward_models"](scorer, trainer)
    stream = Stream(data, seed=config.run.seed, config=config.data)
    engine = make_engine(config, trainer, first_tokens=algorithm.hot_first_token.temperature > 0, logs=run.folder.path)
    run.close_at_end(engine)
    require_capabilities(config.rollout, engine)
    sets = questions.validation_sets(config, family) if config.val.every else {}
    run.compare_sets(sets)
    HOOKS["warn_of_rewards"](scorer, [data, *sets.values()])
    HOOKS["warn_of_rows"](config, family, stream, sets.values())
    total = total_steps(config, stream.rows_per_epoch)
    learners, reference = _learners(config, algorithm, family, trainer, run, total)
    surplus = CarriedGroups(sample_of=data.sample)
    moving = reference if algorithm.reference_moves else None
    carried = surplus if algorithm.filter.keep_surplus else None
    # Without memory of its own, an engine gets at most the requests of one step at a time.
    of_a_step = config.train.prompts_per_step * (algorithm.samples_per_prompt + algorithm.estimator.greedy)
    pool = Pool(engine, at_once=math.inf if engine.capabilities().separate_memory else of_a_step)
    ahead = RolloutsAhead(
        pool=pool, steps=config.rollout.ahead, total=total, sample_of=data.sample, record=record, replay=replay
    )
    begun = run.start is not None and (run.start / "state" / "ahead").is_dir()  # rollout.ahead may have been larger
    going_on = ahead if ahead.steps or begun else None
    # Parts with state, by their folder in a checkpoint.
    with_state = {"critic": learners.critic, "reference": moving, "surplus": carried, "ahead": going_on}
    extra_parts: dict[str, Any] = {name: part for name, part in with_state.items() if part is not None}
    setup = Setup(
        sampler=Sampler(
            engine=engine,
            ahead=ahead,
            family=family,
            scorer=scorer,
            stream=stream,
            quarantine=run.quarantine,
            env=config.env,
            reward=config.reward,
            algorithm=algorithm,
            prompts=config.train.prompts_per_step,
            setup_of=partial(run_parts.episode_setup, config, family, run_parts.rollout_sampling(config, algorithm)),
            work=partial(HOOKS["rollout_work"], config=config),
            watch=run.watch,
            phase=run.display.console.phase,
        ),
        learners=learners,
        reference=reference,
        surplus=surplus,
        validation=Validation(
            evaluator=evaluator_of(run, engine, family, scorer),
            weights=trainer,
            questions=sets,
            every=config.val.every,
            training_follows=False,
            rollout_pool=ahead.pool if ahead.side_by_side else None,
        ),
    )
    streams = {"stream": stream}
    if learners.demonstrations is not None:
        streams["demonstrations"] = learners.demonstrations.stream
    run.restore(trainer, streams, extra_parts)
    run.progress = replace(run.progress, algorithm=resolved_options(algorithm))
    engine.update_weights(trainer, version=run.step)  # its own copy may be from another checkpoint
    extra_parts |= HOOKS["average"](config, family, trainer, run.start)
    run.begin(total, trainer, (data, *sets.values()), extra_parts)
    return setup


def _learners(
    config: Config, algorithm: Algorithm, family: Family, trainer: Trainer, run: Run, total: int
) -> tuple[Learners, Reference | None]:
    """The models that learn, with what an update reads, and the reference."""
    reference = critic = demonstrations = None
    if algorithm.needs_reference:
        reference = model_setup.load_beside("reference", config, family, algorithm, trainer)
    if algorithm.needs_critic:
        critic = model_setup.load_beside("critic", config, family, algorithm, trainer)
    if config.train.sft_coef:
        demonstrations = HOOKS["demonstrations"](config, family, run.quarantine, updates=algorithm.updates_per_step)
    learners = Learners(
        policy=trainer,
        critic=critic,
        demonstrations=demonstrations,
        train=config.train,
        scoring=Scoring(temperature=config.rollout.temperature),
        seed=config.run.seed,
        parity_max=config.rollout.parity_max,
        total=total,
        folder=run.folder.path,
    )
    return learners, reference


def _record_folders(rollout: RolloutConfig, run: Run) -> tuple[Path | None, Path | None]:
    """The folders of `rollout.record`: one to store completions in, and one of another run to replay."""
    record = rollout.record
    if record is None or record == "write":
        return (run.folder.trajectories / RECORD if record else None), None
    replay = Path(record) / TRAJECTORIES / RECORD
    if not replay.is_dir():
        raise ConfigError(f"rollout.record={record}: no record there; a run with rollout.record=write writes one")
    theirs = yaml.safe_load((Path(record) / CONFIG).read_text(encoding="utf-8"))["rollout"]["ahead"]
    if theirs != rollout.ahead:
        raise ConfigError(f"rollout.record={record}: its draws began {theirs} steps ahead; use rollout.ahead={theirs}")
    return None, replay
