"""Reinforcement learning end to end on a tiny model: what a step does, what it leaves behind."""

import gzip
import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import saccade
from saccade.cli import app
from saccade.config import load
from saccade.errors import ConfigError, TrainingError
from saccade.plugins.reports.trajectories import read_trajectories
from saccade.recipes import rl
from saccade.run import checkpoint
from saccade.run.loggers import read_metrics
from tests.recipes.documented import unnamed

# Of the names of docs/runs.md, those that every run of GRPO with a KL has.
NAMES = {
    "reward": "mean std min max accuracy abstain_rate error_rate by_source/counting/accuracy",
    "group": "dead_frac all_right_frac all_wrong_frac constant_low constant_high singleton std_mean kept_frac rounds",
    "policy": "loss pg_loss kl_ref kl_loss kl_coef kl_old entropy clip_frac_low clip_frac_high "
    "ratio_mean ratio_max grad_norm grad_norm_vision lr update_skipped",
    "adv": "mean std min max clip_frac",
    "guard": "nonfinite",
    "mismatch": "logp_gap_mean logp_gap_max mult_prob_error",
    "length": "response_mean response_std response_min response_max response_p50 response_p95 "
    "prompt_mean vision_tokens_mean truncated_frac parse_rate think_rate",
    "turns": "mean max overturn_frac void_frac images_per_sample",
    "data": "epoch cursor bad_rows",
    "time": "rollout reward_wait logp_ref advantage update step bottleneck",
    "perf": "samples_per_s rollout_tokens_per_s update_tokens_per_s tokens_per_s_per_gpu",
    "mem": "host_rss_gb rss_growth_gb",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, rl_config):
    """Five steps with a KL, validated every other step, each saved, one kept, the third one traced."""
    out = tmp_path_factory.mktemp("rl")
    changes = {"run.max_steps": 5, "val.every": 2, "save.every": 1, "save.keep": 1}
    config = rl_config(out) | changes | {"data.val": rl_config(out)["data.train"].replace("train", "val")}
    rl.run(config | {"track.trajectories_every": 2, "run.trace": True})
    return out / "run"


def test_stored_rollouts_say_what_they_taught(finished):
    members = [json.loads(line) for line in (finished / "trajectories" / "step-4.jsonl").open()]
    assert {member["version"] for member in members} == {3}  # sampled before the fourth update
    stored = {p.name for p in (finished / "trajectories").rglob("step-*.jsonl")}
    assert {"step-1.jsonl", "step-2.jsonl", "step-4.jsonl", "step-5.jsonl"} <= stored
    manifest = json.loads((finished / "manifest.json").read_text())
    assert {"data", "template", "prompt_texts", "pixels", "family", "packages", "seed"} <= manifest.keys()
    assert "step 5/5" in (finished / "log.txt").read_text()
    files = [yaml.safe_load((finished / name).read_text()) for name in ("config.resolved.yaml", "config.yaml")]
    usual = {"std_eps": 1e-6, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0, "delta": 0, "kl_clamp": "bounded"}
    assert files[0]["algorithm"]["args"] == usual and "args" not in files[1].get("algorithm", {})
    for start in range(0, len(members), 4):
        rewards = [member["reward"] for member in members[start : start + 4]]
        wanted = [(r - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6) for r in rewards]
        assert [m["advantage"] for m in members[start : start + 4]] == pytest.approx(wanted, abs=1e-5)


