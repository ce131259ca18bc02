"""Which option makes a plan fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saccade.plugins.estimate.batch_plan import Plan
from saccade.plugins.reward_models.reward_model_term import model_terms

SMALLEST_BATCH, SHORTEST_RESPONSE = 1024, 256  # tokens
SMALLEST_PICTURE, SMALLEST_RANK = 224 * 224, 8

Fits = Callable[[Sequence[str]], bool]  # with these options changed


def advice(plan: Plan, fits: Fits) -> Iterator[str]:
    """Every option that is enough alone; if none is, some that are enough together."""
    options = ladder(plan)
    alone = [next((value for value in values if fits([value])), None) for values in options]
    if any(alone):
        yield from filter(None, alone)
    elif together := _together(options, fits):
        yield " ".join(together)


def _together(options: Sequence[Sequence[str]], fits: Fits) -> list[str]:
    """From the strongest value of every option back to the mildest ones that still fit, or to none
    of an option, those that cost most first. Nothing where the strongest are not enough.
    """
    values: dict[str, list[str]] = {}
    for option in options:
        values.setdefault(option[0].partition("=")[0], []).extend(option)
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


def ladder(plan: Plan) -> list[list[str]]:
    """Options that save memory, those that cost least first; the values of each, mildest first."""
    model, train, data, reward = plan.model, plan.train, plan.data, plan.reward
    without = " train.ema=0" if train.ema else ""  # adapters are not averaged
    adapters = {"lora": ["qlora"], "qlora": []}.get(model.train, ["lora", "qlora"])
    smallest = max(data.min_pixels, SMALLEST_PICTURE) if plan.step.pictures else data.max_pixels
    options = [
        ("model.checkpointing", {"off": ["auto", "on"], "auto": ["on"]}.get(model.checkpointing, [])),
        ("train.micro_tokens", _halves(train.micro_tokens, SMALLEST_BATCH)),
        ("reward.offload", ["true"] if model_terms(reward) and not reward.offload else []),
        ("rollout.max_sequences", _halves(plan.sequences, 1)),
        ("train.optimizer", ["adamw_bf16"] if train.optimizer == "adamw" and plan.element < 4 else []),
        ("train.ema", ["0"] if train.ema else []),
        *(("model.train", [f"{kind}{without}"]) for kind in adapters),
        ("model.lora.rank", _halves(model.lora.rank, SMALLEST_RANK)),
        ("rollout.max_tokens", _halves(plan.rollout.max_tokens, SHORTEST_RESPONSE)),
        ("data.max_pixels", _halves(data.max_pixels, smallest)),
    ]
    return [[f"{name}={value}" for value in values] for name, values in options if values]


def _halves(value: int, least: int) -> list[str]:
    """Half the value, half of that, down to the least itself."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(f"{value}")
    return found
