"""What is counted, and where."""

import re
from itertools import chain

import pytest
import torch

from saccade.algorithms.select import split_updates
from saccade.checks.steps import algorithm_of
from saccade.config import LoraConfig, load
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.families import load_family
from saccade.models.load import freeze, load_model
from saccade.plugins.estimate.batch_plan import empty_model, make_step, size_of, typical_prompts
from saccade.plugins.estimate.memory_items import host_peak
from saccade.plugins.families import tiny
from saccade.system import devices
from tests.estimate.works import H200, W1, planned, sizes


def test_weights_and_optimizer_follow_from_the_parameters(large):
    found = sizes(planned(large, H200, W1))
    billion = 3.7549e9
    assert found["weights"] == pytest.approx(2 * billion / 2**30, rel=1e-3)
    assert found["fp32 masters"] == pytest.approx(4 * billion / 2**30, rel=1e-3)
    assert found["moments"] == pytest.approx(8 * billion / 2**30, rel=1e-3)
    assert found["gradient sums"] == found["fp32 masters"]
    assert "reference" not in found and "weights of the critic" not in found
    assert found["keys and values"] == 128 * 880 * (2 * 36 * 2 * 128 * 2) / 2**30


def test_other_models_and_optimizers_take_their_share(large):
    plain = sizes(planned(large, H200, W1))
    found = sizes(planned(large, H200, W1, "algorithm.kl.coef=0.01"))
    assert found["reference"] == found["weights"]
    away = planned(large, H200, W1, "algorithm.kl.coef=0.01", "train.offload=true")
    assert [item.phase for item in away.memory.items if item.name == "reference"] == ["scoring"]
    assert found["reference"] in [item.gib for item in away.host if item.name == "reference"]
    found = sizes(planned(large, H200, W1, "algorithm.preset=ppo", "algorithm.kl.coef=0"))
    assert found["moments of the critic"] == found["moments"]
    assert found["logits"] > 1  # of the policy; a critic reads none
    found = sizes(planned(large, H200, W1, "train.optimizer=adamw_bf16"))
    assert found["moments and compensation"] == pytest.approx(plain["moments"] * 6 / 8)
    assert "fp32 masters" not in found


def test_main_memory_holds_a_copy_of_what_is_saved(large):
    """3.75e9 weights of 14 bytes, of adapters the merged ones; 2.0 to 2.6 GiB were measured without a checkpoint."""
    found = planned(large, H200, W1)
    host = {item.name: item.gib for item in found.host}
    weights = sizes(found)["weights"]
    assert host["copy of a checkpoint"] == pytest.approx(7 * weights)
    assert host_peak(found.host) == pytest.approx(2.0 + 2.5 + 7 * weights)
    adapted = {i.name: i.gib for i in planned(large, H200, W1, "model.train=lora").host}
    assert weights < adapted["copy of a checkpoint"] < 1.3 * weights
    moved = planned(large, H200, W1, "algorithm.kl.coef=0.01", "algorithm.kl.update=copy")  # is in a checkpoint, too
    assert host_peak(moved.host) - host_peak(found.host) == pytest.approx(sizes(moved)["reference"])
    without = planned(large, H200, W1, "save.background=false").host
    assert host_peak(without) == pytest.approx(2.0 + 2.5 + weights)
    assert planned(large, devices.current_device("cpu"), W1).host == ()


def test_an_average_of_the_weights_is_another_copy_and_one_in_fp32(large):
    """In a checkpoint it is a model folder, too: 8 bytes of each weight, whatever their type."""
    for dtype, times in (("bfloat16", 3), ("float32", 1)):
        plain, found = (
            planned(large, devices.lookup("B200"), W1, f"model.dtype={dtype}", f"train.ema={ema}") for ema in (0, 0.99)
        )
        weights, copies = sizes(plain)["weights"], [host_peak(each.host) for each in (plain, found)]
        assert sizes(found)["average"] == times * weights
        assert copies[1] - copies[0] == pytest.approx((times + 1) * weights)
    tight = planned(large, H200, W1, "train.ema=0.99", "run.gpu_memory_gib=72")
    assert tight.advice[-3:] == ("train.ema=0", "model.train=lora train.ema=0", "run.gpus=2")


def test_left_open_as_many_layers_recompute_as_memory_asks_for(large):
    notes = {}
    for name in ("H200", "H100"):
        found = planned(large, devices.lookup(name), W1)
        assert found.memory.fits
        (note,) = (i.note for i in found.memory.items if i.name == "decoder activations")
        notes[name] = int(re.search(r"(\d+) of 36 layers", note)[1])
    assert notes["H200"] == 0 and 20 < notes["H100"] < 36
    kept, again = (planned(large, H200, W1, f"model.checkpointing={mode}") for mode in ("off", "on"))
    assert sizes(kept)["decoder activations"] > 15 * sizes(again)["decoder activations"]
    assert kept.pace.recomputed == 0 and again.pace.recomputed > 300
    assert again.pace.seconds["update"] > kept.pace.seconds["update"] + 0.5


@pytest.mark.parametrize("train", ["full", "freeze:vision", "lora"])
def test_the_model_is_counted_as_it_will_be_loaded(train, tmp_path):
    folder = tiny.build("qwen2_5_vl", tmp_path / "model")
    family = load_family(folder)
    config = load({"model.path": folder, "model.train": train, "model.lora.rank": 4})
    size = size_of(empty_model(family), family, config.model.lora, element=4, train=train)
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    if train == "lora":
        pytest.importorskip("peft")
        lora.add(model, family, LoraConfig(rank=4), seed=0)
    else:
        freeze(model, family, train)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert size.trained == trained
    assert size.weights == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("updates, seen", [(1, 20), (4, 24), (8, 24), (48, 20)])
def test_forests_are_those_of_each_optimizer_step(updates, seen, word_model):
    """48 groups of 40 + 8 x 16 tokens in forests of at most 800 tokens; as many as fill four of these are enough."""
    config = load({"model.path": word_model, "train.updates_per_step": updates, "train.prompts_per_step": 48})
    algorithm, family = algorithm_of(config), load_family(word_model)
    prompts, _ = typical_prompts(config.data, family, None, prompt_tokens=40, image=None)
    step, every = (
        make_step(config.train.model_copy(update={"micro_tokens": size}), 16, algorithm, prompts)
        for size in (800, 10**6)
    )
    trained = [pack(part, micro_tokens=800) for part in split_updates(every.groups, updates, seed=0)]
    found, real = [batch.tokens for batch in step.batches], [batch.tokens for batch in chain(*trained)]
    assert (len(step.groups), len(every.groups)) == (seen, 48) and step.times == 48 / seen
    assert found == real[: len(found)] and max(found) == max(real)
