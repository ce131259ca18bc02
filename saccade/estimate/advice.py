"""Which option makes a plan fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saccade.estimate.plan import Plan

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
    config, micro = plan.config, plan.config.train.micro_tokens // 2
    smaller: list[str] = []
    while micro >= plan.step.longest:
        smaller.append(f"train.micro_tokens={micro}")
        micro //= 2
    adapters = {"full": ["lora", "qlora"], "lora": ["qlora"], "qlora": []}
    options = [
        ["model.checkpointing=auto"] if config.model.checkpointing == "off" else [],
        smaller,
        [f"rollout.max_sequences={n}" for n in (256, 128, 64, 32) if n < plan.sequences],
        ["train.optimizer=adamw_bf16"]
        if config.train.optimizer == "adamw" and plan.element < 4
        else [],
        *([f"model.train={kind}"] for kind in adapters.get(config.model.train, ["lora", "qlora"])),
    ]
    return [values for values in options if values]


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
