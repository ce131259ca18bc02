"""The whole: what is printed, what is left out, which exit code it returns."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from saccade.checks import check
from saccade.cli import app
from saccade.config import load
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.plugins.doctor import Finding, examine, look_in_turn, machine, model_checks
from saccade.plugins.doctor.agreement import rows_agree
from saccade.trainer.local import LocalBackend
from tests.endpoints import Says, scripted


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_without_a_model_the_machine_alone_is_looked_at():
    result = run("--json")
    names = {finding["name"] for finding in json.loads(result.stdout)["findings"]}
    assert names == {"python", "packages", "devices", "attention", "engine", "loopback", "disk"}
    assert result.exit_code == 0


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "internvl", "llava", "qwen3"])
def test_a_healthy_model_passes_to_its_end(family_of, name):
    result = run("--model", family_of(name).path, "run.device=cpu", "--json")
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)["findings"]
    assert {f["status"] for f in findings} <= {"ok", "note"}
    said = {f["name"]: f["text"] for f in findings}
    assert "padded" in said["rows"] and "one by one" in said["rows"]
    assert ("another picture" in said["parity embedded"]) == (name != "qwen3")


def test_a_tiny_model_is_looked_at_too(tmp_path):
    result = run("--model", "tiny:qwen2_5_vl", "run.device=cpu", f"run.out={tmp_path}", "--json")
    assert result.exit_code == 0, result.output
    said = {f["name"]: f["text"] for f in json.loads(result.stdout)["findings"]}
    assert "another picture" in said["parity embedded"] and not list(tmp_path.iterdir())
    assert run("--model", "tiny:nothing").exit_code == 3


def test_replicas_leave_nothing_behind(healthy, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    seen = []

    def broken(config, engine, *args, **options):
        seen.append(engine)
        raise RuntimeError("in the midst of it")

    monkeypatch.setattr("saccade.plugins.engines.parity.compare", broken)
    config = load(None, [f"model.path={healthy}", "run.device=cpu", "rollout.replicas=1"])
    (found,) = look_in_turn([model_checks(config)[2][2:]])
    assert (found.name, found.fix) == ("parity embedded", "fix this and run doctor again")
    (engine,) = seen
    assert not engine._places and not list(tmp_path.glob("saccade-*"))


def test_a_broken_model_exits_with_3_and_says_what_was_left_out(folder):
    (folder / "tokenizer.json").unlink()
    result = run("--model", str(folder))
    assert result.exit_code == 3
    assert "failure  model            no tokenizer" in result.stdout
    assert "to fix it: copy or download it again" in result.stdout
    assert "note     rows             not looked at: see above" in result.stdout
    assert "checks failed: model" in result.stderr


def test_what_a_library_raises_is_a_finding(folder):
    (folder / "tokenizer.json").write_text("{}")
    result = run("--model", str(folder), "--json")
    failed = [f for f in json.loads(result.stdout)["findings"] if f["status"] == "failure"]
    assert result.exit_code == 3 and [f["name"] for f in failed] == ["tokenizer"]


def test_no_folder_at_all(tmp_path):
    assert run("--model", str(tmp_path / "nothing")).exit_code == 3


def test_torch_that_is_missing_is_said_and_nothing_breaks():
    code = "import sys; sys.modules['torch'] = None; from saccade.cli import app; app(['doctor'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 3 and "Traceback" not in answer.stderr
    assert "torch does not load" in answer.stdout and "checks failed: devices" in answer.stderr


# -- the machine ---------------------------------------------------------------------------------


def findings(name: str, *overrides: str) -> list[tuple[str, str]]:
    return [(f.status, f.text) for f in found_by(name, *overrides)]


def found_by(name: str, *overrides: str) -> list[Finding]:
    return [found for found in examine(load(None, list(overrides))) if found.name == name]


def test_packages_against_their_ranges(monkeypatch):
    wanted = ["numpy<1", "no-such-package>=2", "pytest<1; extra == 'test'", "numpy; python_version<'3'"]
    monkeypatch.setattr(machine, "requirements", lambda: [*wanted, "pillow>=1"])
    found = findings("packages")
    assert [status for status, _ in found] == ["failure", "failure", "warning", "ok"]
    assert "is outside <1" in found[0][1] and found[1][1] == "no-such-package is missing"
    assert found[3][1].startswith("pillow ")


def test_ranges_are_read_from_the_source_tree_too(monkeypatch):
    def absent(name):
        raise machine.metadata.PackageNotFoundError

    monkeypatch.setattr(machine.metadata, "requires", absent)
    assert any(line.startswith("transformers>=") for line in machine.requirements())


def test_an_engine_that_is_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr("saccade.plugins.engines.sglang.sglang_transport.find_spec", lambda name: None)
    assert ("note", "sglang is not installed") in findings("engine")
    asked = findings("engine", "rollout.engine=sglang")
    assert ("failure", "sglang is not installed") in asked


def test_an_engine_is_judged_by_its_own_probe(monkeypatch):
    monkeypatch.setattr(machine, "why_not", lambda name: f"{name} is too old; run: this")
    assert ("failure", "vllm is too old") in findings("engine", "rollout.engine=vllm")
    assert ("warning", "vllm is too old") in findings("engine")
    monkeypatch.setattr(machine, "why_not", lambda name: "")
    assert all(status == "ok" for status, _ in findings("engine"))


def test_an_endpoint_is_asked_for_its_models(monkeypatch):
    models = Says(body={"data": [{"id": "a"}, {"id": "b"}]})
    refused = Says(status=401, body={"error": {"message": "who are you?"}})
    monkeypatch.setenv("SACCADE_TEST_KEY", "sesame")
    options = ["rollout.engine=http", "rollout.http.key=SACCADE_TEST_KEY"]
    for says, model, status, text in (
        (models, "a", "ok", "has a"),
        (models, "c", "failure", "has no c, but a, b"),
        (models, "", "failure", "has a, b"),
        (Says(body={"data": [{"id": "a"}]}), "", "ok", "has a"),
        (refused, "a", "failure", "status 401: who are you?"),
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
    assert run("rollout.engine=http").exit_code == 3
    (said,) = found_by("endpoint", "rollout.engine=http")  # all that the error says
    with pytest.raises(ConfigError) as caught:
        check(load(None, ["rollout.engine=http"]), "chat")
    assert said.text == str(caught.value) and "rollout.http.url" in said.text


def test_loopback_keeps_only_those_from_working_who_need_it(monkeypatch):
    def down(*address):
        raise OSError("cannot assign requested address")

    monkeypatch.setattr(machine.socket, "create_server", down)
    ((status, text),) = findings("loopback", "reward.workers=4")
    assert status == "warning" and "cannot assign" in text and "rewards" not in text
    for needs in ("rollout.replicas=1", "rollout.engine=vllm"):
        assert findings("loopback", needs)[0][0] == "failure"


def test_a_folder_for_runs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    ((status, text),) = findings("disk", f"run.out={tmp_path / 'file' / 'runs'}")
    assert status == "failure" and "cannot be written" in text
    (said,) = found_by("disk", f"run.out={tmp_path / 'file' / 'runs'}")
    assert said.fix == "use run.out=FOLDER where this user may write"
    assert findings("disk", f"run.out={tmp_path / 'new' / 'runs'}")[0][0] == "ok"
    assert not (tmp_path / "new").exists()


# -- agreement -----------------------------------------------------------------------------------


def test_positions_that_are_not_the_models_own(family_of, load):
    family = family_of("qwen2_5_vl")
    other = replace(family, positions=lambda n, media: family.positions(n, media) * 2)
    model = load("qwen2_5_vl")
    engine = EmbeddedEngine(model, other)
    ((status, text, _),) = rows_agree(LocalBackend(model, other), engine)
    assert status == "failure" and "padded" in text
    right = rows_agree(LocalBackend(model, family), EmbeddedEngine(model, family))
    assert next(right)[0] == "ok"


def test_weights_that_are_no_numbers(folder, damage):
    weight = damage(folder)
    result = run("--model", str(folder), "run.device=cpu", "--json")
    failed = [f for f in json.loads(result.stdout)["findings"] if f["status"] == "failure"]
    assert result.exit_code == 3 and [f["name"] for f in failed] == ["rows"]
    assert failed[0]["text"].startswith("log-probs are not finite, because ")
    assert f"{weight} holds NaN" in failed[0]["text"]
