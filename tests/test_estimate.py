"""Memory and time of a config before anything is loaded, against what was measured."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from saccade import devices, flops
from saccade.algorithms.build import from_config
from saccade.cli import app
from saccade.config import LoraConfig, load
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.estimate import estimate, show, sizing
from saccade.estimate.advice import levers
from saccade.estimate.host import host_peak
from saccade.estimate.plan import element_of, make_plan
from saccade.estimate.preflight import preflight
from saccade.models import lora, tiny
from saccade.models.families import load_family
from saccade.models.load import freeze, load_model
from saccade.types import Message, Sample

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SIZES = {
    "0.5b": TEXT
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "3b": TEXT,
    "7b": TEXT
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
H200, A100_40, RTX_4090 = (devices.named(n) for n in ("H200", "A100 40GB", "RTX 4090"))
# 16 prompts x 8 rollouts: side of the picture, tokens of prompt and response.
W1, W2 = (448, 374, 512), (1000, 1366, 256)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory):
    """Folders with the config of a Qwen2.5-VL and no weights, by its size."""

    @cache
    def build(size: str) -> str:
        folder, text = tmp_path_factory.mktemp(size), SIZES[size]
        tiny.build("qwen2_5_vl", folder)
        described = json.loads((folder / "config.json").read_text())
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        sections = [half // 4, 3 * half // 8, 3 * half // 8]
        described["text_config"] |= text
        described["text_config"]["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
        described["text_config"]["rope_parameters"]["mrope_section"] = sections
        described["vision_config"] |= VISION | {"out_hidden_size": text["hidden_size"]}
        described["tie_word_embeddings"] = text["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(described))
        (folder / "model.safetensors").unlink()
        return str(folder)

    return build


@pytest.fixture(scope="module")
def large(shaped) -> str:
    return shaped("3b")


def planned(folder, device, work, *overrides, text_only=False):
    side, prompt, new = work
    options = {
        "model.path": str(folder),
        "rollout.max_tokens": new,
        "algorithm.kl.coef": 0.0,
        "train.prompts_per_step": 16,
        "train.samples_per_prompt": 8,
    }
    config = load(options, list(overrides))
    image = None if text_only else (side, side)
    return estimate(config, device, prompt_tokens=prompt, image=image)


def sizes(found) -> dict[str, float]:
    return {item.name: item.gib for item in found.memory.items}


# -- against measurements --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "phase", "checkpointing", "measured"),
    [
        (W1, "rollout", "auto", 53.8),
        (W2, "rollout", "auto", 58.9),
        (W1, "update", "on", 71.5),
    ],
)
def test_peaks_measured_on_an_h200(large, work, phase, checkpointing, measured):
    found = planned(large, H200, work, f"model.checkpointing={checkpointing}")
    assert found.memory.fits
    assert found.memory.peaks[phase] == pytest.approx(measured, rel=0.15)


BASE = (224, 512, 512)
LIMITED = (896, 1120, 1024)
SMALL = ("train.prompts_per_step=8", "run.memory=24")


@pytest.mark.parametrize(
    ("size", "work", "options", "rollout", "update", "peak"),
    [
        ("3b", W1, (), 2.22, 2.96, 103.7),
        ("3b", W2, (), 1.60, 2.97, 121.4),
        ("3b", W1, ("train.prompts_per_step=8",), 1.72, None, None),
        ("3b", W1, ("train.prompts_per_step=64",), 5.09, None, None),
        ("3b", W2, ("train.prompts_per_step=64",), 5.22, None, None),
        ("3b", BASE, ("train.prompts_per_step=4",), None, 0.84, 102.5),
        ("0.5b", BASE, ("train.prompts_per_step=4",), None, 0.51, 34.8),
        ("0.5b", BASE, ("train.prompts_per_step=4", "model.train=lora"), None, None, 19.5),
        ("3b", BASE, ("train.prompts_per_step=4", "model.train=lora"), None, 0.79, 56.7),
        ("7b", BASE, ("train.prompts_per_step=4", "model.train=lora"), None, 1.20, 81.2),
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


def test_packed_weights_save_memory_and_cost_time(large):
    lora, qlora = (
        planned(large, H200, (896, 1120, 256), *SMALL, f"model.train={train}")
        for train in ("lora", "qlora")
    )
    assert sizes(qlora)["weights"] < sizes(lora)["weights"] / 2
    for phase in ("rollout", "update"):
        assert lora.pace.seconds[phase] < qlora.pace.seconds[phase]


def test_every_prompt_of_a_step_is_computed(large):
    """Also where all are planned alike: 16 of 374 tokens and 1,024 patches."""
    one, all_ = (
        planned(large, H200, W1, f"train.prompts_per_step={n}").pace.tflop["rollout"]
        for n in (1, 16)
    )
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


# -- items -----------------------------------------------------------------------------------------


def test_weights_and_optimizer_follow_from_the_parameters(large):
    found = sizes(planned(large, H200, W1))
    billion = 3.7549e9
    assert found["weights"] == pytest.approx(2 * billion / 2**30, rel=1e-3)
    assert found["fp32 masters"] == pytest.approx(4 * billion / 2**30, rel=1e-3)
    assert found["moments"] == pytest.approx(8 * billion / 2**30, rel=1e-3)
    assert found["gradient sums"] == found["fp32 masters"]
    assert "reference" not in found and "weights of the critic" not in found
    assert found["keys and values"] == 128 * 886 * (2 * 36 * 2 * 128 * 2) / 2**30


def test_other_models_and_optimizers_take_their_share(large):
    plain = sizes(planned(large, H200, W1))
    found = sizes(planned(large, H200, W1, "algorithm.kl.coef=0.01"))
    assert found["reference"] == found["weights"]
    found = sizes(planned(large, H200, W1, "algorithm.preset=ppo", "algorithm.kl.coef=0"))
    assert found["moments of the critic"] == found["moments"]
    assert found["logits"] > 1  # of the policy; a critic reads none
    alone, both = (
        planned(large, devices.named("B200"), W1, f"algorithm.preset={name}", "algorithm.kl.coef=0")
        for name in ("grpo", "ppo")
    )
    assert 1.9 < both.pace.tflop["update"] / alone.pace.tflop["update"] < 1.98
    learned = both.pace.tflop["update"] - alone.pace.tflop["update"]  # by a critic, without logits
    assert both.pace.tflop["values"] == pytest.approx(learned / 3, rel=0.01)
    found = sizes(planned(large, H200, W1, "train.optimizer=adamw_bf16"))
    assert found["moments and compensation"] == pytest.approx(plain["moments"] * 6 / 8)
    assert "fp32 masters" not in found


def test_a_tower_that_stands_still_looks_at_a_picture_once(large):
    """Of 1,000 x 1,000 pixels, before log-probs of old and reference and two epochs."""
    passes = ("algorithm.kl.coef=0.01", "algorithm.old=recompute", "train.epochs_per_batch=2")
    lora, full = (
        planned(large, H200, W2, *passes, f"model.train={train}", "train.optimizer=adamw_bf16")
        for train in ("lora", "full")
    )
    seen = full.pace.tflop["logp_ref"] - lora.pace.tflop["logp_ref"]
    assert seen > 0.1 * full.pace.tflop["logp_ref"]
    adapters = lora.pace.tflop["logp_old"] - full.pace.tflop["logp_old"]
    assert 0 < adapters < 0.1 * full.pace.tflop["logp_old"]
    once = planned(large, H200, W2, *passes[:2], "model.train=lora")
    assert lora.pace.tflop["update"] == pytest.approx(2 * once.pace.tflop["update"])
    assert full.pace.tflop["logp_old"] == full.pace.tflop["logp_ref"]


def test_main_memory_holds_a_copy_of_what_is_saved(large):
    """3.75e9 weights: 14 bytes each, of adapters the merged weights alone; 2.0 to 2.6 GiB were
    measured without a checkpoint.
    """
    found = planned(large, H200, W1)
    host = {item.name: item.gib for item in found.host}
    weights = sizes(found)["weights"]
    assert host["copy of a checkpoint"] == pytest.approx(7 * weights)
    assert host_peak(found.host) == pytest.approx(2.0 + 2.5 + 7 * weights)
    adapted = {i.name: i.gib for i in planned(large, H200, W1, "model.train=lora").host}
    assert weights < adapted["copy of a checkpoint"] < 1.3 * weights
    without = planned(large, H200, W1, "save.background=false").host
    assert host_peak(without) == pytest.approx(2.0 + 2.5 + weights)
    assert planned(large, devices.present("cpu"), W1).host == ()


def test_an_average_of_the_weights_is_another_copy_and_one_in_fp32(large):
    """In a checkpoint it is a model folder, too: 8 bytes of each weight, whatever their type."""
    for dtype, times in (("bfloat16", 3), ("float32", 1)):
        plain, found = (
            planned(large, devices.named("B200"), W1, f"model.dtype={dtype}", f"train.ema={ema}")
            for ema in (0, 0.99)
        )
        weights, copies = sizes(plain)["weights"], [host_peak(each.host) for each in (plain, found)]
        assert sizes(found)["average"] == times * weights
        assert copies[1] - copies[0] == pytest.approx((times + 1) * weights)
    tight = planned(large, H200, W1, "train.ema=0.99", "run.memory=72")
    assert tight.advice[-3:] == (
        "train.ema=0",
        "model.train=lora train.ema=0",
        "model.train=qlora train.ema=0",
    )


def test_a_reference_that_moves_is_in_a_checkpoint(large):
    still, moving = (
        planned(large, H200, W1, "algorithm.kl.coef=0.01", f"algorithm.kl.update={update}")
        for update in ("none", "copy")
    )
    added = host_peak(moving.host) - host_peak(still.host)
    assert added == pytest.approx(sizes(moving)["reference"])


def test_recomputing_saves_activations_and_costs_time(large):
    kept, again = (
        planned(large, H200, W1, f"model.checkpointing={mode}") for mode in ("off", "on")
    )
    assert sizes(kept)["decoder activations"] > 15 * sizes(again)["decoder activations"]
    assert kept.pace.recomputed == 0 and again.pace.recomputed > 300
    assert again.pace.seconds["update"] > kept.pace.seconds["update"] + 0.5


def test_left_open_as_many_layers_recompute_as_memory_asks_for(large):
    notes = {}
    for name in ("H200", "H100"):
        found = planned(large, devices.named(name), W1)
        assert found.memory.fits
        (note,) = (i.note for i in found.memory.items if i.name == "decoder activations")
        notes[name] = int(re.search(r"(\d+) of 36 layers", note)[1])
    assert notes["H200"] == 0 and 20 < notes["H100"] < 36


@pytest.mark.parametrize("train", ["full", "freeze:vision", "lora"])
def test_the_model_is_counted_as_it_will_be_loaded(train, tmp_path):
    folder = tiny.build("qwen2_5_vl", tmp_path / "model")
    family = load_family(folder)
    config = load({"model.path": folder, "model.train": train, "model.lora.rank": 4})
    empty = sizing.empty_model(config, family)
    skeleton = sizing.build_skeleton(config.model.lora, family, empty, element=4, train=train)
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    if train == "lora":
        pytest.importorskip("peft")
        lora.add(model, family, LoraConfig(rank=4), seed=0)
    else:
        freeze(model, family, train)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert skeleton.trained == trained
    assert skeleton.weights == 4 * sum(p.numel() for p in model.parameters())


# -- what does not fit -----------------------------------------------------------------------------


def test_a_process_with_less_memory_recomputes_more(large):
    whole, limited = (planned(large, H200, W1, *o) for o in ((), ("run.memory=80",)))
    assert limited.device.memory == 80 and limited.memory.fits
    assert limited.memory.peaks["update"] < 80 < whole.memory.peaks["update"]


def test_adapters_lift_the_limit_of_a_small_gpu(large):
    found = planned(large, RTX_4090, W1)
    assert not found.memory.fits and found.pace is None
    assert found.advice == ("model.train=lora", "model.train=qlora")
    text = show.refusal(found)
    assert "the update needs" in text and "RTX 4090" in text and "model.train=lora" in text
    assert planned(large, RTX_4090, W1, "model.train=lora").memory.fits


def test_keys_and_values_take_their_share_and_prompts_what_is_left(shaped):
    """512 sequences of a 7B. Of 11.7 GiB on an L4 the engine leaves a fifth beside its pool, which
    is enough for 16,384 tokens of prompts; where it is less they are computed in pieces.
    """
    options = ("model.train=qlora", "train.prompts_per_step=512", "train.micro_tokens=4096")
    notes = []
    for device in (devices.named("L4"), devices.Device(name="tight", memory=16.0)):
        found = planned(shaped("7b"), device, (448, 457, 2048), *options)
        assert found.memory.pool == pytest.approx(0.8 * found.memory.free)
        assert found.memory.fits
        assert found.memory.peaks["rollout"] == pytest.approx(found.memory.limit)
        notes += [item.note for item in found.memory.items if item.name == "prompts and logits"]
    assert notes == ["", "prompts in pieces, all at once 2.21"]


LONG = ("data.max_pixels=12000000", "model.train=lora")


def test_prompts_are_computed_together_as_far_as_a_forward_takes_them(large):
    """16,384 tokens: of two prompts with a picture of 15,376 only one; beside it 17 sequences."""
    found = planned(large, RTX_4090, (3472, 15541, 1024), *LONG)
    assert found.memory.fits
    two = planned(large, RTX_4090, (3472, 15541, 1024), *LONG, "train.prompts_per_step=2")
    one = planned(large, RTX_4090, (3472, 15541, 1024), *LONG, "train.prompts_per_step=1")
    logits = 8 * 151_936 * 2 / 2**30  # of eight sequences more
    assert sizes(two)["prompts and logits"] == pytest.approx(
        sizes(one)["prompts and logits"] + logits, rel=0.06
    )


@pytest.mark.parametrize("memory", [18.9, 19.0, 19.1])
def test_a_large_picture_finds_room_in_a_fifth_of_what_is_free(large, memory):
    """1.7 GiB are more than a fifth of the plan, and less than one of what there is."""
    tight = devices.Device(name="tight", memory=memory)
    found = planned(large, tight, (3472, 15541, 1024), *LONG)
    assert found.memory.pool < 0.8 * found.memory.free
    assert found.memory.fits
    assert found.memory.peaks["rollout"] == pytest.approx(found.memory.limit)


def test_in_full_precision_every_sequence_has_a_slot(large):
    """As long as the longest may become; slots take 60 % of what is free."""
    found = planned(large, A100_40, W1, "model.train=lora", "model.dtype=float32")
    assert found.memory.fits
    assert found.memory.pool == 128 * (374 + 512) * (2 * 36 * 2 * 128 * 4) / 2**30
    tight = devices.Device(name="tight", memory=27.0)
    found = planned(large, tight, W1, "model.train=lora", "model.dtype=float32")
    assert found.memory.pool == pytest.approx(0.6 * found.memory.free)


def test_every_option_that_is_enough_alone_is_named(large):
    tight = devices.Device(name="tight", memory=70.7)
    found = planned(large, tight, W1, "model.checkpointing=on")
    assert found.advice[:2] == ("train.micro_tokens=8192", "train.optimizer=adamw_bf16")
    for lever in found.advice:
        assert planned(large, tight, W1, "model.checkpointing=on", lever).memory.fits, lever


def test_options_that_are_enough_together(large):
    small = devices.Device(name="small", memory=10.0)
    found = planned(large, small, W2, "train.optimizer=adamw_bf16")
    (together,) = found.advice
    assert "model.train=qlora" in together and len(together.split()) > 1
    changed = planned(large, small, W2, "train.optimizer=adamw_bf16", *together.split())
    assert changed.memory.fits


def test_shorter_responses_and_smaller_pictures_lift_the_limit_too(shaped):
    """A 7B with responses of 32,000 tokens on an L4, a 3B with pictures of 3,000 x 3,000."""
    found = planned(shaped("7b"), devices.named("L4"), (448, 374, 32000))
    (together,) = found.advice
    assert re.search(r"rollout\.max_tokens=\d+", together) and "model.train=qlora" in together
    fits = planned(shaped("7b"), devices.named("L4"), (448, 374, 32000), *together.split())
    assert fits.memory.fits
    large = ("data.max_pixels=9000000", "model.train=freeze:llm", "train.micro_tokens=1024")
    tight = devices.Device(name="tight", memory=23.0)
    found = planned(shaped("3b"), tight, (3000, 500, 256), *large)
    assert not found.memory.fits
    names = ("train.optimizer=adamw_bf16", "model.train=lora", "model.train=qlora")
    assert found.advice == (*names, "data.max_pixels=4500000")


def test_smaller_adapters_lift_the_limit_too(large):
    wide = ("model.train=qlora", "model.lora.rank=1024", "train.micro_tokens=1024")
    found = planned(large, RTX_4090, LIMITED, "train.prompts_per_step=8", *wide)
    assert not found.memory.fits
    assert found.advice == ("model.lora.rank=512",)
    smaller = planned(large, RTX_4090, LIMITED, "train.prompts_per_step=8", *wide, found.advice[-1])
    assert smaller.memory.fits


def test_a_rollout_with_fewer_sequences_leaves_room_for_a_large_picture(large):
    """Of 7.2 GiB a fifth is too small for 1.7, whatever the pool takes."""
    tight, work = devices.Device(name="tight", memory=18.3), (3472, 15541, 1024)
    found = planned(large, tight, work, *LONG)
    assert not found.memory.fits and found.memory.peaks["update"] < found.memory.limit
    assert found.advice[0] == "rollout.max_sequences=8"
    assert planned(large, tight, work, *LONG, found.advice[0]).memory.fits


def test_options_together_are_no_stronger_than_they_have_to_be(large):
    """All weights of a 3B in 6.3 GiB: adapters of rank 64 would be too large, too."""
    small = devices.Device(name="small", memory=6.3)
    (together,) = planned(large, small, W1).advice
    chosen = dict(lever.split("=") for lever in together.split())
    names = ["train.micro_tokens", "train.optimizer", "model.train", "model.lora.rank"]
    assert list(chosen) == names

    def fits(changed: dict[str, str]) -> bool:
        return planned(large, small, W1, *map("=".join, changed.items())).memory.fits

    assert fits(chosen)
    milder = {"train.optimizer": "adamw", "model.train": "lora"}
    milder |= {name: f"{2 * int(chosen[name])}" for name in (names[0], names[3])}
    for name, value in milder.items():
        assert not fits(chosen | {name: value}), name


def test_a_rank_above_that_of_the_matrices_is_told(large):
    high = ("model.train=lora", "model.lora.rank=2049")
    (note,) = planned(large, H200, W1, *high).notes
    assert note == "model.lora.rank=2049 adds nothing to 2048, the rank of whole matrices"
    assert planned(large, H200, W1, "model.train=lora", "model.lora.rank=2048").notes == ()
    assert planned(large, H200, W1, "model.lora.rank=2049").notes == ()  # no adapters


def test_nothing_helps_only_after_everything_was_tried(large):
    found = planned(large, devices.Device(name="toy", memory=2.0), W1)
    assert found.advice == ()
    assert "not even together: take a smaller model" in show.refusal(found)


def test_options_that_save_memory_and_their_values(large):
    config = load({"model.path": large, "model.checkpointing": "off", "rollout.max_tokens": 1024})
    algorithm, family = from_config(config), load_family(large)
    prompts, _ = sizing.typical_prompts(config, family, prompt_tokens=900, image=(900, 900))
    step = sizing.make_step(config, algorithm, family, prompts)
    empty = sizing.empty_model(config, family)
    build = cache(lambda train, lora: sizing.build_skeleton(lora, family, empty, 2, train))
    values = levers(make_plan(config, algorithm, H200, step, build))
    assert [value for option in values for value in option] == [
        "model.checkpointing=auto",
        "model.checkpointing=on",
        "train.micro_tokens=8192",
        "train.micro_tokens=4096",
        "train.micro_tokens=2048",
        "train.micro_tokens=1024",
        *(f"rollout.max_sequences={2**n}" for n in range(8, -1, -1)),
        "train.optimizer=adamw_bf16",
        "model.train=lora",
        "model.train=qlora",
        *(f"model.lora.rank={rank}" for rank in (32, 16, 8)),
        "rollout.max_tokens=512",
        "rollout.max_tokens=256",
        "data.max_pixels=501760",
        "data.max_pixels=250880",
        "data.max_pixels=125440",
        "data.max_pixels=62720",
        "data.max_pixels=50176",
    ]


# -- at the start of a run -------------------------------------------------------------------------


def started(folder: str, memory: float, *overrides: str) -> list[str]:
    """What is said before weights are loaded onto a GPU with so much free memory."""
    config = load({"model.path": folder, "algorithm.kl.coef": 0.0}, list(overrides))
    sample = Sample(id="0", messages=(Message(role="user", parts=("how many",)),))
    device = devices.Device(name="GPU", memory=memory)
    return preflight(config, load_family(folder), [sample], device=device)


def test_a_run_that_fits_starts_without_a_word(large):
    assert started(large, 120.0) == []


def test_a_run_that_may_not_fit_is_told_so(large):
    (text,) = started(large, 64.0)
    assert "the run starts" in text and "does not fit" in text and "model.train=lora" in text


def test_a_run_that_cannot_fit_is_refused_unless_one_insists(large):
    with pytest.raises(ConfigError, match=r"model\.train=lora.*run\.overcommit=true"):
        started(large, 24.0)
    (text,) = started(large, 24.0, "run.overcommit=true")
    assert "does not fit" in text
    (text,) = started(large, 24.0, "rollout.engine=vllm")  # its memory is not counted
    assert "does not fit" in text


def test_a_run_starts_on_a_cpu_and_with_an_unknown_shape(large, tmp_path):
    config = load({"model.path": large})
    family = load_family(large)
    assert preflight(config, family, [], device=devices.present("cpu")) == []
    unknown = Path(tiny.build("qwen3", tmp_path / "model"))
    described = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(described | {"model_type": "phi"}))
    assert started(str(unknown), 0.1) == []


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_are_those_of_the_data(scenes, word_model):
    config = load({"model.path": word_model, "data.train": str(scenes / "train.jsonl")})
    found = estimate(config, devices.present("cpu"))
    about = r"\d+ tokens \(mean of 24 rows of data.train, the longest \d+\)"
    assert re.fullmatch(about, found.prompts)
    assert found.pace.seconds == {} and found.pace.tflop["update"] > 0


def test_prompts_do_not_depend_on_the_order_of_rows(large, tmp_path):
    rows = [{"problem": "a" * (3_000 if n == 40 else 10), "answer": "1"} for n in range(64)]
    found = []
    for name in ("late", "early"):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = load({"model.path": large, "data.train": str(data)}, ["train.prompts_per_step=8"])
        found.append(estimate(config, H200))
        rows.reverse()
    assert found[0].memory == found[1].memory and found[0].pace == found[1].pace
    assert "the longest 3133" in found[0].prompts
    pictured = estimate(config, H200, image=(448, 448))
    assert "picture of 448x448 (the text is that of 64 rows of data.train)" in pictured.prompts
    assert pictured.prompts.startswith("446 tokens")  # 256 of them are the picture


def test_prompts_that_a_run_would_leave_out_are_told(large):
    (note,) = planned(large, H200, (224, 5000, 64)).notes
    assert note == "a run leaves prompts of 5000 tokens out: data.max_prompt_tokens=4096"
    (note,) = planned(large, H200, (224, 5000, 64), "data.overlong=shrink").notes
    assert note == "a run shortens prompts of 5000 tokens: data.max_prompt_tokens=4096"
    config = load({"model.path": large, "data.max_prompt_tokens": 200})
    (note,) = estimate(config, H200, image=(448, 448)).notes
    assert note == "a run leaves prompts of 257 tokens out: data.max_prompt_tokens=200"


def test_a_gpu_that_is_not_there_is_not_taken_for_a_cpu(large, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["estimate", f"model.path={large}", "run.device=cuda"])
    assert result.exit_code == 3 and "name the one to plan for: --device H100" in result.stderr


def test_without_data_prompts_are_as_long_as_allowed(word_model):
    config = load({"model.path": word_model, "data.max_prompt_tokens": 2000})
    found = estimate(config, devices.present("cpu"))
    assert found.prompts == "2000 tokens, a picture of 1001x1001 (data.max_prompt_tokens)"


def test_pictures_of_planned_prompts_are_shrunk_as_those_of_rows_would_be(large):
    config = load({"model.path": large, "data.max_pixels": 2048**2, "data.max_prompt_tokens": 2048})
    found = estimate(config, H200)
    assert found.prompts == "2048 tokens, a picture of 1172x1172 (data.max_prompt_tokens)"
    assert found.notes == ()  # nothing was said of data
    few = load(config, ["data.max_prompt_tokens=50", "data.min_pixels=262144"])
    assert estimate(few, H200).prompts == "50 tokens (data.max_prompt_tokens)"


def test_data_that_is_not_there_is_named(word_model):
    options = ["data.train=trian.parquet@train", "data.max_prompt_tokens=500"]
    arguments = ["estimate", f"model.path={word_model}", *options, "--device", "cpu"]
    said = "data.train: trian.parquet not found, so prompts are as long as "
    said += "data.max_prompt_tokens=500 allows"
    assert said in CliRunner().invoke(app, arguments).stdout
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(result.stdout)["notes"] == [said]
    result = CliRunner().invoke(app, [*arguments, "--json", "--prompt-tokens", "40"])
    assert json.loads(result.stdout)["notes"] == []
    result = CliRunner().invoke(app, [*arguments, "--json", "--image", "28x28"])
    assert json.loads(result.stdout)["notes"] == [said]
    result = CliRunner().invoke(app, [*arguments, "--json", "--image", "1400x1400"])
    over, missing = json.loads(result.stdout)["notes"]
    assert over.startswith("a run leaves prompts of")
    assert missing == (
        "data.train: trian.parquet not found, so of prompts only the picture is counted"
    )


def test_a_prompt_is_longer_than_its_picture(large):
    found = planned(large, H200, (448, 10, 512))
    assert found.prompts == "257 tokens, a picture of 448x448 (the picture alone takes 256)"


def test_a_large_group_is_a_multiple_of_some_of_its_members(large):
    """Of 1,000,000 as of 128: prompts are computed once, all else as often as there are members."""
    few, many = (
        planned(large, H200, W1, f"train.samples_per_prompt={n}") for n in (128, 1_000_000)
    )
    assert many.memory == few.memory
    times = 1_000_000 / 128
    assert many.pace.tflop["update"] == pytest.approx(times * few.pace.tflop["update"])
    once = planned(large, H200, W1, "train.samples_per_prompt=64").pace.tflop["rollout"]
    decode = (few.pace.tflop["rollout"] - once) / 64  # a member
    whole = few.pace.tflop["rollout"] + decode * (1_000_000 - 128)
    assert many.pace.tflop["rollout"] == pytest.approx(whole)


def test_full_precision_has_no_seconds(large):
    found = planned(large, H200, W1, "model.dtype=float32")
    assert found.memory.fits and found.pace.seconds == {} and found.pace.tflop["update"] > 0
    assert found.notes == ("no seconds with model.dtype=float32: peaks are known in bfloat16 only",)
    unknown = devices.Device(name="other", memory=139.8)  # it has none anyway
    assert planned(large, unknown, W1, "model.dtype=float32").notes == ()


def test_longer_responses_take_more(large):
    short, long = (planned(large, H200, (448, 374, new)) for new in (256, 1024))
    assert long.pace.seconds["rollout"] > 3 * short.pace.seconds["rollout"]
    assert sizes(long)["keys and values"] > 2 * sizes(short)["keys and values"]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_items_and_seconds(large):
    arguments = ["estimate", f"model.path={large}", "--device", "4090", "--image", "448X448"]
    result = CliRunner().invoke(app, [*arguments, "model.train=lora"])
    assert result.exit_code == 0, result.output
    for word in (
        "RTX 4090, prompts",
        "weights",
        "keys and values",
        "peak",
        "an estimate",
        "rollout",
        "update",
    ):
        assert word in result.output


def test_rows_and_their_peaks_have_as_many_decimals(word_model):
    arguments = ["estimate", f"model.path={word_model}", "--prompt-tokens", "40"]
    result = CliRunner().invoke(app, [*arguments, "--device", "H200"])
    memory, step = result.stdout.split("A step (seconds: an estimate)")
    assert len(re.findall(r"peak .*\d\.\d", memory)) == 2
    assert not re.search(r"\d\.\d[^\d]", memory) and "step " in step
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "model.checkpointing=on"])
    memory, step = result.stdout.split("A step\n")
    assert "seconds" not in step and "recomputed in the update" in step


def test_the_command_refuses_what_cannot_fit_and_says_so_in_json_too(large):
    arguments = ["estimate", f"model.path={large}", "--device", "A100 40GB", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--prompt-tokens", "500"])
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["memory"]["fits"] is False and found["pace"] is None
    assert found["advice"][0] == "model.train=lora"
    assert "try model.train=lora" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "H201"], "known are GH200, B200, H200"),
        (["--device", "RTX"], "known are GH200, B200, H200"),
        (["--device", "A100 48 GB"], "the one in the table has 79.2 GiB"),
        (["--prompt-tokens", "9999999"], "has 32768; try --prompt-tokens 16384"),
        (["model.train=lora", "model.lora.dropout=0.1"], "try model.lora.dropout=0"),
        (["--image", "big"], "such as 448x448"),
        (["train.updates_per_step=999"], "train.updates_per_step"),
    ],
)
def test_wrong_options_are_explained(large, options, message):
    result = CliRunner().invoke(app, ["estimate", f"model.path={large}", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_a_cpu_has_memory_and_no_seconds(word_model):
    arguments = ["estimate", f"model.path={word_model}", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--prompt-tokens", "40"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["pace"]["seconds"] == {}
    assert found["device"]["name"] == "CPU" and found["memory"]["limit"] > 0


@pytest.mark.parametrize(
    ("device", "dtype", "element"),
    [
        ("H200", "auto", 2),
        ("H200", "float32", 4),
        ("CPU", "auto", 4),
        ("CPU", "bfloat16", 2),
    ],
)
def test_weights_are_as_wide_as_they_will_be_loaded(device, dtype, element):
    config = load({"model.dtype": dtype})
    assert element_of(config, devices.Device(name=device, memory=64.0)) == element


def test_an_unknown_architecture_is_refused(tmp_path):
    folder = Path(tiny.build("qwen3", tmp_path / "model"))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "phi"}))
    config = load({"model.path": str(folder)})
    with pytest.raises(Exception, match="memory of a phi is not known"):
        estimate(config, H200, prompt_tokens=10)


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni_thinker"])
def test_a_tower_that_hears_is_refused(name, tmp_path):
    config = load({"model.path": tiny.build(name, tmp_path / "model")})
    with pytest.raises(EnvironmentProblem, match=f"memory of a {name} is not known.* hears"):
        estimate(config, H200, prompt_tokens=10)


def test_a_size_needs_two_numbers():
    assert show.size_of("640x480") == show.size_of("640X480") == (640, 480)
    with pytest.raises(ConfigError, match="448x448"):
        show.size_of("0x480")


def test_what_is_not_counted_is_said(large):
    assert planned(large, H200, W1).notes == ()
    vllm = planned(large, H200, W1, "rollout.engine=vllm", "rollout.memory_share=0.4")
    (note,) = vllm.notes
    assert "rollout.engine=vllm is not counted" in note and "holds 0.4" in note
    (note,) = planned(large, H200, W1, "rollout.replicas=2").notes
    assert "2 is not counted" in note
    (note,) = planned(large, H200, W1, "env.name=crop").notes
    assert note.startswith("of an episode of env.name=crop one response is counted")
    assert planned(large, H200, W1, "env.name=crop", "env.max_turns=1").notes == ()
    (note,) = planned(large, H200, W1, "algorithm.preset=dapo").notes
    assert "one round of dynamic sampling is counted" in note and "max_rounds=" in note


def test_a_reward_model_that_is_not_there_is_not_counted(large, tmp_path):
    rated = f"reward.terms=[{{verifier: model, name: rm, args: {{path: {tmp_path}}}}}]"
    kept = (rated, "reward.offload=false")
    found = planned(large, H200, W1, *kept)
    assert found.notes == (
        f"the reward model {tmp_path} is not counted: no *.safetensors lie there",
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    found = planned(large, H200, W1, *kept)
    assert found.notes == () and sizes(found)["reward models"] == 2**-10


def test_a_limit_that_limits_nothing_is_said(large, word_model):
    found = planned(large, H200, W1, "run.memory=500")
    assert found.notes == ("run.memory=500 has no effect: H200 has 139.8 GiB to give",)
    assert found.memory == planned(large, H200, W1).memory
    assert planned(large, H200, W1, "run.memory=100").notes == ()
    config = load({"model.path": word_model, "run.memory": 0.001})
    found = estimate(config, devices.present("cpu"), prompt_tokens=40)
    assert found.notes == ("run.memory=0.001 has no effect on a CPU; it is for a GPU",)
    assert found.memory.fits
