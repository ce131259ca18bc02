"""The files of a model folder, read without torch: what is missing, cut short or does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.disk import size
from saccade.doctor.finding import Finding, failure, ok, warning
from saccade.models.files import AGAIN, INDEX, SINGLE, header_of

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
OPTIONAL = {  # files that may be missing, and what happens then
    "generation_config.json": "generation ends at the tokenizer's own end-of-text token only",
    "preprocessor_config.json": "pictures are normalised as for CLIP",
}


def check(config: Config) -> Iterator[Finding]:
    path = Path(config.model.path)
    found = [*_config(path), *_tokenizer(path), *_template(path, config), *_others(path)]
    yield from found
    yield from _weights(path)


def read_json(path: Path) -> Any:
    """The content, or an error as a value: a folder is judged to its end."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return error


def _config(path: Path) -> Iterator[Finding]:
    read = read_json(path / "config.json")
    if isinstance(read, Exception):
        yield failure("model", f"{path}/config.json cannot be read: {read}", AGAIN)
    elif not read.get("model_type"):
        yield failure("model", f"{path}/config.json names no model_type", AGAIN)


def _tokenizer(path: Path) -> Iterator[Finding]:
    if not any((path / name).is_file() for name in TOKENIZERS):
        yield failure("model", f"no tokenizer: none of {', '.join(TOKENIZERS)} is there", AGAIN)


def _template(path: Path, config: Config) -> Iterator[Finding]:
    settings = read_json(path / "tokenizer_config.json")
    inside = isinstance(settings, dict) and settings.get("chat_template")
    files = any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    if not (config.prompt.chat_template or inside or files):
        yield warning(
            "model",
            "no chat template: turns are written as `role: text`",
            "give that of the model with prompt.chat_template=FILE, unless it is a base model",
        )


def _others(path: Path) -> Iterator[Finding]:
    read = read_json(path / "config.json")
    sees = isinstance(read, dict) and "vision_config" in read.get("thinker_config", read)
    whole = read_json(path / "processor_config.json")
    inside = isinstance(whole, dict) and "image_processor" in whole
    for name, effect in OPTIONAL.items():
        needed = (sees and not inside) or not name.startswith("preprocessor")
        if needed and not (path / name).is_file():
            yield warning("model", f"no {name}: {effect}", f"{AGAIN}, with {name}")


# -- weights ---------------------------------------------------------------------------------------


def _weights(path: Path) -> Iterator[Finding]:
    """Every shard of the index, every tensor of every shard, every byte of every tensor."""
    index = read_json(path / INDEX) if (path / INDEX).exists() else None
    if isinstance(index, Exception):
        yield failure("model", f"{INDEX} cannot be read: {index}", AGAIN)
        return
    places: Mapping[str, str] = index["weight_map"] if index else {}
    shards = sorted(set(places.values())) or [SINGLE]
    headers, problems = {}, []
    for shard in shards:
        header = header_of(path / shard)
        if isinstance(header, str):
            problems.append(failure("model", f"{shard}: {header}", AGAIN))
        else:
            headers[shard] = header
    for name, shard in places.items():
        if shard in headers and name not in headers[shard]:
            problems.append(
                failure("model", f"{shard}: {INDEX} places {name} there, which it lacks", AGAIN)
            )
    yield from problems
    if not problems:
        tensors = {name: entry for header in headers.values() for name, entry in header.items()}
        yield from _vocabulary(path, tensors)
        count, files = len(tensors), len(shards)
        total = sum((path / shard).stat().st_size for shard in shards)
        yield ok("model", f"{path}: {count} tensors in {files} files, {size(total)}")


def _vocabulary(path: Path, tensors: Mapping[str, Any]) -> Iterator[Finding]:
    """Rows of the embedding against config.json and the tokenizer."""
    read = read_json(path / "config.json")
    if isinstance(read, Exception):
        return
    said = read.get("text_config", read).get("vocab_size", read.get("vocab_size"))
    rows = next(
        (t["shape"][0] for name, t in tensors.items() if name.endswith("embed_tokens.weight")), None
    )
    if said is not None and rows is not None and said != rows:
        yield failure(
            "model",
            f"config.json has vocab_size {said}, the embedding {rows} rows",
            "take config.json and weights from the same model",
        )
