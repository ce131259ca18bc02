"""The doctor: the whole, with its exit codes; the machine; model folders that are broken; traps in chat templates."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from os import truncate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from saccade.checks import check
from saccade.cli import app
from saccade.config import load
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.plugins.doctor import examine, look, machine, model_checks
from saccade.plugins.doctor.agreement import rows_agree
from saccade.plugins.families.tiny import TEMPLATE, build
from saccade.system import devices
from saccade.trainer.local import LocalTrainer
from tests.endpoints import Says, scripted


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def failures(result):
    return [f for f in json.loads(result.stdout)["findings"] if f["status"] == "failure"]


def test_without_a_model_the_machine_alone_is_looked_at():
    result = run("--json")
    names = {finding["name"] for finding in json.loads(result.stdout)["findings"]}
    assert names == {"python", "packages", "devices", "attention", "engine", "loopback", "disk"}
    assert result.exit_code == 0


def test_every_gpu_has_a_line(monkeypatch):
    answers = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda index: "NVIDIA H200"}
    answers["mem_get_info"] = lambda index: ((130 << 30, 10 << 30)[index], 140 << 30)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    _, first, second, sums = machine.devices("auto")
    assert first == ("ok", "GPU 0: NVIDIA H200, 130.0 of 140.0 GiB free")
    assert second[0] == "warning" and second[1].startswith("GPU 1: NVIDIA H200, 10.0 of")
    assert sums[:2] == ("warning", "collectives: gloo") and "nccl" in sums[2]


def test_several_gpus_are_told_what_a_dry_run_tells(tmp_path, monkeypatch):
    config = load(None, [f"model.path={build('qwen2_5_vl', tmp_path)}", "run.gpus=8", "data.max_prompt_tokens=512"])
    layout = dict(model_checks(config))["layout"]
    assert "this machine has no GPU" in (said := str([*layout()])) and "saccade estimate --device H200" in said
    monkeypatch.setattr(devices, "current_device", lambda wanted: devices.lookup("H200"))
    wanted = r"whole: a GPU needs .* GiB in the update, .* seconds'.* in the exchange .* speed of a GPU: \d+%"
    assert re.search(wanted, str([*layout()]))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "qwen3"])
def test_a_healthy_model_passes_to_its_end(tmp_path, name):
    result = run("--model", f"tiny:{name}", "run.device=cpu", f"run.out={tmp_path}", "--json")
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)["findings"]
    assert {f["status"] for f in findings} <= {"ok", "note"} and not list(tmp_path.iterdir())
    said = {f["name"]: f["text"] for f in findings}
    rows = " ".join(f["text"] for f in findings if f["name"] == "rows")
    # Of a model of the generic family.
    proved = ("logits of answers: ", "video beside an image: ", "compared with transformers in ")
    assert all(words in rows for words in (proved if name == "internvl" else ("transformers", "one by one")))
    assert ("another image" in said["parity embedded"]) == (name != "qwen3")


def test_media_that_are_refused_beside_others_are_left_out(tmp_path):
    """Of SmolVLM, whose processor has one name for the pixels of both."""
    result = run("--model", "tiny:smolvlm", "run.device=cpu", f"run.out={tmp_path}", "--json")
    (found,) = (f for f in json.loads(result.stdout)["findings"] if f["status"] == "warning")
    assert re.match("video beside an image: cannot be run: ValueError: its processor makes pixel_values", found["text"])
    refused = "rows that hold a video beside an image are refused, others are not: leave them out, or use another model"
    assert found["fix"] == refused


def test_a_broken_model_exits_with_3_and_says_what_was_left_out(tmp_path):
    folder = Path(build("qwen3", tmp_path))
    (folder / "tokenizer.json").write_text("{}")  # what a library raises is a finding
    result = run("--model", str(folder), "--json")
    assert result.exit_code == 3 and [f["name"] for f in failures(result)] == ["tokenizer"]
    (folder / "tokenizer.json").unlink()
    result = run("--model", str(folder))
    assert result.exit_code == 3 and "failure  model            no tokenizer" in result.stdout
    assert "to fix it: copy or download it again" in result.stdout
    assert "note     rows             not looked at: see above" in result.stdout
    assert "checks failed: model" in result.stderr
    for nowhere in (str(tmp_path / "nothing"), "tiny:nothing"):
        assert run("--model", nowhere).exit_code == 3


def test_torch_that_is_missing_is_said_and_nothing_breaks():
    code = "import sys; sys.modules['torch'] = None; from saccade.cli import app; app(['doctor'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 3 and "Traceback" not in answer.stderr
    assert "torch does not load" in answer.stdout and "checks failed: devices" in answer.stderr


def findings(name, *overrides):
    return [(f.status, f.text) for f in examine(load(None, list(overrides))) if f.name == name]


def test_packages_against_their_ranges(monkeypatch):
    wanted = ["numpy<1", "no-such-package>=2", "pytest<1; extra == 'test'", "numpy; python_version<'3'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda name: [*wanted, "pillow>=1"])
    found = [(status, text) for status, text, *_ in machine.packages()]
    assert [status for status, _ in found] == ["failure", "failure", "warning", "ok"]
    assert "is outside <1" in found[0][1] and found[1][1] == "no-such-package is missing"
    assert found[3][1].startswith("pillow ")


def test_an_engine_that_is_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr("saccade.plugins.engines.sglang.sglang_transport.find_spec", lambda name: None)
    assert ("note", "sglang is not installed") in findings("engine")
    assert ("failure", "sglang is not installed") in findings("engine", "rollout.engine=sglang")
    monkeypatch.setattr(machine, "why_not", lambda name: f"{name} is too old; run: this")
    assert ("failure", "vllm is too old") in findings("engine", "rollout.engine=vllm")
    assert ("warning", "vllm is too old") in findings("engine")


def test_an_endpoint_is_asked_for_its_models(monkeypatch):
    models = Says(body={"data": [{"id": "a"}, {"id": "b"}]})
    monkeypatch.setenv("SACCADE_TEST_KEY", "sesame")
    options = ["rollout.engine=http", "rollout.http.key=SACCADE_TEST_KEY"]
    for says, model, status, text in (
        (models, "a", "ok", "has a"),
        (models, "c", "failure", "has no c, but a, b"),
        (models, "", "failure", "has a, b"),
        (Says(body={"data": [{"id": "a"}]}), "", "ok", "has a"),
        (Says(status=401, body={"error": {"message": "who are you?"}}), "a", "failure", "status 401: who are you?"),
    ):
        with scripted([says]) as endpoint:
            at = [f"rollout.http.url={endpoint.url}", f"rollout.http.model={model}"]
            ((found, said),) = findings("endpoint", *options, *at)
        assert (found, text in said) == (status, True), said
        (seen,) = endpoint.asked
        assert seen["path"] == "/v1/models" and seen["headers"]["Authorization"] == "Bearer sesame"
    assert findings("endpoint") == []


def test_an_endpoint_that_is_not_there_fails():
    result = run("rollout.engine=http", "rollout.http.url=http://127.0.0.1:1/v1")
    assert result.exit_code == 3 and "gave no answer in 1 attempts" in result.stdout
    (said,) = findings("endpoint", "rollout.engine=http")  # all that the error says
    with pytest.raises(ConfigError) as caught:
        check(load(None, ["rollout.engine=http"]), "chat")
    assert said == ("failure", str(caught.value)) and "rollout.http.url" in said[1]


def test_loopback_keeps_only_those_from_working_who_need_it(monkeypatch):
    def down(*address):
        raise OSError("cannot assign requested address")

    monkeypatch.setattr(machine.socket, "create_server", down)
    ((status, text),) = findings("loopback", "reward.workers=4")
    assert status == "warning" and "cannot assign" in text and "rewards" not in text
    for needs in ("rollout.replicas=1", "rollout.engine=vllm"):
        assert findings("loopback", needs)[0][0] == "failure"


def test_positions_that_are_not_the_models_own(family_of, load):
    family = family_of("qwen2_5_vl")
    other = replace(family, positions=lambda ids, media: family.positions(ids, media) * 2)
    model = load("qwen2_5_vl")
    ((status, text, _),) = rows_agree(LocalTrainer(model, other), EmbeddedEngine(model, other))
    assert status == "failure" and "transformers" in text


def test_weights_that_are_no_numbers(tmp_path, damage):
    folder = Path(build("qwen3", tmp_path))
    weight = damage(folder)
    result = run("--model", str(folder), "run.device=cpu", "--json")
    (failed,) = failures(result)
    assert result.exit_code == 3 and failed["name"] == "rows"
    assert failed["text"].startswith("log-probs are not finite, because ") and f"{weight} holds NaN" in failed["text"]


@pytest.fixture(scope="session")
def healthy(tmp_path_factory):
    return Path(build("qwen2_5_vl", tmp_path_factory.mktemp("healthy") / "model"))


@pytest.fixture
def folder(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "model")


def found(name, path, *overrides):
    """What a check of a model says, by status."""
    checks = dict(model_checks(load(None, [f"model.path={path}", *overrides])))
    by_status = {}
    for finding in look(name, checks[name]):
        by_status.setdefault(finding.status, []).append(finding.text)
    return by_status


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shards(folder):
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
