"""Build an `Algorithm` from a config: look up its functions, fill in their options, check them.

An invalid combination is refused with the field, the reason and a value that works. Knows nothing of
what the functions compute. Imports no torch.

    >>> resolve(AlgorithmConfig(preset="dapo"), max_tokens=20480).overlong.buffer
    4096
"""

from typing import Any

from saccade.algorithms.algorithm_state import LARGEST_ERROR
from saccade.algorithms.filters import EXCLUDABLE
from saccade.algorithms.resolved_algorithm import AXES, Algorithm
from saccade.algorithms.table import Entry, find, parsed
from saccade.config import AlgorithmConfig, RewardConfig, TrainConfig, load
from saccade.config.schema import CorrectionConfig
from saccade.config.schema.presets import ADD_ONS, args_beside, row_of, unknown
from saccade.config.schema.section import given_options, without_effect
from saccade.errors import ConfigError

EXAMPLES = {"low": 0.97, "high": 1.03, "threshold": 0.01}  # shown for options without a default; 1 for others
FIELDS = AlgorithmConfig.model_fields


def resolve(config: AlgorithmConfig, *, max_tokens: int, ahead: int = 0, **train: int | None) -> Algorithm:
    """The algorithm of an `algorithm` section alone; `train`: options of the train section."""
    tree = {"algorithm": config.model_dump(exclude_unset=True), "rollout": {"max_tokens": max_tokens}, "train": train}
    loaded = load(tree)
    return build(loaded.algorithm, loaded.train, loaded.reward, max_tokens, ahead)


def build(
    given: AlgorithmConfig, train: TrainConfig, reward: RewardConfig, max_tokens: int, ahead: int = 0
) -> Algorithm:
    """The algorithm of a whole run; `max_tokens`: limit per episode. If rollouts run `ahead`, tokens get tis.token
    weights, unless the preset or the config gives `correct` (even an empty one), or `old` is rollout, which is then
    the default of losses made for such tokens.
    """
    algorithm, row, weighed = _assemble(given, train, reward, max_tokens), row_of(given.preset), False
    if ahead and not given.correct:
        changes: dict[str, Any] = {}
        if algorithm.loss.older and given.old == "auto" and not why_recompute(algorithm, in_loss=False):
            changes = {"old": "rollout"}
        elif weighed := "correct" not in given.model_fields_set and given.old != "rollout":
            changes = {"correct": (CorrectionConfig(name="tis.token"),)}
        given = given.model_copy(update=changes)
        algorithm = _assemble(given, train, reward, max_tokens)
    _refuse_contradictions(algorithm)
    _refuse_unread(given, algorithm)
    for problem in without_effect(given, "algorithm.", {"algorithm": algorithm}):
        raise ConfigError(problem)
    once = train.updates_per_step * train.epochs_per_batch == 1
    if row.get("on_policy") and not once:
        raise ConfigError(
            f"algorithm.preset={given.preset[0]} takes one optimizer step per batch; use train.updates_per_step=1 "
            f"train.epochs_per_batch=1 instead of {train.updates_per_step} and {train.epochs_per_batch}, or "
            "algorithm.preset=grpo"
        )
    if row.get("on_policy") and ahead:
        fix = "use rollout.ahead=0, or algorithm.preset=grpo"
        raise ConfigError(f"algorithm.preset={given.preset[0]} is strictly on-policy; {fix}")
    why = why_recompute(algorithm, in_loss=once and given.old != "rollout")
    if why and weighed and not once:
        why = f"rollout.ahead={ahead} weighs tokens by them"
    return algorithm.model_copy(update={"old": old_mode(given.old, once=once, forced=why)})


