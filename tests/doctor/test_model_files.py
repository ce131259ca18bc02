"""Model folders that are incomplete, cut short or put together from two models, and traps in chat templates."""

import json
import shutil
from os import truncate
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from saccade.config import load
from saccade.plugins.doctor import look, model_checks
from saccade.plugins.families.tiny import TEMPLATE, build


@pytest.fixture(scope="session")
def healthy(tmp_path_factory) -> Path:
    return Path(build("qwen2_5_vl", tmp_path_factory.mktemp("healthy") / "model"))


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    return shutil.copytree(healthy, tmp_path / "model")


def found(name: str, path: str | Path, *overrides: str) -> dict[str, list[str]]:
    """What a check of a model says, by status."""
    checks = dict(model_checks(load(None, [f"model.path={path}", *overrides])))
    by_status: dict[str, list[str]] = {}
    for finding in look(name, checks[name]):
        by_status.setdefault(finding.status, []).append(finding.text)
    return by_status


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


def test_a_healthy_folder(healthy, folder, tmp_path):
    assert found("model", healthy) == {"ok": [f"{healthy}: 56 tensors in 1 files, 1.3 MB"]}
    shards(folder)
    assert found("model", folder)["ok"] == [f"{folder}: 56 tensors in 2 files, 1.3 MB"]
    assert found("model", build("qwen3", tmp_path / "text")).keys() == {"ok"}  # no preprocessor, and needs none
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert "warning" not in found("model", folder, f"prompt.chat_template={tmp_path / 'mine.jinja'}")


WEIGHTS = "model.safetensors"
BROKEN = {
    "a missing shard": (lambda f: (shards(f), (f / "model-2.safetensors").unlink()), "model-2.safetensors: is missing"),
    "a tensor that is in no shard": (
        lambda f: (shards(f), change(f / f"{WEIGHTS}.index.json", weight_map={"lost.weight": "model-1.safetensors"})),
        "model-1.safetensors: model.safetensors.index.json places lost.weight there",
    ),
    "cut weights": (lambda f: truncate(f / WEIGHTS, 100_000), f"{WEIGHTS}: has 100,000 bytes, its header asks for "),
    "a header cut short": (lambda f: truncate(f / WEIGHTS, 100), f"{WEIGHTS}: is cut short in its header (100 bytes)"),
    "a Git LFS pointer": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        f"{WEIGHTS}: is a Git LFS pointer instead of weights (run `git lfs pull`",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        "no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json is there",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "weights of another vocabulary": (
        lambda f: change(f / "config.json", text_config={"vocab_size": 300}),
        "config.json has vocab_size 300, the embedding 272 rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(folder, name):
    breaks, text = BROKEN[name]
    breaks(folder)
    failures = found("model", folder)["failure"]
    assert len(failures) == 1 and text in failures[0]


def test_what_can_be_done_without_is_a_warning(folder):
    for name in ("chat_template.jinja", "generation_config.json", "preprocessor_config.json"):
        (folder / name).unlink()
    said = found("model", folder)
    assert sorted(line.partition(":")[0] for line in said["warning"]) == [
        *("no chat template", "no generation_config.json", "no preprocessor_config.json")
    ]
    assert "failure" not in said


TEXT_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
FORGETS = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}",
    1,
)
OPENS = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
SKIPS_TOOLS = TEMPLATE.replace("in messages %}", "in messages if m['role'] != 'tool' %}", 1)
BLIND_TOOLS = TEMPLATE.replace(
    "{% if c['type'] == 'image' %}", "{% if c['type'] == 'image' and m['role'] == 'user' %}", 1
).replace("{{ c['text'] }}", "{{ c['text'] if c['text'] is defined }}", 1)
TRAPS = {
    "default system": (DEFAULT_SYSTEM + TEMPLATE, "warning", "'You are a helpful assistant.'"),
    "forgets thoughts": (FORGETS, "note", "drops thoughts of earlier turns"),
    "opens a thought": (OPENS, "note", "opens <think>"),
    "no system": (REFUSES_SYSTEM + TEMPLATE, "warning", "refuses system turns"),
    "no tools": (SKIPS_TOOLS, "warning", "leaves out tool turns"),
    "no pictures from tools": (BLIND_TOOLS, "warning", "drops images in tool turns"),
    "no pictures": (TEXT_ONLY, "failure", "drops images of a question"),
}


def test_a_plain_template(healthy, word_model, tmp_path):
    assert found("template", healthy)["ok"][0].startswith("system and tool turns")
    assert found("tokenizer", healthy) == {
        "ok": ["264 of 272 ids, 13 never sampled, ends with <|im_end|>, <|endoftext|>"]
    }
    # Templates are judged by what they write, whatever a small vocabulary makes of it.
    assert found("template", word_model).keys() == {"ok"}
    larger = build("qwen3", tmp_path, text={"vocab_size": 262})
    assert found("tokenizer", larger)["failure"] == ["it has 264 ids, the model 262"]


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_and_no_other(healthy, tmp_path, name):
    template, status, text = TRAPS[name]
    (tmp_path / "trap.jinja").write_text(template)
    said = found("template", healthy, f"prompt.chat_template={tmp_path / 'trap.jinja'}")
    assert any(text in line for line in said[status])
    if name not in ("no pictures", "no tools"):  # what shows none shows none of tools either
        assert sum(map(len, said.values())) == 1


def test_words_of_the_rows_that_are_in_no_vocabulary_are_told(word_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "how many teapots ?", "answer": "1"}\n')
    [said] = found("tokenizer", word_model, f"data.train={tmp_path / 'rows.jsonl'}")["warning"]
    assert "does not know 25% of the words of these rows, such as 'teapots'" in said
    assert "warning" not in found("tokenizer", word_model, "data.train=gone.jsonl")
