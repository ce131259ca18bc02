"""Rules about a step: sampling, rewards, environments, the optimizer, validation."""

import math
from collections.abc import Iterator
from pathlib import Path

from saccade import environments
from saccade.algorithms.build import build
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import ADAPTED, Config, ValConfig
from saccade.data.sources import set_names
from saccade.registry import Table

PER_SET_OPTIONS = {"n", "temperature", "top_p", "max_tokens"}  # options of val that a set of data.val may override


def sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if "" in rollout.stop:
        yield "rollout.stop: an empty text ends every response at once; try rollout.stop=[]"
    if rollout.truncated_sampling == "refuse":
        for name, truncates, off in (("top_p", rollout.top_p < 1, 1), ("top_k", rollout.top_k > 0, -1)):
            if truncates:
                yield f"rollout.{name}: biases every ratio; use {name}={off}, or rollout.truncated_sampling=replay"
    if rollout.top_k == 0:
        yield "rollout.top_k: 0 keeps no token; try rollout.top_k=-1 to keep all"


def response_length(config: Config) -> Iterator[str]:
    total, longest = config.env.max_total_tokens, config.data.max_prompt_tokens
    if total <= max(longest, config.rollout.max_tokens):
        needed = config.rollout.max_tokens + longest
        yield f"env.max_total_tokens: {total} cannot hold data.max_prompt_tokens and a response; try {needed}"


def batch(config: Config) -> Iterator[str]:
    updates, prompts = config.train.updates_per_step, config.train.prompts_per_step
    if updates > prompts:
        yield f"train.updates_per_step: {updates} need as many prompts; try train.updates_per_step={prompts}"


def optimizer(config: Config) -> Iterator[str]:
    train, steps = config.train, config.run.max_steps
    if train.ema and config.model.train in ADAPTED:
        yield f"train.ema: averages whole weights; with model.train={config.model.train} use 0"
    if steps is not None and train.warmup >= max(1, steps):
        yield f"train.warmup: {train.warmup:g} steps are all of the run; try train.warmup={steps // 10}"
    if train.optimizer == "adamw_8bit" and config.run.gpus > 1:
        yield f"train.optimizer: adamw_8bit is for one GPU, not run.gpus={config.run.gpus}; try adamw_bf16"
    lora, without = config.model.lora, {"series"}  # towers that get no adapter
    if lora.targets == "all-linear":
        without |= {"audio"} if lora.vision else {"audio", "vision", "projector"}
    for name in sorted(without & train.lr_scale.keys()) if config.model.train in ADAPTED else ():
        yield f"train.lr_scale.{name}: model.train={config.model.train} adds no adapter to that tower; remove it"
    if not all(0 <= beta < 1 for beta in train.betas):
        yield f"train.betas: {train.betas} are not between 0 and 1; try train.betas=[0.9,0.95]"


def reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if not reward.given and not environments.gives_rewards(config.env):
        yield "reward.terms: nothing scores a response; try reward.terms=[math]"
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        low, high = reward.clip
        yield f"reward.clip: {low} is not below {high}; try reward.clip=[-1,1]"


def environment(config: Config) -> Iterator[str]:
    yield from environments.problems(config.env)
    if config.env.name == "single_turn" and config.env.max_turns > 1:
        yield f"env.max_turns: {config.env.max_turns} has no effect with env.name=single_turn; try env.name=tools"


def validation(config: Config) -> Iterator[str]:
    for name, val in {"val": config.val, **val_by_set(config)}.items():
        if val.n > 1 and val.temperature == 0:
            where = name if val is config.val else f"data.val, set {name}: val"
            yield f"{where}.n: {val.n} greedy responses are all the same; try temperature 1 or n 1"
    for source in (*config.data.train, *config.data.demonstrations):
        if given := source.model_fields_set & PER_SET_OPTIONS:
            yield f"data.train: {min(given)} of {source.path} counts in data.val only; remove it"
    yield from environments.sweep_problems(config.env, config.val.turns)


def val_by_set(config: Config) -> dict[str, ValConfig]:
    """The validation settings of those sets of data.val that override some of `val`."""
    shared = config.val.model_dump(exclude_unset=True) | {"max_tokens": config.val.max_tokens}
    own = [source.model_dump(exclude_unset=True, include=PER_SET_OPTIONS) for source in config.data.val]
    named = zip(set_names(config.data.val), own, strict=True)
    return {name: ValConfig.model_validate(shared | given) for name, given in named if given}


def best(config: Config) -> Iterator[str]:
    name = config.save.best_metric
    sets = [f"val/{set_name}/" for set_name in set_names(config.data.val)] if config.val.every else []
    stop = config.run.stop
    wanted = {"save.best_metric": name, "run.stop.patience": stop.patience, "run.stop.target": stop.target}
    for option, value in wanted.items() if not sets else ():
        if value is not None:
            lacking = "val.every=0" if config.data.val else "there is no data.val"
            yield f"{option}: {value} is never measured, as {lacking}; set data.val and val.every=50, or remove it"
    if name and sets and not name.startswith(tuple(sets)):
        yield f"save.best_metric: {name} is of no set of data.val; try save.best_metric={sets[0]}accuracy"


def loggers(config: Config) -> Iterator[str]:
    known: Table[object] = Table("loggers", {})
    for name in config.track.loggers:
        if name not in known:
            yield f"track.loggers: {name!r} is none; try track.loggers=[{', '.join(known)}]"


def selection(config: Config) -> Iterator[str]:
    if config.generate.select != "all":
        yield from reward(config)


def resume(config: Config) -> Iterator[str]:
    resume = config.run.resume
    if resume not in ("none", "auto", "best") and not Path(resume).is_dir():
        yield f"run.resume: {resume} is not a checkpoint folder; try run.resume=auto"


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a run; contradictory options are refused."""
    max_tokens = config.rollout.max_tokens * config.env.max_turns
    return build(config.algorithm, config.train, config.reward, max_tokens, config.rollout.ahead)


def total_steps(config: Config, rows: int) -> int:
    """Steps of a run on `rows` rows per epoch: the last step of an epoch continues into the next."""
    if config.run.max_steps is not None:
        return config.run.max_steps
    steps = config.train.epochs * rows / config.train.prompts_per_step
    return max(1, math.ceil(steps - 1e-9))  # 0.1 * 30 is a little more than 3
