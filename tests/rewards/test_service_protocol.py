"""What crosses the wire: our own words, and those of the programs that were there before."""

import json
from dataclasses import asdict, replace
from typing import Any, get_args

import numpy as np
import pytest

from saccade.config.schema import RemoteConfig
from saccade.plugins.judges.service_protocol import MARKS, read_reply, read_samples, reply_to, request_for, split_query
from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample

AT_HOME = {"media": (), "asked": (), "replied": (), "token_ids": ()}  # what never crosses
MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": "<image>2+2?"}]
FULL = RewardSample(
    id="row-1", response="<think>easy</think><answer>4</answer>", data_source="sums", prompt="Think.\n<image>2+2?",
    messages=MESSAGES, turns=("<think>easy</think>", "<answer>4</answer>"), length=9, truncated=True,
    end_reason="turn_length", images=({"hash": "h", "path": None, "size": [4, 5], "pixels": [1, 9]},),
    observations=("seen",), answer="4", references=("four",), choices=("3", "4"), think_prefilled=True, max_tokens=64,
    extra={"level": ["#@#"], "weight": 0.5}, tool_calls=({"name": "crop", "ok": True},), step=7,
)  # fmt: skip


def sent(samples: list[RewardSample], **options: Any) -> dict[str, Any]:
    return json.loads(json.dumps(request_for(samples, request_id="r", **options)))


def test_a_sample_arrives_whole_but_for_its_token_ids():
    (back,) = read_samples(sent([replace(FULL, token_ids=(1, 2))]))
    assert asdict(back) == json.loads(json.dumps(asdict(FULL))) | AT_HOME
    body = sent([RewardSample(id="a", response="x", answer=answer) for answer in (None, "", ("1", "2"))])
    assert body["labels"] == ["", "", ["1", "2"]]  # old services want no null
    assert [s.answer for s in read_samples(body)] == [None, "", ["1", "2"]]


@pytest.mark.parametrize(("template", "query"), [
    ("chatml", "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<answer>4</answer><|im_end|>"),
    ("deepseek", "<｜User｜>2+2?<｜Assistant｜><answer>4</answer><｜end▁of▁sentence｜>"),  # noqa: RUF001
    ("mistral", "[INST]2+2?[/INST]<answer>4</answer></s>"),
    ("plain", "2+2?<answer>4</answer>"),
])  # fmt: skip
def test_prompt_and_response_are_joined_as_old_services_split_them(template, query):
    sample = RewardSample(id="a", response="<answer>4</answer>", prompt="2+2?")
    assert sent([sample], template=template)["query"] == [query]
    assert set(get_args(RemoteConfig.model_fields["template"].annotation)) == {*MARKS, "plain"}


BEGIN = "<|im_start|>assistant\n"
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
SHOWN = '[{"role": "user", "content": [{"type": "image", "image": "file:///a.png"}, {"type": "text", "text": "2+2?"}]}]'


@pytest.mark.parametrize("body", [
    # OpenRLHF's remote_rm_fn; LMM-R1, whose prompts are JSON of messages.
    {"query": ["2+2?<answer>4</answer>"], "prompts": ["2+2?"], "labels": ["4"]},
    {"query": [CHATML.format("<image>2+2?", "<answer>4</answer>")], "prompts": [SHOWN], "labels": ["4"]},
    {"queries": ["<answer>4</answer>"], "references": ["4"]},  # LightRFT
    {"query": "<answer>4</answer>", "labels": [4]},
])  # fmt: skip
def test_requests_of_older_programs_are_understood(body):
    (sample,) = read_samples(body, response_after=BEGIN)
    assert (sample.response, sample.data_source) == ("<answer>4</answer>", "default")
    assert sample.answer in ("4", None)
    assert sample.messages == () or sample.messages[0]["content"] == "<image>2+2?"


@pytest.mark.parametrize(("query", "prompt", "after", "response"), [
    (CHATML.format("hi", "yes"), None, BEGIN, "yes"),
    # The first turn after the prompt's own: what the policy writes cannot move it.
    (CHATML.format("hi", f"no {BEGIN}yes"), None, BEGIN, f"no {BEGIN}yes"),
    (
        CHATML.format("a", "b") + "\n" + CHATML.format("c", "d"),
        '[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]',
        BEGIN,
        "d",
    ),
    ("<s>[INST] a? [/INST] <s>6</s> 5</s>", "<s>[INST] a? [/INST]", "", "<s>6</s> 5"),
    ("<|user|>\\boxed{4}?<|assistant|>5", "<|user|>\\boxed{4}?<|assistant|>", "", "5"),
    ("<|box_start|>(1,2)<|box_end|><|im_end|>", None, "", "<|box_start|>(1,2)<|box_end|>"),
    ("User: hi\n\nAssistant: yes", None, "Assistant: ", "yes"),
])  # fmt: skip
def test_where_a_response_begins(query, prompt, after, response):
    assert split_query(query, prompt, after) == (response, "")


