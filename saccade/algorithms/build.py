"""A config becomes an `Algorithm`: a preset row, overridden, completed and checked.

What cannot work is refused with the field, the reason and a value that works (see `checks`). Knows
nothing of what the functions compute. Imports no torch.

    >>> resolve(AlgorithmConfig(preset="dapo"), max_tokens=20480).overlong.buffer
    4096
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import ValidationError

from saccade.algorithms.algorithm import (
    AXES,
    KL,
    Algorithm,
    Correct,
    Critic,
    Entropy,
    Filter,
    Fire,
    OldMode,
    Overlong,
)
from saccade.algorithms.checks import find_warnings, refuse_contradictions
from saccade.algorithms.corrections import CORRECTIONS
from saccade.algorithms.kl import KINDS
from saccade.algorithms.presets import ADD_ONS, COMMON, KIND_OF_PLACE, PRESETS, Row
from saccade.algorithms.table import Entry, canonical, find, unknown
from saccade.algorithms.unused import refuse_unread_add_ons, refuse_unused
from saccade.config import AlgorithmConfig, Config, RewardConfig, explain
from saccade.errors import ConfigError

EXAMPLES = {"low": 0.97, "high": 1.03, "threshold": 0.01}  # bounds of a correction


def from_config(config: Config) -> Algorithm:
    """The algorithm of a whole run."""
    return resolve(
        config.algorithm,
        reward=config.reward,
        max_tokens=config.rollout.max_tokens * config.env.turns,
        samples_per_prompt=config.train.samples_per_prompt,
        prompts_per_step=config.train.prompts_per_step,
        updates_per_step=config.train.updates_per_step,
        epochs_per_batch=config.train.epochs_per_batch,
    )


def resolve(
    config: AlgorithmConfig,
    *,
    max_tokens: int,  # most sampled tokens of an episode
    reward: RewardConfig | None = None,
    samples_per_prompt: int | None = None,  # None: the row's
    prompts_per_step: int | None = None,
    updates_per_step: int | None = None,  # None: the row's, at most one per prompt
    epochs_per_batch: int = 1,
) -> Algorithm:
    row = _row(config.preset)
    names = _names(config, row)
    entries = {axis: find(axis, AXES[axis], name) for axis, name in names.items()}
    options = {axis: _options(axis, names, config, row) for axis in AXES}
    if entries["aggregation"].reads("fixed_length") and "fixed_length" not in config.args:
        options["aggregation"]["fixed_length"] = max_tokens
    updates = updates_per_step or min(row["updates_per_step"], prompts_per_step or 1 << 30)
    reward = reward or RewardConfig()
    algorithm = Algorithm(
        preset=config.preset,
        about=row["about"],
        paper=row["paper"],
        samples_per_prompt=samples_per_prompt or row["samples_per_prompt"],
        updates_per_step=updates,
        sequences=(prompts_per_step or 1) * (samples_per_prompt or row["samples_per_prompt"]),
        advantage=names["advantage"],
        advantage_options=options["advantage"],
        whiten=_whiten(config, row, entries["advantage"]),
        whiten_std=_cell(config, row, "whiten_std"),
        adv_clip=_cell(config, row, "adv_clip"),
        reward_clip=reward.clip or row["reward_clip"],
        reward_normalise=reward.normalise,
        reward_range=_cell(config, row, "reward_range"),
        policy_loss=names["policy_loss"],
        loss_options=options["policy_loss"],
        aggregation=names["aggregation"],
        aggregation_options=options["aggregation"],
        denominator=_cell(config, row, "denominator"),
        old="detach",  # until all that may force another is known
        corrections=_corrections(config, row),
        self_normalise=_cell(config, row, "self_normalise"),
        drop_constant=_cell(config, row, "drop_constant"),
        exclude_status=_cell(config, row, "exclude_status"),
        excluded_in_baseline=_cell(config, row, "excluded_in_baseline"),
        entropy=Entropy(
            **{f.name: _cell(config, row, f"entropy_{f.name}") for f in fields(Entropy)}
        ),
        kl=_kl(config, row),
        filter=_filter(config, row),
        overlong=_overlong(config, row, max_tokens),
        fire=_section(Fire, config.fire, row["fire"]),
        critic=_section(Critic, config.critic, row["critic"]),
    )
    refuse_contradictions(algorithm)
    refuse_unread_add_ons(config, algorithm, ADD_ONS)
    refuse_unused(config, algorithm)
    forced = why_recompute(algorithm)
    old = old_mode(_cell(config, row, "old"), updates, epochs_per_batch, forced=forced)
    if row["on_policy"] and updates * epochs_per_batch > 1:
        raise ConfigError(
            f"algorithm.preset={config.preset} takes one optimizer step per batch, not "
            f"train.updates_per_step={updates} train.epochs_per_batch={epochs_per_batch}; use 1 "
            "and 1, or algorithm.preset=grpo"
        )
    algorithm = replace(algorithm, old=old)
    return replace(algorithm, warnings=find_warnings(algorithm))


def old_mode(wanted: str, updates: int, epochs: int, *, forced: str | None = None) -> OldMode:
    """Which old log-probs are used: the detached current ones wherever that is exact.

    `forced` says why they must be recomputed before training, if they must.
    """
    on_policy = updates == 1 and epochs == 1
    if wanted == "auto":
        return "detach" if on_policy and forced is None else "recompute"
    if wanted == "recompute":
        return "recompute"
    if forced is not None:
        raise ConfigError(f"algorithm.old={wanted}: {forced}; use algorithm.old=recompute")
    if wanted == "rollout":
        return "rollout"
    if not on_policy:
        raise ConfigError(
            f"algorithm.old=detach is exact only with one optimizer step per batch, not with "
            f"train.updates_per_step={updates} train.epochs_per_batch={epochs}; use 1 and 1, or "
            "algorithm.old=recompute"
        )
    return "detach"


def why_recompute(algorithm: Algorithm) -> str | None:
    """What needs old log-probs of the trainer before the first update, in words."""
    corrections = ", ".join(c.name for c in algorithm.at_once)
    fire = algorithm.fire
    reasons = {
        "kl.place=reward": algorithm.kl_in_reward,
        f"entropy_top={algorithm.entropy.top:g}": algorithm.entropy.top > 0,
        f"policy_loss={algorithm.policy_loss}": algorithm.loss.select is not None,
        f"correct=[{corrections}]": bool(corrections),
        "self_normalise": algorithm.self_normalise,
        "args.drpo_kl_damp": bool(algorithm.advantage_options.get("drpo_kl_damp")),
        "filter.keep_surplus": algorithm.filter.keep_surplus,
        "fire.first_token=is": fire.temperature > 0 and fire.first_token == "is",
    }
    found = [name for name, forces in reasons.items() if forces]
    return f"algorithm.{found[0]} needs old log-probs before training" if found else None


# -- rows ------------------------------------------------------------------------------------------


def _row(preset: str) -> Row:
    name, *add_ons = preset.split("+")
    if name not in PRESETS:
        if name in ADD_ONS:
            raise ConfigError(
                f"algorithm.preset={preset}: {name} is added to a row, as in grpo+{name}"
            )
        raise unknown("algorithm.preset", name, PRESETS)
    row = _laid_over(COMMON, PRESETS[name])
    for add_on in add_ons:
        if add_on not in ADD_ONS:
            raise unknown(f"algorithm.preset={preset}: add-on", add_on, ADD_ONS)
        extra = ADD_ONS[add_on]
        papers = ", ".join(filter(None, [row["paper"], extra["paper"]]))
        row = {**_laid_over(row, extra), "about": row["about"], "paper": papers}
    return row


def _laid_over(row: Row, upper: Row) -> Row:
    """Sections are merged, lists joined, the rest replaced."""
    merged = dict(row)
    for name, cell in upper.items():
        below: Any = row.get(name)
        if isinstance(below, Mapping):
            merged[name] = {**below, **cell}
        elif name in ("correct", "exclude_status"):
            merged[name] = (*below, *(c for c in cell if c not in below))
        else:
            merged[name] = cell
    return merged


def _cell(section: Any, row: Row, name: str) -> Any:
    value = getattr(section, name)
    return row[name] if value is None else value


def _section(record: type, section: Any, row: Row) -> Any:
    return record(**{f.name: _cell(section, row, f.name) for f in fields(record)})


def _names(config: AlgorithmConfig, row: Row) -> dict[str, str]:
    names = {axis: canonical(table, _cell(config, row, axis)) for axis, table in AXES.items()}
    if names["policy_loss"] != row["policy_loss"] and config.aggregation is None:
        loss = find("policy_loss", AXES["policy_loss"], names["policy_loss"])
        names["aggregation"] = loss.own_aggregation or names["aggregation"]
    return names


def _options(
    axis: str, names: Mapping[str, str], config: AlgorithmConfig, row: Row
) -> dict[str, Any]:
    """Config, else the row's cell, else the entry's default.

    A cell that the row's own entry reads was chosen for that entry, so it holds with no other one.
    """
    own = find(axis, AXES[axis], row[axis])
    entry = find(axis, AXES[axis], names[axis])
    in_place = names[axis] == row[axis]
    cells = {n: v for n, v in row.items() if in_place or not own.reads(n)}
    return _chosen(entry, config, cells)


def _chosen(entry: Entry, section: Any, cells: Row, args: Row | None = None) -> dict[str, Any]:
    """What was given for the options of an entry, else the cells, else its defaults."""
    given = parsed(entry, section.args if args is None else args)
    for name in entry.options:
        value = getattr(section, name, None)
        if value is None and name in ("clip_low", "clip_high"):
            value = getattr(section, "clip", None)
        if value is not None:
            given[name] = value
    return {
        name: given.get(name, cells.get(name, default)) for name, default in entry.options.items()
    }


def parsed(entry: Entry, args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `algorithm.args` that the entry reads, as its annotations want them."""
    found = {}
    for name in (name for name in args if entry.reads(name)):
        try:
            found[name] = entry.parse(name, args[name])
        except ValidationError as error:
            [first, *_] = error.errors()
            where = ("algorithm", "args", name, *first["loc"])
            default = entry.options[name]
            hint = "" if default is None else f" (its default is {default})"
            raise ConfigError(explain({**first, "loc": where}) + hint) from None
    return found


