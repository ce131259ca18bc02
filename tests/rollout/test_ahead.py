"""Rollouts that run ahead of training: interrupted and continued, bounded, repeatable, resumed to the bit."""

import threading
from pathlib import Path

import numpy as np
import pytest

from saccade.config import load
from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import SingleTurn, Step
from saccade.errors import ConfigError
from saccade.plugins.reward_models.learned_reward import load_learned
from saccade.recipes import model_setup, rl, rl_rollout
from saccade.recipes.rollouts_ahead import Draw, RolloutsAhead
from saccade.rewards.reward_sample import reward_sample
from saccade.rollout.collect import Pool
from saccade.rollout.episode import EpisodeSetup, Limits
from saccade.rollout.scoring import seen_by_reward
from saccade.run.loggers import read_metrics
from saccade.types import Message, Sample, Sampling, Source
from tests.endpoints import chat_answer, scripted, shown_to_judge
from tests.engines.asked import counted

LONG = {
    "rollout__max_tokens": 14, "rollout__max_sequences": 8, "run__max_steps": 4, "train__prompts_per_step": 3,
    "run__name": "run",
}  # fmt: skip


@pytest.fixture
def play(family):
    def make(environment=SingleTurn, **sampling):
        limits = Limits(max_turns=3, max_total_tokens=400)
        options = {"max_tokens": 20} | sampling
        return EpisodeSetup(
            environment=environment, family=family, sampling=Sampling(**options), limits=limits, seed="1"
        )

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
            pool.resume()

    return [t for call in calls for group in pool.finish(call, progress) for t in group.trajectories]


@pytest.mark.parametrize("turns", [1, 3])
def test_what_is_interrupted_goes_on_as_if_it_had_not_been(turns, model, family, play, scripted):
    sampling = {"top_k": 20, "support": True, "first": (0.5, 5)}
    again = Message(role="user", parts=("again",))
    steps = [Step((again,), 0.0, turn == 3, {}) for turn in (1, 2, 3)]
    environment = SingleTurn if turns == 1 else lambda: scripted(steps)
    whole = played(model, family, play(environment, **sampling), 0)
    pieces = played(model, family, play(environment, **sampling), 4)
    assert max(t.response_length for t in whole) > 8
    for one, other in zip(whole, pieces, strict=True):
        assert one.key == other.key and np.array_equal(one.ids, other.ids) and one.end_reason == other.end_reason
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5, equal_nan=True)
        assert [list(ids) for ids in one.support] == [list(ids) for ids in other.support]


def test_an_interrupted_group_reads_its_picture_once(load, family, play, image):
    model, parts = load("qwen2_5_vl"), (image(112, 84, 1), "What is this?")
    sample = Sample(id="q", messages=(Message(role="user", parts=parts),))
    engine, how = EmbeddedEngine(model, family), play()
    pool = Pool(engine)
    started = pool.start([sample], how, repeats=8)
    for _ in range(6):
        pool._poll()
    pool.interrupt()
    engine.sleep()
    begun = [len(one.beginning.ids) for one in started.generated().values()]
    with counted(model) as calls:
        pool.finish(started)
    prompt = len(family.render(sample.messages))
    assert calls[:2] == [(prompt, 1), (sum(begun), 0)] and min(begun) > 3
    assert max(calls[2:]) == (8, 0)


def test_a_pool_is_polled_in_the_background_and_its_errors_reach_the_caller(model, family, play, scripted, brief):
    again = Message(role="user", parts=("again",))
    environment = play(lambda: scripted([Step((again,), 0.0, turn == 3, {}) for turn in (1, 2, 3)]))
    told = []

    def fail(sample, trajectory):
        raise OSError("no room on the disk")

    for on_finish in (lambda sample, trajectory: told.append(trajectory), fail):
        engine, over = EmbeddedEngine(model, family), threading.Event()
        pool = Pool(engine)
        started = pool.start(asked(2), environment, repeats=2, on_finish=on_finish)
        if on_finish is fail:
            with pytest.raises(OSError, match="no room on the disk"), pool.polled():
                over.wait(3)
            with pytest.raises(KeyError), pool.polled():  # the caller's own comes first
                raise KeyError
            continue
        with pool.polled():
            while len(told) < 4:
                assert engine.weights_move and not over.wait(0.01)
        groups = pool.finish(started)
        assert [t for group in groups for t in group.trajectories] == sorted(told, key=lambda t: t.key)
        assert max(t.turns for t in told) == 3 and not engine.weights_move


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
        assert any(one.turns or one.beginning for one in second.generated().values()) != equal