def test_the_numbers_of_its_steps(finished):
    rows = read_metrics(finished)
    wanted = {f"{group}/{name}" for group, names in NAMES.items() for name in names.split()}
    assert wanted - rows[-1].keys() == set() and [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert unnamed(rows) == [] and unnamed([{"policy/unheard_of": 1.0}]) == ["policy/unheard_of"]
    for row in rows[1:]:  # on policy
        assert row["policy/ratio_mean"] == row["policy/ratio_max"] == 1.0 and row["mismatch/logp_gap_max"] < 1e-5
    distances = [row["policy/kl_ref"] for row in rows[1:]]  # to a reference that stays where it was
    assert distances[0] == 0.0 and distances[-1] > 1e-3


def test_validation_before_every_and_last_and_the_best_checkpoint_beside_the_newest(finished, numbers):
    scores = {r["step"]: r["val/val/accuracy"] for r in numbers(finished) if "val/val/accuracy" in r}
    assert list(scores) == [0, 2, 4, 5]
    del scores[0]  # before training there is nothing to save
    best = max(scores, key=lambda step: (scores[step], -step))
    progress = checkpoint.read_progress(finished / "checkpoints" / "step-5")
    assert (progress["best_step"], progress["best_score"]) == (best, scores[best])
    assert checkpoint.complete_steps(finished / "checkpoints") == sorted({best, 5})
    assert checkpoint.find(finished / "checkpoints", "best") == finished / "checkpoints" / f"step-{best}"


def test_the_command_and_the_function_do_the_same(tmp_path, rl_config, same_weights, numbers):
    config = rl_config(tmp_path, run__max_steps=1)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(load(config).model_dump(mode="json", exclude_unset=True)))
    done = CliRunner().invoke(app, ["rl", str(file), "run.name=command"])
    assert done.exit_code == 0, done.output
    last = saccade.rl(config, "run.name=function")
    paths = [tmp_path / name / "checkpoints" / "step-1" for name in ("command", "function")]
    assert same_weights(*paths)
    assert numbers(tmp_path / "command") == numbers(tmp_path / "function")
    assert last["reward/mean"] == numbers(tmp_path / "function")[-1]["reward/mean"]


LOSS = '''
from pathlib import Path
import numpy as np
def recorded(new, inputs):
    """the policy gradient, with a record of what it was given"""
    file = Path(__file__).with_suffix(".npz")
    calls = dict(np.load(file)) if file.exists() else {}
    n = len(calls) // 3
    calls |= {f"{n}/new": new.detach().numpy(), f"{n}/old": inputs.old.numpy()}
    calls[f"{n}/advantages"] = inputs.advantages.numpy()
    np.savez(file, **calls)
    return -inputs.advantages * (new - inputs.old).exp(), {}
'''


def test_later_updates_of_a_step_leave_the_old_policy_behind(tmp_path, rl_config):
    file = tmp_path / "loss.py"
    file.write_text(LOSS)
    more = {"algorithm.policy_loss": f"{file}:recorded", "train.epochs_per_batch": 2}
    more["train.prompts_per_step"] = 8
    row = rl.run(rl_config(tmp_path, run__max_steps=1, train__updates_per_step=2) | more)
    calls = np.load(file.with_suffix(".npz"))
    first, second, again, last = ({k: calls[f"{n}/{k}"] for k in ("new", "old", "advantages")} for n in range(4))
    assert len(calls.files) == 12
    assert abs(first["new"] - first["old"]).max() < 1e-5  # nothing has moved yet
    assert abs(second["new"] - second["old"]).max() > 1e-3
    assert (again["old"] == first["old"]).all() and (last["old"] == second["old"]).all()
    assert (again["advantages"] == first["advantages"]).all()
    assert abs(again["new"] - first["new"]).max() > 1e-3
    assert row["mismatch/logp_gap_max"] < 1e-5 and row["policy/ratio_max"] > 1.001
    state = checkpoint.read_progress(tmp_path / "run" / "checkpoints" / "step-1")
    assert state["updates"] == 4
    stored = [one for one in read_trajectories(tmp_path / "run", "train", 1) if one["advantage"] is not None]
    known = [(one["info"], one["segments"][-1]["logp"]) for one in stored]
    assert known and all(info["trainer_logp"] == pytest.approx(logp, abs=1e-5) for info, logp in known)
    assert all(min(info["entropy"]) > 0 and len(info["entropy"]) == len(logp) for info, logp in known)


def test_warm_up_counts_steps_not_updates(tmp_path, rl_config, numbers):
    config = rl_config(tmp_path, run__max_steps=3, train__updates_per_step=2, train__warmup=2)
    rl.run(config | {"train.epochs_per_batch": 2, "train.lr": 8e-4, "algorithm.kl.coef": 0})
    rates = [row["policy/lr"] for row in numbers(tmp_path / "run")]
    assert rates == pytest.approx([2.5e-4, 6.5e-4, 8e-4])


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm.old": "rollout", "algorithm.entropy_coef": 0.01, "model.checkpointing": "on"},
        {"algorithm.old": "recompute", "train.micro_tokens": 10, "rollout.max_sequences": 3},
        {"algorithm.old": "recompute", "rollout.top_p": 0.8, "rollout.top_k": 5, "rollout.temperature": 0.9}
        | {"rollout.truncated_sampling": "replay"},
    ],
)
def test_options_that_leave_the_policy_on_its_own_samples(tmp_path, rl_config, more):
    row = rl.run(rl_config(tmp_path, run__max_steps=1) | {"algorithm.kl.coef": 0.0} | more)
    assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert row["mismatch/logp_gap_max"] < 1e-5 and row["policy/grad_norm"] > 0.1
    assert "time/logp_ref" not in row and "policy/kl_ref" not in row  # no reference that does not count


