"""Memory and time of a config before anything is loaded, against what was measured."""

import json
import re
from pathlib import Path

import pytest

from saccade.plugins.estimate import flops
from saccade.plugins.families import tiny
from saccade.plugins.ranks.layouts import LAYOUTS
from tests.estimate.works import H200, LIMITED, W1, W2, planned, sizes


@pytest.mark.parametrize(
    ("work", "phase", "checkpointing", "measured"),
    [(W1, "rollout", "auto", 53.8), (W2, "rollout", "auto", 58.9), (W1, "update", "on", 71.5)],
)
def test_peaks_measured_on_an_h200(large, work, phase, checkpointing, measured):
    found = planned(large, H200, work, f"model.checkpointing={checkpointing}")
    assert found.memory.fits
    assert found.memory.peaks[phase] == pytest.approx(measured, rel=0.15)


LORA, QLORA, BASE = "model.train=lora", "model.train=qlora", (224, 512, 512)
EIGHT, HALF = "train.prompts_per_step=8", "run.gpu_memory_gib=24"
# The rows of docs/estimate.md: size, work, options.
ALONE = {
    "W1:": ("3b", W1),
    "W1 in": ("3b", W1, "run.gpu_memory_gib=80"),
    "W1, 8": ("3b", W1, EIGHT),
    "W1, 4": ("3b", W1, "train.prompts_per_step=4"),
    "W1, 64": ("3b", W1, "train.prompts_per_step=64"),
    "W2:": ("3b", W2),
    "W2, 64": ("3b", W2, "train.prompts_per_step=64"),
    "W2 in": ("3b", W2, "run.gpu_memory_gib=80"),
    "base": ("3b", BASE),
    "4 responses": ("3b", BASE, "train.samples_per_prompt=4"),
    "64 responses": ("3b", BASE, "train.samples_per_prompt=64"),
    "prompt 256": ("3b", (224, 256, 512)),
    "prompt 8,192": ("3b", (224, 8192, 512)),
    "response 128": ("3b", (224, 512, 128)),
    "response 8,192": ("3b", (224, 512, 8192)),
    "0.5B": ("0.5b", BASE),
    "0.5B, LoRA": ("0.5b", BASE, LORA),
    "3B, LoRA": ("3b", BASE, LORA),
    "7B, LoRA": ("7b", BASE, LORA),
    "LoRA in": ("3b", LIMITED, EIGHT, HALF, LORA),
    "QLoRA in": ("3b", (896, 1120, 256), EIGHT, HALF, QLORA),
}
LONG = ("7b", (448, 368, 32_000), 2, "train.layout=whole", "train.sequence_parallel=4")
# Those of docs/scaling.md: size, work, prompts of the step, options.
RANKS = {
    "3B whole, of 8": ("3b", W1, 128, "run.gpus=8", "train.layout=whole"),
    "3B sharded, of 8": ("3b", W1, 128, "run.gpus=8", "train.layout=sharded"),
    "7B whole, of 8": ("7b", W1, 128, "run.gpus=8", "train.layout=whole"),
    "7B sharded, of 8": ("7b", W1, 128, "run.gpus=8", "train.layout=sharded"),
    "14B whole, of 8": ("14b", W1, 128, "run.gpus=8", "train.layout=whole"),
    "14B sharded, of 8": ("14b", W1, 128, "run.gpus=8", "train.layout=sharded"),
    "32B sharded, of 16": ("32b", W1, 256, "run.gpus=16", "train.layout=sharded"),
    "32B sharded, of 8": ("32b", W1, 128, "run.gpus=8", "train.layout=sharded", "train.offload=true"),
    "14B whole, of 8, `train.offload": ("14b", W1, 128, "run.gpus=8", "train.layout=whole", "train.offload=true"),
    "3B hybrid": ("3b", W1, 256, "run.gpus=16", "train.layout=hybrid"),
    "7B hybrid": ("7b", W1, 256, "run.gpus=16", "train.layout=hybrid"),
    "14B hybrid": ("14b", W1, 256, "run.gpus=16", "train.layout=hybrid"),
    "7B on one GPU": ("7b", W1, 16, "train.offload=true"),
    "7B of 8": (*LONG, "run.gpus=8"),
}
MEASURED = re.compile(r"([\d.]+) / ([\d.]+) \((.\d+) %\)")
OF_RANKS = re.compile(r"([\d.]+) \(([\d.]+)\)")