def test_a_stop_string_over_an_interruption_ends_the_turn(model, family, play):
    sampling = {"top_k": 20, "support": True}
    whole = played(model, family, play(**sampling), 0)
    stop = family.decode(whole[0].response_ids[:9])[-4:]
    cut, wanted = (played(model, family, play(stop=(stop,), **sampling), looks)[0] for looks in (3, 0))
    assert np.array_equal(cut.ids, wanted.ids) and cut.response_length < whole[0].response_length
    assert len(cut.support) == cut.response_length


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


@pytest.fixture(scope="module")
def trained(rl_config, tmp_path_factory):
    """Runs, each once; what each step was given: (versions of sampled tokens, sample ids, those asked for it)."""
    done = {}

    def run(out, ahead, **changes):
        if (key := repr((out, ahead, changes))) in done:
            return done[key]
        found, folder = {}, tmp_path_factory.mktemp(out)
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

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rl, "sample_groups", noted)
            rl.run(rl_config(folder, **LONG | {"rollout__ahead": ahead} | changes))
        assert not any(found.pop("held"))
        return done.setdefault(key, (folder / "run" / "checkpoints", found))

    return run


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_token_is_older_than_allowed_and_runs_repeat(ahead, trained, same_weights):
    first, found = trained("a", ahead, rollout__max_sequences=20)
    ages = {step: step - 1 - versions for step, (versions, _, _) in found.items()}
    assert all(age.min() >= 0 and age.max() <= min(ahead, step - 1) for step, age in ages.items())
    oldest = max(age.max() for age in ages.values())
    assert oldest >= min(ahead, 2)
    assert any(len(set(age)) > 1 for age in ages.values())  # inside one step
    rows = read_metrics(first.parent)
    assert max(row["data/staleness_max"] for row in rows if "data/staleness_max" in row) == oldest
    assert any(row.get("mismatch/ess", 1.0) < 1 for row in rows)  # weighed
    if ahead > 1:
        return
    second, _ = trained("b", ahead, rollout__max_sequences=20)
    assert same_weights(first / "step-4", second / "step-4")
    _, plain = trained("c", 0)
    assert [ids for _, ids, _ in found.values()] == [ids for _, ids, _ in plain.values()]
    assert all((versions == step - 1).all() for step, (versions, _, _) in plain.items())


SAVED = {"save__every": 1, "save__keep": 9}
REFILL = {
    "algorithm__preset": ["dapo"],
    "algorithm__filter__keep_surplus": True,
    "algorithm__filter__max_rounds": 3,
    "algorithm__filter__on_exhausted": "train_partial",
    "run__max_steps": 5,
}


def test_a_step_that_draws_again_takes_what_has_begun(trained):
    """So questions are asked in the order of the data, as without; none is left out, and tokens do not get older."""
    _, found = trained("whole", 2, **SAVED, **REFILL)
    _, plain = trained("plain", 0, **REFILL)
    asked, order = ([name for _, _, names in run.values() for name in names] for run in (found, plain))
    shorter = min(len(asked), len(order))
    assert asked[:shorter] == order[:shorter] and len(asked) > 5 * 3  # prompts of five steps
    ages = [step - 1 - versions for step, (versions, _, _) in found.items()]
    assert all(age.min() >= 0 and age.max() <= 3 for age in ages)  # a surplus is carried for a step
    began = {step: step - 1 - versions.min() for step, (versions, _, names) in found.items() if len(names) > 3}
    assert any(began.values())  # what they drew again, too


WEIGHED = {"algorithm__correct": ["tis.token"]}
CALCULATOR = {"env__name": "calculator", "env__max_turns": 2, "prompt__format": "direct"}


@pytest.mark.parametrize("more", [WEIGHED, REFILL, CALCULATOR])
def test_a_resumed_run_ends_as_if_it_had_never_stopped(more, trained, same_weights):
    whole, _ = trained("whole", 2, **SAVED, **more)
    assert (whole / "step-1" / "state" / "ahead" / "ahead.json").is_file()
    resumed, found = trained("resumed", 2, run__resume=str(whole / "step-1"), **SAVED, **more)
    assert min(found) == 2 and same_weights(whole / f"step-{max(found)}", resumed / f"step-{max(found)}")


