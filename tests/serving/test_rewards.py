"""The reward service, spoken to over sockets; its rules run in real processes."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from saccade.config import DataConfig, RewardConfig
from saccade.config.schema import RemoteConfig, ServeConfig
from saccade.plugins.judges.remote import Remote
from saccade.plugins.serving.http_server import running as running_server
from saccade.plugins.serving.reward_service import RewardService, reward_app
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from tests.endpoints import TOKEN, call

OWN = """
import os, time
def hurt(sample):
    word = sample.response
    if word == "die": os._exit(9)
    if word == "hang": time.sleep(60)
    if word == "raise": raise ValueError("boom")
    if word.startswith("wait"):
        while not os.path.exists(word[5:]): time.sleep(0.01)
    if sample.extra.get("calls"):
        with open(sample.extra["calls"], "a") as file: file.write(word + "\\n")
    return float(len(word))
def sized(sample):
    from PIL import Image
    return float(sum(Image.open(image["path"]).width for image in sample.images))
"""


@dataclass(frozen=True)
class Running:
    service: Any
    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def call(self, method, path, body=None, **headers):
        status, _, text = self.whole(method, path, body, **headers)
        return status, json.loads(text)

    def whole(self, method, path, body=None, **headers):
        return call(self.url, method, path, body, **headers)

    def score(self, *responses, **columns):
        return self.call("POST", "/get_reward", {"query": list(responses), **columns})


@contextmanager
def serving(*terms, token=TOKEN, reward=None, **options):
    config = RewardConfig(**{"terms": list(terms), "workers": 2, "deadline": 10} | (reward or {}))
    scorer = Scorer(config, prompt_format="think_answer", max_tokens=64, isolate=True)
    service = RewardService(scorer, ServeConfig(**options), DataConfig(max_images=2))
    with closing(scorer), running_server(reward_app(service, token=token), "127.0.0.1", 0) as url:
        yield Running(service, int(url.rpartition(":")[2]))


@pytest.fixture(scope="module")
def rules():
    with serving("math", {"verifier": "format:think_answer", "weight": 0.5}) as running:
        yield running


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return str(file)


@pytest.fixture(scope="module")
def hurt(own):
    with serving(f"{own}:hurt", queue=2, unscored=-1.0, log=f"{own}.jsonl") as running:
        yield running


GOOD = "<think>a</think><answer>{}</answer>"


def test_an_older_client_is_served_as_it_is(rules):
    prompt = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    query = f"{prompt}{GOOD.format('1/2')}<|im_end|>"
    status, reply = rules.score(query, "no", prompts=[prompt, "?"], labels=["0.5", "1"])
    assert status == 200 and reply == {
        "rewards": [1.5, 0.0], "scores": [1.0, 0.0], "math_rewards": [1.0, 0.0], "format_rewards": [1.0, 0.0],
    }  # fmt: skip
    odd = "<|user|>say \\boxed{4}<|assistant|>no"  # which nobody can split
    assert rules.score(odd, GOOD.format(4), labels=["4", "4"])[1]["rewards"] == [None, 1.5]


def test_our_own_client_gets_back_what_the_rules_said_in_order(rules):
    os.environ["SACCADE_TEST_TOKEN"] = TOKEN
    remote = Remote(RemoteConfig(url=(rules.url,), token="SACCADE_TEST_TOKEN", batch=16))
    remote.check()
    given = [RewardSample(id=str(n), response=GOOD.format(n), answer=str(n // 2 * 2)) for n in range(50)]
    futures = [remote.submit(sample) for sample in [*given, RewardSample(id="x", response=GOOD.format(7))]]
    scores = [future.result(timeout=60) for future in futures]
    remote.close()
    assert [score.value for score in scores[:50]] == [1.5, 0.5] * 25
    assert scores[7].parts == {"math": 0.0, "format": 1.0, "accuracy": 0.0}
    assert scores[7].extracted == "7" and scores[7].reason == "wrong"
    assert scores[50].kind == "abstain" and "gold_unparseable" in scores[50].reason


def test_who_may_ask(rules):
    assert rules.call("GET", "/info", Authorization="")[0] == 401
    assert rules.call("POST", "/other", {})[0] == 404
    for headers, status in (
        ({"Authorization": "Bearer x"}, 401),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": "x"}, 400),
    ):
        assert rules.whole("POST", "/get_reward", {"query": ["a"]}, **headers)[0] == status, headers
    status, health = rules.call("GET", "/health", Authorization="")
    assert (status, health["status"]) == (200, "ok")
    by_source = {"by_source": {"a": "count", "b": "exact"}}
    with serving(token="", max_body_mb=1, reward=by_source) as open_one:
        assert open_one.call("GET", "/info", Authorization="", Host="evil.example")[0] == 403
        # The whole body crosses before a client looks at the reply.
        status, reply = open_one.call("POST", "/get_reward", b" " * 32 * 2**20)
        assert (status, reply) == (413, {"error": "more than 1 MiB"})
        assert open_one.call("GET", "/info", Authorization="")[0] == 200
        asked = {"labels": ["7", "red"], "data_sources": ["a", "b"]}
        words = ("<answer>7</answer>", "<answer>red</answer>")
        assert open_one.score(*words, **asked)[1]["rewards"] == [1.0, 1.0]
        status, reply = open_one.score(*words, **asked | {"data_sources": ["a", "c"]})
        assert status == 400 and "data_source=c: no such name" in reply["error"]


def test_information_and_metrics(rules):
    info = rules.call("GET", "/info")[1]
    assert info == rules.call("GET", "/get_reward")[1] and info["protocol"] == 2
    assert info["rewards"] == {"default": {"math": "math", "format": "format:think_answer"}}
    assert info["models"] is False
    name = 'samples_total{status="ok"} '
    counts = []
    for _ in range(2):
        rules.score(GOOD.format(1), labels=["1"])
        text = rules.whole("GET", "/metrics")[2].decode()
        counts.append(int(text.split(name)[1].split()[0]))
    assert counts[1] == counts[0] + 1 and 'request_seconds{quantile="0.95"}' in text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        ([], 400, "must be a record"),
        ({}, 400, "query: missing"),
        ({"query": ["a", "b"], "labels": ["1"]}, 400, "labels: 1 entries for 2 samples"),
        ({"query": ["a"], "images": [["/etc/passwd"]]}, 400, "images[0][0]"),
        ({"query": ["a"], "images": [["", "", ""]]}, 400, "at most 2"),
        ({"query": ["a"], "images": [[{"ref": [0, 0]}]]}, 400, "ref: [sample, image] of an earlier one"),
        ({"query": ["a"] * 5000}, 413, "5000 samples, at most 4096"),
    ],
)
def test_what_is_refused(rules, body, status, words):
    got, reply = rules.call("POST", "/get_reward", body)
    assert got == status and words in reply["error"]


def test_a_fault_of_the_service_is_told_and_logged(rules, monkeypatch, caplog):
    monkeypatch.setattr(rules.service.scorer, "recipes", None)
    status, reply = rules.call("GET", "/info")
    assert status == 500 and reply["error"].startswith("TypeError: ")
    assert "/info failed" in caplog.text and "Traceback" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk_costs_the_log_and_no_score(caplog):
    with serving("count", log="/dev/full") as running:
        replies = [running.score("<answer>7</answer>", labels=["7"]) for _ in range(2)]
    assert [(status, reply["rewards"]) for status, reply in replies] == [(200, [1.0])] * 2
    assert caplog.text.count("reward.serve.log: /dev/full cannot be written") == 1


def test_code_that_dies_hangs_or_raises_costs_its_own_sample(own):
    words = ["ok", "die", "fine", "hang", "raise", "good"]
    with serving(f"{own}:hurt", reward={"deadline": 1.0}) as running:
        body = {"protocol": 2, "query": words, "responses": words}
        status, reply = running.call("POST", "/get_reward", body)
        assert running.score("still here")[1]["rewards"] == [10.0]
    assert status == 200 and reply["rewards"] == [2.0, None, 4.0, None, None, 4.0]
    reasons = {index: text.split(":")[0] for index, text in reply["errors"].items()}
    assert reasons == {"1": "crashed", "3": "timeout", "4": "raised"}


def test_a_request_that_comes_again_is_scored_once(hurt, tmp_path):
    calls, go = tmp_path / "calls", tmp_path / "go"
    word = f"wait {go}"
    body = {"protocol": 2, "request_id": "one", "query": [word], "responses": [word]}
    body |= {"extras": [{"calls": str(calls)}]}
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(hurt.call, "POST", "/get_reward", body) for _ in range(2)]
        while hurt.call("GET", "/health")[1]["pending"] != 1:
            time.sleep(0.01)
        go.touch()
        replies = [reply.result() for reply in asked]
        replies.append(hurt.call("POST", "/get_reward", body))  # also when it is done
        other = body | {"labels": ["another body"]}
        hurt.call("POST", "/get_reward", other)  # the same id by mistake
        metrics = hurt.whole("GET", "/metrics")[2].decode()
    assert replies[0] == replies[1] == replies[2] and replies[0][0] == 200
    assert calls.read_text().splitlines() == [word] * 2  # once for each body
    assert "saccade_reward_repeated_total 2" in metrics


def test_when_too_many_wait_clients_are_told_when_to_come_back(hurt, tmp_path):
    go = tmp_path / "go"
    word = f"wait {go}"
    os.environ["SACCADE_TEST_TOKEN"] = TOKEN
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(hurt.score, word, word)
        while hurt.call("GET", "/health")[1]["pending"] != 2:
            time.sleep(0.01)
        status, headers, text = hurt.whole("POST", "/get_reward", {"query": ["a"]})
        assert status == 429 and int(headers["Retry-After"]) >= 1 and b"come back later" in text
        # A client that listens gets through in the end, without using up its one attempt.
        remote = Remote(RemoteConfig(url=(hurt.url,), token="SACCADE_TEST_TOKEN", retries=0))
        patient = remote.submit(RewardSample(id="a", response="abc"))
        while hurt.service._counts["busy"] < 2:
            time.sleep(0.01)
        go.touch()
        assert patient.result(timeout=30).value == 3.0
        assert first.result()[1]["rewards"] == [float(len(word))] * 2
        remote.close()


def test_pictures_are_files_while_they_are_scored_and_that_of_a_group_crosses_once(own, image, monkeypatch):
    monkeypatch.setenv("SACCADE_TEST_TOKEN", TOKEN)
    picture = base64.b64encode(image(28, 28).data or b"").decode()
    images = [[picture, f"data:image/png;base64,{picture}"], []]
    shown = [RewardSample(id=str(n), response="a", media=(image(28, 28), image(56, 28, n % 2))) for n in range(4)]
    with serving(f"{own}:sized") as sized:
        assert sized.score("a", "b", images=images)[1]["rewards"] == [56.0, 0.0]
        assert sized.score("a", raw_images=[[picture]])[1]["rewards"] == [28.0]
        remote = Remote(RemoteConfig(url=(sized.url,), token="SACCADE_TEST_TOKEN", send_images=True, batch=4))
        remote.check()
        kinds = [[type(entry) for entry in row] for row in remote._images(shown)]
        scores = [future.result(timeout=30) for future in [*map(remote.submit, shown)]]
        remote.close()
    assert kinds == [[str, str], [dict, str], [dict, dict], [dict, dict]]
    assert [score.value for score in scores] == [84.0] * 4


def test_old_clients_get_the_number_that_was_chosen_for_them(hurt, own):
    assert hurt.score("raise", "ab")[1] == {"rewards": [-1.0, 2.0]}
    assert hurt.score("\ud800")[1]["rewards"] == [1.0]  # half a character
    rows = [json.loads(line) for line in Path(f"{own}.jsonl").read_text().splitlines()][-3:]
    assert [row["status"] for row in rows] == ["error", "ok", "ok"] and "boom" in rows[0]["reason"]


def test_sigterm_answers_who_waits_then_ends(own, tmp_path):
    command = [sys.executable, "-m", "saccade", "serve-reward", f"reward.terms=[{own}:hurt]", "reward.workers=1"]
    environment, go = {**os.environ, "SACCADE_TOKEN": TOKEN}, tmp_path / "go"
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([*command, "--port", "0"], **options) as process, ThreadPoolExecutor(1) as threads:
        running = Running(None, int(process.stdout.readline().rpartition(":")[2].partition("/")[0]))
        try:
            waiting = threads.submit(running.score, f"wait {go}")
            while running.call("GET", "/health")[1]["pending"] != 1:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while running.call("GET", "/health")[0] != 503:
                time.sleep(0.01)
            status, headers, _ = running.whole("POST", "/get_reward", {"query": ["a"]})
            assert status == 503 and int(headers["Retry-After"]) >= 1
            go.touch()
            assert waiting.result()[1]["rewards"] == [float(len(f"wait {go}"))]
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
