"""The protocol of a reward service: encodes and decodes requests (samples) and replies (scores).

Compatible with services and clients of OpenRLHF and LMM-R1, which use `query`, `prompts` and `labels`
in requests and `rewards` in replies. Does no I/O. Invalid input raises a ValueError that names the
field.

    >>> read_reply({"rewards": [1.5, None]}, 2)[1].kind
    'abstain'
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

PATH = "/get_reward"  # appended to an address without a path
PROTOCOL = 2
NO_REASON = "service: it gave no score"
# Special tokens, which occur in no prose; except those with which a response marks boxes and objects.
CHAT_MARK = re.compile(
    r"<\|(?!(?:box|quad|object_ref)_(?:start|end)\|)[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>"  # noqa: RUF001
    r"|<(?:start|end)_of_turn>|\[/?INST\]"
)
LONGEST_MARK = 80  # characters
END = re.compile(rf"(?:{CHAT_MARK.pattern}|<eos>)\Z")

# Formats of a `query` for services that locate the response by the marks of a chat template: a turn,
# the beginning and the end of the response.
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


def _list_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[kind], config=ConfigDict(strict=True))


TEXT, TEXTS, RECORD, RECORDS, FLAG = map(_list_of, (str, list[str], dict, list[dict], bool))
WHOLE = _list_of(Annotated[int, Field(gt=-(2**53), lt=2**53)])
ANSWER, ANYTHING = map(_list_of, (str | float | list[str] | None, Any))

# Column of a request -> field of a sample, and what its entries must be.
COLUMNS: Mapping[str, tuple[str, TypeAdapter[Any]]] = {
    "ids": ("id", TEXT),
    "data_sources": ("data_source", TEXT),
    "references": ("references", TEXTS),
    "choices": ("choices", TEXTS),
    "extras": ("extra", RECORD),
    "lengths": ("length", WHOLE),
    "max_tokens": ("max_tokens", WHOLE),
    "steps": ("step", WHOLE),
    "turns": ("turns", TEXTS),
    "observations": ("observations", TEXTS),
    "roles": ("roles", TEXTS),
    "tool_calls": ("tool_calls", RECORDS),
    "image_records": ("images", RECORDS),
    "end_reasons": ("end_reason", TEXT),
    "truncated": ("truncated", FLAG),
    "think_prefilled": ("think_prefilled", FLAG),
}
ALIASES = {"queries": "query", "datasources": "data_sources", "raw_images": "images"}


# -- requests --------------------------------------------------------------------------------------


def request_for(samples: Sequence[RewardSample], *, request_id: str, template: str = "chatml") -> dict[str, Any]:
    """The body of a request. Requests with the same `request_id` are scored once."""
    return {
        "protocol": PROTOCOL,
        "request_id": request_id,
        "query": [_query(sample, template) for sample in samples],
        "prompts": [json.dumps(list(s.messages), ensure_ascii=False) for s in samples],
        "labels": ["" if sample.answer is None else sample.answer for sample in samples],
        "answered": [sample.answer is not None for sample in samples],
        "responses": [sample.response for sample in samples],
        **{column: [getattr(sample, field) for sample in samples] for column, (field, _) in COLUMNS.items()},
    }


def _query(sample: RewardSample, template: str) -> str:
    if template not in MARKS:
        return sample.prompt + sample.response
    turn, begin, end = MARKS[template]
    said = sample.messages or [{"role": "user", "content": sample.prompt}]
    own = f"{begin}{{content}}{turn.partition('{content}')[2] or end}"
    shown = "".join((own if m["role"] == "assistant" else turn).format(**m) for m in said)
    return shown + begin + sample.response + ("" if sample.truncated else end)


def read_samples(body: Mapping[str, Any], *, response_after: str = "") -> list[RewardSample]:
    """The samples of a request, without its images. Requests of our protocol have more columns."""
    body = {ALIASES.get(name, name): value for name, value in body.items()}
    ours = body.get("protocol") == PROTOCOL
    columns_read = ("query", "responses") if not ours else ("responses",)
    given = next((name for name in columns_read if body.get(name) is not None), None)
    if given is None:
        raise ValueError(f"{columns_read[0]}: missing; give a list of texts")
    count = len(_column(body, given, TEXT, None))
    queries = _column(body, "query", TEXT, count) or [""] * count
    prompts = _column(body, "prompts", ANYTHING, count) or [None] * count
    responses = _column(body, "responses", TEXT, count)
    found = [(text, "") for text in responses] or [
        split_query(query, prompt, response_after) for query, prompt in zip(queries, prompts, strict=True)
    ]
    gold = "labels" if body.get("labels") is not None else "references"
    labels = _column(body, gold, ANSWER, count) or [None] * count
    answered = _column(body, "answered", FLAG, count) or [True] * count
    asked = {name: about for name, about in COLUMNS.items() if ours or name != "references"}
    columns = {field: column for n, (field, kind) in asked.items() if (column := _column(body, n, kind, count))}
    samples = []
    for index, (response, problem) in enumerate(found):
        text, messages = _prompt(prompts[index])
        label = labels[index] if answered[index] else None
        label = str(label) if isinstance(label, int | float) else label
        base: dict[str, Any] = {"id": str(index), "turns": [response], "prompt": text, "messages": messages}
        base |= {field: column[index] for field, column in columns.items()}
        samples.append(RewardSample(**base | {"response": response, "answer": label, "unreadable": problem}))
    return samples


def _column(body: Mapping[str, Any], name: str, kind: TypeAdapter[Any], count: int | None) -> list[Any]:
    """The validated entries of a column, one per sample; empty if it is missing."""
    value = body.get(name)
    if value is None:
        return []
    if isinstance(value, str) and name in ("query", "responses"):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: give a list with an entry for every sample")
    if count is not None and len(value) != count:
        raise ValueError(f"{name}: {len(value)} entries for {count} samples")
    try:
        kind.validate_python(value)
    except ValidationError as error:
        index = error.errors()[0]["loc"][0]
        raise ValueError(f"{name}[{index}]: {type(value[int(index)]).__name__} is not the expected type") from None
    return value


def _prompt(prompt: Any) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Text and messages of a prompt, which is a text, a list of messages or its JSON."""
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
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and keys <= set(m) for m in prompt):
        return []
    return [{"role": str(m["role"]), "content": _content(m["content"])} for m in prompt]


