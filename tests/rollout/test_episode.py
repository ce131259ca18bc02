"""Episodes with a real engine: token in, token out, and a reason for every end."""

from itertools import pairwise

import numpy as np
import pytest

from saccade.environments import SingleTurn, Step
from saccade.media.images import crop
from saccade.rollout.collect import collect
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
def play(engine, family, sample):
    """One episode with an environment, through `collect`."""

    def played(environment, *, limits=MANY, max_tokens=24, **sampling):
        (group,) = collect(
            engine,
            [sample],
            repeats=1,
            environment=lambda: environment,
            family=family,
            sampling=Sampling(max_tokens=max_tokens, **sampling),
            limits=limits,
            seed="0",
        )
        assert not engine.scheduler.prefix_cache.turns and engine.pending == 0  # caches are given back
        return group.trajectories[0]

    return played


def test_four_turns_with_crops_an_error_and_a_reply_over_the_budget(engine, family, sample, play, saying, scripted):
    root = sample.media[0]
    first = crop(root, (0, 0, 84, 56))
    second = crop(first, (28, 0, 84, 56))
    environment = scripted(
        [
            Step((Message(role="tool", parts=("crop: ", first)),), 0.25, False, {"calls": 1}),
            Step((Message(role="tool", parts=("error: box leaves the image",)),), None, False, {}),
            Step((Message(role="tool", parts=(second, " closer")), user("Well?")), 0.5, False, {}),
        ]
    )
    replies = ["crop 0 0 84 56", "crop 999 0 0 0", "crop <|image_pad|> 28", "I think that it is far too long"]
    with saying(*replies) as ids:
        trajectory = play(environment, max_tokens=24, temperature=1.0)
    ids[3] = ids[3][:24]  # cut by the limit, before its end of turn

    assert (trajectory.end_reason, trajectory.status, trajectory.turns) == ("turn_length", "truncated", 4)
    assert trajectory.turn_rewards == (0.25, 0.5) and trajectory.info["calls"] == 1
    assert environment.heard == replies[:3] and environment.closed == 1

    # A strict prefix chain: request, what was sampled, next request, … , the trajectory.
    requests, completions = engine.requests, engine.completions
    assert len(requests) == len(completions) == 4
    chain = [*[r.ids for r in requests], trajectory.ids]
    for turn, (before, after) in enumerate(pairwise(chain)):
        known = np.concatenate([before, completions[turn].ids])
        assert after[: len(known)].tolist() == known.tolist()
        assert len(after) > len(known) or turn == 3
        assert requests[turn].media == trajectory.media[: len(requests[turn].media)]
        assert requests[turn].first_index == sum(len(c.ids) for c in completions[:turn])
    assert [r.episode for r in requests] == ["s/0"] * 4
    assert len({r.noise for r in requests}) == 1

    # The mask covers exactly what the policy sampled, with what it was sampled with.
    policy = trajectory.policy_mask
    assert trajectory.ids[policy].tolist() == [token for reply in ids for token in reply]
    assert (np.isnan(trajectory.logprobs) == ~policy).all()
    assert ((trajectory.versions == -1) == ~policy).all()
    sampled = np.concatenate([c.logprobs for c in completions])
    assert trajectory.logprobs[policy].tolist() == sampled.tolist()

    # Images match placeholders, and the ids are those of the whole conversation.
    assert [s.media for s in trajectory.media] == [root, first, second]
    inside = np.zeros(len(trajectory.ids), bool)
    for span in trajectory.media:
        inside[span.start : span.end] = True
        assert span.length == family.measure(span.media)[1]
    assert ((trajectory.ids == family.chat.placeholder) == inside).all()
    whole = family.render(trajectory.messages[:-1]).ids
    assert trajectory.ids.tolist() == [*whole, *ids[3]]
    assert trajectory.messages[-1].text == replies[3][:24]
    assert set(trajectory.sources[inside].tolist()) == {Source.PROMPT, Source.OBSERVATION}


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


def raising():
    raise RuntimeError("the simulator crashed")


def test_every_end_has_its_reason(play, saying, scripted, image, sample, family):
    prompt = len(family.render(sample.messages))
    small = image(56, 56, 1)
    total = lambda tokens: {"max_total_tokens": tokens}  # noqa: E731
    one = ["ok"]
    two = ["ok", "ok"]
    observation = len(family.render_continuation([user("more")], last_id=family.chat.end_of_turn))
    budget = prompt + 3 + observation
    cases = [
        (one, SingleTurn(), {}, "answered", "ok", 1),
        (one, scripted([done()]), {}, "env_done", "ok", 1),
        (one, scripted([done(end_reason="tool_errors")]), {}, "tool_errors", "void", 1),
        (one, scripted([go_on(small)]), {"max_images": 1}, "max_images", "overturn", 1),
        (two, scripted([go_on(small), done()]), {"max_images": 2}, "env_done", "ok", 2),
        (one, scripted([go_on("more")]), total(budget), "token_budget", "overturn", 1),
        (two, scripted([go_on("more")]), total(budget + 1), "token_budget", "truncated", 2),
        (one, scripted([raising]), {}, "env_error", "error", 1),
        ([], scripted([]), total(prompt), "token_budget", "truncated", 0),
    ]  # fmt: skip
    for replies, environment, limits, reason, status, turns in cases:
        with saying(*replies) as ids:
            trajectory = play(environment, limits=Limits(**{"max_turns": 8, **limits}))
        got = (trajectory.end_reason, trajectory.status, trajectory.turns)
        assert got == (reason, status, turns), (replies, limits)
        flat = [token for reply in ids for token in reply]
        sampled = trajectory.response_ids.tolist()
        assert sampled == flat[: len(sampled)] and len(sampled) >= turns
        allowed = limits.get("max_total_tokens", 10**6)
        assert len(trajectory.ids) <= allowed
        assert len(trajectory.media) <= limits.get("max_images", 64)
        if isinstance(environment, SingleTurn):
            continue
        assert environment.closed == 1
        # An observation and its pictures are added together or not at all.
        shown = sum(len(m.media) for m in trajectory.messages)
        assert shown == len(trajectory.media)
    assert trajectory.response_length == 0 and len(trajectory.ids) == prompt


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (done(end_reason="bored"), "info['end_reason'] is 'bored'; use one of answered, env_done"),
        (go_on("x", tool_counts=5), "info['tool_counts'] is 5; it must be numbers by name"),
        (done(tool_calls=[{"turn": 1, "ok": False}]), "info['tool_calls'] is [{'turn': 1"),
        (Step((Message(role="narrator", parts=("x",)),), 1.0, False, {}), "the role 'narrator'"),
        (go_on("x" * 32_001), "its messages have 32001 characters, and 32000 are the most"),
    ],
)
def test_what_an_environment_must_not_say_costs_its_own_episode(step, reason, play, saying, scripted):
    with saying("ok"):
        trajectory = play(scripted([step]), limits=Limits(max_turns=8, max_total_tokens=2000))
    assert (trajectory.end_reason, trajectory.status) == ("env_error", "error")
    assert reason in trajectory.info["error"] and trajectory.info.keys() == {"error"}
    assert trajectory.turn_rewards == ()


def test_an_aborted_request_ends_its_episode(engine, play, saying, scripted):
    submit = engine.submit

    def submit_and_abort(request):
        submit(request)
        engine.engine.abort(request.key)

    engine.submit = submit_and_abort
    with saying("ok"):
        trajectory = play(scripted([]))
    assert (trajectory.end_reason, trajectory.status) == ("aborted", "aborted")
    assert trajectory.response_length == 0


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
