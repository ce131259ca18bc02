"""`eval` and `generate` over an endpoint: the same answers, and nothing is asked twice."""

import time
from pathlib import Path

import pytest
import torch

from saccade.errors import ConfigError
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.evaluation import evaluate
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.generate import generate
from tests.endpoints import TOKEN, Says, chat_answer, scripted, serving
from tests.ranks.processes import forked


@pytest.fixture(scope="module")
def endpoint(word_model):
    family = load_family(word_model)
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    with serving(model, family) as served:
        yield served


@pytest.fixture
def over_http(endpoint, rl_config, scenes, monkeypatch):
    monkeypatch.setenv("SACCADE_TEST_KEY", TOKEN)

    def config(out, url=endpoint.url, **changes):
        options = rl_config(out, data__val=str(scenes / "val.jsonl"), **changes)
        options |= {
            "model.path": "", "rollout.engine": "http", "rollout.http.url": url, "rollout.http.model": "tiny",
            "rollout.http.key": "SACCADE_TEST_KEY", "rollout.http.cache": str(out / "answers"),
        }  # fmt: skip
        return options

    return config


def test_an_endpoint_answers_as_the_model_behind_it(tmp_path, rl_config, over_http, scenes):
    """Greedy, with images, without and with a stop string: every field of every row."""
    stop = []
    for name in ("plain", "stopped"):
        same = {"rollout__stop": stop, "data__val": str(scenes / "val.jsonl")}
        here = evaluate.run(rl_config(tmp_path, **same), out=tmp_path / name / "here")
        there = over_http(tmp_path, rollout__stop=stop)
        assert evaluate.run(there, out=tmp_path / name / "there") == here
        found = read_lines(tmp_path / name / "there" / "samples.jsonl")
        assert found == read_lines(tmp_path / name / "here" / "samples.jsonl") and len(found) == 8
        assert found[0]["response"].endswith(tuple(stop) or "")
        assert (found[0]["status"] == "truncated") == (not stop)
        stop = found[0]["response"].split()[1:2]


def test_a_second_run_sends_nothing(tmp_path, over_http, endpoint):
    before = len(endpoint.asked)
    first = evaluate.run(over_http(tmp_path, val__n=3), out=tmp_path / "a")
    assert len(endpoint.asked) - before == 24 and first["val"]["items"] == 8
    evaluate.run(over_http(tmp_path, val__n=3), out=tmp_path / "b")
    assert len(endpoint.asked) - before == 24
    for name in ("samples.jsonl", "results.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    responses = {row["response"] for row in read_lines(tmp_path / "a" / "samples.jsonl")}
    assert len(responses) > 8  # repeats have seeds of their own


def test_generate_counts_tokens_and_costs(tmp_path, over_http, capsys):
    price = {"generate__n": 2, "data__max_samples": 3, "rollout__http__price": [1.0, 2.0]}
    result = generate.run(over_http(tmp_path, **price))
    found = read_lines(Path(result["path"]))
    tokens = [r["tokens"] for row in found for r in row["responses"]]
    assert len(tokens) == 6 and max(tokens) <= 6
    said = capsys.readouterr()
    assert f"and {sum(tokens)} response tokens, cost 0.00" in said.out + said.err
    again = over_http(tmp_path, **price | {"rollout__http__concurrency": 2})
    assert generate.run(again)["skipped"] == 3  # how it is reached makes no other answers


def test_a_killed_run_asks_only_for_what_is_missing(tmp_path, over_http):
    released = []

    def script(body):
        released.append(body)
        return Says(body=chat_answer("<answer>3</answer>").body, after=0.0 if len(released) < 4 else 60)

    with scripted(script) as endpoint:
        config = over_http(tmp_path, url=endpoint.url, rollout__http__concurrency=2)
        run = forked(evaluate.run, config)
        answers = tmp_path / "answers"
        while len(list(answers.rglob("*.json"))) < 3 and run.exitcode is None:
            time.sleep(0.05)
        run.kill()
        run.join()
    kept = len(list(answers.rglob("*.json")))
    assert kept == 3
    port = int(endpoint.url.split(":")[2].split("/")[0])
    with scripted(lambda body: chat_answer("<answer>3</answer>"), port=port) as endpoint:
        result = evaluate.run(over_http(tmp_path, url=endpoint.url), out=tmp_path / "eval")
    assert len(endpoint.asked) == 8 - kept and result["val"]["items"] == 8
    assert result["val"]["response_mean"] == 7  # as the endpoint counted


def broken_off(config, fails):
    """Runs against an endpoint that refuses from request number `fails` on; returns how many it answered."""
    seen = []

    def script(body):
        seen.append(body)
        return chat_answer("<answer>3</answer>") if len(seen) < fails else Says(status=400)

    port = int(config["rollout.http.url"].split(":")[2].split("/")[0])
    with scripted(script, port=port):
        if fails < 100:
            with pytest.raises(ConfigError, match="status 400"):
                evaluate.run(config)
        else:
            evaluate.run(config)
    return min(len(seen), fails - 1)


def test_without_a_cache_of_its_own_a_run_keeps_one(tmp_path, over_http):
    """What was broken off goes on, twice over; what has ended is not taken for the answers of another day."""
    with scripted([]) as endpoint:
        url = endpoint.url
    config = over_http(tmp_path, url=url, rollout__http__concurrency=1, data__max_samples=8)
    del config["rollout.http.cache"]
    assert [broken_off(config, n) for n in (4, 3, 100)] == [3, 2, 8 - 3 - 2]
    assert broken_off(config, 100) == 8
    kept = sorted(path.parent.name for path in tmp_path.rglob("results.json"))
    assert kept == ["run-eval", "run-eval-2"] and len(list(tmp_path.rglob("answers"))) == 2
    out = {"run.out": str(tmp_path / "off"), "rollout.http.cache": "off"}
    assert [broken_off(config | out, n) for n in (4, 100)] == [3, 8]
    assert not list((tmp_path / "off").rglob("answers"))


def test_an_environment_of_several_turns(tmp_path, over_http):
    """Later turns send the whole conversation, images included."""
    file = tmp_path / "asks.py"
    file.write_text(
        "from saccade.types import Message\n"
        "class Twice:\n"
        "    def reset(self, sample, seed):\n"
        "        self.media, self.turn = sample.media, 0\n"
        "        return sample.messages\n"
        "    def step(self, message):\n"
        "        self.turn += 1\n"
        "        again = Message(role='user', parts=(*self.media, 'sure?'))\n"
        "        done = self.turn == 2\n"
        "        return (again,), float(done), done, {}\n"
        "    def close(self): pass\n"
    )
    with scripted(lambda body: chat_answer(f"turn {len(body['messages'])}")) as endpoint:
        config = over_http(
            tmp_path, url=endpoint.url, data__max_samples=2, env__name=f"{file}:Twice", env__max_turns=3,
            reward__terms=[],
        )  # fmt: skip
        result = evaluate.run(config, out=tmp_path / "eval")
    found = read_lines(tmp_path / "eval" / "samples.jsonl")
    assert [row["response"] for row in found] == ["turn 1turn 3"] * 2
    assert [row["tokens"] for row in found] == [14, 14] and result["val"]["reward"] == 1
    last = max((asked["body"]["messages"] for asked in endpoint.asked), key=len)
    assert [m["role"] for m in last] == ["user", "assistant", "user"]
    assert [part["type"] for part in last[2]["content"]] == ["image_url", "text"]
