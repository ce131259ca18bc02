"""Episodes with a real engine: token in, token out, and a reason for every end."""

import numpy as np
import pytest

from saccade.environments import SingleTurn, Step
from saccade.media.images import crop
from saccade.rollout.episode import Limits
from saccade.types import Message, Sample, Sampling, Source

MANY = Limits(max_turns=8)


def user(*parts):
    return Message(role="user", parts=parts)


def go_on(*parts, **info):
    return Step((user(*parts),), None, False, info)


def done(**info):
    return Step((), None, True, info)


@pytest.fixture
def sample(image):
    return Sample(id="s", messages=(user(image(140, 84, 2), "Where is it?"),))


@pytest.fixture
def play(engine, sample, play_with):
    """One episode with an environment, through `collect`."""

    def played(environment, *, limits=MANY, max_tokens=24, **sampling):
        how = {"sampling": Sampling(max_tokens=max_tokens, **sampling), "limits": limits}
        (group,) = play_with(engine, [sample], lambda: environment, **how)
        assert not engine.scheduler.prefix_cache.turns and engine.pending == 0  # caches are given back
        return group.trajectories[0]

    return played


def test_four_turns_with_crops_an_error_and_a_reply_over_the_budget(
    engine, family, sample, play, saying, scripted, check_chain
):
    root = sample.media[0]
    first = crop(root, (0, 0, 84, 56))
    second = crop(first, (28, 0, 84, 56))
    heard = [Message(role="tool", parts=parts) for parts in (("crop: ", first), ("error: no",), (second, " closer"))]
    steps = [Step((heard[0],), 0.25, False, {"calls": 1}), Step((heard[1],), None, False, {})]
    environment = scripted([*steps, Step((heard[2], user("Well?")), 0.5, False, {})])
    replies = ["crop 0 0 84 56", "crop 999 0 0 0", "crop <|image_pad|> 28", "I think that it is far too long"]
    with saying(*replies) as ids:
        trajectory = play(environment, max_tokens=24, temperature=1.0)
    ids[3] = ids[3][:24]  # cut by the limit, before its end of turn

    assert (trajectory.end_reason, trajectory.status, trajectory.turns) == ("turn_length", "truncated", 4)
    assert trajectory.turn_rewards == (0.25, 0.0, 0.5) and trajectory.info["calls"] == 1
    assert environment.heard == replies[:3] and environment.closed == 1

    check_chain(engine, trajectory)
    assert trajectory.response_ids.tolist() == [token for reply in ids for token in reply]
    assert [r.episode for r in engine.requests] == ["s/0"] * 4
    assert len({r.noise for r in engine.requests}) == 1
    for request in engine.requests:
        assert request.media == trajectory.media[: len(request.media)]
    # The ids are those of the whole conversation.
    assert [s.media for s in trajectory.media] == [root, first, second]
    whole = family.render(trajectory.messages[:-1]).ids
    assert trajectory.ids.tolist() == [*whole, *ids[3]]
    assert trajectory.messages[-1].text == replies[3][:24]
    shown = trajectory.sources[trajectory.ids == family.chat.placeholder]
    assert set(shown.tolist()) == {Source.PROMPT, Source.OBSERVATION}


def test_a_turn_that_a_stop_string_ended_gets_its_end_as_template(family, play, saying, scripted):
    environment = scripted([go_on("and then?"), done(end_reason="answered")])
    # The end of turn after the first reply is never sampled in its turn: it is all of the second.
    with saying("call(x)") as ids:
        trajectory = play(environment, stop=(")",))
    end = family.chat.end_of_turn
    assert trajectory.turns == 2 and trajectory.response_ids.tolist() == ids[0]
    (template,) = np.flatnonzero(trajectory.sources == Source.TEMPLATE)
    assert trajectory.ids[template] == end and trajectory.policy_mask[template - 1]
    assert environment.heard == ["call(x)", ""]


