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

from saccade.algorithms.advantages import AdvantageOptions
from saccade.algorithms.algorithm import AXES, KL, Algorithm, Filter, OldMode, Overlong
from saccade.algorithms.checks import find_warnings, refuse_contradictions, refuse_unused
from saccade.algorithms.policy_losses import LossOptions
from saccade.algorithms.presets import COMMON, KIND_OF_PLACE, PRESETS
from saccade.algorithms.table import canonical, find, unknown
from saccade.config import AlgorithmConfig, Config
from saccade.errors import ConfigError


def from_config(config: Config) -> Algorithm:
    """The algorithm of a whole run."""
    return resolve(
        config.algorithm,
        max_tokens=config.rollout.max_tokens * config.env.max_turns,
        samples_per_prompt=config.train.samples_per_prompt,
        updates_per_step=config.train.updates_per_step,
        epochs_per_batch=config.train.epochs_per_batch,
    )


def resolve(
    config: AlgorithmConfig,
    *,
    max_tokens: int,  # most sampled tokens of an episode
    samples_per_prompt: int | None = None,  # None: the row's
    updates_per_step: int = 1,
    epochs_per_batch: int = 1,
) -> Algorithm:
    row = _row(config.preset)
    names = _names(config, row)
    kl = _kl(config, row)
    algorithm = Algorithm(
        preset=config.preset,
        about=row["about"],
        paper=row["paper"],
        samples_per_prompt=samples_per_prompt or row["samples_per_prompt"],
        advantage=names["advantage"],
        advantage_options=_options("advantage", names, config, row, AdvantageOptions),
        adv_clip=_cell(config, row, "adv_clip"),
        policy_loss=names["policy_loss"],
        loss_options=_options("policy_loss", names, config, row, LossOptions),
        aggregation=names["aggregation"],
        fixed_length=config.fixed_length or max_tokens,
        entropy_coef=_cell(config, row, "entropy_coef"),
        old=old_mode(
            _cell(config, row, "old"),
            updates_per_step,
            epochs_per_batch,
            forced=_why_recompute(kl),
        ),
        drop_constant=_cell(config, row, "drop_constant"),
        exclude_status=_cell(config, row, "exclude_status"),
        excluded_in_baseline=_cell(config, row, "excluded_in_baseline"),
        kl=kl,
        filter=_filter(config, row),
        overlong=_overlong(config, row, max_tokens),
    )
    refuse_contradictions(algorithm)
    refuse_unused(config, algorithm)
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


def _row(preset: str) -> Mapping[str, Any]:
    if preset not in PRESETS:
        raise unknown("algorithm.preset", preset, PRESETS)
    row = PRESETS[preset]
    sections = {
        name: {**cells, **row.get(name, {})}
        for name, cells in COMMON.items()
        if isinstance(cells, Mapping)
    }
    return {**COMMON, **row, **sections}


def _cell(section: Any, row: Mapping[str, Any], name: str) -> Any:
    value = getattr(section, name)
    return row[name] if value is None else value


def _names(config: AlgorithmConfig, row: Mapping[str, Any]) -> dict[str, str]:
    names = {axis: canonical(table, _cell(config, row, axis)) for axis, table in AXES.items()}
    if names["policy_loss"] != row["policy_loss"] and config.aggregation is None:
        loss = find("policy_loss", AXES["policy_loss"], names["policy_loss"])
        names["aggregation"] = loss.own_aggregation or names["aggregation"]
    return names


def _options(
    axis: str,
    names: Mapping[str, str],
    config: AlgorithmConfig,
    row: Mapping[str, Any],
    record: type,
) -> Any:
    """Config, else the row's cell while its own entry is in place, else the entry's default."""
    read = find(axis, AXES[axis], names[axis]).options
    defaults = {f.name: f.default for f in fields(record)} if read is None else read
    cells = row if names[axis] == row[axis] else {}
    chosen = {name: cells.get(name, default) for name, default in defaults.items()}
    given = {name: getattr(config, name, None) for name in defaults}
    return record(**chosen | {name: value for name, value in given.items() if value is not None})


def _kl(config: AlgorithmConfig, row: Mapping[str, Any]) -> KL:
    cells = row["kl"]
    place = _cell(config.kl, cells, "place")
    own = cells if place == cells["place"] else {}
    return KL(
        coef=_cell(config.kl, cells, "coef"),
        kind=config.kl.kind or own.get("kind", KIND_OF_PLACE[place]),
        place=place,
        clamp=_cell(config.kl, cells, "clamp"),
    )


def _filter(config: AlgorithmConfig, row: Mapping[str, Any]) -> Filter:
    chosen = {f.name: _cell(config.filter, row["filter"], f.name) for f in fields(Filter)}
    if chosen["function"] is not None:
        chosen["function"] = canonical({}, chosen["function"])
        find("filter.function", {}, chosen["function"])
    return Filter(**chosen)


def _overlong(config: AlgorithmConfig, row: Mapping[str, Any], max_tokens: int) -> Overlong:
    cells = row["overlong"]
    share = min(cells["buffer"], max(1, int(cells["largest_share"] * max_tokens)))
    return Overlong(
        buffer=share if config.overlong.buffer is None else config.overlong.buffer,
        factor=_cell(config.overlong, cells, "factor"),
        max_tokens=max_tokens,
    )


def _why_recompute(kl: KL) -> str | None:
    in_reward = kl.coef > 0 and kl.place == "reward"
    return "algorithm.kl.place=reward needs old log-probs before training" if in_reward else None