def test_the_mass_that_truncated_sampling_keeps(tmp_path, rl_config):
    found = {}
    for top_p in (0.3, 0.8, 1.0):
        more = {"rollout.top_p": top_p, "rollout.truncated_sampling": "replay", "algorithm.kl.coef": 0.0}
        found[top_p] = rl.run(rl_config(tmp_path / str(top_p), run__max_steps=1) | more).get("mismatch/kept_mass")
    # top_p keeps the fewest ids that have so much
    assert 0.3 <= found[0.3] < 0.8 <= found[0.8] < 1 and found[1.0] is None


def test_a_reference_in_main_memory_follows_and_is_resumed(tmp_path, rl_config, numbers):
    copied, rows = {"algorithm.kl.coef": 0.1, "algorithm.kl.update": "copy", "algorithm.kl.update_every": 2}, []
    for offload in (False, True):
        config = rl_config(tmp_path / str(offload), train__offload=offload) | copied
        for steps in (3, 4):
            rl.run(config | {"run.resume": "auto", "run.max_steps": steps})
        rows.append([(row["policy/loss"], row["policy/kl_ref"]) for row in numbers(tmp_path / str(offload) / "run")])
    assert rows[0] == rows[1] and [kl > 0 for _, kl in rows[0]] == [False, True, False, True]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
def test_bfloat16(tmp_path, rl_config, optimizer):
    sizes = {"train.prompts_per_step": 1, "rollout.max_tokens": 3, "algorithm.kl.coef": 0.0}
    config = rl_config(tmp_path, model__dtype="bfloat16", train__optimizer=optimizer) | sizes
    for steps in (1, 2):  # the second goes on from the state of the first
        row = rl.run(config | {"run.resume": "auto", "run.max_steps": steps})
        assert row["guard/nonfinite"] == 0 and row["mismatch/mult_prob_error"] < 1.01


def test_dynamic_sampling_fills_the_step(tmp_path, rl_config, numbers):
    more = {"algorithm.preset": "dapo", "algorithm.overlong.buffer": 0}
    rl.run(rl_config(tmp_path, run__max_steps=3) | more)
    rows = numbers(tmp_path / "run")
    assert max(row["group/rounds"] for row in rows) > 1
    for row in rows:
        assert row["count/samples"] == 16 * row["group/rounds"]
        assert row["policy/live_sequences"] == 16  # four groups of four, all of them informative
        dropped = sum(value for name, value in row.items() if name.startswith("group/dropped/"))
        assert dropped + row["group/kept_frac"] * 4 * row["group/rounds"] == 4 * row["group/rounds"]
        assert row["group/constant_low"] == row["group/constant_high"] == 0


# Random tokens hold a tagged answer about once in a million.
NEVER_RIGHT = {"reward.terms": ["exact"], "prompt.format": "think_answer"}


@pytest.mark.parametrize("exhausted", ["train_partial", "skip", "stop"])
def test_a_step_with_too_few_informative_groups(tmp_path, rl_config, exhausted, word_model, same_weights):
    dynamic = {"algorithm.filter.dynamic": True, "algorithm.filter.max_rounds": 1, "algorithm.kl.coef": 0}
    config = rl_config(tmp_path, run__max_steps=1, run__seed=3) | dynamic | {"algorithm.filter.on_exhausted": exhausted}
    if exhausted == "stop":
        with pytest.raises(TrainingError, match=r"kept \d of 4 groups in 1 rounds; raise"):
            rl.run(config)
        return
    row = rl.run(config)
    assert 0 < row["group/kept_frac"] < 1
    trained = 16 * row["group/kept_frac"] * (exhausted == "train_partial")
    assert row.get("policy/live_sequences", 0) == trained
    assert same_weights(word_model, tmp_path / "run" / "checkpoints" / "step-1") == (trained == 0)