def _whiten(config: AlgorithmConfig, row: Row, entry: Entry) -> bool:
    wanted = row.get("whiten") if config.whiten is None else config.whiten
    return bool(entry.whiten if wanted is None else wanted)


def _kl(config: AlgorithmConfig, row: Row) -> KL:
    cells = row["kl"]
    place = _cell(config.kl, cells, "place")
    own = cells if place == cells["place"] else {}
    kind = canonical(KINDS, config.kl.kind or own.get("kind", KIND_OF_PLACE[place]))
    entry = find("kl.kind", KINDS, kind)
    plain = [f.name for f in fields(KL) if f.name not in ("kind", "place", "options")]
    return KL(
        kind=kind,
        place=place,
        options=_chosen(entry, config.kl, cells, config.args),
        **{name: _cell(config.kl, cells, name) for name in plain},
    )


def _corrections(config: AlgorithmConfig, row: Row) -> tuple[Correct, ...]:
    given = config.correct
    wanted = row["correct"] if given is None else [c.model_dump(exclude_none=True) for c in given]
    corrections = []
    for cells in wanted:
        name = canonical(CORRECTIONS, cells["name"])
        entry = find("correct", CORRECTIONS, name)
        bounds = {key: value for key, value in cells.items() if key != "name"}
        for key in bounds:
            if not entry.reads(key):
                raise ConfigError(
                    f"algorithm.correct: {cells['name']} has no {key}; it reads "
                    f"{', '.join(entry.options) or 'no option'}"
                )
        options = {**entry.options, **parsed(entry, config.args), **bounds}
        missing = [key for key in entry.required if options[key] is None]
        if missing:
            works = bounds | {key: EXAMPLES[key] for key in missing if key in EXAMPLES}
            entries = "".join(f", {key}: {value:g}" for key, value in works.items())
            args = ", ".join(f"{key}: 1" for key in missing if key not in EXAMPLES)
            raise ConfigError(
                f"algorithm.correct: {cells['name']} needs {' and '.join(missing)}; for example "
                f"algorithm.correct=[{{name: {cells['name']}{entries}}}]"
                + (f" algorithm.args={{{args}}}" if args else "")
            )
        corrections.append(Correct(name=name, options=options))
    return tuple(corrections)


def _filter(config: AlgorithmConfig, row: Row) -> Filter:
    chosen = _section(Filter, config.filter, row["filter"])
    if chosen.function is None:
        return chosen
    name = canonical({}, chosen.function)
    find("filter.function", {}, name)
    return replace(chosen, function=name)


def _overlong(config: AlgorithmConfig, row: Row, max_tokens: int) -> Overlong:
    cells = row["overlong"]
    share = min(cells["buffer"], max(1, int(cells["largest_share"] * max_tokens)))
    return Overlong(
        buffer=share if config.overlong.buffer is None else config.overlong.buffer,
        factor=_cell(config.overlong, cells, "factor"),
        max_tokens=max_tokens,
    )
