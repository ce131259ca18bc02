"""The command."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.plugins.estimate import estimate
from saccade.plugins.estimate.estimate_command import refusal
from saccade.plugins.families import tiny
from saccade.system import devices
from saccade.types import Message, Sample
from tests.estimate.works import H200, W1, planned, sizes
from tests.models.against import noise


def test_the_command_prints_items_and_seconds_with_as_many_decimals(word_model):
    arguments = ["estimate", f"model.path={word_model}", "--prompt-tokens", "40"]
    result = CliRunner().invoke(app, [*arguments, "--device", "4090", "--image", "448X448"])
    assert result.exit_code == 0, result.output
    for word in ("RTX 4090, prompts", "weights", "keys and values", "rollout", "update"):
        assert word in result.output
    memory, step = result.stdout.split("A step (seconds: an estimate)")
    assert len(re.findall(r"peak .*\d\.\d", memory)) == 2
    assert not re.search(r"\d\.\d[^\d]", memory) and "step " in step
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "model.checkpointing=on"])
    memory, step = result.stdout.split("A step\n")
    assert "seconds" not in step and "recomputed in the update" in step
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["pace"]["seconds"] == {}
    assert found["device"]["name"] == "CPU" and found["memory"]["limit"] > 0


def test_the_command_refuses_what_cannot_fit_and_says_so_in_json_too(large):
    arguments = ["estimate", f"model.path={large}", "--device", "A100 40GB", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--prompt-tokens", "500"])
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["memory"]["fits"] is False and found["pace"] is None
    assert found["advice"][:2] == ["train.offload=true", "model.train=lora"]
    assert "try train.offload=true, or model.train=lora" in result.stderr


def test_init_writes_what_fits_a_gpu(large, tmp_path):
    (rows := tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    for name, gpu, said in [
        ("a", "H200", "fits one H200: "),
        ("b", "RTX 4090", "fits one RTX 4090 with model.train=lora"),
    ]:
        arguments = ["init", str(large), str(rows), "--out", str(out := tmp_path / f"{name}.yaml"), "--device", gpu]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0 and said in result.stdout and said in out.read_text(), result.output
        assert load(out).model.train == ("lora" if name == "b" else "full")
        assert estimate(load(out), devices.lookup(gpu)).memory.fits
    assert CliRunner().invoke(app, [*arguments[:4], str(tmp_path / "c.yaml"), "--device", "4091"]).exit_code == 2
    assert not (tmp_path / "c.yaml").exists()
    rows.write_text(
        '{"problem": "<image>?", "answer": "4", "images": ["gone.png"]}\n' * 2
    )  # the error has several lines
    result = CliRunner().invoke(app, [*arguments[:4], str(out := tmp_path / "d.yaml"), "--device", "H200"])
    assert result.exit_code == 0 and "# No estimate for one H200: data.train: " in out.read_text() and load(out)


@pytest.mark.parametrize(("size", "gpus", "said", "changed"), [
    ("7b", 1, "fits one H200 with train.offload=true", {"train.offload": True}),
    ("7b", 8, "fits each of 8 H200: ", {}),
    ("32b", 8, "fits each of 8 H200 with train.offload=true", {"train.offload": True}),
    ("72b", 2, "fits each of 2 H200 with model.train=qlora", {"model.train": "qlora"}),
])  # fmt: skip
def test_init_uses_the_gpus_that_are_there(shaped, tmp_path, monkeypatch, size, gpus, said, changed):
    """Before it changes what is trained."""
    monkeypatch.setattr(devices, "current_device", lambda wanted: H200)
    monkeypatch.setattr(devices, "count", lambda wanted="auto": gpus)
    (rows := tmp_path / "rows.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    result = CliRunner().invoke(app, ["init", shaped(size), str(rows), "--out", str(out := tmp_path / "run.yaml")])
    assert result.exit_code == 0 and said in result.stdout, result.output
    written = yaml.safe_load(out.read_text())
    assert written["run"].get("gpus", 1) == gpus and {n: written[n] for n in written if "." in n} == changed


@pytest.mark.parametrize(("options", "message"), [
    (["--device", "H201"], "expected one of GH200, B200, H200"),
    (["--device", "A100 48 GB"], "the one in the table has 79.2 GiB"),
    (["--prompt-tokens", "9999999"], "has 32768; try --prompt-tokens 16384"),
    (["model.train=lora", "model.lora.dropout=0.1"], "try model.lora.dropout=0"),
    (["--image", "big"], "such as 448x448"),
    (["train.updates_per_step=999"], "train.updates_per_step"),
])  # fmt: skip
def test_wrong_options_are_explained(large, options, message):
    result = CliRunner().invoke(app, ["estimate", f"model.path={large}", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_an_architecture_without_a_family_is_estimated(tmp_path):
    folder = Path(tiny.build("qwen3", tmp_path / "model"))
    described = json.loads((folder / "config.json").read_text())
    found = {}
    for kind in ("qwen3", "phi"):
        (folder / "config.json").write_text(json.dumps(described | {"model_type": kind}))
        found[kind] = estimate(load({"model.path": str(folder)}), H200, prompt_tokens=10)
    assert found["phi"].memory.fits and found["phi"].pace.tflop["update"] > 0
    gate = 2 * 64 * 128  # a phi has two matrices in the MLP of each of its two layers
    weights = sizes(found["qwen3"])["weights"] - sizes(found["phi"])["weights"]
    assert weights * 2**30 / 2 == pytest.approx(gate, rel=0.2)


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni", "gemma3n"])
def test_a_tower_that_hears_takes_memory_and_work(name, family_of):
    """Tokens of a sound are those of the run: of its family, or of the processor of any other model."""
    family = family_of(name)
    config, found = load({"model.path": family.path}, ["train.prompts_per_step=2", "algorithm.kl.coef=0"]), {}
    for seconds in (2.0, 8.0):
        rows = [Sample(id="0", messages=(Message(role="user", parts=(noise(seconds), "what?")),))]
        found[seconds] = estimate(config, H200, family=family, samples=rows)
        tokens = len(family.render(rows[0].messages))
        assert found[seconds].prompts == f"{tokens} tokens (mean of 1 rows of data.train, the longest {tokens})"
    short, long = (sizes(each)["audio activations"] for each in found.values())
    # Qwen2-Audio always hears half a minute, of which no silence is counted as work.
    assert long == pytest.approx(short * (1 if name == "qwen2_audio" else 4), rel=0.05)
    short, long = (each.pace.tflop["update"] for each in found.values())
    assert long > short
    told = ("the vision tower is not counted, only its weights: it has no layers that repeat",)
    assert found[2.0].notes == (told if name == "gemma3n" else ())


def test_without_data_a_model_that_only_hears_hears_half_a_minute(family_of):
    family = family_of("qwen2_audio")
    told = {
        most: estimate(load({"model.path": family.path, "data.max_prompt_tokens": most}), H200, family=family).prompts
        for most in (2048, 300)
    }
    assert told[2048] == "2048 tokens, a sound of 30 s (data.max_prompt_tokens)"
    assert told[300] == "300 tokens, a sound of 8 s (data.max_prompt_tokens)"


def test_what_is_not_counted_is_said(large):
    for options, said in {
        (): "",
        ("rollout.engine=vllm", "rollout.memory_share=0.4"): r"engine=vllm are those of the embedded.*holds 0.4",
        ("env.name=crop",): "of an episode of env.name=crop one response is counted",
        ("env.name=crop", "env.max_turns=1"): "",
        ("algorithm.preset=dapo",): "one round of dynamic sampling is counted.*max_rounds=",
    }.items():
        notes = planned(large, H200, W1, *options).notes
        assert len(notes) == bool(said) and all(re.search(said, note) for note in notes), options


def test_a_reward_model_that_is_not_there_is_not_counted(large, tmp_path):
    rated = f"reward.terms=[{{verifier: model, name: rm, args: {{path: {tmp_path}}}}}]"
    kept = (rated, "reward.offload=false")
    found = planned(large, H200, W1, *kept)
    assert found.notes == (f"the reward model {tmp_path} is not counted: no *.safetensors lie there",)
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    found = planned(large, H200, W1, *kept)
    assert found.notes == () and sizes(found)["reward models"] == 2**-10
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100 * 2**30)  # takes no room on a disk
    waiting = planned(large, H200, W1, rated)
    assert waiting.memory.peaks["update"] == planned(large, H200, W1).memory.peaks["update"]
    beside = sum(item.gib for item in waiting.memory.items if item.phase == "always")
    assert waiting.memory.peaks["scoring"] == pytest.approx(beside + 100) and not waiting.memory.fits
    assert refusal(waiting).startswith(f"does not fit: the scoring needs {beside + 100:.1f} GiB (reward models 100.0)")


def test_a_limit_that_limits_nothing_is_said(large, word_model):
    found = planned(large, H200, W1, "run.gpu_memory_gib=500")
    assert found.notes == ("run.gpu_memory_gib=500 has no effect: H200 has 139.8 GiB to give",)
    assert found.memory == planned(large, H200, W1).memory
    assert planned(large, H200, W1, "run.gpu_memory_gib=100").notes == ()
    config = load({"model.path": word_model, "run.gpu_memory_gib": 0.001})
    found = estimate(config, devices.current_device("cpu"), prompt_tokens=40)
    assert found.notes == ("run.gpu_memory_gib=0.001 has no effect on a CPU; it is for a GPU",)
    assert found.memory.fits
