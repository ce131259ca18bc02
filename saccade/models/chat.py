"""Messages → token ids through the model's own chat template, with the source of every token.

Boundaries come from rendering prefixes of the conversation, never from searching for a marker in
the text. Special tokens that a user typed in prose stay prose. Knows nothing of pixels: a medium is
a run of placeholder ids whose length the caller gives.

    chat.render(messages, media_tokens=lambda media: 4, generation=True).ids
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import ConfigError
from saccade.types import Media, MediaSpan, Message, Rendered, Source

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Private-use characters stand for special tokens that were typed as text. Those of the last plane:
# texts from the web
# hold some of the first (icon fonts), and a vocabulary may have more special tokens than the first
# has characters.
_PRIVATE = 0x100000

PROBE = "qzxj"  # a reply that no template has in its own text

Grid = tuple[int, int, int]
Measure = Callable[
    [Media], tuple[Grid, int]
]  # a medium → its grid and its number of placeholder tokens


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A tokenizer with its template."""

    tokenizer: Any
    template: str
    placeholder: int | None  # id that stands for an image before it is expanded; None: text only
    reserved: tuple[str, ...]  # special tokens that text must not smuggle in
    end_of_turn: int | None
    eos_ids: frozenset[int]
    think_prefilled: bool  # the generation prompt already opens <think>

    def render(
        self, messages: Sequence[Message], measure: Measure, *, generation: bool
    ) -> Rendered:
        """A prompt: every token has the source PROMPT."""
        ids = self._encode(self._template(messages, generation))
        return self._expand(ids, np.full(len(ids), Source.PROMPT, np.int8), messages, measure)

    def render_dialogue(self, messages: Sequence[Message], measure: Measure) -> Rendered:
        """A conversation to learn from: what an assistant wrote, its end of turn included, is
        POLICY.
        """
        if messages and messages[0].role == "assistant":
            raise ConfigError(
                "a conversation begins with the assistant, which has nothing to answer; put a "
                "system or user "
                "message before it"
            )
        ids: list[np.ndarray] = []
        sources: list[np.ndarray] = []
        done = ""
        for turn, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._template(messages[:turn], generation=True)
            after = self._template(messages[: turn + 1], generation=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise ConfigError(
                    "the chat template rewrites earlier turns (turn "
                    f"{turn} changes what stands before it), so assistant spans cannot be found; "
                    "give a template that only appends with prompt.chat_template=FILE"
                )
            written = self._encode(after[len(before) :])
            last = np.flatnonzero(np.isin(written, list(self.eos_ids)))
            end = int(last[-1]) + 1 if len(last) else len(written)
            context = self._encode(before[len(done) :])
            ids += [context, written]
            sources += [
                np.full(len(context), Source.PROMPT, np.int8),
                np.full(end, Source.POLICY, np.int8),
                np.full(len(written) - end, Source.TEMPLATE, np.int8),
            ]
            done = after
        if not ids:
            raise ConfigError("a conversation without an assistant turn has nothing to learn from")
        last_turn = max(i for i, m in enumerate(messages) if m.role == "assistant")
        return self._expand(
            np.concatenate(ids), np.concatenate(sources), messages[: last_turn + 1], measure
        )

    def render_continuation(
        self, messages: Sequence[Message], measure: Measure, *, last_id: int
    ) -> Rendered:
        """Only the new ids: what the template puts between a sampled turn and the next generation.

        An end of turn that the policy did not sample is added as TEMPLATE.
        """
        stand_in = (
            Message(role="user", parts=("x",)),
            Message(role="assistant", parts=("y",)),
        )
        before = self._encode(self._template(stand_in, generation=False))
        full = self._encode(self._template((*stand_in, *messages), generation=True))
        ends = np.flatnonzero(np.isin(before, list(self.eos_ids)))
        cut = int(ends[-1]) + 1 if len(ends) else len(before)
        if not np.array_equal(full[:cut], before[:cut]):
            raise ConfigError(
                "the chat template rewrites earlier turns, so episodes cannot be continued; "
                "give a template that only appends with prompt.chat_template=FILE"
            )
        added = full[cut:]
        sources = np.full(len(added), Source.OBSERVATION, np.int8)
        if last_id not in self.eos_ids and self.end_of_turn is not None:
            added = np.concatenate([[self.end_of_turn], added])
            sources = np.concatenate([np.array([Source.TEMPLATE], np.int8), sources])
        return self._expand(added, sources, messages, measure)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def _template(self, messages: Sequence[Message], generation: bool) -> str:
        return self.tokenizer.apply_chat_template(
            [self._plain(message) for message in messages],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=generation,
        )

    def _plain(self, message: Message) -> dict[str, Any]:
        if not message.media:
            return {"role": message.role, "content": self._guard(message.text)}
        content = [
            {"type": "text", "text": self._guard(part)}
            if isinstance(part, str)
            else {"type": part.kind}
            for part in message.parts
        ]
        return {"role": message.role, "content": content}

    def _guard(self, text: str) -> str:
        for index, token in enumerate(self.reserved):
            if token in text:
                text = text.replace(token, chr(_PRIVATE + index))
        return text

    def _encode(self, text: str) -> np.ndarray:
        ids: list[int] = []
        for piece in re.split(f"([{chr(_PRIVATE)}-{chr(_PRIVATE + len(self.reserved))}])", text):
            if len(piece) == 1 and _PRIVATE <= ord(piece) < _PRIVATE + len(self.reserved):
                token = self.reserved[ord(piece) - _PRIVATE]
                halves = (token[:1], token[1:])  # in two halves it is no special token
            else:
                halves = (piece, "")
            for half in halves:
                if half:
                    ids += self.tokenizer.encode(half, add_special_tokens=False)
        return np.array(ids, dtype=np.int64)

    def _expand(
        self, ids: np.ndarray, sources: np.ndarray, messages: Sequence[Message], measure: Measure
    ) -> Rendered:
        media = [m for message in messages for m in message.media]
        places = (
            np.flatnonzero(ids == self.placeholder)
            if self.placeholder is not None
            else np.empty(0, np.int64)
        )
        if len(places) != len(media):
            raise ConfigError(
                f"the chat template shows {len(places)} of {len(media)} images; this model or "
                "template "
                "cannot take them all: use a vision model, or prompt.chat_template=FILE"
            )
        if not media:
            return Rendered(ids=ids, sources=sources)
        measured = [measure(m) for m in media]
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [tokens for _, tokens in measured]
        starts = (np.cumsum(counts) - counts)[places]
        spans = tuple(
            MediaSpan(media=m, start=int(start), length=tokens, grid=grid)
            for m, start, (grid, tokens) in zip(media, starts, measured, strict=True)
        )
        return Rendered(ids=np.repeat(ids, counts), sources=np.repeat(sources, counts), media=spans)


def load_chat(
    path: str,
    *,
    placeholder: int | None,
    template: str | None = None,
    eos_ids: Sequence[int] = (),
    trust_remote_code: bool = False,
) -> Chat:
    """Tokenizer and template of a model folder; `template` (text of a Jinja file) replaces the
    folder's own.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    template = template or tokenizer.chat_template or PLAIN_TEMPLATE
    reserved = tuple(
        token for token in tokenizer.get_added_vocab() if _is_special(tokenizer, token)
    )
    probe = Chat(
        tokenizer=tokenizer,
        template=template,
        placeholder=placeholder,
        reserved=reserved,
        end_of_turn=None,
        eos_ids=frozenset(),
        think_prefilled=False,
    )
    user = Message(role="user", parts=("x",))
    reply = Message(role="assistant", parts=(PROBE,))
    answer = probe._template((user, reply), generation=False)
    special = {tokenizer.convert_tokens_to_ids(token) for token in reserved}
    tail = [
        i
        for i in probe._encode(answer[answer.rindex(PROBE) + len(PROBE) :]).tolist()
        if i in special
    ]
    end_of_turn = tail[0] if tail else tokenizer.eos_token_id
    known = {*eos_ids, end_of_turn, tokenizer.eos_token_id} - {None}
    prompt = probe._template((user,), generation=True)
    return Chat(
        tokenizer=tokenizer,
        template=template,
        placeholder=placeholder,
        reserved=reserved,
        end_of_turn=end_of_turn,
        eos_ids=frozenset(int(i) for i in known),
        think_prefilled=prompt.rstrip().endswith("<think>"),
    )


def _is_special(tokenizer: Any, token: str) -> bool:
    entry = tokenizer.added_tokens_decoder.get(tokenizer.convert_tokens_to_ids(token))
    return entry is not None and entry.special