def test_dead_groups_move_nothing(tmp_path, rl_config, word_model, same_weights, tensors, numbers):
    """With weight decay and a KL in the loss, too. The steps count, and why is said once."""
    config = rl_config(tmp_path, run__max_steps=5) | NEVER_RIGHT | {"train.weight_decay": 0.1}
    rl.run(config)
    last = tmp_path / "run" / "checkpoints" / "step-5"
    assert same_weights(word_model, last) and checkpoint.read_progress(last)["updates"] == 5
    moments = {n: t for n, t in tensors(last / "state").items() if n.startswith("exp_avg")}
    assert moments and not any(bool(moment.any()) for moment in moments.values())
    assert {row["policy/empty_step"] for row in numbers(tmp_path / "run")} == {1.0}
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("nothing is learned: all of the responses have no answer") == 1


def test_an_entropy_bonus_teaches_without_advantages(tmp_path, rl_config, word_model, same_weights):
    config = rl_config(tmp_path, run__max_steps=1, algorithm__entropy_coef=0.01) | NEVER_RIGHT
    row = rl.run(config)
    assert row["policy/empty_step"] == 0 and row["policy/grad_norm"] > 0
    assert not same_weights(word_model, tmp_path / "run" / "checkpoints" / "step-1")


def test_max_hours_ends_a_run_with_a_validation_and_a_checkpoint(tmp_path, rl_config, scenes):
    val = {"data.val": [str(scenes / "val.jsonl")], "val.every": 50, "val.before": False}
    row = rl.run(rl_config(tmp_path, run__max_steps=100, run__max_hours=1e-9) | val)
    assert row["val/val/items"] == 8
    assert checkpoint.complete_steps(tmp_path / "run" / "checkpoints") == [1]
    assert "run.max_hours=1e-09 is reached after step 1" in (tmp_path / "run" / "log.txt").read_text()


def test_validations_that_do_not_beat_the_best_end_a_run_also_a_resumed_one(tmp_path, rl_config, scenes, numbers):
    val = [{"path": str(scenes / "val.jsonl"), "n": 2, "max_tokens": 3}, str(scenes / "val.jsonl")]
    config = rl_config(tmp_path, run__max_steps=50, data__val=val, val__every=1) | NEVER_RIGHT
    config |= {"run.stop.patience": 2}
    rl.run(config)
    assert checkpoint.complete_steps(tmp_path / "run" / "checkpoints") == [1, 3]  # the best one, and the last
    told = "run.stop.patience=2: 2 validations have not beaten val/val/accuracy 0.0 of step 1"
    assert told in (tmp_path / "run" / "log.txt").read_text()
    rows = numbers(tmp_path / "run")
    assert all("val/val/pass@2" in row and "val/val-1/pass@2" not in row for row in rows)
    assert rows[0]["val/val/response_mean"] <= 3 < rows[0]["val/val-1/response_mean"]
    rl.run(config | {"run.resume": "auto"})
    assert len(numbers(tmp_path / "run")) == len(rows)
    rl.run(config | {"run.resume": "auto", "run.stop.patience": 3, "run.stop.target": 0.0})
    assert "run.stop.target=0 is reached" in (tmp_path / "run" / "log.txt").read_text()


def test_a_checkpoint_goes_on_with_its_own_algorithm(tmp_path, rl_config):
    rl.run(rl_config(tmp_path, run__max_steps=1) | {"algorithm.preset": "gspo"})
    start = tmp_path / "run" / "checkpoints" / "step-1"
    other = rl_config(tmp_path, run__max_steps=2, run__name="other", run__resume=str(start))
    with pytest.raises(ConfigError, match=rf"another algorithm .*model.path={start}"):
        rl.run(other | {"algorithm.preset": "ppo"})
    with pytest.raises(
        ConfigError, match=r"holds another model \(qwen2_5_vl, vocab_size 40\) than model.path=.* \(qwen2_vl,"
    ):
        rl.run(other | {"algorithm.preset": "gspo", "model.path": "tiny:qwen2_vl"})
    assert not (tmp_path / "other").exists()
    assert rl.run(other | {"algorithm.preset": "gspo"})["policy/grad_norm"] > 0


def test_the_third_step_is_traced_with_its_phases(finished):
    (path,) = finished.glob("trace-*")
    assert path.name == "trace-step-3.json.gz"
    with gzip.open(path, "rt") as file:
        mine = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    phases = ["rollout", "pack", "logp_ref", "advantage", "update"]
    assert [e["name"] for e in sorted(mine, key=lambda e: e["ts"]) if e["name"] in phases] == phases
    assert f"trace {path}" in (finished / "log.txt").read_text()