def _content(content: Any) -> str:
    """The text of a message's parts, with a placeholder such as <image> for each medium."""
    if not isinstance(content, list):
        return str(content)
    records = (part if isinstance(part, dict) else {"text": part} for part in content)
    return "".join(str(part.get("text", f"<{part.get('type')}>")) for part in records)


def split_query(query: str, prompt: Any = None, response_after: str = "") -> tuple[str, str]:
    """Returns (response, "") from a text prompt + response, or ("", problem), an error of this sample only.

    The response follows the prompt, or the mark `response_after` of the turn after the prompt's own. If
    neither occurs, it is the whole text, unless that contains marks of a chat template.
    """
    if isinstance(prompt, str) and prompt and query.startswith(prompt):
        return _ended(query[len(prompt) :]), ""
    before = sum(message["role"] == "assistant" for message in _messages(prompt))
    if response_after and query.count(response_after) > before:
        return _ended(query.split(response_after, before + 1)[-1]), ""
    response = _ended(query)
    if mark := CHAT_MARK.search(response):
        helps = "send responses, or set reward.serve.response_after='<|im_start|>assistant'"
        return "", f"query: {mark[0]} shows that a prompt is in it; {helps}"
    return response, ""


def _ended(response: str) -> str:
    """Remove end-of-turn tokens."""
    response = response.strip()
    while end := END.search(response[-LONGEST_MARK:]):
        response = response[: -len(end[0])].rstrip()
    return response.removesuffix("</s>").strip()


# -- replies ---------------------------------------------------------------------------------------


def reply_to(scored: Sequence[Scored], *, ours: bool, unscored: float | None) -> dict[str, Any]:
    """The body of a reply. With our protocol it also says why a sample has no score. Other clients convert
    every field to a tensor, so theirs has only lists of numbers; `unscored` replaces missing rewards.
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
    """One score per sample, from a reply of our service or another."""
    rewards, columns, errors = reply["rewards"], _parts(reply), reply.get("errors") or {}
    if not isinstance(errors, Mapping):
        raise ValueError("errors: no mapping of indices")
    for name, column in (("rewards", rewards), *columns.items()):
        if not isinstance(column, list) or len(column) != count:
            raise ValueError(f"{name}: not {count} entries")
        if not all(entry is None or type(entry) in (int, float) for entry in column):
            raise ValueError(f"{name}: an entry is no number")
    reasons, found = ((reply.get(name) or [None] * count) for name in ("reasons", "extracted"))
    scores = []
    for index, (value, reason, extracted) in enumerate(zip(rewards, reasons, found, strict=True)):
        parts = {str(name): column[index] for name, column in columns.items() if column[index] is not None}
        odd = [number for number in (value or 0.0, *parts.values()) if not math.isfinite(number)]
        if (why := errors.get(str(index))) is not None:
            scores.append(Score(kind="error", reason=str(why)))
        elif odd:
            scores.append(Score(kind="error", reason=f"nan: the service gave {odd[0]}"))
        elif value is None:
            scores.append(Score(kind="abstain", reason=str(reason or NO_REASON)))
        else:
            text = None if extracted is None else str(extracted)
            scores.append(Score(kind="value", value=value, parts=parts, reason=str(reason or ""), extracted=text))
    return scores


def _parts(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of reward parts by name. Other services name the accuracy `scores` or `acc_rewards`."""
    columns = {"accuracy": reply["scores"]} if isinstance(reply.get("scores"), list) else {}
    columns |= reply.get("extra_logs") or {}
    columns |= {k.removesuffix("_rewards"): v for k, v in reply.items() if k.endswith("_rewards")}
    columns |= {"accuracy": columns.pop("acc")} if "acc" in columns else {}
    return columns | (reply.get("parts") or {})
