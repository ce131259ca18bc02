"""Checks of a config alone: options that contradict each other or have no effect.

Runs in milliseconds, before data or weights are read, and lists every problem at once, each with the field, the reason
and a value that works. Types and limits of single values are checked by the schema; what needs a tokenizer, a row or a
tensor is checked where these are loaded. A rule is a function from a config to problems, or the name of a plugin's
rule; RULES lists the rules of each command.

    >>> check(load(None, ["model.path=tiny:qwen2_5_vl"]), "sft")
    Traceback (most recent call last):
    saccade.errors.ConfigError: data.train: no training data; try data.train=train.jsonl
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from saccade.checks import model_rules, rows, steps
from saccade.config import Config
from saccade.config.schema.section import ANSWERING, SCORING, TRAINING, VALIDATING, extra, given_options, without_effect
from saccade.errors import ConfigError
from saccade.registry import Table

Rule = Callable[[Config], Iterator[str]]
PLUGIN_RULES: Table[Rule] = Table("rules", {})

# Commands that refuse options they do not read → the command whose options they read. Commands that do not train
# refuse only options of the command line: their config file is that of a training run.
TRAINERS = {**{command: command for command in TRAINING}, "estimate": "rl"}
READERS = {**TRAINERS, **{command: command for command in ("eval", "generate", "chat", "serve-reward")}}
READERS["rescore"] = "serve-reward"
SHOWN = {"rescore": "eval --rescore"}
# Options that a command takes though its reader does not; more GPUs are answered below.
TAKEN = {"eval": ("run.gpus",), "generate": ("run.gpus",), "rescore": ("eval.suites", "eval.folder")}
# Descriptions of long lists of commands.
WHO = {
    ANSWERING: "commands that sample answers",
    SCORING: "commands that score answers",
    VALIDATING: "commands that answer data.val",
    TRAINING: "commands that train",
}


def check(config: Config, command: str, given: Sequence[str] = ()) -> None:
    """Raise one ConfigError with everything that keeps the config from running as COMMAND. `given`: options and
    sections set in addition to the file.
    """
    rules = (PLUGIN_RULES[rule] if isinstance(rule, str) else rule for rule in RULES[command])
    problems = [problem for rule in rules for problem in rule(config)]
    problems += [
        problem
        for name, part in config
        if name != "algorithm" and (command in TRAINERS or name == command)
        for problem in without_effect(part, f"{name}.", dict(config))
        if not why_ignored(problem.partition(":")[0], command)
    ]
    problems += [
        f"{name}: has no effect in `saccade {SHOWN.get(command, command)}` ({reason}); remove it"
        for name in given
        if (reason := why_ignored(name, command)) and name not in TAKEN.get(command, ())
    ]
    if command in ("eval", "generate") and "run.gpus" in given:
        problems.append(f"run.gpus: GPUs that answer are counted otherwise; try rollout.replicas={config.run.gpus}")
    if problems:
        raise ConfigError("\n".join(problems))


def why_ignored(name: str, command: str) -> str | None:
    """Why an option has no effect in a command; None if it has."""
    found = _ignored_part(name, command)
    return found and found[1]


def _ignored_part(name: str, command: str) -> tuple[str, str] | None:
    """Returns (the option, or the section around it, that a command does not read, why); None if it reads the option.
    An option may be read by commands that do not read its section.
    """
    reader, parts = READERS.get(command), name.split(".")
    kind: Any = Config
    found = None
    for end, part in enumerate(parts, 1):
        field = kind.model_fields.get(part) if reader and hasattr(kind, "model_fields") else None
        if field is None:
            break
        if readers := extra(field).get("commands", ()):
            who = WHO.get(readers) or f"`saccade {', '.join(readers)}`"
            why = f"only {who} {'reads' if len(readers) == 1 else 'read'} it"
            found = None if reader in readers else found or (".".join(parts[:end]), why)
        kind = field.annotation
    return found


def ignored_options(config: Config, command: str, read: Sequence[str] = ()) -> str | None:
    """A line that lists options of the config that the command does not read, but for those in `read`; None without
    any.
    """
    found = [_ignored_part(name, command) for name, _, _ in given_options(config)]
    others = dict.fromkeys(part[0] for part in found if part and part[0] not in read)
    return f"`saccade {command}` does not read {', '.join(others)}" if others else None


def idle_gpus(config: Config, command: str, there: int = 0) -> str | None:
    """A line about GPUs that the command leaves idle where the config does not say how many it should use. `there`:
    GPUs of this machine.
    """
    own, rollout, trains = config.run, config.rollout, command in TRAINING
    if rollout.replicas or rollout.engine != "embedded" or (trains and "gpus" in own.model_fields_set):
        return None
    if own.gpus > 1:
        return f"run.gpus={own.gpus} is for training, and one GPU answers; rollout.replicas={own.gpus} uses as many"
    option = "run.gpus" if trains else "rollout.replicas"
    return f"1 of {there} GPUs is used; {option}={there} uses all of them" if there > 1 else None


MODEL = (model_rules.model, model_rules.local_weights_needed, "series")
SAMPLING = (model_rules.lora_dropout, steps.sampling, steps.response_length, steps.batch)
LOOKING = (rows.pixels, rows.prompt_files, model_rules.judge)
READING = (rows.data_files, *LOOKING)
TRAINING_RULES = (
    *(*MODEL, model_rules.several_gpus, rows.train_data, *READING),
    *(steps.optimizer, steps.validation, steps.best, steps.loggers, steps.resume),
)
ANSWERS = (model_rules.answering_model, "series", "trained_series")
RULES: dict[str, tuple[Rule | str, ...]] = {
    "rl": (*TRAINING_RULES, *(model_rules.critic, rows.demonstrations, *SAMPLING, steps.reward, steps.environment)),
    "sft": (*TRAINING_RULES, model_rules.imitation),
    "dpo": (*TRAINING_RULES, "preferences"),
    "reward-model": (*TRAINING_RULES, "rating"),
    "eval": (
        *ANSWERS,
        *(rows.val_data, partial(rows.data_files, names=["val"]), *LOOKING),
        *(steps.response_length, steps.validation, steps.environment),
    ),
    "rescore": (rows.pixels, model_rules.judge),  # `eval` of stored answers
    "generate": (
        *ANSWERS,
        *(rows.some_data, *READING),
        *(steps.response_length, steps.environment, steps.selection, "selection"),
    ),
    "chat": (*ANSWERS, rows.pixels, rows.prompt_files),
    # those of rl that need neither rows nor rewards
    "estimate": (*MODEL, rows.pixels, steps.optimizer, model_rules.critic, *SAMPLING),
    "check-data": ("series", rows.some_data, *READING),
    "serve-reward": (rows.pixels, model_rules.judge, steps.reward),
}
