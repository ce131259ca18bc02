"""Reinforcement learning with the crop tool: a random model whose tokens are whole calls and answers plays."""

import json

import numpy as np
import pytest

from saccade.plugins.evaluation import evaluate
from saccade.plugins.families.tiny import build
from saccade.plugins.reports.trajectories import read_trajectories
from saccade.recipes import rl
from saccade.run.loggers import read_metrics
from tests.browser import page_data
from tests.public_sets import write_all


def call(box, source):
    return f"<grounding>{{'bbox_2d': {box}, 'source': '{source}'}}</grounding>"


WORDS = [
    call([0, 0, 0.5, 0.5], "original_image"), call([0.25, 0.25, 1, 1], "original_image"),
    call([0, 0, 1, 0.5], "observation_1"), call([0, 0, 1, 1], "observation_3"), call([0, 0, 7, 7], "original_image"),
    *(f"<answer>{n}</answer>" for n in (1, 2, 3)), "hm",
]  # fmt: skip


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return build("qwen2_5_vl", tmp_path_factory.mktemp("caller"), words=WORDS)


@pytest.fixture
def config(tmp_path, rl_config, caller):
    own = {
        "run.max_steps": 2, "model.path": caller, "prompt.format": "think_answer", "rollout.max_tokens": 5,
        "env.name": "crop", "env.max_turns": 3, "env.min_pixels": 3136, "env.max_pixels": 12544,
        "env.eval.max_turns": 5, "reward.terms": [{"verifier": "count", "args": {"tolerance": 1}}],
        "algorithm.exclude_status": ["overturn"], "train.prompts_per_step": 4, "train.samples_per_prompt": 8,
        "track.trajectories_every": 1, "track.trajectories_groups": 4,
    }  # fmt: skip
    return rl_config(tmp_path) | own


def test_a_failed_call_costs_its_turn_and_not_those_after_it(config, tmp_path):
    changes = {"env.invalid_call_penalty": 0.5, "algorithm.advantage": "turn_grpo", "algorithm.exclude_status": []}
    rl.run(config | changes | {"run.max_steps": 1})
    records = list(read_trajectories(tmp_path / "run", "train", 1))
    compared = 0
    for group in {r["group"] for r in records}:
        members = [r for r in records if r["group"] == group]
        turns = [[len(s["ids"]) for s in r["segments"] if s["source"] == "policy"] for r in members]
        gains = [
            r["turn_rewards"] + [0.0] * (len(n) - len(r["turn_rewards"])) for r, n in zip(members, turns, strict=True)
        ]
        for record, gain in zip(members, gains, strict=True):
            gain[-1] += record["reward"] - sum(record["turn_rewards"])
            gain[:] = np.cumsum(gain[::-1])[::-1]  # what each turn and those after it earned
        for record, gain, sizes in zip(members, gains, turns, strict=True):
            advantages = np.broadcast_to(record["advantage"], sum(sizes))
            for turn, start in enumerate(np.cumsum([0, *sizes[:-1]])):
                others = [other[turn] for other in gains if len(other) > turn]
                apart = len({r["reward"] for r in members}) > 1 and len(others) > 1 and np.std(others) > 1e-9
                expected = (gain[turn] - np.mean(others)) / (np.std(others, ddof=1) + 1e-6) if apart else 0.0
                assert advantages[start] == pytest.approx(expected, abs=1e-4)
                compared += bool(apart and turn)
    assert compared > 4 and any(r["turn_rewards"] for r in records)


