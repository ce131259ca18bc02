"""Memory and time of a config before anything is loaded, against what was measured."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from saccade import devices
from saccade.cli import app
from saccade.config import LoraConfig, load
from saccade.errors import ConfigError
from saccade.estimate import estimate, memory, show, sizing
from saccade.models import lora, tiny
from saccade.models.families import load_family
from saccade.models.load import freeze, load_model

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151_936,
    "layer_types": ["full_attention"] * 36,
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
H200, A100_40, RTX_4090 = (devices.named(n) for n in ("H200", "A100 40GB", "RTX 4090"))
# 16 prompts x 8 rollouts: side of the picture, tokens of prompt and response.
W1, W2 = (448, 374, 512), (1000, 1366, 256)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config of a Qwen2.5-VL-3B and no weights."""
    folder = tmp_path_factory.mktemp("3b")
    tiny.build("qwen2_5_vl", folder)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"] |= TEXT
    described["text_config"]["rope_parameters"]["mrope_section"] = [16, 24, 24]
    described["vision_config"] |= VISION
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "model.safetensors").unlink()
    return str(folder)


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
        (W1, "update", "auto", 103.7),
        (W2, "update", "auto", 121.4),
        (W1, "update", "on", 71.5),
    ],
)
def test_peaks_measured_on_an_h200(large, work, phase, checkpointing, measured):
    found = planned(large, H200, work, f"model.checkpointing={checkpointing}")
    assert found.memory.fits
    assert found.memory.peaks[phase] == pytest.approx(measured, rel=0.15)


def test_the_peak_of_adapters_in_24_gib_measured_on_an_h200(large):
    options = ("run.memory=24", "model.train=lora", "train.prompts_per_step=8")
    found = planned(large, H200, (896, 1120, 1024), *options)
    assert found.memory.fits and found.memory.peaks["update"] == pytest.approx(21.7, rel=0.15)


@pytest.mark.parametrize(("prompts", "rollout", "update"), [(16, 2.42, 2.92), (64, 5.15, None)])
def test_seconds_measured_on_an_h200(large, prompts, rollout, update):
    found = planned(large, H200, W1, f"train.prompts_per_step={prompts}")
    assert found.pace.seconds["rollout"] == pytest.approx(rollout, rel=0.15)
    if update is not None:
        assert found.pace.seconds["update"] == pytest.approx(update, rel=0.15)


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
    assert (adapted - packed) * 2**30 == pytest.approx((2 - sizing.NF4) * attention, rel=1e-3)
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
    found = sizes(planned(large, H200, W1, "train.optimizer=adamw_bf16"))
    assert found["moments and compensation"] == pytest.approx(plain["moments"] * 6 / 8)
    assert "fp32 masters" not in found


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
    skeleton = sizing.build_skeleton(config, family, element=4, train=train)
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    if train == "lora":
        pytest.importorskip("peft")
        lora.add(model, family, LoraConfig(rank=4), seed=0)
    else:
        freeze(model, family, train)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert skeleton.trained == trained
    assert skeleton.weights == 4 * sum(p.numel() for p in model.parameters())


def test_the_share_of_the_pool_is_that_of_the_engine():
    paged = Path(memory.__file__).parents[1] / "engines" / "embedded" / "paged.py"
    (share,) = re.findall(r"^POOL_SHARE = ([\d.]+)", paged.read_text(), re.MULTILINE)
    assert float(share) == memory.POOL_SHARE


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
    assert "the rollout needs" in text and "RTX 4090" in text and "model.train=lora" in text
    assert planned(large, RTX_4090, W1, "model.train=lora").memory.fits


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


def test_sometimes_nothing_helps(large):
    found = planned(large, devices.Device(name="toy", memory=2.0), W1)
    assert found.advice == ()
    assert "no option makes it fit" in show.refusal(found)


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_are_those_of_the_data(scenes, word_model):
    config = load({"model.path": word_model, "data.train": str(scenes / "train.jsonl")})
    found = estimate(config, devices.present("cpu"))
    assert re.fullmatch(r"\d+ tokens \(mean of 24 rows of data.train\)", found.prompts)
    assert found.pace.seconds == {} and found.pace.tflop["update"] > 0


def test_without_data_prompts_are_as_long_as_allowed(word_model):
    config = load({"model.path": word_model, "data.max_prompt_tokens": 2000})
    found = estimate(config, devices.present("cpu"))
    assert found.prompts == "2000 tokens, a picture of 1001x1001 (data.max_prompt_tokens)"


def test_longer_responses_take_more(large):
    short, long = (planned(large, H200, (448, 374, new)) for new in (256, 1024))
    assert long.pace.seconds["rollout"] > 3 * short.pace.seconds["rollout"]
    assert sizes(long)["keys and values"] > 2 * sizes(short)["keys and values"]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_items_and_seconds(large):
    arguments = ["estimate", f"model.path={large}", "--device", "H200", "--image", "448x448"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for word in ("weights", "keys and values", "peak", "an estimate", "rollout", "update"):
        assert word in result.output


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
        (["--image", "big"], "such as 448x448"),
        (["train.updates_per_step=999"], "train.updates_per_step"),
    ],
)
def test_wrong_options_are_explained(large, options, message):
    result = CliRunner().invoke(app, ["estimate", f"model.path={large}", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_an_unknown_architecture_is_refused(tmp_path):
    folder = Path(tiny.build("qwen3", tmp_path / "model"))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "phi"}))
    config = load({"model.path": str(folder)})
    with pytest.raises(Exception, match="shapes of a phi are not known"):
        estimate(config, H200, prompt_tokens=10)


def test_a_size_needs_two_numbers():
    assert show.size_of("640x480") == (640, 480)
    with pytest.raises(ConfigError, match="448x448"):
        show.size_of("0x480")


def test_what_is_not_counted_is_said(large):
    assert planned(large, H200, W1).note == ""
    vllm = planned(large, H200, W1, "rollout.engine=vllm", "rollout.memory_share=0.4")
    assert "rollout.engine=vllm is not counted" in vllm.note and "holds 0.4" in vllm.note
    assert "2 is not counted" in planned(large, H200, W1, "rollout.replicas=2").note
