"""Memory and time of a config before anything is loaded, against what was measured."""

import json
from pathlib import Path

import pytest

from saccade.plugins.estimate import flops
from saccade.plugins.families import tiny
from tests.estimate.works import H200, LIMITED, W1, W2, planned, sizes


@pytest.mark.parametrize(
    ("work", "phase", "checkpointing", "measured"),
    [(W1, "rollout", "auto", 53.8), (W2, "rollout", "auto", 58.9), (W1, "update", "on", 71.5)],
)
def test_peaks_measured_on_an_h200(large, work, phase, checkpointing, measured):
    found = planned(large, H200, work, f"model.checkpointing={checkpointing}")
    assert found.memory.fits
    assert found.memory.peaks[phase] == pytest.approx(measured, rel=0.15)


BASE = (224, 512, 512)
SMALL = ("train.prompts_per_step=8", "run.gpu_memory_gib=24")


@pytest.mark.parametrize(
    ("size", "work", "options", "rollout", "update", "peak"),
    [
        ("3b", W1, (), 2.22, 2.96, 103.7),
        ("3b", W2, (), 1.60, 2.97, 121.4),
        ("3b", W2, ("train.prompts_per_step=64",), 5.22, None, None),
        ("3b", BASE, ("train.prompts_per_step=4",), None, 0.84, 102.5),
        ("0.5b", BASE, ("train.prompts_per_step=4",), None, 0.51, 34.8),
        ("0.5b", BASE, ("train.prompts_per_step=4", "model.train=lora"), None, None, 19.5),
        ("3b", BASE, ("train.prompts_per_step=4", "model.train=lora"), None, 0.79, 56.7),
        ("7b", BASE, ("train.prompts_per_step=4", "model.train=lora"), None, 1.20, 81.2),
        ("32b", W1, ("run.gpus=16", "train.prompts_per_step=256", "train.layout=sharded"), 12.9, 32.0, 129),
        ("3b", LIMITED, (*SMALL, "model.train=lora"), 6.39, 3.78, 21.0),
        ("3b", (896, 1120, 256), (*SMALL, "model.train=qlora"), 2.92, 1.32, 19.8),
    ],
)
def test_seconds_and_peaks_measured_on_an_h200(shaped, size, work, options, rollout, update, peak):
    found = planned(shaped(size), H200, work, *options)
    for phase, measured in (("rollout", rollout), ("update", update)):
        if measured is not None:
            assert found.pace.seconds[phase] == pytest.approx(measured, rel=0.1)
    if peak is not None:
        assert max(found.memory.peaks.values()) == pytest.approx(peak, rel=0.05)


def test_every_prompt_of_a_step_is_computed(large):
    """Also where all are planned alike: 16 of 374 tokens and 1,024 patches."""
    one, all_ = (planned(large, H200, W1, f"train.prompts_per_step={n}").pace.tflop["rollout"] for n in (1, 16))
    assert all_ == pytest.approx(16 * one, rel=1e-6)


def test_experts_are_all_kept_and_only_the_chosen_ones_compute(tmp_path):
    """The shape of a Mixtral 8x7B: 46.7e9 weights, of which a token passes 12.9e9."""
    folder = Path(tiny.build("mixtral", tmp_path))
    described = json.loads((folder / "config.json").read_text()) | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "vocab_size": 32_000,
        "num_local_experts": 8,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(described))
    found = {
        train: planned(folder, H200, (1, 512, 1024), f"model.train={train}", text_only=True)
        for train in ("lora", "qlora", "full")
    }
    whole, adapted, packed = (sizes(found[n])["weights"] for n in ("full", "lora", "qlora"))
    assert whole * 2**30 / 2 == pytest.approx(46.70e9, rel=1e-3)
    adapters = 64 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))  # of the attention, rank 64
    assert (adapted - whole) * 2**30 / 2 == pytest.approx(adapters, rel=1e-6)
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)  # all that 4 bits can hold
    assert (adapted - packed) * 2**30 == pytest.approx((2 - flops.NF4) * attention, rel=1e-3)
    assert found["lora"].memory.fits and not found["full"].memory.fits
    tokens = 16 * (512 + 8 * 1024)
    assert found["lora"].pace.tflop["rollout"] == pytest.approx(2e-12 * 12.9e9 * tokens, rel=0.05)
