"""What happens when an update could not be made."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.backends import Update
from saccade.config import TrainConfig
from saccade.errors import TrainingError
from saccade.recipes.parts import save_batches
from saccade.recipes.run import Run
from saccade.types import Batch


def guard(run: Run, train: TrainConfig, batches: Sequence[Batch], update: Update) -> None:
    """A skipped update costs its batch; several in a row end the run."""
    run.progress["bad_updates"] = run.progress.get("bad_updates", 0) + 1 if update.skipped else 0
    if not update.skipped:
        return
    step = run.step + 1
    name = f"step-{step}-{run.progress['bad_updates']}"
    where = save_batches(run.folder.path / "bad-batches" / f"{name}.npz", batches)
    run.console.note(f"step {step}: loss or gradient not finite, update skipped; batch in {where}")
    if train.on_nonfinite == "stop" or run.progress["bad_updates"] >= train.max_bad_updates:
        raise TrainingError(
            f"{run.progress['bad_updates']} updates in a row were not finite (train.on_nonfinite="
            f"{train.on_nonfinite}); lower train.lr, and look at {where}"
        )
