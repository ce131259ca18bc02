"""A config becomes an `Algorithm`: its functions are looked up, their options filled in, checked.

What cannot work is refused with the field, the reason and a value that works (see `checks`). Knows
nothing of what the functions compute. Imports no torch.

    >>> resolve(AlgorithmConfig(preset="dapo"), max_tokens=20480).overlong.buffer
    4096
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.algorithms.checks import find_warnings, refuse_contradictions
from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.policy_losses import KINDS
from saccade.algorithms.resolved_algorithm import AXES, Algorithm, Correct, OldMode
from saccade.algorithms.table import Entry, canonical, find, parsed
from saccade.config import AlgorithmConfig, Config, load
from saccade.config.schema import CorrectionConfig
from saccade.config.schema.presets import ADD_ONS, row_of, unknown
from saccade.config.schema.section import without_effect
from saccade.errors import ConfigError

EXAMPLES = {"low": 0.97, "high": 1.03, "threshold": 0.01}  # bounds of a correction
FIELDS = AlgorithmConfig.model_fields
OF_FUNCTIONS = {  # fields that are options of a function on one of the axes
    n for table in AXES.values() for entry in table.values() for n in entry.options if n in FIELDS
}


def resolve(config: AlgorithmConfig, *, max_tokens: int, **train: int | None) -> Algorithm:
    """The algorithm of a section alone; `train`: what is given of that section."""
    tree = {"algorithm": config.model_dump(exclude_unset=True), "rollout": {"max_tokens": max_tokens}, "train": train}
    return from_config(load(tree))


def from_config(config: Config) -> Algorithm:
    """The algorithm of a whole run."""
    given, train, row = config.algorithm, config.train, row_of(config.algorithm.preset)
    max_tokens = config.rollout.max_tokens * config.env.max_turns
    names = {axis: canonical(table, getattr(given, axis)) for axis, table in AXES.items()}
    if names["policy_loss"] != row.get("policy_loss", "clip"):
        loss = find("policy_loss", AXES["policy_loss"], names["policy_loss"])
        if loss.own_aggregation and "aggregation" not in given.model_fields_set:
            names["aggregation"] = loss.own_aggregation
    entries = {axis: find(axis, AXES[axis], name) for axis, name in names.items()}
    options = {axis: _options(entry, given) for axis, entry in entries.items()}
    if entries["aggregation"].reads("fixed_length") and "fixed_length" not in given.args:
        options["aggregation"]["fixed_length"] = max_tokens
    kind = canonical(KINDS, given.kl.kind or {"loss": "k3", "reward": "k1"}[given.kl.place])
    divergence = find("kl.kind", KINDS, kind)
    kl_options = divergence.options | parsed(divergence, given.args)
    if given.kl.clamp is not None and divergence.reads("clamp"):
        kl_options["clamp"] = given.kl.clamp
    corrections = tuple(_correction(cells, given.args) for cells in given.correct)
    used = {name: value for axis in AXES for name, value in options[axis].items()}
    chosen = dict(given) | names | {name: used.get(name) for name in OF_FUNCTIONS}
    if given.filter.function is not None:
        function = canonical({}, given.filter.function)
        find("filter.function", {}, function)
        chosen["filter"] = given.filter.model_copy(update={"function": function})
    algorithm = Algorithm.model_construct(
        **chosen
        | {
            "args": given.args | {n: value for n, value in used.items() if n not in FIELDS},
            "whiten": bool(entries["advantage"].whiten if given.whiten is None else given.whiten),
            "kl": given.kl.model_copy(update={"kind": kind, "clamp": kl_options.get("clamp")}),
            "correct": tuple(CorrectionConfig.model_construct(name=c.name) for c in corrections),
        },
        about=row["about"],
        paper=row["paper"],
        samples_per_prompt=train.samples_per_prompt,
        updates_per_step=train.updates_per_step,
        sequences=train.prompts_per_step * train.samples_per_prompt,
        max_tokens=max_tokens,
        reward_clip=config.reward.clip,
        reward_normalise=config.reward.running_norm,
        advantage_options=options["advantage"],
        loss_options=options["policy_loss"],
        aggregation_options=options["aggregation"],
        kl_options=kl_options,
        corrections=corrections,
    )
    refuse_contradictions(algorithm)
    _refuse_unread(given, algorithm)
    for problem in without_effect(given, "algorithm.", {"algorithm": algorithm}):
        raise ConfigError(problem)
    updates, epochs = train.updates_per_step, train.epochs_per_batch
    old = old_mode(given.old, updates, epochs, forced=why_recompute(algorithm))
    if row.get("on_policy") and updates * epochs > 1:
        raise ConfigError(
            f"algorithm.preset={given.preset[0]} takes one optimizer step per batch, not "
            f"train.updates_per_step={updates} train.epochs_per_batch={epochs}; use 1 and 1, or "
            "algorithm.preset=grpo"
        )
    return algorithm.model_copy(update={"old": old, "warnings": find_warnings(algorithm)})


def old_mode(wanted: str, updates: int, epochs: int, *, forced: str | None = None) -> OldMode:
    """Which old log-probs are used: the detached current ones wherever that is exact.

    `forced` says why they must be recomputed before training, if they must.
    """
    on_policy = updates == 1 and epochs == 1
    if wanted == "recompute" or (wanted == "auto" and (forced or not on_policy)):
        return "recompute"
    if forced is not None:
        raise ConfigError(f"algorithm.old={wanted}: {forced}; use algorithm.old=recompute")
    if wanted == "detach" and not on_policy:
        raise ConfigError(
            f"algorithm.old=detach is exact only with one optimizer step per batch, not with train.updates_per_step="
            f"{updates} train.epochs_per_batch={epochs}; use 1 and 1, or algorithm.old=recompute"
        )
    return "rollout" if wanted == "rollout" else "detach"


def why_recompute(algorithm: Algorithm) -> str | None:
    """What needs old log-probs of the trainer before the first update, in words."""
    corrections = ", ".join(c.name for c in algorithm.at_once)
    fire = algorithm.hot_first_token
    reasons = {
        "kl.place=reward": algorithm.kl_in_reward,
        f"entropy_top={algorithm.entropy_top:g}": algorithm.entropy_top > 0,
        f"policy_loss={algorithm.policy_loss}": algorithm.loss.select is not None,
        f"correct=[{corrections}]": bool(corrections),
        "self_normalise": algorithm.self_normalise,
        "args.drpo_kl_damp": bool(algorithm.advantage_options.get("drpo_kl_damp")),
        "filter.keep_surplus": algorithm.filter.keep_surplus,
        "hot_first_token.first_token=is": fire.temperature > 0 and fire.first_token == "is",
    }
    found = [name for name, forces in reasons.items() if forces]
    return f"algorithm.{found[0]} needs old log-probs before training" if found else None


# -- options of functions --------------------------------------------------------------------------


def _options(entry: Entry, given: AlgorithmConfig) -> dict[str, Any]:
    """What was given for the options of an entry, else its defaults."""
    fields = {n: getattr(given, n) for n in entry.options if n in FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    return entry.options | parsed(entry, given.args) | fields


def _correction(cells: CorrectionConfig, args: Mapping[str, Any]) -> Correct:
    name = canonical(CORRECTIONS, cells.name)
    entry = find("correct", CORRECTIONS, name)
    bounds = cells.model_dump(exclude_none=True, exclude={"name"})
    for key in bounds:
        if not entry.reads(key):
            raise ConfigError(
                f"algorithm.correct: {cells.name} has no {key}; it reads {', '.join(entry.options) or 'no option'}"
            )
    options = {**entry.options, **parsed(entry, args), **bounds}
    missing = [key for key in entry.required if options[key] is None]
    if missing:
        works = bounds | {key: EXAMPLES[key] for key in missing if key in EXAMPLES}
        shown = "".join(f", {key}: {value:g}" for key, value in works.items())
        others = ", ".join(f"{key}: 1" for key in missing if key not in EXAMPLES)
        raise ConfigError(
            f"algorithm.correct: {cells.name} needs {' and '.join(missing)}; for example "
            f"algorithm.correct=[{{name: {cells.name}{shown}}}]" + (f" algorithm.args={{{others}}}" if others else "")
        )
    return Correct(name=name, options=options)


def _refuse_unread(given: AlgorithmConfig, algorithm: Algorithm) -> None:
    """Options and add-ons that no chosen function reads would do nothing."""
    entries = [entry for _, entry, _ in algorithm.axes.values()]
    entries += [algorithm.divergence, *(correction.entry for correction in algorithm.corrections)]
    read = {name for entry in entries for name in entry.options}
    asked = {name: f"{name}: has no effect" for name in given.model_fields_set}
    asked |= {name: f"args.{name}: has no effect" for name in given.args}
    for add_on in given.preset[1:]:
        about = f"preset: {add_on} has no effect, as {{name}} is not read"
        asked |= {name: about.format(name=name) for name in ADD_ONS[add_on] if name in FIELDS}
    for name, says in asked.items():
        for axis, table in AXES.items() if name not in read else ():
            readers = [other for other, entry in table.items() if entry.reads(name)]
            if readers:
                raise ConfigError(
                    f"algorithm.{says} with {axis}={getattr(algorithm, axis)}; remove it, or use "
                    f"algorithm.{axis}={readers[0]}"
                )
    for name in given.args:
        if name in FIELDS:
            raise ConfigError(f"algorithm.args: {name} is an option: write algorithm.{name}=…")
        if name not in read:
            raise unknown("algorithm.args", name, sorted(read - FIELDS.keys()))
