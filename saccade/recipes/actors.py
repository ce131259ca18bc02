"""Who takes part in a step of reinforcement learning, made from a config or a checkpoint.

actors = make_actors(config, algorithm, family, data, run)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.describe import describe
from saccade.backends import Reference, Scoring
from saccade.backends.local import LocalBackend
from saccade.config import Config
from saccade.contents import File
from saccade.data.datasets import Dataset, Stream
from saccade.engines import Engine
from saccade.models.families import Family
from saccade.models.load import describe_trained
from saccade.recipes import models, parts, questions
from saccade.recipes.demonstrations import Demonstrations
from saccade.recipes.engines import make_engine, require_support
from saccade.recipes.run import Run
from saccade.recipes.validation import Validation
from saccade.rewards.scorer import Scorer
from saccade.rollout.stored import group_files, load_groups
from saccade.types import Group, Sample

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Surplus:
    """Groups that the last finished step had no room for. They are part of a checkpoint."""

    sample_of: Callable[[str], Sample]
    groups: list[Group] = field(default_factory=list)

    def saved_bytes(self) -> int:
        return 0  # nothing beside a model

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        yield from group_files(self.groups)

    def load_state(self, folder: Path) -> None:
        self.groups = load_groups(folder, self.sample_of)


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Who takes part in a step."""

    config: Config
    algorithm: Algorithm
    family: Family
    engine: Engine
    policy: LocalBackend
    reference: Reference | None
    critic: LocalBackend | None
    scorer: Scorer | None
    stream: Stream
    surplus: Surplus
    validation: Validation
    demonstrations: Demonstrations | None

    @property
    def scoring(self) -> Scoring:
        return Scoring(temperature=self.config.rollout.temperature)


def make_actors(
    config: Config, algorithm: Algorithm, family: Family, data: Dataset, run: Run
) -> Actors:
    parts.environments_of(config, family)  # refused here, not in the first rollout
    scorer = parts.make_scorer(config, algorithm)
    run.close_at_end(scorer)
    parts.test_rewards(config, scorer, data.samples)
    parts.check_algorithm(algorithm, scorer, data.samples)
    policy = models.load_policy(config, family, folder=str(run.start) if run.start else None)
    log.info(describe_trained(policy.model, family))
    backend = models.learner(config, policy)
    stream = Stream(data, seed=config.run.seed, config=config.data)
    engine = make_engine(
        config,
        policy,
        first_tokens=algorithm.fire.temperature > 0,
        logs=run.folder.path,
    )
    run.close_at_end(engine)
    require_support(config, engine)
    run.progress.setdefault("stream", stream.state())
    run.progress["algorithm"] = describe(algorithm).splitlines()
    sets = questions.validation_sets(config, family) if config.val.every else {}
    run.compare_sets(sets)
    parts.warn_of_unused(scorer, [data, *sets.values()])
    parts.warn_of_rows(config, family, stream, sets.values())
    reference = critic = None
    if algorithm.needs_reference:
        reference = models.load_reference(config, family, algorithm, backend)
    if algorithm.needs_critic:
        critic = models.load_critic(config, family, algorithm)
    demonstrations = None
    if config.train.ptx_coef:
        demonstrations = Demonstrations(config, family, updates=algorithm.updates_per_step)
    actors = Actors(
        config=config,
        algorithm=algorithm,
        family=family,
        engine=engine,
        policy=backend,
        reference=reference,
        critic=critic,
        scorer=scorer,
        stream=stream,
        surplus=Surplus(sample_of=data.sample),
        validation=Validation(
            run, config, family, engine, backend, scorer, sets, training_follows=False
        ),
        demonstrations=demonstrations,
    )
    if run.start is not None:
        backend.load_state(run.start / "state")
        stream.restore(run.progress["stream"])
        if demonstrations is not None:
            demonstrations.stream.restore(run.progress["demonstrations"])
        for name, part in parts_with_state(actors).items():
            part.load_state(run.start / "state" / name)
    engine.update_weights(backend, version=run.step)  # its own copy may be of another checkpoint
    return actors


def parts_with_state(actors: Actors) -> dict[str, Any]:
    """What a checkpoint holds beside the policy, by the name of its folder."""
    moving = actors.reference if actors.algorithm.reference_moves else None
    surplus = actors.surplus if actors.algorithm.filter.keep_surplus else None
    everything = {"critic": actors.critic, "reference": moving, "surplus": surplus}
    return {name: part for name, part in everything.items() if part is not None}
