"""The words of a reward service, both ways: samples to a request, scores to a reply, and back.

Speaks to services and clients of OpenRLHF and LMM-R1 as well, which know `query`, `prompts` and
`labels` on the way there and `rewards` on the way back. Sends nothing, opens no file; what it
cannot make sense of is a ValueError that names the field.

    >>> read_reply({"rewards": [1.5, None]}, 2)[1].kind
    'abstain'
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

PROTOCOL = 2
NO_REASON = "service: it gave no score"
# What no prose has: special tokens, but for those by which a response points at something.
CHAT_MARK = re.compile(
    r"<\|(?!(?:box|quad|object_ref)_(?:start|end)\|)[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>"  # noqa: RUF001
    r"|<(?:start|end)_of_turn>|\[/?INST\]"
)
LONGEST_MARK = 80  # characters
END = re.compile(rf"(?:{CHAT_MARK.pattern}|<eos>)\Z")

# How a `query` is written for services that find the response by the marks of a chat template: a
# turn, the beginning and the end of the response.
MARKS: Mapping[str, tuple[str, str, str]] = {
    "chatml": ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "deepseek": ("<｜User｜>{content}", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    "gemma": ("<start_of_turn>{role}\n{content}<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>"),
    "mistral": ("[INST]{content}", "[/INST]", "</s>"),
    "base": ("User: {content}", "\n\nAssistant: ", ""),
}
# -- columns ---------------------------------------------------------------------------------------


Check = Callable[[Any], bool]


def _is(kind: type | tuple[type, ...]) -> Check:
    """A value of this type; a bool is no number."""
    return lambda value: isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _whole(value: Any) -> bool:
    return _is(int)(value) and abs(value) < 2**53


_text, _flag, _record, _number = _is(str), _is(bool), _is(dict), _is((int, float))


# Column of a request -> field of a sample, and what an entry must be.
COLUMNS: Mapping[str, tuple[str, Check]] = {
    "ids": ("id", _text),
    "data_sources": ("data_source", _text),
    "references": ("references", _list_of(_text)),
    "choices": ("choices", _list_of(_text)),
    "extras": ("extra", _record),
    "lengths": ("length", _whole),
    "max_tokens": ("max_tokens", _whole),
    "steps": ("step", _whole),
    "turns": ("turns", _list_of(_text)),
    "observations": ("observations", _list_of(_text)),
    "roles": ("roles", _list_of(_text)),
    "tool_calls": ("tool_calls", _list_of(_record)),
    "image_records": ("images", _list_of(_record)),
    "end_reasons": ("end_reason", _text),
    "truncated": ("truncated", _flag),
    "think_prefilled": ("think_prefilled", _flag),
}
ALIASES = {"queries": "query", "datasources": "data_sources", "raw_images": "images"}


# -- requests --------------------------------------------------------------------------------------


def request_for(samples: Sequence[RewardSample], *, request_id: str, template: str = "chatml") -> dict[str, Any]:
    """What a service is sent; the same `request_id` is scored once, however often it arrives."""
    return {
        "protocol": PROTOCOL,
        "request_id": request_id,
        "query": [_query(sample, template) for sample in samples],
        "prompts": [json.dumps(list(s.messages), ensure_ascii=False) for s in samples],
        "labels": ["" if s.answer is None else _listed(s.answer) for s in samples],
        "answered": [sample.answer is not None for sample in samples],
        "responses": [sample.response for sample in samples],
        **{column: [_listed(getattr(sample, field)) for sample in samples] for column, (field, _) in COLUMNS.items()},
    }


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _query(sample: RewardSample, template: str) -> str:
    if template not in MARKS:
        return sample.prompt + sample.response
    turn, begin, end = MARKS[template]
    said = sample.messages or [{"role": "user", "content": sample.prompt}]
    own = f"{begin}{{content}}{turn.partition('{content}')[2] or end}"
    shown = "".join((own if m["role"] == "assistant" else turn).format(**m) for m in said)
    return shown + begin + sample.response + ("" if sample.truncated else end)


def read_samples(body: Mapping[str, Any], *, response_after: str = "") -> list[RewardSample]:
    """The samples of a request, without its images; ours carries more than that of others."""
    body = {ALIASES.get(name, name): value for name, value in body.items()}
    ours = body.get("protocol") == PROTOCOL
    known = ("query", "responses") if not ours else ("responses",)
    given = next((name for name in known if body.get(name) is not None), None)
    if given is None:
        raise ValueError(f"{known[0]}: missing; give a list of texts")
    count = len(_column(body, given, _text, None))
    queries = _column(body, "query", _text, count) or [""] * count
    prompts = _column(body, "prompts", _is(object), count) or [None] * count
    told = _column(body, "responses", _text, count)
    found = [(text, "") for text in told] or [
        _found(query, prompt, response_after) for query, prompt in zip(queries, prompts, strict=True)
    ]
    gold = "labels" if body.get("labels") is not None else "references"
    labels = _column(body, gold, _answer, count) or [None] * count
    answered = _column(body, "answered", _flag, count) or [True] * count
    columns = {
        field: column
        for name, (field, check) in COLUMNS.items()
        if (ours or name != "references") and (column := _column(body, name, check, count))
    }
    samples = []
    for index, (response, problem) in enumerate(found):
        own = {field: column[index] for field, column in columns.items()}
        text, messages = _prompt(prompts[index])
        label = labels[index] if answered[index] else None
        label = str(label) if _number(label) else label
        base: dict[str, Any] = {"id": str(index), "turns": [response], "prompt": text, "messages": messages}
        base |= {**own, "response": response, "answer": label, "unreadable": problem}
        samples.append(RewardSample(**base))
    return samples


def _answer(value: Any) -> bool:
    return value is None or _text(value) or _number(value) or _list_of(_text)(value)


def _column(body: Mapping[str, Any], name: str, check: Check, count: int | None) -> list[Any]:
    """A list with an entry for every sample; nothing where the column is missing."""
    value = body.get(name)
    if value is None:
        return []
    if isinstance(value, str) and name in ("query", "responses"):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: give a list with an entry for every sample")
    if count is not None and len(value) != count:
        raise ValueError(f"{name}: {len(value)} entries for {count} samples")
    wrong = next((index for index, entry in enumerate(value) if not check(entry)), None)
    if wrong is not None:
        raise ValueError(f"{name}[{wrong}]: {type(value[wrong]).__name__} is not what stands here")
    return value


def _prompt(prompt: Any) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Its text and its messages; it is a text, or the JSON of messages."""
    if messages := _messages(prompt):
        return "\n".join(str(message["content"]) for message in messages), messages
    return (prompt if isinstance(prompt, str) else ""), ()


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        try:
            prompt = json.loads(prompt)
        except (ValueError, RecursionError):
            return []
    keys = {"role", "content"}
    if not isinstance(prompt, list) or not all(_record(m) and keys <= set(m) for m in prompt):
        return []
    return [{"role": str(m["role"]), "content": _content(m["content"])} for m in prompt]


