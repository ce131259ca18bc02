"""What a tokenizer and its chat template do to a conversation, found by rendering some: traps that
have cost others whole runs. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from saccade.config import DataConfig
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.types import Media, Message

WORD, OTHER = "qzxj", "vwkq"  # that no template says by itself
USER, REPLY = Message(role="user", parts=(WORD,)), Message(role="assistant", parts=(WORD,))
PICTURE = Media(hash="0", width=56, height=56, data=b"")
ANOTHER = "give another template with prompt.chat_template=FILE"
FIXES = {
    "system": "put the text into the question with prompt.instruction, or " + ANOTHER,
    "tool": "environments that answer as `tool` need another template: " + ANOTHER,
}

Rows = Iterator[tuple[str, ...]]


def tokenizer(family: Family, data: DataConfig) -> Rows:
    """Its ids, and words of the rows that it does not know, where the config names some rows."""
    from saccade.data import datasets
    from saccade.data.sources import parse_address
    from saccade.recipes.questions import READ, unknown_words

    known, rows = len(family.chat.tokenizer), family.vocabulary
    if known > rows:
        fix = "take tokenizer and weights from the same model"
        yield "failure", f"it has {known} ids, the model {rows}", fix
    else:
        ends = [family.chat.decode([i], special=True) for i in sorted(family.chat.eos_ids)]
        banned = int(family.banned.sum())
        yield "ok", f"{known} of {rows} ids, {banned} never sampled, ends with {', '.join(ends)}"
    paths = [Path(parse_address(source.path).path) for source in data.train]
    if paths and all(path.exists() for path in paths):
        some = {"max_samples": READ, "max_bad_fraction": 1.0, "on_bad_row": "quarantine"}
        samples = datasets.load(data.train, data.model_copy(update=some)).samples
        if found := unknown_words(family, samples):
            yield "warning", *found


def traps(family: Family) -> Rows:
    found = [*default_system(family), *thoughts(family), *roles(family), *pictures(family)]
    yield from found or [("ok", "system and tool turns, pictures and thoughts pass as they are")]


def shown(family: Family, *messages: Message) -> str | None:
    """What the template writes; None where it refuses."""
    try:
        return family.chat.text_of(messages, False)
    except ConfigError:
        return None


def default_system(family: Family) -> Rows:
    """Without a system message the prompt looks as with one, and the text is the template's."""
    plain = shown(family, USER) or ""
    asked = shown(family, Message(role="system", parts=(OTHER,)), USER)
    before, found, after = (asked or "").partition(OTHER)
    middle = plain[len(before) : len(plain) - len(after)]
    if found and plain == before + middle + after and middle.strip():
        text = f"it adds a system message where there is none: {middle.strip()[:60]!r}"
        fix = "say it yourself with prompt.system, so that every engine and evaluation agrees"
        yield "warning", text, fix


def thoughts(family: Family) -> Rows:
    reply = Message(role="assistant", parts=(f"<think>{OTHER}</think>{WORD}",))
    text = shown(family, USER, reply, USER)
    if text is not None and OTHER not in text:
        yield "note", "it drops thoughts of earlier turns; episodes keep them, as they were sampled"
    if family.chat.think_prefilled:
        yield "note", "its generation prompt opens <think>: responses and formats begin inside it"


def roles(family: Family) -> Rows:
    conversations = {
        "system": (Message(role="system", parts=(OTHER,)), USER),
        "tool": (USER, REPLY, Message(role="tool", parts=(OTHER,))),
    }
    for role, messages in conversations.items():
        text = shown(family, *messages)
        if text is None or OTHER not in text:
            verb = "refuses" if text is None else "leaves out"
            yield "warning", f"it {verb} {role} turns", FIXES[role]


def pictures(family: Family) -> Rows:
    """In every place where an environment or a row may show one."""
    if family.spec.image_token is None:
        return
    mark = family.chat.tokenizer.convert_ids_to_tokens(family.chat.placeholder)
    two = Message(role="user", parts=(PICTURE, PICTURE, WORD))
    if (shown(family, two) or "").count(mark) < 2:
        yield "failure", "it drops pictures of a question", ANOTHER
    tool = Message(role="tool", parts=(PICTURE, WORD))
    if mark not in (shown(family, USER, REPLY, tool) or ""):
        yield "warning", "it drops pictures in tool turns", FIXES["tool"]
