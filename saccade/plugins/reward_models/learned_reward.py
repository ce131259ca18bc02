"""A trained reward model that scores responses, rendered in its own chat template and packed as token forests.

Samples of one question share its prompt as a trunk. With `offload` the weights stay in main memory between
calls. A reward service hosts the same class.

    model = LearnedReward.load("runs/rm/checkpoints/step-100", device=device, dtype=dtype)
    model.score([RewardSample(id="a", response="7", messages=[...], media=[...])])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.config import Config, RewardConfig, SeriesConfig
from saccade.errors import ConfigError, DataError
from saccade.forest.packing import pack
from saccade.models.families import Family, load_family
from saccade.models.load import load_model, pick_dtype
from saccade.plugins.offload.host_trainer import HostTrainer
from saccade.plugins.reward_models import reward_card
from saccade.plugins.reward_models.reward_card import REWARD_FILE, RewardCard, read_card, why_unusable
from saccade.plugins.reward_models.reward_head import RewardHead, attach_reward
from saccade.plugins.reward_models.reward_losses import judgements, ratings
from saccade.plugins.reward_models.reward_model_term import SUMMARIES, conversation_of, model_terms
from saccade.recipes import model_setup
from saccade.registry import HOOKS
from saccade.rewards.reward_sample import RewardSample
from saccade.trainer.local import LocalTrainer
from saccade.types import Group, Media, Message, Sample, Trajectory


class LearnedReward:
    fatal: tuple[type[Exception], ...] = ()  # errors of `read` that end the run; others only cost these scores

    def __init__(self, trainer: LocalTrainer, card: RewardCard, *, micro_tokens: int = 16_384) -> None:
        self.trainer, self.card, self.family, self.micro_tokens = trainer, card, trainer.family, micro_tokens
        self._tokens = reward_card.verdict_ids(self.family, card.tokens)

    @staticmethod
    def load(
        folder: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        untrained: bool = False,
        by_rows: Any = None,
        trainer: type[LocalTrainer] = LocalTrainer,
        offload: bool = False,
        **options: Any,
    ) -> LearnedReward:
        """`untrained`: a folder without a head gets a random one, to try out a config. `by_rows`: how to shard the
        weights over processes while loading, for a `trainer` that trains or scores sharded models.
        """
        card, family = describe_folder(folder, trust_remote_code, untrained=untrained)
        model = load_model(family, dtype=dtype, device=device, trust_remote_code=trust_remote_code, by_rows=by_rows)
        if card.kind == "scalar":
            trained = (Path(folder) / REWARD_FILE).is_file()
            head = RewardHead(like=model, card=card, seed=0, stored=Path(folder) if trained else None)
            attach_reward(model, head)
            head.above = []  # free the layers after the probed one: this model is never saved
        return LearnedReward((HostTrainer if offload else trainer)(model, family), card, **options)

    def check(self, *, head: str | None = None, normalise: bool = False, steps: str | None = None) -> None:
        heads = self.card.heads
        flaws = {
            f"has no head {head!r}; it has {', '.join(heads)}": head is not None and head not in heads,
            f"has the heads {', '.join(heads)}; set args.head": head is None and len(heads) > 1,
            f"scores whole responses; drop steps={steps}": steps is not None and self.card.kind == "scalar",
            "has no mean of its scores; drop normalise": normalise and not self.card.statistics,
        }
        if found := [words for words, wrong in flaws.items() if wrong]:
            raise ConfigError(f"reward.terms: {self.family.path} {found[0]}")

    def check_media(self, media: Sequence[Media]) -> None:
        for one in media:
            try:
                self.family.measure(one)
            except DataError as error:
                raise ConfigError(f"reward.terms: {self.family.path}: {error}") from None

    def score(self, samples: Sequence[RewardSample], **options: Any) -> list[float]:
        """One number per sample, NaN if it could not be scored; options are those of `value`."""
        return [math.nan if isinstance(found, str) else self.value(found, **options) for found in self.read(samples)]

    def read(self, samples: Sequence[RewardSample]) -> list[np.ndarray | str]:
        """Per sample the scores of all heads, or of all steps; a string is the reason why there are none."""
        groups, keys = self._groups(samples)
        found = self._numbers(groups)
        return [key if isinstance(key, str) else found[key] for key in keys]

    def value(
        self, numbers: np.ndarray, *, head: str | None = None, normalise: bool = False, steps: str = "mean"
    ) -> float:
        if self.card.kind != "scalar":
            return float(SUMMARIES[steps](numbers)) if len(numbers) else math.nan
        value = float(numbers[self.card.heads.index(head) if head else 0])
        if not normalise:
            return value
        mean, deviation = self.card.statistics[head or self.card.heads[0]]
        return (value - mean) / max(deviation, 1e-6)

    def _numbers(self, groups: Sequence[Group]) -> dict[tuple[str, int], np.ndarray]:
        """Per sequence its scores [heads], or the probability of the best verdict at each of its steps [steps]."""
        scalar = self.card.kind == "scalar"
        batches = pack(groups, micro_tokens=self.micro_tokens, ends=scalar)
        found = ratings(self.trainer, batches) if scalar else judgements(self.trainer, batches, self._tokens)
        return {
            key: rows[index] if scalar else np.exp(rows[batch.sequence == index, 0])
            for batch, rows in zip(batches, found, strict=True)
            for index, key in enumerate(batch.keys)
        }

    def _groups(self, samples: Sequence[RewardSample]) -> tuple[list[Group], list[tuple[str, int] | str]]:
        """Returns (one group per question, per sample its key or the reason why it has no score)."""
        members: dict[tuple[Message, ...], list[Trajectory]] = {}
        keys: list[tuple[str, int] | str] = []
        for number, sample in enumerate(samples):
            try:
                asked, reply = conversation_of(sample)
                read = self._read(str(number), asked, reply)
            except Exception as error:  # a bad sample of one client must not fail those of others
                keys.append(f"unreadable: {type(error).__name__}: {error}")
                continue
            fits = len(read.ids) <= self.family.max_positions
            keys.append(read.key if fits else "unscored: longer than the reward model can read")
            if fits:
                members.setdefault(asked, []).append(read)
        question = Sample(id="", messages=())
        return [Group(sample=question, trajectories=tuple(each)) for each in members.values()], keys

    def _read(self, name: str, asked: tuple[Message, ...], reply: tuple[Message, ...]) -> Trajectory:
        if self.card.kind == "scalar":
            return reward_card.reply_trajectory(name, 0, asked, reply, self.family)
        said = "\n".join(message.text for message in reply if message.role == "assistant")
        messages = reward_card.with_marks(asked, said, self.card)
        return reward_card.steps_trajectory(name, messages, self.family, self.card.placeholder)


def describe_folder(folder: str | Path, trust_remote_code: bool, *, untrained: bool) -> tuple[RewardCard, Family]:
    """Card and family of a reward model, without loading weights; refuses a folder that holds no reward model."""
    if not untrained and (wrong := why_unusable(Path(folder))):
        raise ConfigError(f"reward.terms: {wrong}")
    card = read_card(folder) or RewardCard(kind="scalar", heads=("preference",))
    family = load_family(str(folder), trust_remote_code=trust_remote_code)
    return card, HOOKS["plug_series"](family, SeriesConfig())


# -- for reward terms --------------------------------------------------------------------------------


def load_learned(config: Config, path: str, *, by_rows: Any = None, **options: Any) -> LearnedReward:
    """Load into this process, next to the policy. A model that is sharded over processes is never offloaded."""
    model_setup.quiet_libraries()
    device = model_setup.device_of(config.run)
    return LearnedReward.load(
        model_setup.model_folder(config.run, path),
        device=device,
        dtype=pick_dtype(config.model.dtype, device),
        micro_tokens=config.train.micro_tokens,
        offload=config.reward.offload and by_rows is None,
        trust_remote_code=config.model.trust_remote_code,
        untrained=path.startswith("tiny:"),
        by_rows=by_rows,
        **options,
    )


def require_folders(reward: RewardConfig) -> None:
    """Raise ConfigError for a `path` that holds no reward model, before the run's folder is created."""
    for args in model_terms(reward):
        if not args["path"].startswith("tiny:") and (wrong := why_unusable(Path(args["path"]))):
            raise ConfigError(f"reward.terms: {wrong}")
