"""What a config alone can say against a run: options that contradict each other or do nothing.

Runs in milliseconds, before data or weights are touched, and lists every problem at once, each with
the field, the reason and a value that works. Types and limits of single values are the schema's
business; what needs a tokenizer, a row or a tensor is checked by whoever holds it. A rule is a
function from a config to problems; RULES says which command asks which.

    >>> check(load(None, ["model.path=tiny:qwen2_5_vl"]), "sft")
    Traceback (most recent call last):
    saccade.errors.ConfigError: data.train: no training data; try data.train=train.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saccade.checks import models, offline, rows, steps
from saccade.checks.models import chosen
from saccade.config import Config
from saccade.errors import ConfigError

Rule = Callable[[Config], Iterator[str]]

SUPERVISED = {
    "run.overcommit": "only `saccade rl` plans its memory before it starts",
    "rollout.http": "an endpoint only evaluates",
    "algorithm": "only `saccade rl` reads it",
    "eval": "only `saccade eval` reads it",
    "prompt.permute_choices": "rows name the letters that they were written with",
    "data.demonstrations": "only `saccade rl` reads it",
    "train.ptx_coef": "only `saccade rl` reads it",
    "train.samples_per_prompt": "nothing is sampled",
    "train.updates_per_step": "a step is one update",
    "train.epochs_per_batch": "a step is one update",
    **dict.fromkeys(
        ("track.trajectories_every", "track.trajectories_groups"),
        "only `saccade rl` stores rollouts of its steps",
    ),
}
SFT = {"sft": "only `saccade sft` reads it"}
DPO = {"dpo": "only `saccade dpo` reads it"}
RATING = {"reward_model": "only `saccade reward-model` reads it"}
# Of a reward model neither training nor evaluation asks for answers.
OF_ANSWERS = ("n", "temperature", "top_p", "max_tokens", "turns", "log_generations")
UNASKED = {
    **dict.fromkeys(
        ("reward", "rollout", "generate", *(f"val.{name}" for name in OF_ANSWERS)),
        "nothing is sampled",
    ),
    "data.max_prompt_tokens": "reward_model.max_tokens limits whole rows",
}

RL = {
    **SFT,
    **DPO,
    **RATING,
    "generate": "only `saccade generate` reads it",
    "eval": "only `saccade eval` reads it",
    "rollout.http": "an endpoint only evaluates",
}

# Options and sections that a command does not read. One file serves all commands, so there they
# stand for another one; who names them beside the command expects something of them.
WITHOUT_EFFECT = {
    "rl": RL,
    "estimate": RL,
    "sft": SUPERVISED | DPO | RATING,
    "dpo": SUPERVISED | SFT | RATING,
    "reward-model": SUPERVISED | SFT | DPO | UNASKED,
}


def check(config: Config, command: str, given: Sequence[str] = ()) -> None:
    """Raise one ConfigError with everything that keeps the config from running as COMMAND. `given`:
    options and sections that were named beside the file.
    """
    problems = [problem for rule in RULES[command] for problem in rule(config)]
    problems += [
        f"{name}: has no effect in `saccade {command}` ({reason}); remove it"
        for name in given
        if (reason := unread(name, command))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def unread(name: str, command: str) -> str | None:
    """Why an option has no effect in a command; None where it has."""
    reasons = WITHOUT_EFFECT.get(command, {}).items()
    return next((why for key, why in reasons if _within(name, key)), None)


def not_counted(config: Config, command: str) -> str | None:
    """A line about the options of the config that are for other commands."""
    names, keys = list(chosen(config)), WITHOUT_EFFECT.get(command, {})
    others = [key for key in keys if any(_within(name, key) for name in names)]
    return f"`saccade {command}` does not read {', '.join(others)}" if others else None


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


MODEL = (
    *(models.model, models.patterns, models.own_weights, models.engine_options, models.lora),
    models.series,
)
CRITIC = (models.critic, models.critic_warmup)
SAMPLING = (models.lora_dropout, steps.sampling, steps.response_length, steps.batch)
LOOKING = (rows.pixels, rows.prompt_files, models.judge)
READING = (rows.data_files, *LOOKING)
TRAINING = (
    *(*MODEL, rows.train_data, *READING),
    *(steps.optimizer, steps.validation, steps.before, steps.best, steps.resume),
)
ANSWERING = (models.answering_model, models.series, models.trained_series)
RULES: dict[str, tuple[Rule, ...]] = {
    "rl": (
        *TRAINING,
        *(*CRITIC, offline.demonstrations, *SAMPLING, steps.reward, steps.environment),
    ),
    "sft": (*TRAINING, offline.imitation),
    "dpo": (*TRAINING, offline.preferences),
    "reward-model": (*TRAINING, offline.rating),
    "eval": (
        *ANSWERING,
        *(rows.val_data, rows.val_files, *LOOKING),
        *(steps.response_length, steps.validation, steps.environment),
    ),
    "rescore": (rows.pixels, models.judge),  # `eval` of answers that are there already
    "generate": (
        *ANSWERING,
        *(rows.some_data, *READING),
        *(steps.response_length, steps.environment, steps.selection, offline.selection),
    ),
    "chat": (*ANSWERING, rows.pixels, rows.prompt_files),
    # those of rl that need neither rows nor rewards
    "estimate": (*MODEL, rows.pixels, steps.optimizer, *CRITIC, *SAMPLING),
    "check-data": (models.series, rows.some_data, *READING),
    "serve-reward": (rows.pixels, models.judge, steps.reward),
}
