"""The client against services that are old, busy, broken or gone."""

import itertools
import re
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from saccade.config import RewardConfig
from saccade.config.schema import RemoteConfig
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.judges import remote
from saccade.plugins.judges.http_client import sender
from saccade.plugins.judges.remote import Remote
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from saccade.types import Media, Score
from tests.endpoints import Endpoint, Says, scripted


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(sender, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "GATHER", 20.0)  # requests are full, however slow the machine


def samples(count: int) -> list[RewardSample]:
    said = {str(n): f"<think>a</think><answer>{n}</answer>" for n in range(count)}
    known = {"prompt": "?", "data_source": "digits"}
    return [RewardSample(id=n, response=text, answer=str(int(n) % 3), **known) for n, text in said.items()]


def asked(config: RemoteConfig, given: list[RewardSample]) -> tuple[list[Score], dict[str, float]]:
    said = {name: getattr(config, name) for name in config.model_fields_set}
    client = Remote(RemoteConfig(**{"batch": len(given), **said}))
    try:
        futures = [client.submit(sample) for sample in given]
        return [future.result(timeout=30) for future in futures], client.metrics()
    finally:
        client.close()


def to(*services: Endpoint, **options: Any) -> RemoteConfig:
    return RemoteConfig(url=tuple(service.url for service in services), **options)


def lmm_r1(body: dict[str, Any]) -> Says:
    """As its math verifier: two lists of texts, the response found by its chat mark, one number."""
    if not body:
        return Says(status=405, body={"detail": "Method Not Allowed"})
    if not all(isinstance(text, str) for text in (*body["query"], *body["prompts"])):
        return Says(status=422, body={"detail": [{"msg": "Input should be a valid string"}]})
    rewards = []
    for text, label in zip(body["query"], body["labels"], strict=True):
        response = text.partition("<|im_start|>assistant\n")[2].replace("<|im_end|>", "").strip()
        shaped = re.match(r"^<think>(?:(?!</think>).)*</think><answer>.*</answer>\Z", response)
        rewards.append(0.5 * bool(shaped) + float(f"<answer>{label}</answer>" in response))
    return Says(body={"rewards": rewards})


def test_an_old_service_scores_as_it_always_did():
    with scripted(lmm_r1) as service:
        Remote(to(service)).check()
        scores, metrics = asked(to(service, batch=4), samples(12))
    assert [score.value for score in scores] == [1.5] * 3 + [0.5] * 9
    assert (metrics["samples"], metrics["requests"]) == (12, 3)


def test_a_request_is_sent_again_under_the_same_id_until_it_is_answered():
    replies = iter([Says(status=500, body={}), Says(body=b"<html>"), Says(body={"rewards": [1, 0]})])
    with scripted(lambda body: next(replies)) as service:
        scores, metrics = asked(to(service), samples(2))
    assert [score.value for score in scores] == [1, 0]
    assert (metrics["requests"], metrics["repeated"]) == (3, 2)
    assert len({request["body"]["request_id"] for request in service.asked}) == 1


def test_a_busy_service_is_waited_for_and_costs_no_attempt():
    busy = Says(status=429, body={"error": "busy"}, headers=(("Retry-After", "0.05"),))
    with scripted([*[busy] * 6, Says(body={"rewards": [1.0]})]) as service:
        scores, _ = asked(to(service, retries=0), samples(1))
    assert scores[0].value == 1.0
    times = [request["at"] for request in service.asked]
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(times))
    with scripted(lambda body: replace(busy, status=503)) as service:  # but not for ever
        scores, metrics = asked(to(service, deadline=0.3), samples(2))
    assert {score.kind for score in scores} == {"error"} and metrics["failures"] == 2
    assert "gave no answer in time" in scores[0].reason


@pytest.mark.parametrize(("says", "words"), [
    (Says(status=500, body={}), "status 500"),
    (Says(body={"rewards": [1.0]}), "cannot be read.*not 2 entries"),
    (Says(status=401, body={"error": "wrong or missing token"}), "remote.token"),
])  # fmt: skip
def test_what_is_not_scored_is_never_0(says, words):
    kind = "abstain" if says.status == 500 else "error"
    with scripted(lambda body: says) as service:
        scores, metrics = asked(to(service, retries=1, on_failure=kind), samples(2))
    assert [score.kind for score in scores] == [kind, kind] and metrics["failures"] == 2
    assert re.search(words, scores[0].reason), scores[0].reason


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_several_services_share_the_work_and_one_that_is_gone_is_left_out():
    both = threading.Barrier(2, timeout=20)

    def first(body: dict[str, Any]) -> Says:
        both.wait()  # neither is done before the other has begun
        return lmm_r1(body)

    with scripted(first) as one, scripted(first) as two:
        scores, _ = asked(to(one, two, batch=1), samples(2))
        assert len(one.asked) == len(two.asked) == 1
    assert all(score.kind == "value" for score in scores)
    with scripted(lmm_r1) as left:
        gone = f"http://127.0.0.1:{free_port()}/get_reward"
        scores, _ = asked(RemoteConfig(url=(gone, left.url), batch=1, concurrency=2), samples(8))
        assert len(left.asked) == 8
    assert [score.value for score in scores] == [1.5] * 3 + [0.5] * 5


