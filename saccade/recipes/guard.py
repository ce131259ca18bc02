"""What happens when an update could not be made."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.backends import Update
from saccade.config import TrainConfig
from saccade.errors import TrainingError
from saccade.recipes.parts import save_batches
from saccade.recipes.run import Run
from saccade.types import Batch


def guard(
    run: Run, train: TrainConfig, batches: Sequence[Batch], update: Update, *, who: str = "policy"
) -> None:
    """A skipped update costs its batch; several in a row end the run."""
    counts = run.progress.setdefault("bad_updates", {})
    counts[who] = counts.get(who, 0) + 1 if update.skipped else 0
    if not update.skipped:
        return
    step, whose = run.step + 1, "" if who == "policy" else f"{who} "
    name = f"{whose}step-{step}-{counts[who]}.npz".replace(" ", "-")
    where = save_batches(run.folder.path / "bad-batches" / name, batches)
    run.console.note(
        f"step {step}: {whose}loss or gradient not finite, update skipped; batch in {where}"
    )
    if train.on_nonfinite == "stop" or counts[who] >= train.max_bad_updates:
        raise TrainingError(
            f"{counts[who]} {whose}updates in a row were not finite (train.on_nonfinite="
            f"{train.on_nonfinite}); lower train.lr, and look at {where}"
        )
