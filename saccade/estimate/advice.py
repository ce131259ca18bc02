"""Which option makes a plan fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saccade.estimate.plan import Plan
from saccade.rewards.reward_model_term import model_terms

SMALLEST_BATCH, SHORTEST_RESPONSE = 1024, 256  # tokens
SMALLEST_PICTURE, SMALLEST_RANK = 224 * 224, 8

Fits = Callable[[Sequence[str]], bool]  # with these options changed


def advice(plan: Plan, fits: Fits) -> Iterator[str]:
    """Every option that is enough alone; if none is, some that are enough together."""
    options = levers(plan)
    alone = [lever for values in options if (lever := _first(values, fits))]
    if alone:
        yield from alone
    elif together := _together(options, fits):
        yield " ".join(together)


def _together(options: Sequence[Sequence[str]], fits: Fits) -> list[str]:
    """From the strongest value of every option back to the mildest ones that still fit, or to none
    of an option, those that cost most first. Nothing where the strongest are not enough.
    """
    values: dict[str, list[str]] = {}
    for option in options:
        values.setdefault(_key(option[0]), []).extend(option)
    chosen = {name: found[-1] for name, found in values.items()}
    if not fits(list(chosen.values())):
        return []
    for name in reversed(values):
        others = [value for other, value in chosen.items() if other != name]
        if fits(others):
            del chosen[name]
        else:
            chosen[name] = next(value for value in values[name] if fits([*others, value]))
    return list(chosen.values())


def levers(plan: Plan) -> list[list[str]]:
    """Options that save memory, those that cost least first; of each its values, the mildest
    first.
    """
    model, train, data, reward = (
        getattr(plan.config, name) for name in ("model", "train", "data", "reward")
    )
    recompute = {"off": ["auto", "on"], "auto": ["on"], "on": []}[model.checkpointing]
    adapters = {"lora": ["qlora"], "qlora": []}.get(model.train, ["lora", "qlora"])
    without = " train.ema=0" if train.ema else ""  # adapters are not averaged
    pictures = any(batch.media for batch in plan.step.batches)
    smallest = max(data.min_pixels, SMALLEST_PICTURE) if pictures else data.max_pixels
    halves = {
        "train.micro_tokens": _halves(train.micro_tokens, SMALLEST_BATCH),
        "rollout.max_tokens": _halves(plan.config.rollout.max_tokens, SHORTEST_RESPONSE),
        "data.max_pixels": _halves(data.max_pixels, smallest),
    }
    smaller = {name: [f"{name}={value}" for value in found] for name, found in halves.items()}
    options = [
        [f"model.checkpointing={mode}" for mode in recompute],
        smaller["train.micro_tokens"],
        ["reward.offload=true"] if model_terms(reward) and not reward.offload else [],
        [f"rollout.max_sequences={n}" for n in _halves(plan.sequences, 1)],
        ["train.optimizer=adamw_bf16"] if train.optimizer == "adamw" and plan.element < 4 else [],
        ["train.ema=0"] if train.ema else [],
        *([f"model.train={kind}{without}"] for kind in adapters),
        [f"model.lora.rank={rank}" for rank in _halves(model.lora.rank, SMALLEST_RANK)],
        smaller["rollout.max_tokens"],
        smaller["data.max_pixels"],
    ]
    return [values for values in options if values]


def _halves(value: int, least: int) -> list[int]:
    """Down to the least itself."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(value)
    return found


def _first(values: Sequence[str], fits: Fits) -> str | None:
    return next((value for value in values if fits([value])), None)


def _key(lever: str) -> str:
    return lever.partition("=")[0]
