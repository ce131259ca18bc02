"""Messages → token ids through the model's own chat template, with the source of every token.

A conversation is built the way an episode is: prompt, assistant turn, continuation, assistant turn. So a template
may rewrite earlier turns: its rendering of the history is never used. Special tokens typed by a user are encoded as
plain text. No pixels here: a medium is a run of placeholder ids whose length the caller gives.

    chat.render(messages, lambda media: ((1, 4, 4), 4), generation=True).ids
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.types import Media, MediaSpan, Message, Rendered, Source

log = logging.getLogger(__name__)

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Special tokens typed as text are replaced by private-use characters of the last Unicode plane: web texts contain
# some of the first private-use area (icon fonts), and a vocabulary may have more special tokens than that area has
# characters.
_PRIVATE = 0x100000
SERIES_MARK = "\U0010ffff"  # marks a time series, which no template supports; a noncharacter

PROBE = "qzxj"  # a reply that occurs in no template's own text
THINK = "<think>"
CACHED_TURNS = 16_384
_QUESTION = Message(role="user", parts=("x",))
_REPLY = Message(role="assistant", parts=(PROBE,))

# A content item of each kind; templates test its type or the presence of a key.
SHOWN = {
    "image": {"type": "image"},
    "video": {"type": "video", "video": ""},
    "audio": {"type": "audio", "audio": "", "audio_url": ""},
}
Grid = tuple[int, ...]
Measure = Callable[[Media], tuple[Grid, int]]  # a medium → its grid and its number of placeholder tokens
Expand = Callable[[str, Sequence[Media]], str]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A tokenizer with its template."""

    tokenizer: Any
    template: str
    placeholders: Mapping[str, int]  # kind of media → its placeholder id, before expansion
    reserved: tuple[str, ...]  # special tokens; typed in text they are plain text
    end_of_turn: int | None = None
    eos_ids: frozenset[int] = frozenset()
    think_prefilled: bool = False  # the generation prompt already opens <think>
    begin: tuple[int, ...] = ()  # ids that start a conversation, missing from the template
    needs_lists: bool = False  # the template reads text only from lists of content items
    expand: Expand | None = None  # (rendered text, media) → text with one placeholder per medium
    ids_of: Callable[[Media], np.ndarray] | None = None  # medium → ids in place of its placeholder; None: repeat it

    @property
    def placeholder(self) -> int | None:
        """The id of the image placeholder; None: the model takes no images."""
        return self.placeholders.get("image")

    @cached_property
    def unknown(self) -> int | None:
        """The id of words outside the vocabulary; None: the tokenizer splits them into known pieces."""
        model = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "model", None)
        token = getattr(model, "unk_token", None) or self.tokenizer.unk_token
        return None if token is None else self.tokenizer.convert_tokens_to_ids(token)

    def is_text(self, ids: np.ndarray) -> np.ndarray:
        return ~np.isin(ids, list(self.placeholders.values()))

    def render(self, messages: Sequence[Message], measure: Measure, *, generation: bool) -> Rendered:
        """Render a prompt; every token has the source PROMPT."""
        ids = self._opening(messages, generation)
        return self._expand(ids, np.full(len(ids), Source.PROMPT, np.int8), messages, measure)

    def render_dialogue(self, messages: Sequence[Message], measure: Measure) -> Rendered:
        """Render a conversation to train on, built as an episode is. Assistant text and its end of turn are POLICY;
        nothing follows the last assistant turn.
        """
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns:
            raise ConfigError("a conversation without an assistant turn has nothing to learn from")
        if turns[0] == 0:
            raise ConfigError("a conversation begins with the assistant; put a system or user message before it")
        contexts = [self._opening(messages[: turns[0]], generation=True)]
        between, reply = self._cached
        contexts += [between(tuple(messages[a + 1 : b])) for a, b in pairwise(turns)]
        end = [] if self.end_of_turn is None else [self.end_of_turn]
        ids: list[np.ndarray] = []
        sources: list[np.ndarray] = []
        for number, (turn, context) in enumerate(zip(turns, contexts, strict=True)):
            written = reply(messages[turn])
            ids += [context, written, np.array(end, np.int64)]
            kind = Source.OBSERVATION if number else Source.PROMPT
            sources += [np.full(len(context), kind, np.int8), np.full(len(written) + len(end), Source.POLICY, np.int8)]
        return self._expand(np.concatenate(ids), np.concatenate(sources), messages[: turns[-1] + 1], measure)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text without a template; special tokens in it are encoded as plain text."""
        return self._encode(self._guard(text))

    def encode_document(self, text: str) -> np.ndarray:
        """Ids of a text without a template, followed by an end token."""
        ends = [id for id in (self.tokenizer.eos_token_id, self.end_of_turn) if id is not None]
        return np.concatenate([self.encode(text), np.array(ends[:1], np.int64)])

    def render_continuation(self, messages: Sequence[Message], measure: Measure, *, last_id: int) -> Rendered:
        """Returns only the new ids: the template's text between a sampled turn and the next generation.

        If the policy did not sample an end of turn, one is added with source TEMPLATE.
        """
        added = self._continuation(messages)
        sources = np.full(len(added), Source.OBSERVATION, np.int8)
        if last_id not in self.eos_ids and self.end_of_turn is not None:
            added = np.concatenate([[self.end_of_turn], added])
            sources = np.concatenate([np.array([Source.TEMPLATE], np.int8), sources])
        return self._expand(added, sources, messages, measure)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template supports the tool role, with images. One that merely prints the role's name does not
        count: the model never saw that word there.
        """
        picture = () if self.placeholder is None else (Media(hash=PROBE, width=64, height=64, path=PROBE),)

        def shown(role: Any) -> str:
            messages = [Message(role=role, parts=(*picture, PROBE))]
            try:
                rendered = self.render_continuation(messages, lambda media: ((1, 1, 1), 1), last_id=-1)
            except ConfigError:  # the template refuses the role, or drops the image
                return ""
            return self.decode(rendered.ids, special=True)

        known = shown("tool")
        other = shown("nobody").replace("nobody", "tool").replace("NOBODY", "TOOL")
        return PROBE in known and known != other

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Decode to text; special tokens are dropped unless `special`."""
        return self.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=not special)

    def _opening(self, messages: Sequence[Message], generation: bool) -> np.ndarray:
        text = self._encode(self.text_of(messages, generation))
        return np.concatenate([np.array(self.begin, np.int64), text])

    def _continuation(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids after an end of turn, up to the next generation.

        Taken from a rendering with a known reply (PROBE), so what the template does to earlier replies does not
        matter (some drop their thoughts).
        """
        _, after = self._around_probe(messages, generation=True)
        end = "" if self.end_of_turn is None else self.tokenizer.convert_ids_to_tokens(self.end_of_turn)
        before, found, rest = after.partition(end) if end else ("", "", after)
        if not found or before.strip():  # the template writes no end of turn
            return self._encode_after(after)
        return self._encode(end + rest)[1:]

    @cached_property
    def _cached(self) -> tuple[Callable[[tuple[Message, ...]], np.ndarray], Callable[[Message], np.ndarray]]:
        """Cached functions for continuations and replies: rows share many, and the template is the slowest step."""
        continuation = lru_cache(CACHED_TURNS)(self._continuation)
        return continuation, lru_cache(CACHED_TURNS)(lambda message: self._encode_after(self._written(message)))

    @cached_property
    def _frame(self) -> tuple[str, str, str]:
        """Returns the template's text around a final reply: (whitespace between generation prompt and reply, all
        text after the reply, the thought that the generation prompt opens).
        """
        before, after = self._around_probe((), generation=False)
        prompt = self.text_of((_QUESTION,), generation=True)
        lead = before[len(prompt) :] if before.startswith(prompt) else ""
        opened = prompt[prompt.rindex(THINK) :] if self.think_prefilled else ""
        return lead if lead.isspace() else "", after, opened

    def _written(self, message: Message) -> str:
        """The text that the policy would have sampled for this message: stripped as the template strips it, without
        the <think> that the generation prompt already wrote.
        """
        if message.media:
            raise ConfigError("an assistant turn holds an image or another medium; only a user or a tool shows one")
        lead, tail, opened = self._frame
        text = self._guard(message.text)
        shown = self.text_of((_QUESTION, message), generation=False)
        forms = (text, text.rstrip(), text.lstrip(), text.strip())
        text = lead + next((t for t in forms if shown.endswith(lead + t + tail)), text)
        if opened and text.lstrip().startswith(THINK):
            return text.lstrip().removeprefix(THINK).removeprefix(opened.removeprefix(THINK))
        return text

    def _around_probe(self, messages: Sequence[Message], *, generation: bool) -> tuple[str, str]:
        text = self.text_of((_QUESTION, _REPLY, *messages), generation)
        before, found, after = text.partition(PROBE)
        if not found:
            raise ConfigError("the chat template does not show what an assistant wrote; try prompt.chat_template=FILE")
        return before, after

    def text_of(self, messages: Sequence[Message], generation: bool, *, expanded: bool = True) -> str:
        """Render a conversation to text; with `expanded`, each medium is one placeholder (see `expand`)."""
        from jinja2 import TemplateError

        plain = [self._plain(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                plain, chat_template=self.template, tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, TypeError) as error:  # a TypeError: text where it expects a list
            roles = ", ".join(message.role for message in messages)
            hint = "leave out what it does not take (such as prompt.system), or give prompt.chat_template=FILE"
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}; {hint}") from error
        media = [m for message in messages for m in message.media]
        return self.expand(text, media) if self.expand and media and expanded else text

    def _plain(self, message: Message) -> dict[str, Any]:
        # Without media the parts are joined first, so special tokens that span two parts are found, too.
        shown = message.parts if message.media else (message.text,)
        parts: list[Any] = [self._shown(part) for part in shown]
        listed = self.needs_lists or not all(isinstance(part, str) for part in parts)
        items = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        return {"role": message.role, "content": items if listed else "".join(parts)}

    def _shown(self, part: str | Media) -> str | dict[str, str]:
        if isinstance(part, str):
            return self._guard(part)
        if part.kind != "series":
            return SHOWN[part.kind]
        if "series" not in self.placeholders:
            what = f"a row holds a time series ({part.path or part.hash[:12]}), and this model has no encoder for it"
            raise ConfigError(f"{what}; try model.series.encoder=patches model.series.channels={part.height}")
        return SERIES_MARK

    def _guard(self, text: str) -> str:
        for index, token in enumerate(self.reserved):
            if token in text:
                text = text.replace(token, chr(_PRIVATE + index))
        return text.replace(SERIES_MARK, "\ufffd") if "series" in self.placeholders else text

    def _encode(self, text: str) -> np.ndarray:
        ids: list[int] = []
        split = f"([{chr(_PRIVATE)}-{chr(_PRIVATE + len(self.reserved))}{SERIES_MARK}])"
        for piece in filter(None, re.split(split, text)):
            place = ord(piece) - _PRIVATE if len(piece) == 1 else -1
            if piece == SERIES_MARK and "series" in self.placeholders:
                ids.append(self.placeholders["series"])
                continue
            # Encoded in two halves, it is not recognised as a special token.
            token = self.reserved[place] if 0 <= place < len(self.reserved) else ""
            for half in filter(None, (token[:1], token[1:])) if token else (piece,):
                ids += self.tokenizer.encode(half, add_special_tokens=False)
        return np.array(ids, dtype=np.int64)

    def _encode_after(self, text: str) -> np.ndarray:
        """Ids of a text that continues another, without the space that some tokenizers put before their input."""
        if not self._adds_space:
            return self._encode(text)
        return self._encode("\n" + text)[len(self._encode("\n")) :]

    @cached_property
    def _adds_space(self) -> bool:
        line, alone, behind = (self._encode(t).tolist() for t in ("\n", "a", "\na"))
        return behind[: len(line)] == line and behind[len(line) :] != alone

    def _expand(self, ids: np.ndarray, sources: np.ndarray, messages: Sequence[Message], measure: Measure) -> Rendered:
        media = [m for message in messages for m in message.media]
        places = np.flatnonzero(~self.is_text(ids))
        if ids[places].tolist() != [self.placeholders.get(m.kind) for m in media]:
            kinds = " and ".join(sorted({f"{m.kind}s" for m in media})) or "images"
            other = "model.family=generic, " if self.placeholders else ""
            hint = f"use a model that takes {kinds}, {other}or prompt.chat_template=FILE"
            raise ConfigError(f"the chat template shows {len(places)} of {len(media)} {kinds}: {hint}")
        if not media:
            return Rendered(ids=ids, sources=sources)
        measured = [measure(m) for m in media]
        inside = [] if self.ids_of is None else [self.ids_of(m) for m in media]
        if inside:
            measured = [(grid, len(own)) for (grid, _), own in zip(measured, inside, strict=True)]
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [tokens for _, tokens in measured]
        starts = (np.cumsum(counts) - counts)[places]
        spans = tuple(
            MediaSpan(media=m, start=int(start), length=tokens, grid=grid)
            for m, start, (grid, tokens) in zip(media, starts, measured, strict=True)
        )
        ids = np.repeat(ids, counts)
        for span, own in zip(spans, inside, strict=False):
            ids[span.start : span.end] = own
        return Rendered(ids=ids, sources=np.repeat(sources, counts), media=spans)