def test_rl_with_tools_leaves_overturned_members_out_of_loss_and_baseline(config, tmp_path):
    rl.run(config)
    rows = [row for row in read_metrics(tmp_path / "run") if "policy/loss" in row]
    assert len(rows) == 2
    for step, row in enumerate(rows, 1):
        assert row["mismatch/logp_gap_max"] < 1e-5  # engine and trainer saw the same pictures
        records = list(read_trajectories(tmp_path / "run", "train", step))
        assert len(records) == 32
        assert {r["status"] for r in records} >= {"ok", "overturn"}
        live = [r for r in records if r["status"] not in ("overturn", "error")]
        groups = {r["group"]: [x for x in live if x["group"] == r["group"]] for r in live}
        moved = 0
        for record in records:
            members = [m["reward"] for m in groups.get(record["group"], [])]
            if record["status"] == "overturn" or len(members) < 2 or np.std(members) < 1e-6:
                assert not record["advantage"]  # no gradient
                continue
            wanted = (record["reward"] - np.mean(members)) / (np.std(members, ddof=1) + 1e-6)
            assert record["advantage"] == pytest.approx(wanted, abs=1e-3)
            moved += 1
        assert moved
        trained = sum(r["tokens"]["response"] for r in records if r["advantage"])
        assert 0 < trained <= row["policy/live_tokens"]
        assert row["policy/live_tokens"] <= sum(r["tokens"]["response"] for r in live)
        assert row["policy/grad_norm"] > 0


def test_one_evaluation_gives_every_limit_of_turns(config, tmp_path, scenes):
    """Accuracy under a limit is that of an evaluation with this limit, to the last digit."""
    limits = (1, 3, 5)
    del config["env.eval.max_turns"]
    val = {"data.val": str(scenes / "val.jsonl"), "val.n": 4, "val.temperature": 1.0}
    found = evaluate.run(config | val | {"val.turns": limits}, out=tmp_path / "all")["val"]
    alone = {
        limit: evaluate.run(config | val | {"env.eval.max_turns": limit}, out=tmp_path / str(limit))["val"]
        for limit in limits
    }
    assert list(found["by_limit"]) == [str(limit) for limit in limits]
    for limit, one in alone.items():
        row = found["by_limit"][str(limit)]
        shared = {"items", "accuracy", "ci_low", "ci_high", "avg@4", "pass@4"}
        assert shared <= row.keys() and {k: row[k] for k in shared} == {k: one[k] for k in shared}
        assert row["accuracy"] == found[f"accuracy_within_{limit}_turns"]
        assert row["overturn_frac"] == one["turns/end/max_turns"]
        assert row["turns_mean"] == one["turns/mean"]
    assert found["accuracy"] == found["by_limit"]["5"]["accuracy"]
    assert found["by_limit"]["1"]["overturn_frac"] > found["by_limit"]["5"]["overturn_frac"] > 0
    used = found["by_turns"]
    assert sum(row["episodes"] for row in used.values()) == 32 and used.keys() <= set("12345")
    right = sum(row["episodes"] * row["accuracy"] for row in used.values())
    assert right / 32 == pytest.approx(found["accuracy"])
    assert found["tool/calls_per_sample"] > 0 and "tool/acc_with_call" in found
    drawn = page_data(tmp_path / "all" / "report.html")
    assert "val: accuracy by limit of turns" in [table["title"] for table in drawn["tables"]]
    assert max(len(episode["turns"]) for episode in drawn["episodes"]["items"]) > 1


def test_suites(config, tmp_path, image, capsys):
    names = ["vstar", "visualprobe_hard", "hrbench4k"]
    [rows] = (folder := write_all(tmp_path, image, names)).glob("**/vstar*/*.jsonl")
    rows.write_text(rows.read_text().replace('"label": "B"', '"label": "3"'))
    public = {"eval.suites": names, "eval.folder": str(folder)}
    own = {"val.n": 2, "val.temperature": 1.0, "data.max_pixels": 12544, "data.format": "qa"}
    found = evaluate.run(config | own | public, out=tmp_path / "eval")
    assert list(found) == names
    assert found["vstar"]["by_category"].keys() == {"direct_attributes", "relative_position"}
    assert found["hrbench4k"]["by_category"].keys() == {"cross", "single"}
    assert found["hrbench4k"]["items"] == 8 and 0 <= found["hrbench4k"]["all_rotations"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "eval" / "samples.jsonl").open()]
    asked = next(row for row in rows if row["set"] == "vstar")
    assert "(A) rubber\n(B) cotton" in asked["prompt"] and "letter" not in asked["prompt"]
    assert {row["data_source"] for row in rows} == set(names)
    said = " ".join(capsys.readouterr().out.split())
    assert "choice cannot read these golds, such as '3'" in said  # no reason to stop
    assert "have no answer that can be read" in said
