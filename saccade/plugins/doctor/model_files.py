"""Checks of a model folder without torch: files that are missing, truncated or inconsistent; and traps of its
tokenizer and chat template, found by rendering conversations.
"""

import json
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from saccade.config import DataConfig
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.models.files import AGAIN, INDEX, SINGLE, header_of
from saccade.plugins.doctor.machine import Rows
from saccade.types import Media, Message

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
WORD, OTHER = "qzxj", "vwkq"  # texts that no template contains
USER, REPLY = Message(role="user", parts=(WORD,)), Message(role="assistant", parts=(WORD,))
SYSTEM = Message(role="system", parts=(OTHER,))
PICTURE = Media(hash="0", width=56, height=56, data=b"")
ANOTHER = "give another template with prompt.chat_template=FILE"
TOOLS = f"environments that answer as `tool` need another template: {ANOTHER}"


# -- files -----------------------------------------------------------------------------------------


def check(path: Path, has_template: bool) -> Rows:
    """`has_template`: the config names a chat template."""
    if not path.is_dir():
        yield "failure", f"{path} is not a folder", "give a Hugging Face model folder"
        return
    config = read_json(path / "config.json")
    if isinstance(config, Exception):
        yield "failure", f"{path}/config.json cannot be read: {config}", AGAIN
        config = {}
    there = {file.name for file in path.iterdir()}
    if there.isdisjoint(TOKENIZERS):
        yield "failure", f"no tokenizer: none of {', '.join(TOKENIZERS)} is there", AGAIN
    inside = "chat_template" in _settings(path / "tokenizer_config.json")
    if not (has_template or inside or not there.isdisjoint(TEMPLATES)):
        fix = "give that of the model with prompt.chat_template=FILE, unless it is a base model"
        yield "warning", "no chat template: turns are written as `role: text`", fix
    optional = {"generation_config.json": "generation ends at the tokenizer's end-of-text only"}
    sees = "vision_config" in config.get("thinker_config", config)
    if sees and "image_processor" not in _settings(path / "processor_config.json"):
        optional["preprocessor_config.json"] = "images are normalised as for CLIP"
    for name in optional.keys() - there:
        yield "warning", f"no {name}: {optional[name]}", f"{AGAIN}, with {name}"
    yield from weights(path, config.get("text_config", config).get("vocab_size"))


def read_json(path: Path) -> Any:
    """The content of a JSON file, or the error as a value, so that the check goes on."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return error


def _settings(path: Path) -> set[str]:
    """The keys of a JSON file whose value is not empty."""
    read = read_json(path)
    return {key for key, value in read.items() if value} if isinstance(read, dict) else set()


def weights(path: Path, vocabulary: int | None) -> Rows:
    """Check that all shards of the index exist, are complete, and hold the tensors that the index names."""
    places = json.loads((path / INDEX).read_bytes())["weight_map"] if (path / INDEX).exists() else {}
    headers: dict[str, Any] = {shard: header_of(path / shard) for shard in {*places.values()} or {SINGLE}}
    broken = [f"{shard}: {why}" for shard, why in sorted(headers.items()) if isinstance(why, str)]
    lost = [(n, s) for n, s in places.items() if not isinstance(headers[s], str) and n not in headers[s]]
    broken += [f"{shard}: {INDEX} places {name} there, which it lacks" for name, shard in lost]
    if broken:
        yield from (("failure", text, AGAIN) for text in broken)
        return
    tensors = {name: entry for header in headers.values() for name, entry in header.items()}
    embedded = (t["shape"][0] for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
    if vocabulary is not None and (rows := next(embedded, vocabulary)) != vocabulary:
        text = f"config.json has vocab_size {vocabulary}, the embedding {rows} rows"
        yield "failure", text, "take config.json and weights from the same model"
    total = size(sum((path / shard).stat().st_size for shard in headers))
    yield "ok", f"{path}: {len(tensors)} tensors in {len(headers)} files, {total}"


# -- tokenizer and template ------------------------------------------------------------------------


def tokenizer(family: Family, data: DataConfig) -> Rows:
    """Check the tokenizer's ids, and whether it knows the words of data.train, if the config has any."""
    from saccade.data import datasets
    from saccade.data.sources import parse_address
    from saccade.plugins.check_data.row_warnings import READ, unknown_words

    tokens, rows = len(family.chat.tokenizer), family.vocabulary
    if tokens > rows:
        yield "failure", f"it has {tokens} ids, the model {rows}", "take tokenizer and weights from the same model"
    else:
        ends = [family.chat.decode([i], special=True) for i in sorted(family.chat.eos_ids)]
        banned = int(family.banned.sum())
        yield "ok", f"{tokens} of {rows} ids, {banned} never sampled, ends with {', '.join(ends)}"
    paths = [Path(parse_address(source.path).path) for source in data.train]
    if paths and all(path.exists() for path in paths):
        some = {"max_samples": READ, "max_bad_fraction": 1.0, "on_bad_row": "quarantine"}
        if found := unknown_words(family, datasets.load(data.train, data.model_copy(update=some)).samples):
            yield "warning", *found


def traps(family: Family) -> Rows:
    found = [*_traps(family)]
    yield from found or [("ok", "system and tool turns, images and thoughts pass as they are")]


def shown(family: Family, *messages: Message) -> str | None:
    """The text that the template renders, or None if it refuses."""
    try:
        return family.chat.text_of(messages, False)
    except ConfigError:
        return None


def _traps(family: Family) -> Rows:
    plain, asked = shown(family, USER) or "", shown(family, SYSTEM, USER)
    before, found, after = (asked or "").partition(OTHER)
    middle = plain[len(before) : len(plain) - len(after)]
    if found and plain == before + middle + after and middle.strip():
        text = f"it adds a system message where there is none: {middle.strip()[:60]!r}"
        yield "warning", text, "say it yourself with prompt.system, so that every engine and evaluation agrees"
    thinks = Message(role="assistant", parts=(f"<think>{OTHER}</think>{WORD}",))
    text = shown(family, USER, thinks, USER) or OTHER
    if OTHER not in text:
        yield "note", "it drops thoughts of earlier turns; episodes keep them, as they were sampled"
    if family.chat.think_prefilled:
        yield "note", "its generation prompt opens <think>: responses and formats begin inside it"
    tool = shown(family, USER, REPLY, Message(role="tool", parts=(OTHER,)))
    instead = f"put the text into the question with prompt.instruction, or {ANOTHER}"
    for role, written, fix in (("system", asked, instead), ("tool", tool, TOOLS)):
        if written is None or OTHER not in written:
            yield "warning", f"it {'refuses' if written is None else 'leaves out'} {role} turns", fix
    if family.spec.image_token is None:
        return
    mark = family.chat.tokenizer.convert_ids_to_tokens(family.chat.placeholder)
    if (shown(family, Message(role="user", parts=(PICTURE, PICTURE, WORD))) or "").count(mark) < 2:
        yield "failure", "it drops images of a question", ANOTHER
    if mark not in (shown(family, USER, REPLY, Message(role="tool", parts=(PICTURE, WORD))) or ""):
        yield "warning", "it drops images in tool turns", TOOLS