def load_chat(
    path: str,
    *,
    placeholders: Mapping[str, int],
    template: str | None = None,
    eos_ids: Sequence[int] = (),
    begins: bool = False,
    trust_remote_code: bool = False,
) -> Chat:
    """Load the tokenizer and template of a model folder; `template` (text of a Jinja file) replaces the folder's.
    `begins`: the model has a processor, which starts a conversation with the tokenizer's bos token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        why = "" if tokenizer.encode("a") else "it has no tokens"
    except Exception as error:  # missing or damaged files raise different errors per tokenizer class
        why = str(error).partition("\n")[0]
    if why:
        files = "copy or download its tokenizer files again"
        raise EnvironmentProblem(f"{path}: its tokenizer cannot be used ({why}); {files}")
    template = template or tokenizer.chat_template
    if not template:
        log.warning("%s has no chat template: prompts read `user: …`; prompt.chat_template=FILE gives one", path)
        template = PLAIN_TEMPLATE
    added = tokenizer.added_tokens_decoder
    reserved = tuple(token for token, i in tokenizer.get_added_vocab().items() if i in added and added[i].special)
    probe = Chat(tokenizer=tokenizer, template=template, placeholders=placeholders, reserved=reserved)
    probe = replace(probe, needs_lists=_needs_lists(probe))
    _, after = probe._around_probe((), generation=False)
    special = {tokenizer.convert_tokens_to_ids(token) for token in reserved}
    tail = [i for i in probe._encode(after).tolist() if i in special]
    end_of_turn = tail[0] if tail else tokenizer.eos_token_id
    ends = {*eos_ids, end_of_turn, tokenizer.eos_token_id} - {None}
    prompt = probe.text_of((_QUESTION,), generation=True)
    first = tokenizer.encode("", add_special_tokens=True)[:1] if begins else []
    unwritten = first == [tokenizer.bos_token_id] and not prompt.startswith(tokenizer.bos_token)
    return replace(
        probe,
        end_of_turn=end_of_turn,
        eos_ids=frozenset(int(i) for i in ends),
        think_prefilled=prompt.rstrip().endswith(THINK),
        begin=tuple(first) if unwritten else (),
    )


def _needs_lists(chat: Chat) -> bool:
    """Whether the template drops, or fails on, content that is text instead of a list of items."""
    try:
        return PROBE not in chat.text_of((_QUESTION, _REPLY), generation=False)
    except ConfigError:
        return True