def _content(content: Any) -> str:
    """Parts of a message as its text, with a mark for each medium."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", f"<{part.get('type')}>")) if _record(part) else str(part) for part in content)


def _found(query: str, prompt: Any, response_after: str) -> tuple[str, str]:
    """The response, or why it is not known: an error of its sample alone."""
    try:
        return split_query(query, prompt, response_after), ""
    except ValueError as problem:
        return "", str(problem)


def split_query(query: str, prompt: Any = None, response_after: str = "") -> str:
    """The response in prompt + response: what follows the prompt, or the mark of the turn after
    those that the prompt has. The whole text where neither is there, unless marks of a chat
    template show that a prompt is in it: that is a ValueError.
    """
    if isinstance(prompt, str) and prompt and query.startswith(prompt):
        return _ended(query[len(prompt) :])
    before = sum(message["role"] == "assistant" for message in _messages(prompt))
    if response_after and query.count(response_after) > before:
        return _ended(query.split(response_after, before + 1)[-1])
    response = _ended(query)
    if mark := CHAT_MARK.search(response):
        raise ValueError(
            f"query: {mark[0]} shows that a prompt is in it, and where the response begins is not "
            "known; send responses, or prompts that it begins with, or set "
            "reward.serve.response_after='<|im_start|>assistant'"
        )
    return response


def _ended(response: str) -> str:
    """Without the tokens that end a turn."""
    response = response.strip()
    while end := END.search(response[-LONGEST_MARK:]):
        response = response[: -len(end[0])].rstrip()
    return response.removesuffix("</s>").strip()


# -- replies ---------------------------------------------------------------------------------------


def reply_to(scored: Sequence[Scored], *, ours: bool, unscored: float | None) -> dict[str, Any]:
    """Ours says why a sample has no score. Clients of others make a tensor of everything that they
    get, so theirs is lists of numbers and nothing else.
    """
    names = dict.fromkeys(name for each in scored for name in each.parts)
    parts = {name: [each.parts.get(name) for each in scored] for name in names}
    outcomes = [each.outcome for each in scored]
    if ours:
        return {
            "protocol": PROTOCOL,
            "rewards": [each.reward for each in scored],
            "parts": parts | {"accuracy": outcomes},
            "errors": {str(i): s.reason for i, s in enumerate(scored) if s.status == "error"},
            "reasons": [each.reason for each in scored],
            "extracted": [each.extracted for each in scored],
        }
    flat = {"scores": outcomes} | {f"{name}_rewards": column for name, column in parts.items()}
    rewards = [unscored if each.reward is None else each.reward for each in scored]
    return {"rewards": rewards} | {k: column for k, column in flat.items() if None not in column}


def read_reply(reply: Any, count: int) -> list[Score]:
    """One score for each sample, whichever service replied."""
    rewards = _numbers("rewards", reply["rewards"], count)
    parts = _parts(reply, count)
    errors = reply.get("errors") or {}
    reasons, found = reply.get("reasons") or [], reply.get("extracted") or []
    for name, column in (("reasons", reasons), ("extracted", found)):
        if column and (not isinstance(column, list) or len(column) != count):
            raise ValueError(f"{name}: not {count} entries")
    return [
        _score(
            value,
            {name: each for name, column in parts.items() if (each := column[index]) is not None},
            failed=errors.get(str(index)),
            reason=str(reasons[index]) if reasons else "",
            extracted=found[index] if found else None,
        )
        for index, value in enumerate(rewards)
    ]


def _score(value: float | None, parts: Mapping[str, float], *, failed: Any, reason: str, extracted: Any) -> Score:
    if failed is not None:
        return Score(kind="error", reason=str(failed))
    odd = [number for number in (value or 0.0, *parts.values()) if not math.isfinite(number)]
    if odd:
        return Score(kind="error", reason=f"nan: the service gave {odd[0]}")
    if value is None:
        return Score(kind="abstain", reason=reason or NO_REASON)
    text = None if extracted is None else str(extracted)
    return Score(kind="value", value=value, parts=parts, reason=reason, extracted=text)


def _parts(reply: Mapping[str, Any], count: int) -> dict[str, list[float | None]]:
    """Named columns. `scores` and `acc_rewards` are what others call the accuracy."""
    columns = {"accuracy": reply["scores"]} if isinstance(reply.get("scores"), list) else {}
    columns |= reply.get("extra_logs") or {}
    columns |= {k.removesuffix("_rewards"): v for k, v in reply.items() if k.endswith("_rewards")}
    columns |= {"accuracy": columns.pop("acc")} if "acc" in columns else {}
    columns |= reply.get("parts") or {}
    return {str(name): _numbers(name, column, count) for name, column in columns.items()}


def _numbers(name: str, column: Any, count: int) -> list[float | None]:
    if not isinstance(column, list) or len(column) != count:
        raise ValueError(f"{name}: not {count} entries")
    if not all(entry is None or _number(entry) for entry in column):
        raise ValueError(f"{name}: an entry is no number")
    return column
