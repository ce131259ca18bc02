"""What a chat template does to a conversation, found by rendering some: traps that have cost others
whole runs. Reads the tokenizer, no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from saccade.config import Config
from saccade.doctor.finding import Finding, failure, note, ok, warning
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.types import Media, Message

WORD, OTHER = "qzxj", "vwkq"  # that no template says by itself
USER = Message(role="user", parts=(WORD,))
PICTURE = Media(hash="0", width=56, height=56, data=b"")
OWN = "give another template with prompt.chat_template=FILE"


def check(config: Config) -> Iterator[Finding]:
    from saccade.recipes.models import family_of, quiet_libraries

    quiet_libraries()
    family = family_of(config, config.model.path)
    yield from _vocabulary(family)
    yield from _unknown(config, family)
    found = [finding for trap in TRAPS for finding in trap(family)]
    yield from found
    if not found:
        yield ok("template", "system and tool turns, pictures and thoughts pass as they are")


def _vocabulary(family: Family) -> Iterator[Finding]:
    known, rows = len(family.chat.tokenizer), family.vocabulary
    if known > rows:
        yield failure(
            "tokenizer",
            f"it has {known} ids, the model {rows}",
            "take tokenizer and weights from the same model",
        )
    else:
        ends = [family.chat.decode([i], special=True) for i in sorted(family.chat.eos_ids)]
        banned = int(family.banned.sum())
        text = f"{known} of {rows} ids, {banned} never sampled, ends with {', '.join(ends)}"
        yield ok("tokenizer", text)


def _unknown(config: Config, family: Family) -> Iterator[Finding]:
    """Words of the rows, where the config names some that are there."""
    from saccade.data import datasets
    from saccade.data.sources import parse_address
    from saccade.recipes.questions import READ, unknown_words

    sources = config.data.train
    if not sources or not all(Path(parse_address(s.path).path).exists() for s in sources):
        return
    some = {"max_samples": READ, "max_bad_fraction": 1.0, "on_bad_row": "quarantine"}
    data = datasets.load(sources, config.data.model_copy(update=some))
    if found := unknown_words(family, data.samples):
        yield warning("tokenizer", *found)


def shown(family: Family, *messages: Message) -> str | None:
    """What the template writes; None where it refuses."""
    try:
        return family.chat.text_of(messages, False)
    except ConfigError:
        return None


def default_system(family: Family) -> Iterator[Finding]:
    """Without a system message the prompt looks as with one, and the text is the template's."""
    plain = shown(family, USER) or ""
    told = shown(family, Message(role="system", parts=(OTHER,)), USER)
    before, found, after = (told or "").partition(OTHER)
    middle = plain[len(before) : len(plain) - len(after)]
    if found and plain == before + middle + after and middle.strip():
        yield warning(
            "template",
            f"it adds a system message where there is none: {middle.strip()[:60]!r}",
            "say it yourself with prompt.system, so that every engine and evaluation agrees",
        )


def thoughts(family: Family) -> Iterator[Finding]:
    reply = Message(role="assistant", parts=(f"<think>{OTHER}</think>{WORD}",))
    text = shown(family, USER, reply, USER)
    if text is not None and OTHER not in text:
        yield note(
            "template",
            "it drops the thoughts of earlier turns; episodes keep them, as they were sampled",
        )
    if family.chat.think_prefilled:
        yield note(
            "template", "its generation prompt opens <think>: responses and formats begin inside it"
        )


def roles(family: Family) -> Iterator[Finding]:
    for role, before in (("system", ()), ("tool", (USER, _reply(WORD)))):
        turn = Message(role=role, parts=(OTHER,))  # type: ignore[arg-type]
        text = shown(family, *before, turn, *(() if before else (USER,)))
        if text is None or OTHER not in text:
            verb = "refuses" if text is None else "leaves out"
            yield warning("template", f"it {verb} {role} turns", FIXES[role])


FIXES = {
    "system": "put the text into the question with prompt.instruction, or " + OWN,
    "tool": "environments that answer as `tool` need another template: " + OWN,
}


def _reply(text: str) -> Message:
    return Message(role="assistant", parts=(text,))


def pictures(family: Family) -> Iterator[Finding]:
    """In every place where an environment or a row may show one."""
    if family.spec.image_token is None:
        return
    two = Message(role="user", parts=(PICTURE, PICTURE, WORD))
    if _pictures(family, two) < 2:
        yield failure("template", "it drops pictures of a question", OWN)
    tool = Message(role="tool", parts=(PICTURE, WORD))
    if _pictures(family, USER, _reply(WORD), tool) < 1:
        yield warning("template", "it drops pictures in tool turns", FIXES["tool"])


def _pictures(family: Family, *messages: Message) -> int:
    mark = family.chat.tokenizer.convert_ids_to_tokens(family.chat.placeholder)
    return (shown(family, *messages) or "").count(mark)


TRAPS: tuple[Callable[[Family], Iterator[Finding]], ...] = (
    default_system,
    thoughts,
    roles,
    pictures,
)