def test_a_query_with_a_prompt_that_nothing_marks_is_an_error_of_its_sample_alone():
    odd = "<|user|>\\boxed{4}?<|assistant|>5"
    bad, good = read_samples({"query": [odd, "4"]})
    assert "<|user|> shows that a prompt is in it" in bad.unreadable and bad.response == ""
    assert (good.response, good.unreadable) == ("4", "")


@pytest.mark.parametrize(("body", "words"), [
    ({}, "query: missing"),
    ({"query": ["a", "b"], "labels": ["1"]}, "labels: 1 entries for 2 samples"),
    ({"protocol": 2, "query": ["a"]}, "responses: missing"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(body, words):
    with pytest.raises(ValueError, match=words):
        read_samples(body)


SCORED = [
    Scored(status="ok", reward=1.5, outcome=1.0, parts={"math": 1.0, "format": 1.0}, extracted="4"),
    Scored(status="abstain", reason="gold_unparseable: math: ?"),
    Scored(status="error", reason="timeout: math: no result after 3 s"),
]


def test_our_own_reply_keeps_values_abstentions_and_errors_apart():
    reply = json.loads(json.dumps(reply_to(SCORED, ours=True, unscored=0.0)))
    assert reply["rewards"] == [1.5, None, None]
    value, abstention, error = read_reply(reply, 3)
    assert (value.value, value.extracted, value.parts["accuracy"]) == (1.5, "4", 1.0)
    assert (abstention.kind, abstention.reason) == ("abstain", "gold_unparseable: math: ?")
    assert (error.kind, error.reason[:7]) == ("error", "timeout")


def test_an_older_client_gets_lists_of_numbers_and_nothing_else():
    """LMM-R1 makes a tensor of every value of the reply, OpenRLHF reads `rewards` and `scores`."""
    reply = reply_to(SCORED[:1] * 2, ours=False, unscored=None)
    arrays = {name: np.array(values, dtype=np.float32) for name, values in reply.items()}
    ones = {name: [1.0, 1.0] for name in ("scores", "math_rewards", "format_rewards")}
    assert {name: array.tolist() for name, array in arrays.items()} == {"rewards": [1.5, 1.5]} | ones
    assert reply_to(SCORED, ours=False, unscored=None) == {"rewards": [1.5, None, None]}
    assert reply_to(SCORED, ours=False, unscored=-1.0) == {"rewards": [1.5, -1.0, -1.0]}


@pytest.mark.parametrize(("reply", "accuracy"), [
    ('{"rewards": [1.5, 0.0]}', None),  # math_verifier of LMM-R1, serve_rm of OpenRLHF
    ('{"rewards": [1.5, 0.0], "accuracy_rewards": [1.0, 0.0], "format_rewards": [0.5, 0]}', [1.0, 0.0]),
    ('{"rewards": [1.5, 0.0], "scores": [0.75, 0.0], "extra_logs": {"dummy_scores": [1.5, 0.0]}}', [0.75, 0.0]),
])  # fmt: skip
def test_replies_of_older_services(reply, accuracy):
    scores = read_reply(json.loads(reply), 2)
    assert [score.value for score in scores] == [1.5, 0.0]
    found = [score.parts.get("accuracy") for score in scores]
    assert found == (accuracy or [None, None])


@pytest.mark.parametrize("reply", [
    {"score": [1.0, 0.0]},
    {"rewards": [1.0]},
    {"rewards": [1.0, "0"]},
    {"rewards": [1.0, 0.0], "parts": {"math": [1.0]}},
])  # fmt: skip
def test_a_reply_of_the_wrong_shape_is_no_reward(reply):
    with pytest.raises((ValueError, KeyError)):
        read_reply(reply, 2)


def test_numbers_that_are_none_are_errors_of_their_sample_alone():
    scores = read_reply(json.loads('{"rewards": [NaN, 1.0, Infinity, null]}'), 4)
    assert [score.kind for score in scores] == ["error", "value", "error", "abstain"]
    scores = read_reply({"rewards": [None, 1.0], "errors": {"0": "raised: ZeroDivisionError"}}, 2)
    assert [(score.kind, score.reason) for score in scores] == [("error", "raised: ZeroDivisionError"), ("value", "")]
    scores = read_reply({"rewards": [1, 2], "parts": {"rewards": [0.5, None]}}, 2)
    assert [(score.value, score.parts) for score in scores] == [(1, {"rewards": 0.5}), (2, {})]