def test_every_end_has_its_reason(play, saying, scripted, sample, family):
    """Those that an environment or a tokenizer has a say in; test_tools.py has the others."""
    prompt = len(family.render(sample.messages))
    observation = len(family.render_continuation([user("more")], last_id=family.chat.end_of_turn))
    budget = prompt + 3 + observation
    one, two = ["ok"], ["ok", "ok"]
    cases = [
        (one, SingleTurn(), 32_768, "answered", "ok"),
        (one, scripted([done()]), 32_768, "env_done", "ok"),
        (one, scripted([done(end_reason="tool_errors")]), 32_768, "tool_errors", "void"),
        (one, scripted([go_on("more")]), budget, "token_budget", "overturn"),
        (two, scripted([go_on("more")]), budget + 1, "token_budget", "truncated"),
        (one, scripted([lambda: 1 / 0]), 32_768, "env_error", "error"),
        ([], scripted([]), prompt, "token_budget", "truncated"),
    ]
    for replies, environment, total, reason, status in cases:
        with saying(*replies) as ids:
            trajectory = play(environment, limits=Limits(max_turns=8, max_total_tokens=total))
        got = (trajectory.end_reason, trajectory.status, trajectory.turns)
        assert got == (reason, status, len(replies)), (replies, total)
        sampled = trajectory.response_ids.tolist()
        assert sampled == [token for reply in ids for token in reply][: len(sampled)]
        assert len(sampled) >= len(replies) and len(trajectory.ids) <= total
        assert isinstance(environment, SingleTurn) or environment.closed == 1
    assert trajectory.response_length == 0 and len(trajectory.ids) == prompt


@pytest.mark.parametrize(("step", "reason"), [
    (done(end_reason="bored"), "info['end_reason'] is 'bored'; use one of answered, env_done"),
    (go_on("x", tool_counts=5), "info['tool_counts'] is 5; it must be numbers by name"),
    (done(tool_calls=[{"turn": 1, "ok": False}]), "info['tool_calls'] is [{'turn': 1"),
    (Step((Message(role="narrator", parts=("x",)),), 1.0, False, {}), "the role 'narrator'"),
    (go_on("x" * 32_001), "its messages have 32001 characters, and 32000 are the most"),
])  # fmt: skip
def test_what_an_environment_must_not_say_costs_its_own_episode(step, reason, play, saying, scripted):
    with saying("ok"):
        trajectory = play(scripted([step]), limits=Limits(max_turns=8, max_total_tokens=2000))
    assert (trajectory.end_reason, trajectory.status) == ("env_error", "error")
    assert reason in trajectory.info["error"] and trajectory.info.keys() == {"error"}
    assert trajectory.turn_rewards == ()


def test_an_aborted_request_ends_its_episode(engine, play, saying, scripted):
    submit = engine.submit
    engine.submit = lambda request: (submit(request), engine.engine.abort(request.key))
    with saying("ok"):
        trajectory = play(scripted([]))
    assert (trajectory.end_reason, trajectory.status, trajectory.response_length) == ("aborted", "aborted", 0)


def test_an_environment_may_open_the_conversation_itself(play, saying, scripted, family):
    environment = scripted([done()])
    opening = (Message(role="system", parts=("Play.",)), user("Your move"))
    environment.reset = lambda sample, seed: opening
    with saying("e4"):
        trajectory = play(environment)
    prompt = family.render(opening).ids
    assert trajectory.ids[: len(prompt)].tolist() == prompt.tolist()
    assert [m.text for m in trajectory.messages] == ["Play.", "Your move", "e4"]


def test_support_of_all_turns_is_kept(play, saying, scripted):
    with saying("ab", "c"):
        trajectory = play(scripted([go_on("more"), done()]), top_k=3, support=True)
    assert len(trajectory.support) == trajectory.response_length == 5
    for token, kept in zip(trajectory.response_ids, trajectory.support, strict=True):
        assert token in kept and len(kept) == 3
