"""One episode as a generator: it yields what it waits for and is sent the result.

It yields a `Request` and is sent a `Completion`; it yields an `EnvironmentCall` and is sent its outcome. Sampled ids
are appended unchanged, so the final ids extend those of every earlier request. Knows nothing of engines or scheduling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from saccade.environments import Environment, Step
from saccade.models.families import Family
from saccade.rollout.env_checks import CHARACTERS, CONVERSATION, messages_flaw, step_flaw
from saccade.rollout.env_setup import EnvironmentCall, Failed
from saccade.types import (
    STATUS_OF_END,
    Completion,
    MediaSpan,
    Message,
    Rendered,
    Request,
    Sample,
    Sampling,
    Source,
    Trajectory,
)
from saccade.user_code import raised_at

COLUMNS = ("ids", "sources", "logprobs", "versions")  # of a trajectory, one entry for each token
GREEDY = -1  # the repeat of a rollout that is a baseline: scored, never trained


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_turns: int = 1
    max_images: int = 64
    max_turn_tokens: int | None = None  # overrides sampling.max_tokens
    max_total_tokens: int = 32_768
    min_turn_tokens: int = 1  # tokens that an observation must leave for the next turn
    max_tool_errors: int | None = None
    timeout: float = 600.0  # seconds of the environment over a whole episode
    step_timeout: float = 60.0
    smaller_turns: frozenset[int] = frozenset()  # turn limits below max_turns to evaluate as well

    def tokens(self, family: Family) -> int:
        return min(self.max_total_tokens, family.max_positions)


@dataclass(frozen=True, kw_only=True)
class EpisodeSetup:
    """How to run episodes: their environment, sampling parameters and limits."""

    environment: Callable[[], Environment]  # makes one for each episode
    family: Family
    sampling: Sampling
    limits: Limits
    seed: str  # seeds their noise


@dataclass(kw_only=True)
class _Session:
    """The environment of an episode, what it has returned so far, and the seconds it has used."""

    environment: Environment
    limits: Limits
    rewards: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    spent: float = 0.0

    def ask(self, function: Callable[[], Any]) -> Generator[EnvironmentCall, Any, Any]:
        """Call the environment; returns its result, or an exception if it failed."""
        try:
            outcome = function()
        except Exception as error:  # the user's code, when a caller passed an object
            outcome = Failed(raised_at(error))
        if isinstance(outcome, EnvironmentCall):
            pending = outcome
            pending.seconds = min(self.limits.step_timeout, max(0.001, self.limits.timeout - self.spent))
            outcome = yield pending
            self.spent += pending.took
        return outcome

    def begin(self, sample: Sample, noise: int) -> Generator[EnvironmentCall, Any, tuple[list[Message], str]]:
        """Reset the environment; returns the conversation, and the end reason if that failed."""
        start = yield from self.ask(lambda: self.environment.reset(sample, noise))
        most = CHARACTERS * self.limits.max_total_tokens + sum(len(message.text) for message in sample.messages)
        if not isinstance(start, BaseException) and (flaw := messages_flaw(start, CONVERSATION, longest=most)):
            start = Failed(flaw)
        reason = self.failure(start)
        return list(sample.messages if reason else start), reason

    def failure(self, outcome: Any) -> str:
        """Returns the end reason if the outcome is a failure, which is noted in `info`; else empty."""
        if not isinstance(outcome, BaseException):
            return ""
        self.info["error"] = str(outcome)
        return "timeout" if isinstance(outcome, TimeoutError) else "env_error"


@dataclass(kw_only=True)
class _History:
    """The messages of an episode so far, and their tokens: append only."""

    messages: list[Message]
    pieces: list[tuple[np.ndarray, ...]] = field(default_factory=list)  # one array for each of COLUMNS
    media: list[MediaSpan] = field(default_factory=list)
    support: list[np.ndarray] = field(default_factory=list)
    turns: int = 0
    length: int = 0
    sampled: int = 0

    def add_prompt(self, rendered: Rendered) -> None:
        n = len(rendered)
        self.media += [span.moved(self.length) for span in rendered.media]
        self.pieces.append((rendered.ids, rendered.sources, np.full(n, np.nan, np.float32), np.full(n, -1, np.int32)))
        self.length += n

    def add_answer(self, completion: Completion, text: str) -> None:
        n = len(completion.ids)
        sources = np.full(n, Source.POLICY, np.int8)
        self.pieces.append((completion.ids, sources, completion.logprobs, completion.versions))
        self.support += completion.support or ()
        self.messages.append(Message(role="assistant", parts=(text,)))
        self.turns, self.length, self.sampled = self.turns + 1, self.length + n, self.sampled + n

    def copy(self) -> _History:
        """Later turns do not change the copy."""
        said, pieces, media, support = [*self.messages], [*self.pieces], [*self.media], [*self.support]
        return replace(self, messages=said, pieces=pieces, media=media, support=support)

    def columns(self) -> dict[str, Any]:
        """The fields of a trajectory that hold tokens."""
        joined = map(np.concatenate, zip(*self.pieces, strict=True))
        columns = dict(zip(COLUMNS, joined, strict=True))
        return {**columns, "media": tuple(self.media), "support": tuple(self.support) or None}


def noise_key(*parts: object) -> int:
    """A hash of 63 bits that depends on the parts alone: the same on every machine and in every batch."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def episode_key(uid: str, repeat: int) -> str:
    return f"{uid}/{'greedy' if repeat == GREEDY else repeat}"