def _assemble(given: AlgorithmConfig, train: TrainConfig, reward: RewardConfig, max_tokens: int) -> Algorithm:
    """The functions that are named, with their options; nothing is refused yet."""
    row = row_of(given.preset)
    loss, estimator = (_choose(axis, getattr(given, axis), given) for axis in ("policy_loss", "advantage"))
    aggregation = given.aggregation
    if loss.name != row.get("policy_loss", "clip") and "aggregation" not in given.model_fields_set:
        aggregation = loss.own_aggregation or aggregation
    longest = {"fixed_length": max_tokens} if "fixed_length" not in given.args else {}
    aggregate = _choose("aggregation", aggregation, given, **longest)
    divergence = _choose("kl.kind", given.kl.kind, given)
    corrections = tuple(_correction(config, given) for config in given.correct)
    used = estimator.options | loss.options | aggregate.options | (divergence.options if given.kl.coef > 0 else {})
    used |= {name: value for name, value in given.args.items() if any(c.reads(name) for c in corrections)}
    changed: dict[str, Any] = {
        "args": used,
        "kl": given.kl.model_copy(update={"kind": divergence.name}),
        "correct": tuple(CorrectionConfig.model_construct(name=c.name, **c.options) for c in corrections),
        **{"advantage": estimator.name, "policy_loss": loss.name, "aggregation": aggregate.name},
    }
    if given.filter.function is not None:
        function = find("filter.function", {}, given.filter.function).name
        changed["filter"] = given.filter.model_copy(update={"function": function})
    beside = ", ".join(f"{n}={value}" for n, _, value in given_options(given) if n not in ("preset", "correct"))
    return Algorithm.model_construct(
        **dict(given) | changed,
        about=row["about"] + f" Here with {beside}." * bool(beside),
        paper=row["paper"],
        samples_per_prompt=train.samples_per_prompt,
        updates_per_step=train.updates_per_step,
        sequences=train.prompts_per_step * train.samples_per_prompt,
        max_tokens=max_tokens,
        reward_clip=reward.clip,
        reward_normalise=reward.running_norm,
        estimator=estimator,
        loss=loss,
        aggregate=aggregate,
        divergence=divergence,
        corrections=corrections,
    )


def old_mode(wanted: str, *, once: bool, forced: str | None) -> str:
    """Which old log-probs are used. auto: the detached current ones if that is exact, that is with one
    optimizer step per batch (`once`). `forced`: why they must be recomputed before training, or None.
    """
    if wanted == "auto":
        return "detach" if once and not forced else "recompute"
    if wanted == "detach" and not once:
        forced = forced or "is exact only with train.updates_per_step=1 and train.epochs_per_batch=1"
    if forced and wanted != "recompute":
        raise ConfigError(f"algorithm.old={wanted}: {forced}; use algorithm.old=recompute")
    return wanted


def why_recompute(algorithm: Algorithm, *, in_loss: bool) -> str | None:
    """Why the trainer's old log-probs are needed before the first update, or None. `in_loss`: the loss can compute
    weights itself; masks and sums over the step cannot wait, as they decide whether anything is left to train on.
    """
    masked = any(c.masks or not c.weighs for c in algorithm.at_once)
    whole = algorithm.self_normalise or algorithm.denominator == "kept" or masked
    corrections = ", ".join(c.name for c in algorithm.at_once if whole or not in_loss)
    hot = algorithm.hot_first_token
    reasons = {
        "kl.place=reward": algorithm.kl_in_reward,
        f"entropy_top={algorithm.entropy_top:g}": algorithm.entropy_top > 0,
        f"policy_loss={algorithm.policy_loss}": algorithm.loss.select is not None,
        f"correct=[{corrections}]": bool(corrections),
        "args.drpo_kl_damp": bool(algorithm.estimator.options.get("drpo_kl_damp")),
        "filter.keep_surplus": algorithm.filter.keep_surplus,
        "hot_first_token.first_token=is": hot.temperature > 0 and hot.first_token == "is",
    }
    found = next((name for name, forces in reasons.items() if forces), None)
    return found and f"algorithm.{found} needs old log-probs before training"


# -- options of functions --------------------------------------------------------------------------


def _choose(axis: str, name: str, given: AlgorithmConfig, **options: Any) -> Entry:
    """The entry called `name`, with the options given for it."""
    entry = find(axis, AXES[axis], name)
    entry = entry.with_options(parsed(entry, given.args) | parsed(entry, options, f"algorithm.{axis}"))
    if missing := [n for n, p in entry.parameters.items() if p.default is p.empty and n not in entry.overrides]:
        args = ", ".join(f"{n}: {EXAMPLES.get(n, 1)}" for n in missing)
        needed = " and ".join(missing)
        raise ConfigError(f"algorithm.{axis}={name} needs {needed}; for example algorithm.args={{{args}}}")
    return entry


