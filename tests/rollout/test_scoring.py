"""Rewards onto groups: what one member's failure means for the others, and waiting for the last."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from saccade.rewards.combine import Scored
from saccade.rollout.scoring import RewardStream, thinks
from saccade.types import Message, Sample

GOOD = Scored(status="ok", reward=1.0, outcome=1.0, extracted="7")
SAMPLE = Sample(id="s", messages=(Message(role="user", parts=("?",)),), answer="7")


class Given:
    """Scores in the order in which they are asked for."""

    def __init__(self, *scored):
        self.left = list(scored)
        self.last: Future[Scored] = Future()

    def submit(self, sample):
        self.last = Future()
        if self.left:
            self.last.set_result(self.left.pop(0))
        return self.last

    def flush(self):
        pass


@pytest.fixture
def group(grow, family_of):
    grown = grow(np.random.default_rng(0), family_of("qwen2_5_vl"), size=3, images=0)
    return replace(grown, sample=SAMPLE)


def stream(scores, group, family):
    made = RewardStream(scores, family)
    for trajectory in group.trajectories:
        made.submit(group.sample, trajectory)
    return made


def statuses(members):
    return [(member.status, member.outcome) for member in members]


@pytest.mark.parametrize(
    ("reason", "others"), [("judge: down", ("ok", 1.0)), ("drop_group: judge: down", ("abstain", None))]
)
def test_a_failure_may_cost_the_whole_group(reason, others, group, family_of):
    scores = Given(GOOD, Scored(status="error", reason=reason), GOOD)
    (scored,) = stream(scores, group, family_of("qwen2_5_vl")).attach([group])
    assert statuses(scored.trajectories) == [others, ("error", None), others]


def test_rewards_of_an_environment_that_are_no_numbers_are_errors(group, family_of):
    bad, good, lost = group.trajectories
    members = (replace(bad, turn_rewards=(0.5, float("nan"))), replace(good, turn_rewards=(0.5, 1.0)))
    greedy = replace(lost, status="error", turn_rewards=(1.0,))
    (scored,) = RewardStream(None, family_of("qwen2_5_vl")).attach(
        [replace(group, trajectories=members, greedy=greedy)]
    )
    bad, good = scored.trajectories
    assert (bad.status, bad.reward) == ("error", None) and "nan" in bad.reason
    assert (good.status, good.reward, good.outcome) == ("ok", 1.5, 1.5)
    assert scored.greedy.reward is None


def test_when_too_many_have_failed_the_rest_is_not_waited_for(group, family_of):
    failed = Scored(status="error", reason="timeout: no result")
    for tolerated, heard in ((0.3, []), (0.34, [(2, 3)])):  # one of three has failed
        scores, said = Given(GOOD, failed), []

        def progress(done, total, scores=scores, said=said):
            said.append((done, total))
            scores.last.set_result(GOOD)

        waiting = stream(scores, group, family_of("qwen2_5_vl"))
        (scored,) = waiting.attach([group], progress, tolerated=tolerated)
        last = ("ok", 1.0) if heard else ("abstain", None)
        assert statuses(scored.trajectories) == [("ok", 1.0), ("error", None), last]
        assert said == heard


@pytest.mark.parametrize(("response", "prefilled", "expected"), [
    ("<think>a</think>b", False, True),
    ("<think> </think>b", False, False),
    ("<think>a", False, False),
    ("a</think>b", True, True),
    ("a</think>b", False, False),
])  # fmt: skip
def test_a_thought_is_closed_and_not_blank(response, prefilled, expected):
    turn = SimpleNamespace(role="assistant", text=response)
    family = SimpleNamespace(chat=SimpleNamespace(think_prefilled=prefilled))
    assert thinks(SimpleNamespace(messages=[turn], context=0), family) is expected
