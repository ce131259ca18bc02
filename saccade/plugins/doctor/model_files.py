"""The files of a model folder, read without torch: what is missing, cut short or does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.models.files import AGAIN, INDEX, SINGLE, header_of
from saccade.system.disk import size

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")

Rows = Iterator[tuple[str, ...]]


def check(path: Path, has_template: bool) -> Rows:
    """`has_template`: the config names a chat template."""
    if not path.is_dir():
        yield "failure", f"{path} is not a folder", "give a Hugging Face model folder"
        return
    config = read_json(path / "config.json")
    if isinstance(config, Exception):
        yield "failure", f"{path}/config.json cannot be read: {config}", AGAIN
        config = {}
    elif not config.get("model_type"):
        yield "failure", f"{path}/config.json names no model_type", AGAIN
    there = {file.name for file in path.iterdir()}
    if there.isdisjoint(TOKENIZERS):
        yield "failure", f"no tokenizer: none of {', '.join(TOKENIZERS)} is there", AGAIN
    inside = "chat_template" in _settings(path / "tokenizer_config.json")
    if not (has_template or inside or not there.isdisjoint(TEMPLATES)):
        yield (
            "warning",
            "no chat template: turns are written as `role: text`",
            "give that of the model with prompt.chat_template=FILE, unless it is a base model",
        )
    sees = "vision_config" in config.get("thinker_config", config)
    optional = {"generation_config.json": "generation ends at the tokenizer's end-of-text only"}
    if sees and "image_processor" not in _settings(path / "processor_config.json"):
        optional["preprocessor_config.json"] = "pictures are normalised as for CLIP"
    for name, effect in optional.items():
        if name not in there:
            yield "warning", f"no {name}: {effect}", f"{AGAIN}, with {name}"
    yield from weights(path, config.get("text_config", config).get("vocab_size"))


def read_json(path: Path) -> Any:
    """The content, or an error as a value: a folder is judged to its end."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return error


def _settings(path: Path) -> set[str]:
    """Keys of a file that have a value."""
    read = read_json(path)
    return {key for key, value in read.items() if value} if isinstance(read, dict) else set()


def weights(path: Path, vocabulary: int | None) -> Rows:
    """Every shard of the index, every tensor of every shard, every byte of every tensor."""
    index = read_json(path / INDEX) if (path / INDEX).exists() else {"weight_map": {}}
    if isinstance(index, Exception):
        yield "failure", f"{INDEX} cannot be read: {index}", AGAIN
        return
    places = index["weight_map"]
    headers = {shard: header_of(path / shard) for shard in {*places.values()} or {SINGLE}}
    broken = [f"{shard}: {why}" for shard, why in sorted(headers.items()) if isinstance(why, str)]
    broken += [
        f"{shard}: {INDEX} places {name} there, which it lacks"
        for name, shard in places.items()
        if not isinstance(headers[shard], str) and name not in headers[shard]
    ]
    yield from (("failure", text, AGAIN) for text in broken)
    if broken:
        return
    read = [header for header in headers.values() if not isinstance(header, str)]
    tensors = {name: entry for header in read for name, entry in header.items()}
    embedded = (t["shape"][0] for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
    if vocabulary is not None and (rows := next(embedded, vocabulary)) != vocabulary:
        yield (
            "failure",
            f"config.json has vocab_size {vocabulary}, the embedding {rows} rows",
            "take config.json and weights from the same model",
        )
    total = size(sum((path / shard).stat().st_size for shard in headers))
    yield "ok", f"{path}: {len(tensors)} tensors in {len(headers)} files, {total}"
