"""Learned rewards of a run on several GPUs: every rank holds the reward models, and scores a share of the questions
between rollout and update. The controller holds only their cards (`RewardCard`).

    model = open_reward(config, "runs/rm/checkpoints/step-100")
    place_rewards(scorer, policy)
    model.read(samples)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.config import Config
from saccade.errors import SaccadeError
from saccade.forest.packing import deal
from saccade.models.families import Family
from saccade.plugins.ranks.team import Team
from saccade.plugins.reward_models.learned_reward import LearnedReward, describe_folder, load_learned
from saccade.plugins.reward_models.reward_card import RewardCard
from saccade.plugins.reward_models.reward_model_term import NOT_LOADED, conversation_of
from saccade.recipes import model_setup
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from saccade.system.codec import decode
from saccade.trainer import Trainer
from saccade.types import Message

Conversation = tuple[Message, ...]
Question = tuple[Conversation, tuple[Conversation, ...]]  # a prompt, and the replies to it
ReplyScores = tuple[tuple[np.ndarray, ...], tuple[str, ...]]  # for each reply its scores, or why it has none


class RankReward(LearnedReward):
    """A reward model that all ranks hold."""

    fatal = (SaccadeError,)  # means that the ranks have ended, not that one response has no score

    def __init__(self, path: str, card: RewardCard, family: Family) -> None:
        self.path, self.card, self.family = path, card, family
        self.team: Team | None = None  # None until the ranks have started

    def place(self, team: Team) -> None:
        self.team = team
        team.ask_all("add_reward", [{"path": self.path}] * team.size)

    def read(self, samples: Sequence[RewardSample]) -> list[np.ndarray | str]:
        if self.team is None:
            return [NOT_LOADED] * len(samples)
        found: dict[int, np.ndarray | str] = {}
        asked: dict[Conversation, list[tuple[int, Conversation]]] = {}
        for number, sample in enumerate(samples):
            try:
                question, reply = conversation_of(sample)
                asked.setdefault(question, []).append((number, reply))
            except ValueError as error:
                found[number] = f"unreadable: {error}"
        questions = list(asked.items())
        sizes = [sum(1 + len(samples[number].response) for number, _ in replies) for _, replies in questions]
        dealt = [[questions[index] for index in mine] for mine in deal(sizes, self.team.size)]
        sent = [tuple((question, tuple(reply for _, reply in replies)) for question, replies in mine) for mine in dealt]
        blocks = self.team.ask_all("rate", [{"path": self.path, "questions": mine} for mine in sent])
        for mine, block in zip(dealt, blocks, strict=True):
            numbers = [number for _, replies in mine for number, _ in replies]
            values, reasons = decode(ReplyScores, block.row["result"], block.arrays)
            found |= zip(numbers, (reason or value for value, reason in zip(values, reasons, strict=True)), strict=True)
        return [found[number] for number in range(len(samples))]


def open_reward(config: Config, path: str) -> LearnedReward:
    """Open a reward model: in this process, or with several GPUs on the ranks, once they have started."""
    if config.run.gpus == 1:
        return load_learned(config, path)
    folder, remote = model_setup.model_folder(config.run, path), config.model.trust_remote_code
    return RankReward(path, *describe_folder(folder, remote, untrained=path.startswith("tiny:")))


def place_rewards(scorer: Scorer | None, policy: Trainer) -> None:
    """Load the scorer's models on the policy's ranks, and move its workers to where the launcher can start them."""
    team = policy.engine
    if scorer is None or team is None:
        return
    for model in scorer.model_terms.models.values() if scorer.model_terms is not None else ():
        model.place(team)
    if scorer.pool is not None and team.place_workers is not None:
        team.place_workers(scorer.pool, scorer.config.workers)


def rate(model: LearnedReward, questions: Sequence[Question]) -> Any:
    """Runs in a rank. Returns for each reply its scores (empty if it has none), and the reasons ("" if it has some)."""
    samples = [
        RewardSample(id="", response="", asked=question, replied=reply)
        for question, replies in questions
        for reply in replies
    ]
    found = model.read(samples)
    none = np.zeros(0, np.float32)
    return tuple(none if isinstance(f, str) else f for f in found), [f if isinstance(f, str) else "" for f in found]