def episode(
    sample: Sample, repeat: int, uid: str, setup: EpisodeSetup, on_limit: Callable[[Trajectory], None] | None = None
) -> Generator[Request | EnvironmentCall, Any, Trajectory]:
    """Runs until the environment is done or a limit is reached; the end reason is always recorded.

    Prompts do not mention the turn limit, so an episode under a smaller limit is a prefix of this one. `on_limit` gets
    the trajectory under each limit of `limits.smaller_turns` that would have ended this episode.
    """
    family, sampling, limits = setup.family, setup.sampling, setup.limits
    key = episode_key(uid, repeat)
    noise = noise_key(setup.seed, key)
    session = _Session(environment=setup.environment(), limits=limits)
    messages, reason = yield from session.begin(sample, noise)
    history, pending, context = _History(messages=messages), False, len(messages)
    history.add_prompt(family.render(messages))

    def ended(history: _History, reason: str, *, pending: bool) -> Trajectory:
        waiting = reason == "token_budget" and pending
        return Trajectory(
            sample_id=uid,
            repeat=repeat,
            messages=tuple(history.messages),
            context=context,
            end_reason=reason,
            status=STATUS_OF_END[f"{reason}_pending" if waiting else reason],
            turns=history.turns,
            trained=repeat != GREEDY,
            turn_rewards=tuple(session.rewards),
            info=dict(session.info),
            **history.columns(),
        )

    longest = limits.max_turn_tokens or sampling.max_tokens
    while not reason:
        allowed = min(longest, limits.tokens(family) - history.length)
        if allowed < 1:
            reason, pending = "token_budget", history.turns > 0
            break
        completion: Completion = yield Request(
            key=key,
            ids=np.concatenate([piece[0] for piece in history.pieces]) if history.turns else history.pieces[0][0],
            media=tuple(history.media),
            messages=tuple(history.messages),
            sampling=sampling if allowed == sampling.max_tokens else replace(sampling, max_tokens=allowed),
            noise=noise,
            first_index=history.sampled,
            opening=len(history.pieces[0][0]),
            episode=key if limits.max_turns > 1 else None,
        )
        history.add_answer(completion, family.decode(completion.ids))
        if completion.finish == "aborted":
            reason = "aborted"
        elif completion.finish == "length":
            reason = "turn_length" if allowed == longest else "token_budget"
        else:
            at_limit = on_limit if history.turns in limits.smaller_turns else None
            written = history.copy() if at_limit else history
            reason, pending = yield from _answer(session, history, family)
            if at_limit is not None and (pending or not reason):
                at_limit(ended(written, "max_turns", pending=True))
    closed = yield from session.ask(session.environment.close)
    session.failure(closed)  # noted in `info`; the episode is over anyway
    return ended(history, reason, pending=pending)


def _answer(session: _Session, history: _History, family: Family) -> Generator[EnvironmentCall, Any, tuple[str, bool]]:
    """Step the environment; returns the end reason (empty: continue), and whether a limit of turns, images or tokens
    cut off its observation, which is added with all of its images or not at all.
    """
    limits, environment = session.limits, session.environment
    outcome = yield from session.ask(lambda: environment.step(history.messages[-1]))
    if failure := session.failure(outcome):
        return failure, False
    step = Step(*outcome)
    if flaw := step_flaw(step, longest=CHARACTERS * limits.max_total_tokens):
        return session.failure(Failed(flaw)), False
    session.info.update(step.info)
    if step.reward is not None:
        session.rewards += [0.0] * (history.turns - 1 - len(session.rewards)) + [float(step.reward)]
    if step.done:
        return step.info.get("end_reason", "env_done"), False
    errors = session.info.get("tool_counts", {}).get("failed", 0)
    if limits.max_tool_errors is not None and errors > limits.max_tool_errors:
        return "tool_errors", False
    if history.turns >= limits.max_turns:
        return "max_turns", True
    if len(history.media) + sum(len(m.media) for m in step.messages) > limits.max_images:
        return "max_images", True
    added = family.render_continuation(step.messages, last_id=int(history.pieces[-1][0][-1]))
    if limits.tokens(family) - history.length - len(added) < limits.min_turn_tokens:
        return "token_budget", True
    family.prefetch([span.media for span in added.media])  # prepared while others generate
    history.add_prompt(added)
    history.messages += step.messages
    return "", False