def test_half_of_a_request_that_fails_does_not_take_the_other_along(image, monkeypatch):
    monkeypatch.setattr(remote, "LARGEST", 1)
    shown = [RewardSample(id=str(n), response="x", media=(image(32, 24, n),)) for n in range(2)]
    replies = [Says(status=422, body={"error": "no"}), Says(body={"rewards": [1]})]
    with scripted(replies) as service:
        scores, metrics = asked(to(service, send_images=True), shown)
    assert [score.kind for score in scores] == ["error", "value"] and metrics["failures"] == 1


def test_pictures_are_sent_where_they_are_asked_for_and_no_video(image):
    picture = image(32, 24)
    film = Media(hash="f", width=32, height=24, kind="video", frames=(0, 1), fps=1.0, pictures=(picture,) * 2)
    shown = [RewardSample(id=m.kind, response="x", media=(m,)) for m in (film, picture)]
    with scripted([Says(body={"rewards": [1, 1]}), Says(body={"rewards": [1]})]) as endpoint:
        asked(to(endpoint), shown)
        scores, _ = asked(to(endpoint, send_images=True, batch=1), shown)
    without, with_pictures = (request["body"] for request in endpoint.asked)
    assert "images" not in without and with_pictures["images"][0][0].startswith("iVBOR")  # a PNG in base64
    assert [score.kind for score in scores] == ["error", "value"] and "and no video" in scores[0].reason


def test_a_model_of_the_service_must_see_the_rows():
    for send, kind, words in (
        (False, "image", "set reward.remote.send_images=true"),
        (True, "video", "carry images only"),
    ):
        with scripted([Says(body={"protocol": 2, "models": True})]) as service:
            client = Remote(to(service, send_images=send))
            client.check()
        client.check_media(set())
        with pytest.raises(ConfigError, match=words):
            client.check_media({kind})


@pytest.mark.parametrize(("options", "words"), [
    ({}, r"reward\.remote\.url: takes http://HOST.*; try reward\.remote\.url=http"),
    ({"url": "127.0.0.1:8400"}, r"reward\.remote\.url: takes http://HOST"),
    ({"url": "http://127.0.0.1:1", "token": "NO_SUCH_VARIABLE"}, r"reward\.remote\.token"),
    ({"urls": "http://127.0.0.1:1"}, r"remote: urls: .*arguments are url, token"),
])  # fmt: skip
def test_bad_options_are_refused_before_anything_is_sent(options, words):
    config = RewardConfig(terms=[{"verifier": "remote", "args": options}])
    with pytest.raises(ConfigError, match=words):
        Scorer(config, prompt_format="think_answer", max_tokens=8)


def test_a_service_that_is_gone_or_closed_to_us_stops_a_run_before_it_starts():
    config = RemoteConfig(url=(f"http://127.0.0.1:{free_port()}",), retries=1)
    with pytest.raises(EnvironmentProblem, match=r"reward\.remote\.url: .*no answer in 2 attempts"):
        Remote(config).check()
    with scripted([Says(status=401, body={"error": "no"})]) as service:
        terms = [{"verifier": "remote", "args": {"url": service.url}}]
        with pytest.raises(ConfigError, match=r"reward\.remote\.token: .*status 401"):
            Scorer(RewardConfig(terms=terms), prompt_format="think_answer", max_tokens=8)


def test_closing_leaves_nobody_waiting():
    hold = threading.Event()

    def slow(body: dict[str, Any]) -> Says:
        hold.wait(20)
        return Says(status=500, body={})

    with scripted(slow) as service:
        client = Remote(to(service, batch=1, concurrency=1))
        futures = [client.submit(sample) for sample in samples(3)]
        client.close()
        hold.set()
        scores = [future.result(timeout=20) for future in futures]
    assert {score.kind for score in scores} == {"error"}
    assert client.submit(samples(1)[0]).result().kind == "error"
