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

from collections.abc import Callable, Iterator

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

# Options and sections that a training command does not read. `generate` makes rows for sft and dpo,
# so one file may hold both. Eval and generate take the file of a training run as it is, so there
# nothing is refused.
WITHOUT_EFFECT = {
    "rl": {
        **SFT,
        **DPO,
        **RATING,
        "generate": "only `saccade generate` reads it",
        "eval": "only `saccade eval` reads it",
        "rollout.http": "an endpoint only evaluates",
    },
    "sft": SUPERVISED | DPO | RATING,
    "dpo": SUPERVISED | SFT | RATING,
    "reward-model": SUPERVISED | SFT | DPO | UNASKED,
}


def check(config: Config, command: str) -> None:
    """Raise one ConfigError with everything that keeps the config from running as COMMAND."""
    problems = [problem for rule in RULES[command] for problem in rule(config)]
    problems += _without_effect(config, command)
    if problems:
        raise ConfigError("\n".join(problems))


def unread(name: str, command: str) -> str | None:
    """Why an option has no effect in a command; None where it has."""
    reasons = WITHOUT_EFFECT.get(command, {}).items()
    return next((why for key, why in reasons if name == key or name.startswith(f"{key}.")), None)


def _without_effect(config: Config, command: str) -> Iterator[str]:
    for name in chosen(config):
        if reason := unread(name, command):
            yield f"{name}: has no effect in `saccade {command}` ({reason}); remove it"


def _planned(config: Config) -> Iterator[str]:
    sections = {name.partition(".")[0] for name in chosen(config)}
    for section in sorted(sections & {"sft", "dpo", "reward_model"}):
        yield (
            f"{section}: `saccade estimate` plans steps of `saccade rl` only, none of "
            f"`saccade {section.replace('_', '-')}`; give it the config of an rl run"
        )


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
    *(steps.optimizer, steps.validation, steps.best, steps.resume),
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
    "estimate": (_planned, *MODEL, rows.pixels, steps.optimizer, *CRITIC, *SAMPLING),
    "check-data": (models.series, rows.some_data, *READING),
    "serve-reward": (rows.pixels, models.judge, steps.reward),
}