def test_a_run_can_go_on_with_another_number_of_steps_ahead(trained):
    """No question is left out, whatever had begun."""
    whole, found = trained("whole", 2, **SAVED, **WEIGHED)
    wanted = [ids for _, ids, _ in found.values()]
    fewer, found = trained("fewer", 0, run__resume=str(whole / "step-1"), **SAVED, **WEIGHED)
    assert [ids for _, ids, _ in found.values()] == wanted[1:]
    _, found = trained("more", 1, run__resume=str(fewer / "step-2"), **SAVED, **WEIGHED)
    assert [ids for _, ids, _ in found.values()] == wanted[2:]


def test_old_tokens_can_be_left_out_and_on_policy_presets_refuse(trained, same_weights, rl_config, tmp_path):
    changes = SAVED | {"algorithm__kl__coef": 0.0, "rollout__max_sequences": 64}
    some, all_tokens = {"name": "recent", "high": 0}, {"name": "reject.token.k1", "low": 5, "high": 6}
    run, _ = trained("a", 2, algorithm__correct=["tis.token", some], **changes)
    assert any(0 < row.get("mismatch/masked_frac", 0) < 1 for row in read_metrics(run.parent))
    run, _ = trained("b", 2, algorithm__correct=["tis.token", all_tokens], **changes)
    assert all(row["policy/empty_step"] == 1 for row in read_metrics(run.parent) if "policy/empty_step" in row)
    assert all(same_weights(run / f"step-{step}", run / "step-1") for step in range(2, 5))
    with pytest.raises(ConfigError, match=r"algorithm\.old=detach: rollout\.ahead=1 weighs tokens"):
        rl.run(rl_config(tmp_path, **LONG, rollout__ahead=1, algorithm__old="detach", train__updates_per_step=2))
    with pytest.raises(ConfigError, match=r"gpg is strictly on-policy; use rollout\.ahead=0"):
        rl.run(rl_config(tmp_path, **LONG, rollout__ahead=1, algorithm__preset=["gpg"]))
    with pytest.raises(ConfigError, match=r"rollout\.at_update: has no effect without .*use rollout\.replicas=1"):
        rl.run(rl_config(tmp_path, **LONG, rollout__ahead=1, rollout__at_update="keep_keys"))
    assert not Path(tmp_path / "run").exists()


def test_judges_and_reward_models_score_what_ran_ahead(rl_config, tmp_path, monkeypatch):
    """Each answer has the verdict on its own text, and the score that the model gives it alone."""
    found, learned = {}, {"verifier": "model", "weight": 0.1, "args": {"path": "tiny:qwen2_vl"}}
    sample_groups = rl_rollout.sample_groups

    def noted(sampler, *given, step):
        rollouts = sample_groups(sampler, *given, step=step)
        found[step] = [(group.sample, t) for group in rollouts.groups for t in group.trajectories]
        return rollouts

    def digits(text):
        return sum(map(str.isdigit, text)) % 2

    monkeypatch.setattr(rl, "sample_groups", noted)
    with scripted(lambda body: chat_answer(f"Score: {digits(shown_to_judge(body)[1])}")) as judge:
        options = rl_config(tmp_path, **LONG, rollout__ahead=1, reward__self_test="off")
        options |= {"reward.judge.url": judge.url, "reward.judge.model": "m"}
        options |= {"reward.terms": [{"verifier": "judge", "args": {"order": ["whole"]}}, learned]}
        rl.run(options)
    model = load_learned(load(options), "tiny:qwen2_vl")
    own = model_setup.family_of(load(options), load(options).model.path)
    for told in found.values():
        seen = [seen_by_reward(reward_sample(sample, ""), t, own) for sample, t in told]
        assert [t.parts["model"] for _, t in told] == pytest.approx(model.score(seen), abs=1e-4)
        assert [t.parts["judge"] for _, t in told] == [digits(t.extracted or "") for _, t in told]
        assert all(t.reward == pytest.approx(t.parts["judge"] + 0.1 * t.parts["model"]) for _, t in told)
    rows = read_metrics(tmp_path / "run")
    assert {t.parts["judge"] for told in found.values() for _, t in told} == {0.0, 1.0} and len(found) == 4
    assert max(row["data/staleness_max"] for row in rows) == 1 and all(row["policy/grad_norm"] > 0 for row in rows)


def test_what_was_recorded_after_a_checkpoint_is_forgotten(tmp_path):
    for name in ("1/1", "2/1", "2/2", "3/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.json").touch()
    begun = [Draw(name="2/2", step=3, samples=[])]
    RolloutsAhead(pool=None, steps=1, total=9, sample_of=None, record=tmp_path, stored=begun).delete_records_after(2)
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.json")} == {"1/1.json", "2/1.json"}
