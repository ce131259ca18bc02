"""Rules of the house that a running step shows."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade.algorithms.policy_losses import LOSSES
from saccade.recipes import rl

PACKAGE = str(Path(saccade.__file__).parent)


def test_the_formula_of_the_loss_is_four_calls_from_the_loop(
    tmp_path: Path, rl_config: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, stacks = LOSSES["clip"], []

    @wraps(entry.function)
    def clip(*arguments: Any, **options: Any) -> Any:
        ours = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
        stacks.append([Path(f.filename).stem + "." + f.name for f in ours])
        return entry.function(*arguments, **options)

    monkeypatch.setitem(LOSSES, "clip", replace(entry, function=clip))  # type: ignore[arg-type]
    rl.run(rl_config(tmp_path, run__max_steps=1))
    between = stacks[0][stacks[0].index("rl.run") + 1 :]
    assert between == [
        *("updates.update_models", "local.train_step", "local.sum_gradients"),
        "objective.objective",
    ]
