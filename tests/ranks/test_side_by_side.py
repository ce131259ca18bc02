"""Rollouts ahead of training in other processes: they go on while the trainer trains, no token is older than allowed,
and no episode is lost or comes twice, also when a process is killed.
"""

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import saccade
from saccade.errors import ConfigError, Interrupted
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.engines.replicas.replica_pool import Replicas
from saccade.recipes import rl, rl_rollout
from saccade.recipes.validation import Validation
from saccade.rollout.collect import Pool
from saccade.rollout.scoring import RewardStream
from saccade.run import checkpoint
from saccade.run.loggers import read_metrics
from saccade.types import Source
from tests.ranks.processes import LIMIT, forked
from tests.ranks.test_ranks import STABLE

AHEAD, STEPS, PROMPTS, REPEATS = 2, 4, 3, 4
LONG = {
    "run__name": "run",
    "run__max_steps": STEPS,
    "rollout__ahead": AHEAD,
    "rollout__max_tokens": 60,
    "rollout__max_sequences": 24,
    "train__prompts_per_step": PROMPTS,
    "train__samples_per_prompt": REPEATS,
}


class Watched:
    """What the steps of a run were given, and what lived while each was trained and when weights were handed over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: dict[int, Any] = {}
        self.under_way: dict[int, int] = {}
        self.slept = 0
        self.handed_over: dict[int, int] = {}
        self.before_update = lambda engine, step: None
        self.after_sampling = lambda step: None
        self.validated: dict[int, list[int]] = {}  # step -> steps that were sampled by its begin and by its end
        sample_groups, update_models, sleep = rl_rollout.sample_groups, rl.update_models, Replicas.sleep
        begin, update_weights = Validation.begin, Replicas.update_weights

        def begun(validation: Validation, step: int, scores: Any) -> Any:
            found = begin(validation, step, scores)
            self.validated[step] = [max(self.groups)]

            def measured() -> Any:
                measured = found()
                assert self.engine.version == step
                self.validated[step].append(max(self.groups))
                return measured

            return measured

        def sampled(sampler: Any, *given: Any, step: int) -> Any:
            rollouts = sample_groups(sampler, *given, step=step)
            self.groups[step], self.engine = rollouts.groups, sampler.engine
            self.after_sampling(step)
            return rollouts

        def trained(*given: Any) -> Any:
            step = given[-1]
            self.under_way[step] = self.engine.pending
            self.before_update(self.engine, step)
            return update_models(*given)

        def slept(engine: Replicas) -> None:
            self.slept += 1
            sleep(engine)

        def handed_over(engine: Replicas, source: Any, version: int) -> None:
            self.handed_over.setdefault(version, len(engine._tasks))
            update_weights(engine, source, version)

        patch.setattr(Replicas, "update_weights", handed_over)
        patch.setattr(rl, "sample_groups", sampled)
        patch.setattr(rl, "update_models", trained)
        patch.setattr(Replicas, "sleep", slept)
        patch.setattr(Validation, "begin", begun)

    def require_sound(self) -> int:
        """Each question and each of its episodes once, no token too old. Returns the age of the oldest."""
        oldest = 0
        asked = [group.sample.id for groups in self.groups.values() for group in groups]
        assert len(asked) == len(set(asked)) == STEPS * PROMPTS
        for step, groups in self.groups.items():
            members = [t for group in groups for t in group.trajectories]
            assert len(members) == len({t.key for t in members}) == PROMPTS * REPEATS
            assert all(t.status not in ("aborted", "error") for t in members)
            ages = step - 1 - np.concatenate([t.versions[t.sources == Source.POLICY] for t in members])
            assert ages.min() >= 0 and ages.max() <= min(AHEAD, step - 1)
            oldest = max(oldest, int(ages.max()))
        assert [*self.groups] == [*range(1, STEPS + 1)]
        return oldest


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture
def run(rl_config, tmp_path):
    def go(**more: Any) -> Any:
        rl.run(rl_config(tmp_path, **LONG | more) | STABLE)
        return tmp_path / "run"

    return go


@pytest.fixture
def validated(scenes):
    options = {"data__val": str(scenes / "val.jsonl"), "val__every": 1, "val__before": False}
    return options | {"val__max_tokens": 30, "save__every": 1, "save__keep": STEPS}


def scores_of(folder: Path) -> dict[int, dict[str, float]]:
    """Those of the validation of each step, which is recorded once."""
    rows = [row for row in read_metrics(folder) if "val/val/accuracy" in row]
    steps = [row["step"] for row in rows]
    assert steps == [*range(1, STEPS + 1)]
    return {row["step"]: {k: v for k, v in row.items() if k.startswith("val/val/")} for row in rows}


def test_ranks_that_train_take_their_rollouts_back_first(watched, run):
    """The engines are in the processes that train: they stop and free their memory."""
    folder = run(run__gpus=2)
    assert watched.require_sound() == AHEAD
    assert set(watched.under_way.values()) == {0} and watched.slept >= STEPS
    assert any(row.get("mismatch/ess", 1.0) < 1 for row in read_metrics(folder))


def test_a_replica_goes_on_while_two_ranks_train(
    watched, run, validated, rl_config, tmp_path, same_weights, monkeypatch
):
    """And answers the questions of a validation while the next step is sampled. It finds what one does that training
    waits for, and is part of the checkpoint of its step. As many ranks repeat the run from its record.
    """

    def send(number: int) -> None:
        for replica in watched.engine._working:
            os.kill(replica.child.popen.pid, number)

    # While slow ranks score in step 1, it could answer all that it is asked.
    watched.after_sampling = lambda step: watched.under_way or send(signal.SIGSTOP)
    watched.before_update = lambda engine, step: send(signal.SIGCONT)
    folder = run(rollout__replicas=1, run__gpus=2, rollout__record="write", **validated)
    assert watched.require_sound() == AHEAD
    assert watched.under_way[1] > 0 and watched.slept == 0
    rows = [row for row in read_metrics(folder) if "data/staleness_max" in row]
    assert max(row["data/staleness_max"] for row in rows) == AHEAD
    assert watched.validated == {step: [step, step + 1] for step in range(1, STEPS)}
    found = scores_of(folder)
    best = [max(range(1, step + 1), key=lambda n: found[n]["val/val/accuracy"]) for step in found]
    for step in found:
        path = folder / "checkpoints" / f"step-{step}"
        progress = checkpoint.read_progress(path)
        assert (progress["best_step"], progress["unvalidated"]) == (best[step - 1], False)
        if step in (2, 3):
            asked = rl_config(tmp_path, **LONG, **validated) | {"model.path": str(path)}
            again = saccade.evaluate(asked, out=tmp_path / f"eval-{step}")["val"]
            assert found[step] == {f"val/val/{name}": value for name, value in again.items()}
    monkeypatch.delattr(Pool, "_ask")
    rl.run(rl_config(tmp_path / "again", **LONG, run__gpus=2, rollout__record=str(folder)) | STABLE)
    last = f"run/checkpoints/step-{STEPS}"
    assert same_weights(tmp_path / last, tmp_path / "again" / last)


SURE = """
from saccade.types import Message

