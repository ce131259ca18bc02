"""Attaches rewards to trajectories; rewards are computed while other episodes are still generated.

stream = RewardStream(scorer, family, step=3)
groups = stream.attach(collect(..., on_finish=stream.submit))
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from math import isfinite
from typing import Any

from saccade.config import RewardConfig
from saccade.engines import Engine
from saccade.models.families import Family
from saccade.rewards.combine import DROPPED, Scored, drops_group
from saccade.rewards.reward_sample import RewardSample, reward_sample, shown_text
from saccade.rewards.scorer import Scorer
from saccade.types import ALWAYS_EXCLUDED, Group, Sample, Trajectory

log = logging.getLogger(__name__)

THOUGHT = re.compile("<think>(.*?)</think>", re.DOTALL)
GLANCE = 0.25  # seconds between two polls of pending rewards
GIVEN_UP: Future[Scored] = Future()
GIVEN_UP.set_result(Scored(status="abstain", reason="given_up: too many others failed"))
PATIENCE = 15.0  # seconds of waiting before the first message; doubled for each further one
SHOWN = 160  # characters of a response that a message quotes
Progress = Callable[[int, int], None]  # done, all


class RewardStream:
    """Submits trajectories for scoring as they finish; `attach` returns the groups with their rewards."""

    def __init__(self, scorer: Scorer | None, family: Family, *, step: int = 0) -> None:
        """Without a scorer the environment's rewards count."""
        self.scorer, self.family, self.step = scorer, family, step
        self._pending: dict[tuple[str, int], Future[Scored]] = {}
        self._questions: dict[str, RewardSample] = {}  # what the members of a group have in common

    def submit(self, sample: Sample, trajectory: Trajectory) -> None:
        if self.scorer is not None:
            if sample.id not in self._questions:
                self._questions[sample.id] = reward_sample(sample, "", step=self.step)
            seen = seen_by_reward(self._questions[sample.id], trajectory, self.family)
            self._pending[trajectory.key] = self.scorer.submit(seen)

    def attach(
        self, groups: Sequence[Group], progress: Progress | None = None, *, tolerated: float = 1.0
    ) -> list[Group]:
        """Wait for pending rewards. `progress` is called meanwhile and may raise to stop. If more than the `tolerated`
        share of all members has failed, the others are not waited for.
        """
        if self.scorer is not None:
            self.scorer.flush()
        members = [t for group in groups for t in group.everyone]
        lost = {t.key for t in members if t.status == "error"}
        out = set(self._pending.values()) if progress is not None else set()
        while progress is not None and (out := wait(out, timeout=GLANCE).not_done):
            scored = {key: f.result() for key, f in self._pending.items() if f.done()}
            failed = {key for key, score in scored.items() if score.status == "error"}
            if len(lost | failed) > tolerated * len(members):
                self._pending |= dict.fromkeys(self._pending.keys() - scored.keys(), GIVEN_UP)
                break
            progress(len(self._pending) - len(out), len(self._pending))
        return [dropped_together(g.each(lambda t: with_score(t, self._pending.pop(t.key, None)))) for g in groups]


def with_score(trajectory: Trajectory, pending: Future[Scored] | None) -> Trajectory:
    """Returns the trajectory with its score, after waiting for it unless the episode failed. Without a pending score,
    the environment's rewards count.
    """
    earned = sum(trajectory.turn_rewards)
    if trajectory.status in ("error", "aborted"):
        why = f"{trajectory.end_reason}: {trajectory.info.get('error', '')}".rstrip(": ")
        return replace(trajectory, reason=trajectory.reason or why)
    if not isfinite(earned):
        return replace(trajectory, status="error", reason=f"nan: the environment gave a reward of {earned}")
    if pending is None:
        return replace(trajectory, reward=earned, outcome=earned)
    scored = pending.result()
    if scored.status != "ok":
        return replace(trajectory, status=scored.status, parts=scored.parts, reason=scored.reason)
    assert scored.reward is not None, "status ok means that there is a value"
    unanswered = not parsed(scored.extracted, scored.reason) and trajectory.end_reason == "answered"
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


def report_slow_rewards(progress: Progress, scorer: Scorer | None, reward: RewardConfig) -> Progress:
    """Wraps a progress callback: when rewards take long, it also logs which terms are pending."""
    begun, patience = time.monotonic(), PATIENCE

    def watch(done: int, total: int) -> None:
        nonlocal patience
        progress(done, total)
        if scorer is None or (took := time.monotonic() - begun) < patience:
            return
        patience = 2 * took
        hint = f"; reward.deadline={reward.deadline:g}, reward.workers={reward.workers}" * (scorer.pool is not None)
        log.info(f"waiting for rewards ({', '.join(scorer.remote_terms)}): {done} of {total} after {took:.0f} s{hint}")

    return watch


def free_memory_for_rewards(engine: Engine, scorer: Scorer | None) -> None:
    """Free the engine's cache before reward models run: both may not fit into memory together."""
    if scorer is not None and scorer.model_terms is not None:
        engine.sleep()


def dropped_together(group: Group) -> Group:
    """If a failed reward excludes its whole group, exclude the other members."""
    if not drops_group(t.reason for t in group.everyone):
        return group
    lost: dict[str, Any] = {"status": "abstain", "reward": None, "outcome": None, "reason": DROPPED}
    return group.each(lambda t: t if t.status in ALWAYS_EXCLUDED else replace(t, **lost))


def parsed(extracted: str | None, reason: str) -> bool:
    """Whether an answer was found, or none was looked for (then there is no reason either). Not meant for members
    without a score, whose reason says why there is none.
    """
    return extracted is not None or not reason


def missing_answer(groups: Sequence[Group], scorer: Scorer | None, family: Family) -> str:
    """Says where the verifier looks for an answer, and quotes one response without one; empty if every response has
    one.
    """
    found = (
        (group.sample.data_source, trajectory)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.status not in ALWAYS_EXCLUDED and not parsed(trajectory.extracted, trajectory.reason)
    )
    source, trajectory = next(found, ("", None))
    if scorer is None or trajectory is None:
        return ""
    text = family.decode(trajectory.response_ids)
    end = text if len(text) <= SHOWN else f"…{text[-SHOWN:]}"
    return f" ({scorer.accuracy_rule(source)}; one of them ends with {end!r})"


def thinks(trajectory: Trajectory, family: Family) -> bool:
    """Whether any turn has a think block that is not empty."""
    opened = "<think>" if family.chat.think_prefilled else ""
    turns = (opened + m.text for m in trajectory.messages[trajectory.context :] if m.role == "assistant")
    return any(found[1].strip() for text in turns if (found := THOUGHT.search(text)))


def seen_by_reward(question: RewardSample, trajectory: Trajectory, family: Family) -> RewardSample:
    """The input of a reward: the policy's text, never prompt and response in one."""
    added = trajectory.messages[trajectory.context :]
    turns = tuple(m.text for m in added if m.role == "assistant")
    return replace(
        question,
        response=turns[0] if len(turns) == 1 else family.decode(trajectory.response_ids),
        turns=turns,
        replied=added,
        observations=tuple(shown_text(m) for m in added if m.role != "assistant"),
        roles=tuple(m.role for m in added),
        token_ids=trajectory.response_ids.tolist(),
        length=trajectory.response_length,
        truncated=trajectory.status == "truncated",
        end_reason=trajectory.end_reason,
        tool_calls=tuple(trajectory.info.get("tool_calls") or ()),
        think_prefilled=family.chat.think_prefilled,
    )
