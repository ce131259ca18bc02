"""Main memory of a run on a GPU, by item. On a CPU all items of `memory` are there."""

from __future__ import annotations

from saccade.estimate.memory import GIB, Item, Memory
from saccade.estimate.plan import Plan
from saccade.media.pixel_cache import DECODED
from saccade.models.families.pixels import CACHE_BYTES

PROCESS_GIB = 2.0  # libraries and the context of CUDA, as one H200 showed
# How items begin that a checkpoint holds beside the weights.
STATE = ("fp32 masters", "moments", "average")


def host_of(plan: Plan, memory: Memory) -> tuple[Item, ...]:
    """`phase` says when: always, start or save. Weights go through main memory; a checkpoint is
    copied there, if it fits, and written while training goes on.
    """
    if not plan.device.is_gpu:
        return ()
    weights = plan.whole.weights * len(plan.learners) / GIB  # of adapters the merged ones
    if plan.config.train.ema:  # in a model folder, beside what it goes on from
        weights += plan.whole.weights / GIB
    kept = (*STATE, "reference") if plan.algorithm.reference_moves else STATE
    state = sum(item.gib for item in memory.items if item.name.startswith(kept))
    items = [
        Item(name="the process", gib=PROCESS_GIB, phase="always"),
        Item(name="weights while they load", gib=plan.whole.weights / GIB, phase="start"),
    ]
    if any(batch.media for batch in plan.step.batches):
        size = (CACHE_BYTES + DECODED.max_bytes) / GIB
        items.append(Item(name="pictures", gib=size, phase="always", note="at most"))
    if plan.config.save.background:
        note = "kept for the next one; without room for twice that training waits"
        items.append(
            Item(name="copy of a checkpoint", gib=weights + state, phase="save", note=note)
        )
    return tuple(items)


def host_peak(items: tuple[Item, ...]) -> float:
    always = sum(item.gib for item in items if item.phase == "always")
    return always + max((item.gib for item in items if item.phase != "always"), default=0.0)
