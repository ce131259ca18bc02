"""Builds parts of recipes from a config: rewards, sampling, limits, environments. Models are in model_setup.py, data in
questions.py.

Each function makes one part; the recipes decide which they need and in what order.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import Config, DataConfig, PromptConfig, ValConfig
from saccade.data import datasets, prompts
from saccade.environments import Environment, stop_strings
from saccade.environments.texts import texts_hash
from saccade.errors import ConfigError
from saccade.models import files
from saccade.models.families import Family
from saccade.registry import HOOKS
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import FORMATS
from saccade.rollout import env_setup
from saccade.rollout.episode import EpisodeSetup, Limits
from saccade.types import Sample, Sampling

log = logging.getLogger(__name__)


def make_scorer(config: Config, algorithm: Algorithm | None = None) -> Scorer | None:
    reward = config.reward
    if not reward.given:
        return None
    overlong = None
    if algorithm is not None:
        overlong = (algorithm.overlong.buffer, algorithm.overlong.factor, algorithm.max_tokens)
    scorer = Scorer(
        reward,
        prompt_format=config.prompt.format,
        max_tokens=config.rollout.max_tokens,
        overlong=overlong,
        load_model=lambda path: HOOKS["load_reward_model"](config, path),
    )
    for name, unused in (("judge", scorer.judge is None), ("remote", not scorer.services)):
        given = getattr(reward, name).model_fields_set
        if algorithm is not None and unused and given:
            scorer.close()
            who = "judge or hybrid" if name == "judge" else name
            raise ConfigError(f"reward.{name}.{min(given)}: has no effect without {who} in reward.terms; remove it")
    return scorer


def test_rewards(config: Config, scorer: Scorer | None, samples: Sequence[Sample]) -> None:
    """Check before step 1 that every data source has a reward recipe, and that it scores known answers correctly."""
    if scorer is None:
        return
    scorer.check_sources(sample.data_source for sample in samples)
    scorer.check_media(samples)
    if config.reward.self_test != "off":
        HOOKS["check_known_answers"](scorer, samples, prompt=config.prompt, mode=config.reward.self_test)
    scorer.metrics()  # discard the metrics of the test


def check_algorithm(algorithm: Algorithm, scorer: Scorer | None, samples: Sequence[Sample], *, ahead: int = 0) -> None:
    """Check before step 1 that rewards and rows have what the algorithm needs."""
    if algorithm.overlong.buffer and scorer is None:
        raise ConfigError("algorithm.overlong: a term of the reward; set reward.terms, or algorithm.overlong.buffer=0")
    if algorithm.estimator.components and scorer is None:
        raise ConfigError(f"algorithm.advantage={algorithm.advantage}: compares terms of the reward; set reward.terms")
    if algorithm.estimator.components and scorer is not None:
        for source in sorted({sample.data_source for sample in samples}):
            scorer.component_weights(source)
    if algorithm.estimator.weigh and all(sample.extra.get("domain") is None for sample in samples):
        log.info("no row has a `domain`: all of them are one, and only difficulty weighs")
    if ahead and not algorithm.allows_older:
        by_loss = algorithm.loss.ratio or algorithm.loss.older
        also = " algorithm.old=auto" if algorithm.old == "rollout" else " or algorithm.old=rollout" if by_loss else ""
        what = f"rollout.ahead={ahead}: tokens of older weights count as if they were new"
        log.warning(f"{what}; to weigh them, use algorithm.correct=[tis.token]{also}")


def rollout_sampling(config: Config, algorithm: Algorithm | None = None) -> Sampling:
    """Sampling parameters of rollouts, with the algorithm's own for the first token."""
    rollout, fire = config.rollout, algorithm.hot_first_token if algorithm else None
    return Sampling(
        first=(fire.temperature, fire.top_k) if fire and fire.temperature else None,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop=(*rollout.stop, *stop_strings(config.env)),
        ignore_eos=rollout.ignore_eos,
        support=rollout.top_p < 1 or rollout.top_k > 0,
    )


def validation_sampling(config: Config, val: ValConfig) -> Sampling:
    stop = (*config.rollout.stop, *stop_strings(config.env))
    return Sampling(temperature=val.temperature, top_p=val.top_p, max_tokens=val.max_tokens, stop=stop)


def limits_of(config: Config, *, evaluation: bool) -> Limits:
    env = config.env
    counted: dict[str, Any] = env.limits(evaluation=evaluation)
    if turns := frozenset(config.val.turns if evaluation else ()):
        counted["max_turns"] = max(turns)
    return Limits(
        timeout=env.timeout, step_timeout=env.step_timeout, smaller_turns=turns - {counted["max_turns"]}, **counted
    )


def answer_places(prompt: PromptConfig) -> tuple[str, ...]:
    """Places where answers are looked for, over the formats of all data sources."""
    formats = [prompt.format] if isinstance(prompt.format, str) else [*prompt.format.values(), prompt.of("").format]
    places = dict.fromkeys(place for one in formats for place in FORMATS.get(str(one), FORMATS["none"]).order)
    return tuple(sorted(places, key="whole".__eq__))  # `whole` last, as it matches any text


def environments_of(config: Config, family: Family) -> Callable[[], Environment]:
    """Returns the function that makes the environment of each episode."""
    if config.env.coordinates == "absolute" and family.size_unit is None:
        raise ConfigError(f"env.coordinates=absolute: {family.name} sees tiles of an image; use env.coordinates=milli")
    return env_setup.environments(
        config.env,
        order=answer_places(config.prompt),
        think_prefilled=family.chat.think_prefilled,
        role="tool" if family.chat.knows_tools else "user",
        unit=family.unit,
    )


def episode_setup(
    config: Config, family: Family, sampling: Sampling, seed: str, *, evaluation: bool = False
) -> EpisodeSetup:
    """`seed` tells the noise of this call apart from others in the run."""
    return EpisodeSetup(
        environment=environments_of(config, family),
        family=family,
        sampling=sampling,
        limits=limits_of(config, evaluation=evaluation),
        seed=f"{config.run.seed}/{seed}",
    )


def manifest(family: Family, data: datasets.Dataset | None, options: DataConfig) -> dict[str, Any]:
    """What identifies data, texts and weights of a run; a resumed run must match `run.folder.PINNED` of it."""
    return {
        "data": data.hash if data is not None else None,
        "sets": [
            {"path": part.path, "rows": part.stop - part.start, "hash": part.hash}
            for part in (data.parts if data is not None else ())
        ],
        "template": hashlib.sha256(family.chat.template.encode()).hexdigest(),
        "prompt_texts": prompts.texts_hash(),
        "environment_texts": texts_hash(),
        "pixels": [options.min_pixels, options.max_pixels],
        "family": family.name,
        # On resume, adapters and references are built on this folder again, not on a checkpoint.
        "weights": files.fingerprint(Path(family.path)),
    }
