"""Demonstrations that reinforcement learning also learns from: a second stream, the same updates.

    loss of an update + train.sft_coef * mean of -log p over the tokens of its demonstrations

demonstrations = Demonstrations(config, family, quarantine, updates=algorithm.updates_per_step)
backend.train_step([*batches, *demonstrations.batches()], PolicyLoss(algorithm, scoring), lr=lr)
"""

import math
from dataclasses import replace

import numpy as np

from saccade.config import Config
from saccade.data.datasets import Stream
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.recipes import questions
from saccade.recipes.to_trajectory import dialogue
from saccade.run.quarantine import Quarantine
from saccade.types import Batch


class Demonstrations:
    def __init__(self, config: Config, family: Family, quarantine: Quarantine, *, updates: int) -> None:
        self.config, self.family, self.quarantine = config, family, quarantine
        self.rows = math.ceil(config.train.prompts_per_step / updates)
        data = questions.load_dialogues(config, config.data.demonstrations, family)
        self.stream = Stream(data, seed=config.run.seed, config=config.data)

    def batches(self) -> list[Batch]:
        """The next rows. Without advantages they are imitated."""
        rows = self.quarantine.take(self.stream, self.rows, self.family)
        groups = [dialogue(row, self.family, "assistant") for row in rows]
        train = self.config.train
        batches = pack(groups, positions=self.family.positions, micro_tokens=train.micro_tokens)
        scale = train.sft_coef / sum(len(batch.reads) for batch in batches)
        return [replace(b, scales=np.full(len(b.reads), scale, np.float32)) for b in batches]