class Sure:
    def reset(self, sample, seed):
        self.turn = 0
        return sample.messages
    def step(self, message):
        self.turn += 1
        return (Message(role="user", parts=("sure?",)),), float(self.turn), self.turn == 6, {}
    def close(self):
        pass
"""


def test_turns_and_rewards_of_later_steps_are_asked_for_while_the_trainer_trains(
    watched, run, tmp_path, monkeypatch, rl_config, same_weights
):
    """Of episodes with six turns in processes of their own. The run is repeated from its record all the same."""
    (tmp_path / "sure.py").write_text(SURE)
    env = {"env__name": f"{tmp_path / 'sure.py'}:Sure", "env__max_turns": 6}
    asked, scored, training = Counter[int](), Counter[int](), list[int]()

    def note(owner: Any, name: str, counts: Counter[int]) -> None:
        method = getattr(owner, name)

        def noted(*given: Any) -> Any:
            counts.update(training)
            return method(*given)

        monkeypatch.setattr(owner, name, noted)

    def wait(engine: Replicas, step: int) -> None:
        end = time.monotonic() + 20
        training[:] = [step]
        while step == 2 and not (asked[2] >= PROMPTS and scored[2]) and time.monotonic() < end:
            time.sleep(0.01)
        training.clear()

    note(Replicas, "submit", asked)
    note(RewardStream, "submit", scored)
    watched.before_update = wait
    folder = run(rollout__replicas=1, rollout__record="write", **env)
    watched.require_sound()
    assert asked[2] >= PROMPTS and scored[2]
    monkeypatch.delattr(Pool, "_ask")
    rl.run(rl_config(tmp_path / "again", **LONG | env, rollout__record=str(folder)) | STABLE)
    last = f"run/checkpoints/step-{STEPS}"
    assert same_weights(tmp_path / last, tmp_path / "again" / last)


def test_a_validation_that_a_run_ended_without_is_made_when_it_is_resumed(watched, run, validated):
    """Whether it was told to end or failed."""

    def end(step: int) -> None:
        if step == 2 and resume == "auto":
            raise RuntimeError("on purpose")
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    watched.after_sampling = end
    for resume, ended in (("none", Interrupted), ("auto", RuntimeError)):
        with pytest.raises(ended):
            run(rollout__replicas=1, **validated, run__resume=resume)
        assert [*watched.validated] == [1]
    watched.after_sampling = lambda step: None
    folder = run(rollout__replicas=1, **validated, run__resume="auto")
    watched.require_sound()
    scores = scores_of(folder)
    stored = [checkpoint.read_progress(folder / "checkpoints" / f"step-{step}") for step in scores]
    assert stored[0]["best_score"] == scores[1]["val/val/accuracy"] and stored[0]["best_step"] == 1
    assert not any(progress["unvalidated"] for progress in stored)


@pytest.mark.parametrize("keep", [False, True])
def test_kill_9_of_replicas_amid_rollouts_training_and_a_hand_over(watched, run, monkeypatch, keep, validated):
    """All at once, with the rollouts of several steps. Then one is ready again before weights are handed over: it takes
    none from a trainer that has changed them. One dies while it takes weights. Whether sequences live on or not, what
    counts as new is what the trainer itself computes.
    """
    killed: list[Any] = []
    hand_out, begin = Replicas._hand_out, Replica.begin

    def kill(replicas: list[Any]) -> None:
        for replica in replicas:
            os.kill(replica.child.popen.pid, signal.SIGKILL)
            killed.append(replica)

    def amid_rollouts(engine: Replicas) -> None:
        hand_out(engine)
        if engine.version == 1 and engine._tasks and not killed:
            kill(engine._working)

    def amid_training(engine: Replicas, step: int) -> None:
        if step == 2:
            kill([replica for replica in engine._working if replica not in killed][:1])
            while not engine._ready:  # what it says is heard in the background
                time.sleep(0.01)

    def amid_a_hand_over(replica: Replica, call: str, arguments: Any, *arrays: Any) -> Any:
        answer = begin(replica, call, arguments, *arrays)
        if call == "load" and arguments[-1] == 3 and replica.log.stem == "engine-1" and not dying:
            dying.append(replica)
            kill(dying)
        return answer

    dying: list[Any] = []
    monkeypatch.setattr(Replica, "begin", amid_a_hand_over)
    monkeypatch.setattr(Replicas, "_hand_out", amid_rollouts)
    watched.before_update = amid_training
    few = {"save__every": 2, "rollout__max_sequences": 4}  # so that later steps have to wait
    folder = run(rollout__replicas=2, rollout__at_update="keep_keys" if keep else "interrupt", **validated | few)
    assert watched.require_sound() == AHEAD and watched.under_way[1] > 0 and watched.slept == 0
    assert [watched.handed_over[step] > 0 for step in (1, 2)] == [keep, False]  # not before a checkpoint
    gaps = [row["mismatch/logp_gap_max"] for row in read_metrics(folder) if "mismatch/logp_gap_max" in row]
    assert gaps and max(gaps) < 1e-4
    deaths = re.findall(r"died and starts again, (\d+) requests wait", (folder / "log.txt").read_text())
    assert len(deaths) == len(killed) >= 3 and dying and sum(map(int, deaths)) >= PROMPTS * REPEATS


def test_a_run_is_repeated_from_its_record(watched, run, rl_config, tmp_path, same_weights, monkeypatch, said):
    """Whenever its engine was interrupted, and from a checkpoint, too; no engine is asked."""
    refill = {"algorithm__preset": ["dapo"], "algorithm__filter__max_rounds": 3}
    more = refill | {"algorithm__filter__on_exhausted": "train_partial", "algorithm__filter__keep_surplus": True}
    first = run(rollout__replicas=1, rollout__record="write", save__every=2, **more)
    members = [t for groups in watched.groups.values() for group in groups for t in group.trajectories]
    assert any(len(set(t.versions[t.sources == Source.POLICY])) > 1 for t in members)
    asked: list[str] = []
    monkeypatch.setattr(Pool, "_ask", lambda pool, key: asked.append(key))
    again = rl_config(tmp_path / "again", **LONG, **more, rollout__record=str(first)) | STABLE
    rl.run(again)
    rl.run(again | {"run.name": "half", "run.resume": str(first / "checkpoints" / "step-2")})
    runs = [first, *(tmp_path / "again" / name for name in ("run", "half"))]
    one, *others = (folder / "checkpoints" / f"step-{STEPS}" for folder in runs)
    assert all(same_weights(one, other) for other in others)
    assert not asked and not any("rollout.record" in text for text in said)
    with pytest.raises(ConfigError, match=r"its draws began 2 steps ahead; use rollout\.ahead=2"):
        rl.run(again | {"run.name": "nearer", "rollout.ahead": 1})
    with pytest.raises(ConfigError, match=r"draw 1/1 asked counting-24-\d+, .* use the config\.yaml of that run"):
        rl.run(again | {"run.name": "other", "run.seed": 7})
    with pytest.raises(ConfigError, match=r"draw 1/1 has \d+ answers, here it asks for \d+; use train\.samples_per_p"):
        rl.run(again | {"run.name": "more", "train.samples_per_prompt": 5})


def _killed_in_step_3(options: dict[str, Any]) -> None:
    update_models = rl.update_models

    def killing(*given: Any) -> Any:
        if given[-1] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return update_models(*given)

    rl.update_models = killing
    rl.run(options)


@pytest.mark.parametrize(
    "more", [{}, {"rollout__replicas": 1, "rollout__at_update": "drain"}], ids=["carried", "drained"]
)
def test_kill_9_of_a_run_whose_rollouts_are_ahead(rl_config, tmp_path, tensors, forked_ranks, more):
    """Resumed from its last checkpoint it ends with the weights of one that nobody disturbed, if none of its rollouts
    depends on when weights changed: they are carried, or all have ended before.
    """
    more |= {"rollout__max_tokens": 24, "rollout__max_sequences": 8, "save__every": 1}
    killed, undisturbed = (rl_config(tmp_path / name, **LONG | more) for name in ("killed", "undisturbed"))
    process = forked(_killed_in_step_3, killed)
    rl.run(undisturbed)
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL
    rl.run(killed | {"run.resume": "auto"})
    ages = {row["step"]: row["data/staleness_mean"] for row in read_metrics(tmp_path / "killed" / "run") if
            "data/staleness_mean" in row}  # fmt: skip
    assert [*ages] == [*range(1, STEPS + 1)]
    assert [*ages.values()] == [0, 1, 2, 2] if "rollout__replicas" in more else max(ages.values()) < AHEAD
    ours, theirs = (
        tensors(tmp_path / name / "run" / "checkpoints" / f"step-{STEPS}") for name in ("killed", "undisturbed")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