def _correction(config: CorrectionConfig, given: AlgorithmConfig) -> Entry:
    bounds = config.model_dump(exclude_none=True, exclude={"name"})
    entry = _choose("correct", config.name, given, **bounds)
    if unread := [key for key in bounds if not entry.reads(key)]:
        reads = ", ".join(entry.options) or "no option"
        raise ConfigError(f"algorithm.correct: {config.name} has no {unread[0]}; it reads {reads}")
    return entry


def _refuse_unread(given: AlgorithmConfig, algorithm: Algorithm) -> None:
    """Refuse options and add-ons that no chosen function uses."""
    axes = {axis: {name for entry in entries for name in entry.options} for axis, entries in algorithm.chosen.items()}
    read = {name for names in axes.values() for name in names}
    own = args_beside(given.model_dump(exclude_unset=True) | {"preset": given.preset})
    asked = {name: f"args.{name}: has no effect" for name in own}
    for add_on in given.preset[1:]:
        about = f"preset: {add_on} has no effect, as {{name}} is not read"
        asked |= {name: about.format(name=name) for name in ADD_ONS[add_on].get("args", ())}
    for name, says in asked.items():
        for axis, entries in algorithm.chosen.items() if name not in read else ():
            if readers := [other for other, entry in AXES[axis].items() if entry.reads(name)]:
                now = ", ".join(entry.name for entry in entries)
                fix = f"remove it, or use algorithm.{axis}={readers[0]}"
                raise ConfigError(f"algorithm.{says} with {axis}={now}; {fix}")
    for name in given.args:
        if len(readers := [axis for axis, names in axes.items() if name in names]) > 1:
            both = " and ".join(f"{axis}={algorithm.chosen[axis][0].name}" for axis in readers)
            raise ConfigError(f"algorithm.args.{name}: {both} read it; give the parameter of your own another name")
    for name in own:
        if name in FIELDS and name not in read:
            raise ConfigError(f"algorithm.args: {name} is an option: write algorithm.{name}=…")
        if name not in read:
            raise unknown("algorithm.args", name, sorted(read))


# -- contradictions --------------------------------------------------------------------------------


def _refuse_contradictions(algorithm: Algorithm) -> None:
    """Raise an error that names the field, the reason and a value that works."""
    for status in algorithm.exclude_status:
        if status not in EXCLUDABLE:
            raise unknown("algorithm.exclude_status", status, EXCLUDABLE)
    for name, low, high, works in _bounds(algorithm):
        if low >= high:
            raise ConfigError(f"algorithm.{name}: {low:g} is not below {high:g}; use algorithm.{works}")
    for message, holds in _contradictions(algorithm).items():
        if holds:
            raise ConfigError(message)


def _bounds(algorithm: Algorithm) -> list[tuple[str, float, float, str]]:
    """Options with a lower and an upper bound: (name, low, high, a setting that works)."""
    limits, options = algorithm.filter, algorithm.loss.options
    found = [
        ("filter.low", limits.low, limits.high, "filter.low=0.01 algorithm.filter.high=0.99"),
        ("entropy_range", *algorithm.entropy_range, "entropy_range=[0,0.05]"),
    ]
    if "reward_range" in algorithm.estimator.options:
        found.append(("args.reward_range", *algorithm.estimator.options["reward_range"], "args.reward_range=[0,1]"))
    if options.get("weight_floor"):
        found.append(("args.weight_floor", options["weight_floor"], options["weight_cap"], "args.weight_floor=0"))
    for one in algorithm.corrections:
        if one.reads("low") and one.reads("high"):
            works = f"correct=[{{name: {one.name}, low: 0.97, high: 1.03}}]"
            found.append((f"correct: {one.name}", one.options["low"], one.options["high"], works))
    return found