def rows_of(page, rows):
    """(estimated, measured) of rollout, update and peak in each row of a page, found by how the row begins."""
    found = {}
    for line in Path(f"docs/{page}.md").read_text().splitlines():
        name, *cells = [cell.strip() for cell in f"|{line}".split("|")[2:-1]] or [""]
        named = max((row for row in rows if name.startswith(row)), key=len, default=None)
        numbers = [MEASURED.fullmatch(cell) or OF_RANKS.fullmatch(cell) for cell in cells]
        if named and len(cells) == 3 and any(numbers):
            order = (1, 2) if page == "estimate" else (2, 1)
            found[named] = [number and [number[n] for n in order] for number in numbers]
    assert found.keys() == rows.keys()
    return found


def test_every_measured_row_is_as_the_page_says_and_within_15_percent(shaped):
    """Seconds of rollout and update, and GiB, of one H200."""
    for name, told in rows_of("estimate", ALONE).items():
        size, work, *options = ALONE[name]
        prompts = "train.prompts_per_step=" + ("4" if work[0] == 224 else "16")
        compared(name, told, planned(shaped(size), H200, work, prompts, *options), 0.0)


def test_ranks_are_as_the_page_says_and_within_15_percent(shaped):
    """One of several, which exchanges nothing: what FSDP does beside it counts, and copies of the state."""
    for name, told in rows_of("scaling", RANKS).items():
        size, work, prompts, *options = RANKS[name]
        found = planned(shaped(size), H200, work, f"train.prompts_per_step={prompts}", *options)
        layers = {"3b": 36, "7b": 28, "14b": 48, "32b": 64}[size]
        compared(name, told, found, LAYOUTS[found.layout].overhead * layers * 16 / 3)


def compared(name, told, found, beside):
    seconds = found.pace.seconds
    update = seconds["update"] + seconds.get("offload", 0.0) + beside
    estimated = (seconds["rollout"], update, max(found.memory.peaks.values()))
    for number, cell in zip(estimated, told, strict=True):
        if cell is not None:
            said, measured = map(float, cell)
            digits = len(cell[0].partition(".")[2])
            assert (name, round(number, digits)) == (name, said)
            assert said == pytest.approx(measured, rel=0.15), name


def test_engines_beside_divide_the_prompts_and_generate_while_others_train(large):
    def step(*options):
        return planned(large, H200, W1, "run.gpus=8", "train.prompts_per_step=128", *options).pace

    here, eight = step(), step("rollout.replicas=8")
    assert eight.seconds["rollout"] == pytest.approx(here.seconds["rollout"])
    assert here.step == pytest.approx(sum(here.seconds.values())) and eight.step == pytest.approx(here.step)
    two, four = (step(f"rollout.replicas={n}", "rollout.max_sequences=4096").seconds["rollout"] for n in (2, 4))
    assert 1.2 * here.seconds["rollout"] < 1.2 * four < two < 2 * four
    split = step("rollout.replicas=2", "rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.memory_share=0.9")
    assert split.seconds["rollout"] == pytest.approx(four, rel=0.05)
    engines = ("run.gpus=8", "train.layout=sharded", "rollout.replicas=8", "rollout.engine=vllm")
    tight, wide = (planned(large, H200, W1, *engines, f"rollout.memory_share={share}") for share in (0.04, 0.6))
    assert not tight.memory.fits and "rollout.tensor_parallel=2 rollout.engine=vllm" in tight.advice
    assert wide.memory.fits and wide.memory.peaks["rollout"] < 0.6 * H200.memory and not wide.notes[1:]
    ahead = step("rollout.replicas=2", "rollout.ahead=1")
    others = sum(ahead.seconds.values()) - ahead.seconds["rollout"]
    assert ahead.step == max(ahead.seconds["rollout"], others) and not planned(large, H200, W1).efficiency


def test_every_prompt_of_a_step_is_computed(large):
    """Also where all are planned alike: 16 of 368 tokens and 1,024 patches."""
    one, all_ = (planned(large, H200, W1, f"train.prompts_per_step={n}").pace.tflop["rollout"] for n in (1, 16))
    assert all_ == pytest.approx(16 * one, rel=1e-6)


def test_experts_are_all_kept_and_only_the_chosen_ones_compute(tmp_path):
    """The shape of a Mixtral 8x7B: 46.7e9 weights, of which a token passes 12.9e9."""
    folder = Path(tiny.build("mixtral", tmp_path))
    described = json.loads((folder / "config.json").read_text()) | {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32_000},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None},
        **{"num_local_experts": 8, "tie_word_embeddings": False},
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
