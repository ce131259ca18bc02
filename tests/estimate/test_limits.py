"""What does not fit is refused, with options that lift the limit; at the start of a run, too."""

import json
from pathlib import Path

import pytest

from saccade.config import load
from saccade.errors import ConfigError
from saccade.models.families import load_family
from saccade.plugins.estimate.estimate_command import preflight, refusal
from saccade.plugins.families import tiny
from saccade.system import devices
from saccade.types import Message, Sample
from tests.estimate.works import H200, RTX_4090, W1, loaded, planned


def test_adapters_lift_the_limit_of_a_small_gpu(large):
    found = planned(large, RTX_4090, W1)
    assert not found.memory.fits and found.pace is None
    assert found.advice == ("model.train=lora",)
    text = refusal(found)
    assert "the update needs" in text and "RTX 4090" in text and "model.train=lora" in text
    assert planned(large, RTX_4090, W1, "model.train=lora").memory.fits
    limited = planned(large, H200, W1, "run.gpu_memory_gib=80")  # a process with less memory recomputes more
    assert limited.device.memory == 80 and limited.memory.fits and limited.memory.peaks["update"] < 80


def test_keys_and_values_take_their_share_and_prompts_what_is_left(shaped):
    """512 sequences of a 7B. Of 11.7 GiB on an L4 the engine leaves a fifth beside its pool, which
    is enough for 16,384 tokens of prompts; where it is less they are computed in pieces.
    """
    options = ("model.train=qlora", "train.prompts_per_step=512", "train.micro_tokens=4096")
    notes = []
    for device in (devices.lookup("L4"), devices.Device(name="tight", memory=16.0)):
        found = planned(shaped("7b"), device, (448, 457, 2048), *options)
        assert found.memory.pool == pytest.approx(0.8 * found.memory.free)
        assert found.memory.fits
        assert found.memory.peaks["rollout"] == pytest.approx(found.memory.limit)
        notes += [item.note for item in found.memory.items if item.name == "prompts and logits"]
    assert notes == ["", "prompts in pieces, all at once 2.21"]


def test_every_option_that_is_enough_alone_is_named(large):
    tight = devices.Device(name="tight", memory=70.7)
    found = planned(large, tight, W1, "model.checkpointing=on")
    assert found.advice[:3] == ("train.micro_tokens=8192", "train.offload=true", "train.optimizer=adamw_bf16")
    for lever in found.advice:
        assert planned(large, tight, W1, "model.checkpointing=on", lever).memory.fits, lever


def test_options_together_are_no_stronger_than_they_have_to_be(large):
    """All weights of a 3B in 6.3 GiB."""
    small = devices.Device(name="small", memory=6.3)
    (together,) = planned(large, small, W1).advice
    chosen = dict(lever.split("=") for lever in together.split())
    names = ["train.micro_tokens", "train.offload", "train.optimizer", "model.train"]
    assert list(chosen) == names
    # Responses are not shortened below what the algorithm allows.
    assert planned(large, small, W1, "algorithm.overlong.buffer=300").advice == (together,)

    def fits(changed):
        return planned(large, small, W1, *map("=".join, changed.items())).memory.fits

    assert fits(chosen)
    milder = {"train.offload": "false", "train.optimizer": "adamw", "model.train": "lora"}
    milder["train.micro_tokens"] = f"{2 * int(chosen['train.micro_tokens'])}"
    for name, value in milder.items():
        assert not fits(chosen | {name: value}), name


def test_nothing_helps_only_after_everything_was_tried(large):
    found = planned(large, devices.Device(name="toy", memory=2.0), W1)
    assert found.advice == ()
    assert "not even together: take a smaller model" in refusal(found)


def started(folder, memory, *overrides):
    """What is said before weights are loaded onto a GPU with so much free memory."""
    config = load({"model.path": folder, "algorithm.kl.coef": 0.0}, list(overrides))
    sample = Sample(id="0", messages=(Message(role="user", parts=("how many",)),))
    device = devices.Device(name="GPU", memory=memory)
    return preflight(config, loaded(folder), [sample], device=device)


def test_a_run_that_may_not_fit_is_warned_and_one_that_cannot_is_refused(large):
    assert started(large, 120.0) == []
    (text,) = started(large, 64.0)
    assert "the run starts" in text and "does not fit" in text and "model.train=lora" in text
    with pytest.raises(ConfigError, match=r"model\.train=lora.*run\.overcommit=true"):
        started(large, 24.0)
    for insists in ("run.overcommit=true", "rollout.engine=vllm"):  # its memory is not counted
        (text,) = started(large, 24.0, insists)
        assert "does not fit" in text


def test_a_run_starts_on_a_cpu_and_with_a_family_of_its_own(large, tmp_path):
    config = load({"model.path": large})
    family = load_family(large)
    assert preflight(config, family, [], device=devices.current_device("cpu")) == []
    unknown = Path(tiny.build("qwen3", tmp_path / "model"))
    described = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(described | {"model_type": "phi"}))
    (text,) = started(str(unknown), 0.1)  # compared with no measurement, so never refused
    assert "the run starts" in text
    (text,) = started(tiny.build("qwen2_audio", tmp_path / "hears"), 0.1)
    assert "does not fit" in text