def _contradictions(a: Algorithm) -> dict[str, bool]:
    """Error message → whether it applies."""
    few, kl, buffer, sequences = a.samples_per_prompt < 2, a.kl, a.overlong.buffer, a.sequences
    dual_clip, delta = a.loss.options.get("dual_clip") or 0, a.loss.options.get("delta") or 0
    weighing = [c.name for c in a.corrections if c.weighs]
    adaptive = a.needs_reference and kl.controller == "adaptive"
    coef, (low, high) = a.entropy_coef, a.entropy_range
    return {
        f"train.samples_per_prompt={a.samples_per_prompt}: advantage {a.advantage} compares the members of a group; "
        "use train.samples_per_prompt=8, or algorithm.preset=reinforce_pp": few and a.estimator.group,
        "algorithm.filter.dynamic would keep no group, as one outcome is always constant; use "
        "train.samples_per_prompt=8, or algorithm.filter.dynamic=false": few and a.filter.dynamic,
        f"algorithm.kl.kind={kl.kind}: in the loss its gradient does not lead to the reference; use "
        "algorithm.kl.kind=k1+ or k3, or algorithm.kl.place=reward": a.kl_in_loss and not a.divergence.in_loss,
        **{
            f"algorithm.args.{name}={value:g} must be above 1, or 0; use algorithm.args.{name}=3": 0 < value <= 1
            for name, value in (("dual_clip", dual_clip), ("delta", delta))
        },
        f"algorithm.args.delta={delta:g} bounds the same loss as algorithm.args.dual_clip={dual_clip:g}; use "
        "algorithm.args.dual_clip=3 algorithm.args.delta=0": bool(dual_clip and delta),
        "algorithm.args.whiten_std: has no effect without whitening; remove it, or use algorithm.args.whiten=true": (
            a.estimator.options.get("whiten_std") is False and not a.estimator.options["whiten"]
        ),
        "algorithm.args.kl_clamp: has no effect without a KL in the loss; remove it, or use algorithm.kl.coef=0.01 "
        "algorithm.kl.place=loss": a.divergence.options.get("kl_clamp") == "zero" and not a.kl_in_loss,
        f"algorithm.kl.horizon={kl.horizon:g} is so short that the {sequences} sequences of a step could turn the "
        f"coefficient to 0; use algorithm.kl.horizon={10 * sequences}": adaptive
        and LARGEST_ERROR * sequences >= kl.horizon,
        f"algorithm.overlong.buffer={buffer} must be below the longest response of {a.max_tokens} tokens; use "
        f"algorithm.overlong.buffer={a.max_tokens // 5}": buffer >= a.max_tokens,
        "algorithm.exclude_status=[truncated] leaves out what algorithm.overlong punishes; use "
        "algorithm.overlong.buffer=0, or algorithm.exclude_status=[]": buffer > 0 and "truncated" in a.exclude_status,
        f"algorithm.entropy_coef={coef:g} is outside algorithm.entropy_range=[{low:g},{high:g}], in which it is "
        f"steered; use algorithm.entropy_coef={low:g}": bool(a.entropy_target and coef) and not low <= coef <= high,
        f"algorithm.advantage={a.advantage} needs rewards >= 0; use algorithm.kl.place=loss "
        "algorithm.overlong.buffer=0 reward.running_norm=std, or algorithm.advantage=grpo": a.estimator.positive
        and (a.kl_in_reward or buffer > 0 or a.reward_normalise == "mean_std"),
        "algorithm.args.drpo_kl_damp measures the distance to a reference; use algorithm.kl.coef=1e-4": bool(
            a.estimator.options.get("drpo_kl_damp") and not a.needs_reference
        ),
        f"algorithm.kl.place=reward: advantage {a.advantage} compares the terms of the reward, and a KL is none of "
        "them; use algorithm.kl.place=loss": a.estimator.components and a.kl_in_reward,
        f"algorithm.correct: {' and '.join(weighing)} both weigh tokens for the same gap; keep one, such as "
        f"algorithm.correct=[{''.join(weighing[:1])}]": len(weighing) > 1,
        f"algorithm.correct: policy loss {a.policy_loss} multiplies the weights of all tokens, so each must be that "
        "of the token; use algorithm.correct=[tis.token]": a.loss.applies_weights
        and any(c.by_sequence for c in a.corrections),
    }
