"""Training and evaluating with a judge: one that knows, one that rambles, one that dies."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from saccade.errors import ConfigError, EnvironmentProblem, RewardError, SelfTestError
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.evaluation import evaluate
from saccade.plugins.judges.http_client import sender as endpoint_client
from saccade.recipes import rl
from saccade.run.loggers import read_metrics
from tests.endpoints import TOKEN, Says, fair_judge, scripted, serving

Make = Callable[..., dict[str, Any]]
NAMES = "samples by_rule calls cache_hit_rate latency_p50 latency_p95 tokens cost failures"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoint_client, "FIRST_PAUSE", 0.01)


@pytest.fixture
def fair():
    with scripted(fair_judge) as endpoint:
        yield endpoint


@pytest.fixture
def judged(rl_config):
    """Two steps in which `judge` or `hybrid` looks at the last number of an answer."""

    def config(out, url, verifier="judge", **changes):
        term = {"verifier": verifier, "args": {"order": ["last_number", "whole"]}}
        judge = {"url": url, "model": "m", "retries": 1, "price": [1.0, 2.0]}
        named = {f"reward.judge.{name}": value for name, value in judge.items()}
        return rl_config(out) | named | {"reward.terms": [term], "run.max_steps": 2} | changes

    return config


def test_a_second_run_sends_nothing_and_learns_the_same(tmp_path, judged, fair, same_weights):
    cache = {"reward.judge.cache": str(tmp_path / "verdicts")}
    asked = []
    for name in ("a", "b"):
        rl.run(judged(tmp_path, fair.url) | cache | {"run.name": name, "run.max_steps": 1})
        asked.append(len(fair.asked))
    assert asked[1] == asked[0] > 0
    first, last = read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")[-1]
    assert len(first) == 1 and first[0]["judge/calls"] > 0
    for step in first:
        assert {f"judge/{name}" for name in NAMES.split()} <= step.keys()
        assert step["judge/samples"] + step["judge/by_rule"] == 16
        assert step["judge/calls"] <= step["judge/samples"] and step["judge/failures"] == 0
        assert step["reward/judge"] == step["reward/accuracy"]
        assert step["judge/tokens"] == 107 * step["judge/calls"]
    assert (last["judge/calls"], last["judge/cost"], last["judge/cache_hit_rate"]) == (0, 0, 1)
    a, b = (tmp_path / name / "checkpoints" / "step-1" for name in ("a", "b"))
    assert same_weights(a, b)
    with scripted(fair_judge) as moved:  # the judge may stand elsewhere when a run goes on
        further = {"run.name": "b", "run.resume": "auto", "run.max_steps": 2}
        rl.run(judged(tmp_path, moved.url) | cache | further)
    assert len(read_metrics(tmp_path / "b")) == 2


def dying(questions):
    """Fair for so many questions, then out of order."""
    left, lock = [None] * questions, threading.Lock()

    def script(body):
        with lock:
            alive = bool(left) and left.pop() is None
        return fair_judge(body) if alive else Says(status=503, body="out of order")

    return script


def test_a_judge_that_dies_in_the_middle(tmp_path, judged):
    off = {"reward.self_test": "off"}
    for on_failure in ("abstain", "drop_group"):
        changes = off | {"reward.judge.on_failure": on_failure, "reward.max_error_rate": 1.0}
        with scripted(dying(12)) as endpoint:
            rl.run(judged(tmp_path, endpoint.url) | changes | {"run.name": on_failure})
        last = read_metrics(tmp_path / on_failure)[-1]
        assert last["judge/failures"] > 0 and last["reward/abstain_rate"] > 0
        assert (last["reward/error_rate"] == 0) == (on_failure == "abstain")
    stops = pytest.raises(RewardError, match=r"judge.*out of order.*max_error_rate")
    with scripted(dying(20)) as endpoint, stops:
        rl.run(judged(tmp_path, endpoint.url) | off | {"run.max_steps": 9})


def test_a_tiny_model_is_a_bad_judge(tmp_path, judged, word_model, monkeypatch):
    """It is reached and says no verdict: the test before step 1 fails; without it all answers abstain."""
    monkeypatch.setenv("SACCADE_TEST_KEY", TOKEN)
    family = load_family(word_model)
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    changes = {"reward.judge.key": "SACCADE_TEST_KEY", "reward.judge.max_tokens": 8}
    changes |= {"reward.judge.retries": 0, "data.max_samples": 4, "reward.judge.model": ""}
    with serving(model, family) as endpoint:
        with pytest.raises(SelfTestError, match="no verdict"):
            rl.run(judged(tmp_path / "strict", endpoint.url) | changes)
        changes |= {"reward.self_test": "off", "reward.judge.on_failure": "abstain"}
        rl.run(judged(tmp_path, endpoint.url) | changes | {"run.max_steps": 1})
        asked = len(endpoint.asked)
        monkeypatch.setenv("SACCADE_TEST_KEY", "wrong")
        with pytest.raises(ConfigError, match=r"reward\.judge\.key.*status 401"):
            rl.run(judged(tmp_path / "locked", endpoint.url) | changes)
    (step,) = read_metrics(tmp_path / "run")
    assert step["judge/failures"] == step["judge/samples"] > 0 and asked > step["judge/calls"]
    assert step["reward/abstain_rate"] == step["judge/samples"] / 16


def test_evaluation_and_rescoring(tmp_path, judged, fair, scenes, capsys):
    config = judged(tmp_path, fair.url) | {"data.val": str(scenes / "val.jsonl")}
    result = evaluate.run(config, out=tmp_path / "eval")["val"]
    assert result["judge/samples"] + result["judge/by_rule"] == 8
    assert "judge: " in capsys.readouterr().out
    written = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert written["val"]["judge/calls"] == result["judge/calls"]
    samples = tmp_path / "eval" / "samples.jsonl"
    again = evaluate.run(config, out=tmp_path / "again", rescore=samples)["val"]
    assert again["accuracy"] == result["accuracy"]
    assert again["judge/samples"] == result["judge/samples"]
    shown = config | {"reward.judge.send_images": True, "reward.judge.cache": None}
    fair.asked.clear()
    seen = evaluate.run(shown, out=tmp_path / "x", rescore=samples)["val"]
    assert seen["accuracy"] == result["accuracy"]
    pictures = [r["body"]["messages"][0]["content"] for r in fair.asked[1:]]
    assert pictures and all(parts[0]["type"] == "image_url" for parts in pictures)
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows[0]["media"][0]["path"] = str(tmp_path / "gone.png")
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"send_images: 1 of 8 images .*gone\.png"):
        evaluate.run(shown, out=tmp_path / "y", rescore=samples)


def test_what_is_refused_before_a_run(tmp_path, judged, rl_config):
    with pytest.raises(EnvironmentProblem, match="Connection refused"):
        rl.run(judged(tmp_path, "http://127.0.0.1:9/v1"))
    for name, told in (("judge", "judge or hybrid"), ("remote", "remote")):
        with pytest.raises(ConfigError, match=rf"reward\.{name}\.url: has no effect without {told} in reward\.terms"):
            rl.run(rl_config(tmp_path) | {f"reward.{name}.url": "http://127.0.0.1:9/v1"})
