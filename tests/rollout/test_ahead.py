"""Rollouts that run ahead of training: interrupted and continued, bounded, repeatable, resumed to the bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import SingleTurn
from saccade.errors import ConfigError
from saccade.recipes import rl, rl_rollout
from saccade.recipes.rollouts_ahead import Draw, RolloutsAhead
from saccade.rollout import collect
from saccade.rollout.collect import Pool
from saccade.rollout.episode import Limits, Play
from saccade.run.loggers import read_metrics
from saccade.types import Completion, Message, Sample, Sampling, Source

LONG = {
    "rollout__max_tokens": 24,
    "rollout__max_sequences": 8,
    "run__max_steps": 5,
    "train__prompts_per_step": 3,
    "run__name": "run",
}


class Thrice:
    """Three turns, of which the last is answered."""

    def __init__(self):
        self.turns = 0

    def reset(self, sample, seed):
        return sample.messages

    def step(self, message):
        self.turns += 1
        return (Message(role="user", parts=("again",)),), 0.0, self.turns == 3, {}

    def close(self):
        pass


@pytest.fixture
def play(family):
    def make(environment=SingleTurn, **sampling):
        limits = Limits(max_turns=3, max_total_tokens=400)
        options = {"max_tokens": 20} | sampling
        return Play(environment=environment, family=family, sampling=Sampling(**options), limits=limits, seed="1")

    return make


def asked(count):
    return [Sample(id=f"q{n}", messages=(Message(role="user", parts=(f"What is {n}?",)),)) for n in range(count)]


def played(model, family, play, looks, **options):
    """Answers of two calls in one pool that is interrupted after so many looks at the engine, each time."""
    engine = EmbeddedEngine(model, family)
    pool = Pool(engine, at_once=4)
    calls = [pool.start(asked(3), play, repeats=2, name=name, **options) for name in ("1|", "2|")]
    seen = 0

    def progress(done, total):
        nonlocal seen
        seen += 1
        if looks and seen % looks == 0:
            pool.interrupt()
            assert engine.pending == 0
            engine.sleep()
            pool.go_on()

    return [t for call in calls for group in pool.finish(call, progress) for t in group.trajectories]


@pytest.mark.parametrize("environment", [SingleTurn, Thrice])
def test_what_is_interrupted_goes_on_as_if_it_had_not_been(environment, model, family, play):
    sampling = {"top_k": 20, "support": True, "first": (0.5, 5)}
    whole = played(model, family, play(environment, **sampling), 0)
    pieces = played(model, family, play(environment, **sampling), 4)
    assert max(t.response_length for t in whole) > 8
    for one, other in zip(whole, pieces, strict=True):
        assert one.key == other.key and np.array_equal(one.ids, other.ids) and one.end_reason == other.end_reason
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5, equal_nan=True)
        assert [list(ids) for ids in one.support] == [list(ids) for ids in other.support]


def test_later_answers_fill_gaps_alone(model, family, play):
    """Answers of equal length leave none: nothing is sampled ahead."""
    for ignore_eos in (True, False):
        engine = EmbeddedEngine(model, family)
        pool, pending = Pool(engine, at_once=6), [6]
        how = play(ignore_eos=ignore_eos)
        first, second = (pool.start(asked(3), how, repeats=2, name=name) for name in ("1|", "2|"))
        groups = pool.finish(first, lambda *_: pending.append(engine.pending))  # noqa: B023
        pool.interrupt()
        equal = len({t.response_length for group in groups for t in group.trajectories}) == 1
        assert max(pending) == 6 and equal == ignore_eos
        assert any(one.turns or one.beginning for one in second.heard().values()) != equal


def test_a_stop_string_over_an_interruption_ends_the_turn(model, family, play):
    whole = played(model, family, play(), 0)
    text = family.decode(whole[0].response_ids[:9])
    stop = text[-4:]
    cut = played(model, family, play(stop=(stop,)), 3)[0]
    wanted = played(model, family, play(stop=(stop,)), 0)[0]
    assert np.array_equal(cut.ids, wanted.ids) and cut.response_length < whole[0].response_length


def test_what_is_preferred_is_asked_after_the_oldest(model, family, play):
    """With a sequence at a time."""
    pool, ended = Pool(EmbeddedEngine(model, family, max_sequences=1)), []
    options = {"repeats": 1, "on_finish": lambda sample, trajectory: ended.append(sample.id)}
    first, *others = asked(3)
    pool.interrupt()
    oldest = pool.start([first], play(), name="1|", **options)
    started = [pool.start([one], play(), name=f"{one.id}|", **options) for one in others]
    pool.prefer(started[1])
    for each in (started[0], started[1], oldest):
        pool.finish(each)
    assert ended == ["q0", "q2", "q1"]


def test_a_piece_is_cut_where_its_support_is():
    numbers = np.arange(4)
    one = Completion(
        key="a",
        ids=numbers,
        logprobs=np.zeros(4, np.float32),
        versions=numbers,
        finish="length",
        support=(numbers,) * 4,
    )
    cut = collect._until_stop(replace(one, finish="length"), ("12",), lambda ids: "".join(map(str, ids)))
    assert cut.ids.tolist() == [0, 1, 2] and cut.finish == "stop" and len(cut.support) == 3


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture
def trained(rl_config, tmp_path, monkeypatch):
    """Runs; what each step was given: (versions of sampled tokens, sample ids, those that were asked for it)."""

    def run(out, ahead, **changes):
        found = {}
        sample_groups = rl_rollout.sample_groups

        def noted(sampler, *given, step):
            rollouts = sample_groups(sampler, *given, step=step)
            now = sampler.ahead
            held = [now.begun, now.pool.started, now.pool._owners, now.pool.calls]
            found["held"] = [*held, now.stored]
            assert len(now.begun) == len(now.pool.started) == now.last(step) - step
            assert all(len(some) <= 3 * 4 * ahead for some in held)  # whatever the number of the step
            members = [t for group in rollouts.groups for t in group.trajectories]
            versions = np.concatenate([t.versions[t.sources == Source.POLICY] for t in members])
            found[step] = versions, *([g.sample.id for g in some] for some in (rollouts.groups, rollouts.scored))
            return rollouts

        monkeypatch.setattr(rl, "sample_groups", noted)
        rl.run(rl_config(tmp_path / out, **LONG | {"rollout__ahead": ahead} | changes))
        monkeypatch.setattr(rl, "sample_groups", sample_groups)
        assert not any(found.pop("held"))
        return tmp_path / out / "run", found

    return run


def weights(run, step, tensors):
    return tensors(run / "checkpoints" / f"step-{step}")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_token_is_older_than_allowed_and_runs_repeat(ahead, trained, tensors):
    first, found = trained("a", ahead, rollout__max_sequences=20)
    ages = {step: step - 1 - versions for step, (versions, _, _) in found.items()}
    assert all(age.min() >= 0 and age.max() <= min(ahead, step - 1) for step, age in ages.items())
    oldest = max(age.max() for age in ages.values())
    assert oldest >= min(ahead, 2)
    assert any(len(set(age)) > 1 for age in ages.values())  # inside one step
    rows = read_metrics(first)
    assert max(row["data/staleness_max"] for row in rows if "data/staleness_max" in row) == oldest
    assert any(row.get("mismatch/ess", 1.0) < 1 for row in rows)  # weighed
    if ahead > 1:
        return
    second, _ = trained("b", ahead, rollout__max_sequences=20)
    assert same(weights(first, 5, tensors), weights(second, 5, tensors))
    _, plain = trained("c", 0)
    assert [ids for _, ids, _ in found.values()] == [ids for _, ids, _ in plain.values()]
    assert all((versions == step - 1).all() for step, (versions, _, _) in plain.items())


REFILL = {
    "algorithm__preset": ["dapo"],
    "algorithm__filter__keep_surplus": True,
    "algorithm__filter__max_rounds": 3,
    "algorithm__filter__on_exhausted": "train_partial",
}


def test_a_step_that_draws_again_takes_what_has_begun(trained):
    """So questions are asked in the order of the data, as without; none is left out, and tokens do not get older."""
    _, found = trained("a", 2, **REFILL)
    _, plain = trained("b", 0, **REFILL)
    asked, order = ([name for _, _, names in run.values() for name in names] for run in (found, plain))
    shorter = min(len(asked), len(order))
    assert asked[:shorter] == order[:shorter] and len(asked) > 5 * 3  # prompts of five steps
    ages = [step - 1 - versions for step, (versions, _, _) in found.items()]
    assert all(age.min() >= 0 and age.max() <= 3 for age in ages)  # a surplus is carried for a step
    began = {step: step - 1 - versions.min() for step, (versions, _, names) in found.items() if len(names) > 3}
    assert any(began.values())  # what they drew again, too


@pytest.mark.parametrize(
    "more", [{}, REFILL, {"env__name": "calculator", "env__max_turns": 2, "prompt__format": "direct"}]
)
def test_a_resumed_run_ends_as_if_it_had_never_stopped(more, trained, tensors):
    options = {"save__every": 1, "save__keep": 9} | more
    whole, _ = trained("whole", 2, **options)
    stored = whole / "checkpoints" / "step-2" / "state" / "ahead"
    assert (stored / "ahead.json").is_file()
    resumed, found = trained("resumed", 2, run__resume=str(whole / "checkpoints" / "step-2"), **options)
    assert min(found) == 3
    assert same(weights(whole, 5, tensors), weights(resumed, 5, tensors))


def test_a_run_can_go_on_with_another_number_of_steps_ahead(trained):
    """No question is left out, whatever had begun."""
    options = {"save__every": 1, "save__keep": 9, "algorithm__correct": ["tis.token"]}
    whole, found = trained("whole", 2, **options)
    wanted = [ids for _, ids, _ in found.values()]
    fewer, found = trained("fewer", 0, run__resume=str(whole / "checkpoints" / "step-2"), **options)
    assert [ids for _, ids, _ in found.values()] == wanted[2:]
    _, found = trained("more", 1, run__resume=str(fewer / "checkpoints" / "step-4"), **options)
    assert [ids for _, ids, _ in found.values()] == wanted[4:]


def test_old_tokens_can_be_left_out_and_on_policy_presets_refuse(trained, tensors, rl_config, tmp_path):
    changes = {"algorithm__kl__coef": 0.0, "save__every": 1, "save__keep": 9, "rollout__max_sequences": 64}
    some, all_tokens = {"name": "recent", "high": 0}, {"name": "reject.token.k1", "low": 5, "high": 6}
    run, _ = trained("a", 2, algorithm__correct=["tis.token", some], **changes)
    assert any(0 < row.get("mismatch/masked_frac", 0) < 1 for row in read_metrics(run))
    run, _ = trained("b", 2, algorithm__correct=["tis.token", all_tokens], **changes)
    assert all(row["policy/empty_step"] == 1 for row in read_metrics(run) if "policy/empty_step" in row)
    assert all(same(weights(run, step, tensors), weights(run, 1, tensors)) for step in range(2, 6))
    with pytest.raises(ConfigError, match=r"algorithm\.old=detach: rollout\.ahead=1 weighs tokens"):
        rl.run(rl_config(tmp_path, **LONG, rollout__ahead=1, algorithm__old="detach", train__updates_per_step=2))
    with pytest.raises(ConfigError, match=r"gpg is strictly on-policy; use rollout\.ahead=0"):
        rl.run(rl_config(tmp_path, **LONG, rollout__ahead=1, algorithm__preset=["gpg"]))
    with pytest.raises(ConfigError, match=r"rollout\.keep_keys: has no effect without .*use rollout\.replicas=1"):
        rl.run(rl_config(tmp_path, **LONG, rollout__ahead=1, rollout__keep_keys=True))
    assert not Path(tmp_path / "run").exists()


def test_what_was_recorded_after_a_checkpoint_is_forgotten(tmp_path):
    for name in ("1/1", "2/1", "2/2", "3/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.json").touch()
    begun = [Draw(name="2/2", step=3, samples=[])]
    RolloutsAhead(pool=None, steps=1, total=9, sample_of=None, record=tmp_path, stored=begun).forget_later(2)
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.json")} == {"1/1.json", "2/1.json"}
