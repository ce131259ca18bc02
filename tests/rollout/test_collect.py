"""Many episodes over one engine: order, independence, hand-over of what is finished."""

from dataclasses import replace

import numpy as np
import pytest

from saccade.config import RewardConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import SingleTurn, Step
from saccade.rewards.scorer import Scorer
from saccade.rollout.scoring import RewardStream
from saccade.types import Message, Request, Sample, Sampling, Source

SAMPLING = Sampling(max_tokens=12)


@pytest.fixture
def samples(image):
    pictures = [image(56, 56, 1), image(84, 56, 2), image(140, 84, 3)]
    parts = {f"q{n}": (*pictures[:n], f"What is q{n}?") for n in (2, 0, 3, 1)}
    return [Sample(id=name, messages=(Message(role="user", parts=asked),)) for name, asked in parts.items()]


@pytest.fixture
def run(play_with):
    def groups(engine, samples, environment=SingleTurn, **changes):
        options = {"repeats": 3, "sampling": SAMPLING, "seed": "7"}
        return play_with(engine, samples, environment, **options | changes)

    return groups


def flat(groups):
    return [t for group in groups for t in group.trajectories]


def test_groups_keep_their_order_whatever_finishes_first(run, model, family, samples, brief):
    finished, counts = [], []
    told = {"on_finish": lambda sample, t: finished.append((sample.id, *t.key))}
    groups = run(EmbeddedEngine(model, family), samples, progress=lambda *now: counts.append(now), **told)
    wanted = [(s.id, r) for s in samples for r in range(3)]
    assert [t.key for t in flat(groups)] == wanted
    assert [g.sample for g in groups] == samples and [g.uid for g in groups] == [s.id for s in samples]
    assert sorted(f[1:] for f in finished) == sorted(wanted)
    assert [f[1:] for f in finished] != wanted and all(f[0] == f[1] for f in finished)
    assert counts[-1] == (12, 12) and counts == sorted(counts)
    lengths = {t.response_length for t in flat(groups)}
    assert len(lengths) > 2
    assert {t.end_reason for t in flat(groups)} <= {"answered", "turn_length"}


def test_results_do_not_depend_on_slots_or_order(run, model, family, samples, brief, image, scripted):
    said = [Message(role="user", parts=parts) for parts in ((image(56, 56, 9), "again"), ("again",))]
    steps = [*(Step((one,), 0.5, False, {}) for one in said), Step((), 1.0, True, {"end_reason": "answered"})]

    def trajectories(slots, asked):
        engine = EmbeddedEngine(model, family, max_sequences=slots)
        groups = run(engine, asked, environment=lambda: scripted(steps))
        assert not engine.scheduler.prefix_cache.turns
        assert engine.cache.pages.free == engine.cache.pages.count
        return {t.key: t for t in flat(groups)}

    wanted = trajectories(64, samples)
    assert max(t.turns for t in wanted.values()) == 3
    for slots, asked in ((2, samples), (5, samples[::-1])):
        for key, t in trajectories(slots, asked).items():
            assert t.ids.tolist() == wanted[key].ids.tolist(), key
            assert np.nanmax(np.abs(t.logprobs - wanted[key].logprobs)) < 1e-5
            assert t.end_reason == wanted[key].end_reason
    for t in wanted.values():
        media = sum(len(m.media) for m in t.messages)
        assert len(t.media) == media
        assert (t.ids == family.chat.placeholder).sum() == sum(s.length for s in t.media)
        assert t.sources[0] == Source.PROMPT


def test_a_sample_that_comes_twice_gets_other_noise(run, model, family, samples):
    twice = [samples[1], samples[0], samples[1]]
    groups = run(EmbeddedEngine(model, family), twice, repeats=2)
    assert [g.uid for g in groups] == ["q0", "q2", "q0~2"]
    assert groups[2].sample is groups[0].sample
    named_so = replace(samples[0], id="q0~2")
    assert [g.uid for g in run(EmbeddedEngine(model, family), [*twice, named_so], repeats=1)][2:] == ["q0~3", "q0~2"]
    assert len({t.response_ids.tobytes() for t in flat(groups)}) == 6
    other = run(EmbeddedEngine(model, family), twice, repeats=2, seed="8")
    assert flat(other)[0].response_ids.tolist() != flat(groups)[0].response_ids.tolist()


WILD = replace(SAMPLING, temperature=1.3, top_k=40, top_p=0.9, first=(10.0, -1), support=True)


def test_a_greedy_rollout_stands_beside_the_members(run, model, family, samples, brief):
    counts = []
    asked = [*samples, samples[0]]
    how = {"sampling": WILD, "greedy": True, "progress": lambda *now: counts.append(now)}
    groups = run(EmbeddedEngine(model, family), asked, **how)
    assert counts[-1] == (20, 20)
    alone = run(EmbeddedEngine(model, family), asked, sampling=WILD)
    assert all(group.greedy is None for group in alone)
    for t, wanted in zip(flat(groups), flat(alone), strict=True):  # nothing leaks into the members
        assert t.key == wanted.key and t.trained and t.ids.tolist() == wanted.ids.tolist()
        assert np.nanmax(np.abs(t.logprobs - wanted.logprobs)) < 1e-5
        assert not len(t.support[0]) and all(map(len, t.support[1:]))
    for group in groups:
        baseline = group.greedy
        assert baseline.key == (group.uid, -1) and not baseline.trained
        assert baseline.support is None
        rendered = family.render(group.sample.messages)
        likeliest = Request(key="x", ids=rendered.ids, media=rendered.media, sampling=Sampling(temperature=0.0))
        likeliest = replace(likeliest, sampling=replace(likeliest.sampling, max_tokens=12))
        (wanted,) = generate(EmbeddedEngine(model, family), [likeliest])
        assert baseline.response_ids.tolist() == wanted.ids.tolist()
    assert [group.uid for group in groups][-1] == "q2~2"


def test_members_and_baseline_are_scored_apart(run, model, family, samples, brief):
    told = [replace(sample, answer="7") for sample in samples]
    reward = RewardConfig(terms=[{"verifier": "length", "shaping": False, "args": {"target": 12}}])
    with Scorer(reward, prompt_format="direct", max_tokens=12) as scorer:
        stream = RewardStream(scorer, family)
        groups = run(EmbeddedEngine(model, family), told, greedy=True, on_finish=stream.submit)
        groups = stream.attach(groups)
    for group in groups:
        for t in (*group.trajectories, group.greedy):
            assert t.reward == t.outcome == pytest.approx(t.response_length / 12)
        assert len(group.trajectories) == 3
    assert len({t.reward for t in flat(groups)}) > 2
    earned = RewardStream(None, family).attach(groups)
    assert [group.greedy.reward for group in earned] == [0, 0, 0, 0]
