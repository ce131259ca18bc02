"""Model folders that are incomplete, cut short or put together from two models."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from saccade.models.tiny import build


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shards(folder: Path) -> None:
    """The weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + n % 2}.safetensors" for n, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        part = {name: t for name, t in tensors.items() if places[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_healthy_folder(found, healthy):
    assert found(0, healthy) == {"ok": [f"{healthy}: 56 tensors in 1 files, 1.3 MB"]}


def test_a_healthy_folder_in_shards(found, folder):
    shards(folder)
    assert found(0, folder)["ok"] == [f"{folder}: 56 tensors in 2 files, 1.3 MB"]


BROKEN = {
    "a missing shard": (lambda f: (shards(f), (f / "model-2.safetensors").unlink()), "model-2.safetensors: is missing"),
    "a tensor that is in no shard": (
        lambda f: (
            shards(f),
            change(f / "model.safetensors.index.json", weight_map={"lost.weight": "model-1.safetensors"}),
        ),
        "model-1.safetensors: model.safetensors.index.json places lost.weight there",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: is missing"),
    "weights cut short": (
        lambda f: cut(f / "model.safetensors", 100_000),
        "model.safetensors: has 100,000 bytes, its header asks for ",
    ),
    "a header cut short": (
        lambda f: cut(f / "model.safetensors", 100),
        "model.safetensors: is cut short in its header (100 bytes)",
    ),
    "a Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors: is a Git LFS pointer instead of weights (run `git lfs pull`",
    ),
    "an empty file": (lambda f: cut(f / "model.safetensors", 0), "is cut short in its header (0"),
    "a page of an error instead of weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"<htm>"),
        "model.safetensors: has no valid header",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        "no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json is there",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "half a config": (lambda f: cut(f / "config.json", 40), "config.json cannot be read"),
    "weights of another vocabulary": (
        lambda f: change(
            f / "config.json",
            text_config=json.loads((f / "config.json").read_text())["text_config"] | {"vocab_size": 300},
        ),
        "config.json has vocab_size 300, the embedding 272 rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(found, folder, name):
    breaks, text = BROKEN[name]
    breaks(folder)
    failures = found(0, folder)["failure"]
    assert len(failures) == 1 and text in failures[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "no chat template"),
        ("generation_config.json", "no generation_config.json"),
        ("preprocessor_config.json", "no preprocessor_config.json"),
    ],
)
def test_what_can_be_done_without_is_a_warning(found, folder, name, text):
    (folder / name).unlink()
    said = found(0, folder)
    assert len(said["warning"]) == 1 and text in said["warning"][0] and "failure" not in said


def test_a_template_of_ones_own_is_enough(found, folder, tmp_path):
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert "warning" not in found(0, folder, f"prompt.chat_template={tmp_path / 'mine.jinja'}")


def test_a_text_model_needs_no_preprocessor(found, tmp_path):
    assert found(0, Path(build("qwen3", tmp_path / "text"))).keys() == {"ok"}
