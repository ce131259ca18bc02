"""Which option makes a plan fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saccade.estimate.plan import Plan
from saccade.rewards.learned import model_terms

SMALLEST_BATCH, SHORTEST_RESPONSE = 1024, 256  # tokens
SMALLEST_PICTURE = 224 * 224

Fits = Callable[[Sequence[str]], bool]  # with these options changed


def advice(plan: Plan, fits: Fits) -> Iterator[str]:
    """Every option that is enough alone; if none is, some that are enough together."""
    options = levers(plan)
    alone = [lever for values in options if (lever := _first(values, fits))]
    yield from alone
    if alone:
        return
    together: list[str] = []
    for values in options:
        before = [lever for lever in together if _key(lever) != _key(values[0])]
        enough = next((v for v in values if fits([*before, v])), None)
        together = [*before, enough or values[-1]]
        if enough:
            yield " ".join(_needed(together, fits))
            return


def levers(plan: Plan) -> list[list[str]]:
    """Options that save memory, those that cost least first; of each its values, the mildest
    first.
    """
    model, train, data, reward = (
        getattr(plan.config, name) for name in ("model", "train", "data", "reward")
    )
    recompute = {"off": ["auto", "on"], "auto": ["on"], "on": []}[model.checkpointing]
    adapters = {"lora": ["qlora"], "qlora": []}.get(model.train, ["lora", "qlora"])
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
        [f"rollout.max_sequences={n}" for n in (256, 128, 64, 32) if n < plan.sequences],
        ["train.optimizer=adamw_bf16"] if train.optimizer == "adamw" and plan.element < 4 else [],
        *([f"model.train={kind}"] for kind in adapters),
        [f"model.lora.rank={rank}" for rank in _halves(model.lora.rank, 8) if plan.adapted],
        smaller["rollout.max_tokens"],
        smaller["data.max_pixels"],
    ]
    return [values for values in options if values]


def _halves(value: int, least: int) -> list[int]:
    found = []
    while (value := value // 2) >= least:
        found.append(value)
    return found


def _first(values: Sequence[str], fits: Fits) -> str | None:
    return next((value for value in values if fits([value])), None)


def _needed(together: Sequence[str], fits: Fits) -> list[str]:
    """Without those that the others do not need."""
    needed = list(together)
    for lever in together:
        without = [other for other in needed if other != lever]
        if without and fits(without):
            needed = without
    return needed


def _key(lever: str) -> str:
    return lever.partition("=")[0]
