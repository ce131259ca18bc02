"""The input of a reward: plain data of one episode, sent to worker processes as JSON.

No tokenizers or templates: `response` is the decoded text of the policy's tokens and nothing else.

    >>> RewardSample(id="a", response="7", answer="7").golds
    ('7',)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.system.codec import jsonable
from saccade.types import Media, Message, Sample, Score


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One finished episode. Sequences arrive as lists in worker processes."""

    id: str
    response: str  # text of the policy only, all turns joined
    data_source: str = "default"
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()  # {"role", "content"}
    turns: Sequence[str] = ()  # text of the policy, turn by turn
    token_ids: Sequence[int] = ()
    length: int = 0  # sampled tokens
    truncated: bool = False
    end_reason: str = "answered"
    images: Sequence[Mapping[str, Any]] = ()  # {"hash", "path", "size", "pixels": (least, most)}
    observations: Sequence[str] = ()
    roles: Sequence[str] = ()  # of each turn and observation after the question, in order
    answer: str | Sequence[str] | None = None
    references: Sequence[str] = ()  # further answers that count as right
    choices: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: Sequence[Mapping[str, Any]] = ()
    step: int = 0
    think_prefilled: bool = False  # the template already opened <think>
    max_tokens: int = 0  # 0: the limit of the run
    media: Sequence[Media] = field(default=(), repr=False)  # of the question; stays in this process
    asked: Sequence[Message] = field(default=(), repr=False)  # the question; stays in this process
    replied: Sequence[Message] = field(default=(), repr=False)  # all messages after it; stay in this process
    unreadable: str = ""  # why it cannot be scored; if set, no verifier sees it

    @property
    def golds(self) -> tuple[str, ...]:
        """Every text that counts as the right answer; blank texts do not count."""
        own = (self.answer,) if isinstance(self.answer, str) else tuple(self.answer or ())
        golds = own if not self.references else tuple(dict.fromkeys((*own, *self.references)))
        return tuple(gold for gold in golds if gold.strip())

    @property
    def text(self) -> str:
        """The response with the <think> that the template prefilled, for parsing tags."""
        return "<think>" + self.response if self.think_prefilled else self.response


def no_gold(sample: RewardSample) -> Score:
    return Score(kind="abstain", reason=f"gold_unparseable: {sample.answer!r}")


_BULKY = {"prompt", "messages", "token_ids", "observations", "roles", "images", "extra"}
_HERE = {"media", "asked", "replied", "unreadable"}  # fields that never leave this process


def to_json(sample: RewardSample, *, brief: bool = False) -> str:
    """`brief` leaves out fields that no isolated built-in verifier reads; `turns` is sent only if there are several."""
    left_out = _HERE | (_BULKY | ({"turns"} if len(sample.turns) < 2 else set()) if brief else set())
    return json.dumps({name: value for name, value in vars(sample).items() if name not in left_out}, default=jsonable)


def reward_sample(sample: Sample, response: str, **fields: Any) -> RewardSample:
    """The RewardSample of a response to a data row; `fields` are those of its rollout (length, truncated, …)."""
    messages = [{"role": m.role, "content": shown_text(m)} for m in sample.messages]
    row = {name: getattr(sample, name) for name in ("id", "data_source", "media", "answer", "choices", "extra")} | {
        "response": response,
        "prompt": "\n".join(message["content"] for message in messages),
        "messages": messages,
        "turns": (response,),
        "images": image_records(sample.media),
        "asked": sample.messages,
    }
    return RewardSample(**(row | fields))


def image_records(media: Sequence[Media]) -> list[dict[str, Any]]:
    return [
        {"hash": m.hash, "path": m.path, "size": [m.width, m.height], "pixels": [m.min_pixels, m.max_pixels]}
        for m in media
    ]


def shown_text(message: Message) -> str:
    """The text of a message, with a mark such as <image> in place of each medium."""
    return "".join(part if isinstance(part, str) else f"<{part.kind}>" for part in message.parts)
