"""An exponential moving average of the policy's weights; checkpoints contain it as a model folder.

average = b * average + (1 - b) * weights, after every update; b = train.ema
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.models.families import Family
from saccade.recipes import model_setup
from saccade.run.checkpoint import copy_processor
from saccade.system.contents import File
from saccade.trainer.local import LocalTrainer


@dataclass(frozen=True)
class Average:
    trainer: LocalTrainer

    def saved_bytes(self) -> int:
        return 2 * self.trainer.saved_bytes()

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        """The files to resume from (fp32 if the average is fp32), and a loadable model folder."""
        yield from self.trainer.state_files(copy=copy)
        yield from self.trainer.model_files(copy=copy)
        yield "", partial(copy_processor, self.trainer.family)


def set_up_ema(
    config: Config, family: Family, policy: Any, start: Path | None, attach: Callable[[Any], object] = lambda _: None
) -> dict[str, Any]:
    """Set up the average if train.ema is set; returns it as a part of checkpoints, by name. `start` is the checkpoint
    to resume from; `attach` adds heads that the model's folder does not have.
    """
    if not config.train.ema:
        return {}
    if policy.engine is not None:  # the policy is on ranks, so its average is, too
        return {"ema": policy.beside("ema")}
    model = model_setup.load_policy(config, family, divided=True)
    attach(model)
    average = model_setup.backend_of(config)(model, family)
    if start is not None:
        average.load_state(start / "state" / "ema")
    policy.ema = (average, 1 - config.train.ema)
    return {"ema": Average(average)}
