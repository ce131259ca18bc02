"""Rewards onto trajectories, while others still generate.

stream = RewardStream(scorer, family, step=3)
groups = stream.attach(collect(..., on_finish=stream.submit))
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import isfinite
from typing import Protocol

from saccade.models.families import Family
from saccade.rewards.combine import Scored
from saccade.rewards.extract import has_think
from saccade.rewards.sample import RewardSample, reward_sample
from saccade.types import Group, Message, Sample, Trajectory


class Scores(Protocol):
    def submit(self, sample: RewardSample) -> Future[Scored]: ...


class RewardStream:
    """Takes trajectories as they finish, gives back groups with rewards when all are in."""

    def __init__(self, scorer: Scores | None, family: Family, *, step: int = 0) -> None:
        """Without a scorer the environment's own rewards count."""
        self.scorer, self.family, self.step = scorer, family, step
        self._pending: dict[tuple[str, int], Future[Scored]] = {}
        self._questions: dict[str, RewardSample] = {}  # what the members of a group have in common

    def submit(self, sample: Sample, trajectory: Trajectory) -> None:
        if self.scorer is not None:
            question = self._questions.get(sample.id)
            if question is None:
                question = self._questions[sample.id] = reward_sample(sample, "", step=self.step)
            seen = seen_by_reward(question, trajectory, self.family)
            self._pending[trajectory.key] = self.scorer.submit(seen)

    def attach(self, groups: Sequence[Group]) -> list[Group]:
        return [
            replace(
                group,
                trajectories=tuple(self._scored(t) for t in group.trajectories),
                greedy=None if group.greedy is None else self._scored(group.greedy),
            )
            for group in groups
        ]

    def _scored(self, trajectory: Trajectory) -> Trajectory:
        earned = sum(trajectory.turn_rewards)
        pending = self._pending.pop(trajectory.key, None)
        if trajectory.status in ("error", "aborted"):
            why = f"{trajectory.end_reason}: {trajectory.info.get('error', '')}".rstrip(": ")
            return replace(trajectory, reason=trajectory.reason or why)
        if not isfinite(earned):
            reason = f"nan: the environment gave a reward of {earned}"
            return replace(trajectory, status="error", reason=reason)
        if pending is None:
            return replace(trajectory, reward=earned, outcome=earned)
        scored = pending.result()
        if scored.status != "ok":
            return replace(
                trajectory, status=scored.status, parts=scored.parts, reason=scored.reason
            )
        assert scored.reward is not None, "status ok means that there is a value"
        unanswered = (
            not parsed(scored.extracted, scored.reason) and trajectory.end_reason == "answered"
        )
        return replace(
            trajectory,
            reward=scored.reward + earned,
            outcome=scored.outcome,
            parts=scored.parts,
            extracted=scored.extracted,
            reason=scored.reason,
            end_reason="eos_no_answer" if unanswered else trajectory.end_reason,
            status="void" if unanswered else trajectory.status,
        )


def parsed(extracted: str | None, reason: str) -> bool:
    """Whether an answer was found; a reward that looks for none gives no reason either."""
    return extracted is not None or not reason


def thinks(trajectory: Trajectory, family: Family) -> bool:
    """Whether any turn holds a think block with something in it."""
    turns = (m.text for m in trajectory.messages[trajectory.context :] if m.role == "assistant")
    return any(has_think(text, family.chat.think_prefilled) for text in turns)


def seen_by_reward(question: RewardSample, trajectory: Trajectory, family: Family) -> RewardSample:
    """What a reward may look at: the policy's own text, never prompt and response in one."""
    added = trajectory.messages[trajectory.context :]
    turns = tuple(m.text for m in added if m.role == "assistant")
    return replace(
        question,
        response=turns[0] if len(turns) == 1 else family.decode(trajectory.response_ids),
        turns=turns,
        observations=tuple(_shown(m) for m in added if m.role != "assistant"),
        token_ids=trajectory.response_ids.tolist(),
        length=trajectory.response_length,
        truncated=trajectory.status == "truncated",
        end_reason=trajectory.end_reason,
        tool_calls=tuple(trajectory.info.get("tool_calls", ())),
        think_prefilled=family.chat.think_prefilled,
    )


def _shown(message: Message) -> str:
    return "".join(part if isinstance(part, str) else f"<{part.kind}>" for part in message.parts)
