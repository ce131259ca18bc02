"""Memory of each GPU, seconds and efficiency where several share a run."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.errors import ConfigError
from saccade.plugins.estimate import estimate
from saccade.plugins.estimate.estimate_command import preflight, refusal, short_of_memory
from saccade.plugins.estimate.layout_choice import choose_layout
from saccade.plugins.ranks.layouts import REACHED, Sizes, candidates, collective_seconds, exchange_seconds
from saccade.system import devices
from saccade.types import Message, Sample
from tests.estimate.works import H200, W1, loaded, planned, sizes

SAMPLE = Sample(id="0", messages=(Message(role="user", parts=("how many",)),))
TIGHT = devices.Device(name="tight", memory=50.0)
WHOLE_OR_SHARDED = ("train.layout=whole", "train.layout=sharded")


def test_optimizer_state_and_prompts_are_divided(large):
    one = planned(large, H200, W1)
    eight = planned(large, H200, W1, "run.gpus=8", "train.prompts_per_step=128")
    whole, rank = sizes(one), sizes(eight)
    divided = {"fp32 masters", "moments"}
    assert rank == {name: gib / 8 if name in divided else gib for name, gib in whole.items()}
    assert eight.memory.peaks["update"] == pytest.approx(67, rel=0.05)  # one rank of 8, measured without the others
    saved = {item.name: item.gib for item in eight.host}["copy of a checkpoint"]
    assert saved == pytest.approx({item.name: item.gib for item in one.host}["copy of a checkpoint"])
    uneven = planned(large, H200, W1, "run.gpus=8", "train.prompts_per_step=121")
    assert uneven.memory == eight.memory


def test_the_exchange_and_the_controller_cost_efficiency(large):
    one = planned(large, H200, W1).pace.seconds
    eight = planned(large, H200, W1, "run.gpus=8", "train.prompts_per_step=128")
    seconds = eight.pace.seconds
    assert seconds["rollout"] == one["rollout"] and 0.95 < seconds["update"] / one["update"] < 1
    assert seconds["exchange"] == pytest.approx(6 * 3.75e9 * 7 / 8 / (REACHED * 450e9), rel=0.01)
    assert 0.9 < eight.efficiency["prompts per GPU"] < 1
    assert 0.5 < eight.efficiency["prompts per step"] < eight.efficiency["prompts per GPU"]
    assert collective_seconds(16e9, (450.0, 400.0), gpus=16) == pytest.approx(15 / (REACHED * 400))
    second = 8 / 7 * REACHED * 450e9  # bytes of a collective of 8 GPUs
    sent = Sizes(sums=4 * second, trained=2 * second, divided=2 * second, copied=2 * second)
    counts: Any = {"sizes": sent, "updates": 2, "forests": 8, "layers": 36}
    exchange = partial(exchange_seconds, links=(450.0, 400.0), **counts)
    assert exchange("whole", gpus=8, compute=0.0) == pytest.approx(2 * (4 + 2))
    sharded, hidden = (exchange("sharded", gpus=8, compute=seconds) for seconds in (40.0, 99.0))
    assert (sharded, hidden) == pytest.approx((2 + 8 * (4 + 2 * 2) - 40, 2 + 8 * 36 * 2.5e-3))
    assert exchange("hybrid", gpus=16, compute=40.0) - sharded == pytest.approx(6 * second / (REACHED * 400e9))
    assert planned(large, H200, W1).efficiency == {}
    slow, shards = replace(H200, link=1.0), ("run.gpus=8", "train.prompts_per_step=128", "train.layout=sharded")
    for more, copied in (
        ((), 0),
        (("train.offload=true",), 1),
    ):  # frozen weights: gathered twice for each of 16/3 forests
        found = planned(large, slow, W1, *shards, "model.train=lora", "model.lora.rank=1", *more).pace.seconds
        gathered = (2 * 16 / 3 + copied) * collective_seconds(2 * 3.75e9, (1.0, 1.0), gpus=8)
        assert found["exchange"] + found["update"] == pytest.approx(gathered, rel=0.02)
    idle = planned(large, H200, W1, "run.gpus=64")
    assert idle.notes == ("train.prompts_per_step=16 leaves 48 of 64 GPUs idle",)


def test_the_smallest_number_of_gpus_that_is_enough_is_advised_and_starts(shaped, large):
    found = planned(shaped("7b"), H200, W1)
    assert found.advice[-1] == "run.gpus=2"
    two = planned(shaped("7b"), H200, W1, "run.gpus=2")
    assert two.memory.fits and set(two.efficiency) == {"prompts per GPU"}  # one alone has no room
    engines = "rollout.replicas=8 run.gpus=32 rollout.engine=vllm rollout.tensor_parallel=4"  # or a copy on each GPU
    assert planned(shaped("72b"), H200, W1, "run.gpus=64").advice[0] == engines
    assert planned(shaped("72b"), H200, W1, *engines.split()).memory.fits
    eight = planned(shaped("7b"), H200, W1, "run.gpus=8", "train.prompts_per_step=128")
    assert eight.memory.peaks["update"] == pytest.approx(111, rel=0.1)  # as above
    config, device = load({"model.path": large, "algorithm.kl.coef": 0.0}), devices.Device(name="GPU", memory=45.0)
    with pytest.raises(ConfigError, match=r"run\.gpus=4"):
        preflight(config, loaded(large), [SAMPLE], device=device)
    assert preflight(load(config, ["run.gpus=4"]), loaded(large), [SAMPLE], device=device) == []


def test_a_sharded_model_is_divided_but_for_its_towers_and_the_copy_that_generates(shaped):
    options = ("run.gpus=8", "train.prompts_per_step=128")
    whole, found = (planned(shaped("7b"), H200, W1, *options, *more) for more in ((), ("train.layout=sharded",)))
    before, after = sizes(whole), sizes(found)
    towers = 0.68 / 8.29
    for name in ("weights", "gradient sums"):
        assert after[name] / before[name] == pytest.approx(towers + (1 - towers) / 8, rel=0.02)
    assert after["moments"] == before["moments"] and after["copy for generation"] == before["weights"]
    assert found.pace.seconds["exchange"] > 28 * 5 * 2.5e-3
    away = planned(shaped("7b"), H200, W1, *options, "train.layout=sharded", "train.offload=true")
    assert sizes(away)["copy for generation"] == before["weights"]
    for one, phase in ((found, "always"), (away, "rollout")):  # given back in the update
        assert [item.phase for item in one.memory.items if item.name == "copy for generation"] == [phase]
    two = ("run.gpus=16", "train.prompts_per_step=256", "train.layout=hybrid")
    hybrid = sizes(planned(shaped("7b"), H200, W1, *two))
    assert all(hybrid[name] == pytest.approx(after[name]) for name in ("weights", "gradient sums"))
    assert hybrid["moments"] == pytest.approx(after["moments"] / 2)
    tight = planned(shaped("7b"), TIGHT, W1, *options, "model.checkpointing=on", "train.layout=whole")
    assert "train.layout=sharded" in tight.advice


def test_a_run_makes_only_the_copies_that_the_estimate_counts(shaped, tmp_path):
    """Replicas have weights of their own, and so has a policy of 4 bits; rows need no answers. A teacher and reward
    models are divided as the student is.
    """
    shards = ("run.gpus=8", "train.prompts_per_step=128", "train.layout=sharded")
    alone, beside = (planned(shaped("7b"), H200, W1, *shards, *more) for more in ((), ("rollout.replicas=8",)))
    assert "copy for generation" in sizes(alone) and "copy for generation" not in sizes(beside)
    always = [sum(item.gib for item in found.memory.items if item.phase == "always") for found in (alone, beside)]
    assert always[0] - always[1] == pytest.approx(sizes(alone)["copy for generation"])
    given = {"model.path": shaped("7b"), "run.gpus": 8, "model.checkpointing": "on", "data.max_prompt_tokens": 400}
    family, val = loaded(shaped("7b")), f"data.val={tmp_path / 'rows.jsonl'}"

    def items(*options: str, device: devices.Device = TIGHT, command: str = "sft") -> Any:
        found = estimate(load(given, [*options], command), device, command=command, family=family)
        return found, sizes(found)

    rows = "sft.max_tokens=512", "dpo.max_tokens=512"
    row, pair = (items(text, device=H200, command=name)[0] for name, text in zip(("sft", "dpo"), rows, strict=True))
    assert row.prompts == pair.prompts == "256 tokens, an image of 410x410 (of rows of 512)"
    tokens = pair.pace.tflop["update"] / row.pace.tflop["update"]  # a pair shares its prompt: 768 instead of 512
    assert tokens == pytest.approx(1.5, rel=0.1) and {*pair.pace.seconds} == {"update", "exchange", "controller"}
    assert not {"copy for generation", "keys and values"} & items("train.layout=sharded")[1].keys()
    assert {"copy for generation", "keys and values"} <= items("train.layout=sharded", val)[1].keys()
    assert "copy for generation" not in items("train.layout=sharded", val, "rollout.replicas=1")[1]
    save_file({"w": torch.zeros(3 * 2**10)}, teacher := tmp_path / "model.safetensors")
    given_teacher = f"sft.teacher={teacher.parent}"
    found, parts = items(given_teacher, "train.layout=whole")
    assert parts["teacher"] == 3 * 2**11 / 2**30 and not found.memory.fits and "train.layout=sharded" in found.advice
    divided, parts = items(given_teacher)
    towers = 8 * parts["teacher"] * 2**30 / (3 * 2**11) - 1  # share of the weights that stays whole, times 7
    assert divided.layout == "sharded" and divided.memory.fits and 0 < towers / 7 < 0.1
    rated = f"reward.terms=[{{verifier: model, name: rm, args: {{path: {teacher.parent}}}}}]"
    rewards = sizes(planned(shaped("7b"), H200, W1, *shards, rated))["reward models"] * 2**30
    assert rewards == pytest.approx((1 + towers) / 8 * teacher.stat().st_size)
    packed = ("model.train=qlora", "algorithm.preset=[ppo]")
    whole, sharded = (sizes(planned(shaped("7b"), H200, W1, *shards, *packed, layout)) for layout in WHOLE_OR_SHARDED)
    assert whole["weights"] == sharded["weights"] and "copy for generation" not in sharded
    assert sharded["weights of the critic"] < whole["weights of the critic"] / 4
    assert refusal(replace(found, advice=("rollout.max_tokens=256",)), "sft").endswith("; try sft.max_tokens=256")
    assert items()[0].layout == "sharded"


def test_gpus_that_share_a_forest_divide_its_activations(large):
    """A prompt with two responses of 32 thousand tokens; 16 heads, 2 of keys, of 128 numbers, in 36 layers."""
    options = ("run.gpus=8", "train.prompts_per_step=8", "train.samples_per_prompt=2", "model.checkpointing=on")
    options += ("train.layout=whole",)
    work = (448, 374, 32_000)
    one, four, eight = (planned(large, H200, work, *options, f"train.sequence_parallel={n}") for n in (1, 4, 8))
    before, after = sizes(one), sizes(four)
    assert after["decoder activations"] == pytest.approx(before["decoder activations"] / 4, rel=0.01)
    assert after["moments"] == before["moments"] and four.memory.peaks["update"] < one.memory.peaks["update"] - 5
    assert four.pace.tflop["update"] == pytest.approx(one.pace.tflop["update"], rel=0.01)
    assert four.pace.seconds["rollout"] == pytest.approx(one.pace.seconds["rollout"])
    more = [found.pace.seconds["exchange"] - one.pace.seconds["exchange"] for found in (four, eight)]
    heads = 3 * 2 * 32_374 * 36 * 128 * 2  # bytes of one: forward, backward, and the forward that is computed again
    assert more[0] == pytest.approx(heads * 2 * (16 + 4) * 3 / 4 / (REACHED * 450e9), rel=0.01)  # keys are repeated
    assert more[1] == pytest.approx(heads * 2 * (16 + 8) * 7 / 8 / (REACHED * 450e9), rel=0.01)
    tight = devices.Device(name="tight", memory=one.memory.peaks["update"] - 1)
    assert "train.sequence_parallel=2" in planned(large, tight, work, *options).advice
    with pytest.raises(ConfigError, match=r"3 does not divide 16 heads of attention of .*; try 1 or 2 or 4 or 8"):
        planned(large, H200, work, *options, "train.sequence_parallel=3")


def test_a_layout_that_is_left_open_is_whole_where_that_fits(shaped, monkeypatch):
    options = ("run.gpus=8", "train.prompts_per_step=128", "model.checkpointing=on")
    roomy, tight = (planned(shaped("7b"), device, W1, *options) for device in (H200, TIGHT))
    assert (roomy.layout, tight.layout) == ("whole", "sharded") and tight.memory.fits
    assert roomy.memory == planned(shaped("7b"), H200, W1, *options, "train.layout=whole").memory
    assert tight.memory == planned(shaped("7b"), TIGHT, W1, *options, "train.layout=sharded").memory
    needed = max(roomy.memory.peaks.values())
    assert roomy.reason == f"a GPU needs {needed:.1f} GiB, and {roomy.memory.limit:.1f} can be planned with"
    assert tight.reason == f"whole, a GPU would need {needed:.1f} GiB, and {tight.memory.limit:.1f} can be planned with"
    assert planned(shaped("7b"), H200, W1).reason == ""
    several = planned(shaped("7b"), TIGHT, W1, *options, "run.gpus=16", "train.prompts_per_step=256")
    assert several.layout == "hybrid" and several.memory.fits  # nothing is known of seconds there
    for network, faster in ((400.0, "sharded"), (10.0, "hybrid")):
        small = replace(H200, memory=50.0, network=network)
        found = planned(shaped("7b"), small, W1, *options, "run.gpus=16", "train.prompts_per_step=256")
        assert found.layout == faster and re.search(r"; a step takes hybrid [\d.]+ s, sharded [\d.]+ s$", found.reason)
    assert candidates("auto", gpus=12, cuda=True)[0] == ("whole", "sharded")
    given = {"model.path": str(shaped("7b")), "run.gpus": 8, "model.checkpointing": "on", "data.max_prompt_tokens": 400}
    for command in ("rl", "reward-model"):  # sft and dpo: above
        config = load(given | {"algorithm.kl.coef": 0.0}, command=command)
        found = []
        for device in (H200, devices.Device(name="CPU", memory=64.0), TIGHT):
            for name in ("current_device", "device_with_free_memory"):
                monkeypatch.setattr(devices, name, lambda wanted, device=device: device)
            found.append(choose_layout(config, command, loaded(str(shaped("7b")))))
        assert [layout for layout, _ in found] == ["whole", "whole", "sharded"], command
        assert found[1][1] == "this machine has no GPU" and found[2][1].startswith("whole, a GPU would need")
    # Others hold memory now, as the processes of a run that has just died do: the layout stays, and does not fit.
    monkeypatch.setattr(devices, "current_device", lambda wanted: H200)
    config, family = load(given | {"algorithm.kl.coef": 0.0}), loaded(str(shaped("7b")))
    assert choose_layout(config, "rl", family)[0] == "whole"
    with pytest.raises(ConfigError, match=r"on each of 8 tight .* try .*, or train\.layout=sharded"):
        preflight(config, family, [SAMPLE])
    assert choose_layout(load(given, ["train.layout=sharded"]), "rl", loaded(str(shaped("7b"))))[0] == "sharded"


def test_state_in_main_memory_makes_room_on_the_gpu_and_takes_seconds(shaped, monkeypatch):
    on, off = (f"train.offload={value}" for value in ("true", "false"))
    beside, away = (planned(shaped("7b"), H200, W1, "model.checkpointing=on", value) for value in (off, on))
    assert "train.offload=true" in beside.advice and away.memory.fits and not beside.memory.fits
    weights = sizes(away)["weights"] * 2**30 / 2
    assert sizes(beside).keys() - sizes(away).keys() == {"fp32 masters", "moments"}
    host, before = ({item.name: item.gib for item in found.host} for found in (away, beside))
    assert host.pop("state of the optimizer") == pytest.approx(12 * weights / 2**30) and host == before
    assert away.pace.seconds["offload"] == pytest.approx(12 * weights / 55e9, rel=0.01)
    shared = planned(shaped("7b"), H200, W1, "train.offload=true", "run.gpus=8", "train.prompts_per_step=128")
    assert shared.pace.seconds["offload"] == pytest.approx(away.pace.seconds["offload"] / 8)
    assert {item.name: item.gib for item in shared.host}["state of the optimizer"] == pytest.approx(
        12 * weights / 2**30
    )
    config = load({"model.path": str(shaped("7b")), "algorithm.kl.coef": 0.0, "train.offload": True})
    for free, refused in ((90, True), (110, False)):
        monkeypatch.setattr(devices, "free_host_bytes", lambda free=free: free * 2**30)
        text = short_of_memory(config, away) or ""
        assert ("(state of the optimizer 92.7), and 90.0 are free; try train.optimizer=adamw_bf16" in text) == refused
        if refused:
            with pytest.raises(ConfigError, match=r"train\.offload: .* run\.overcommit=true"):
                preflight(config, loaded(str(shaped("7b"))), [SAMPLE], device=H200)
        else:
            assert preflight(config, loaded(str(shaped("7b"))), [SAMPLE], device=H200) == []


def test_a_dry_run_shows_layout_memory_exchange_and_efficiency(large, scenes, monkeypatch):
    rows, more = f"data.train={scenes / 'train.jsonl'}", ["run.gpus=8", "--dry-run"]
    given = [f"model.path={large}", rows, "algorithm.kl.coef=0", "rollout.max_tokens=512", "reward.terms=[exact]"]

    def shown(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "`saccade estimate --device H200` shows layout" in shown("rl", *given)
    monkeypatch.setattr(devices, "current_device", lambda wanted: H200)
    found = shown("rl", *given)
    for text in (r"each of 8 H200, prompts", r"train\.layout=whole: a GPU needs", r"\d+ GiB in the update, of"):
        assert re.search(text, found), text
    assert re.search(
        r"of these seconds 0\.\d\d in the exchange .* speed of a GPU: \d\d% with as many prompts per GPU", found
    )
    tight = shown("sft", *given[:2], "run.gpu_memory_gib=30")
    assert re.search(r"train\.layout=sharded: whole, a GPU would need .*\na step of `saccade sft` takes", tight)
    assert re.search(r"about [\d.]+ seconds with rows .*\nof these seconds 0\.\d\d in the exchange", tight)
    assert "does not fit" not in tight
    tight = shown("sft", *given[:2], "run.gpu_memory_gib=12")
    assert re.search(r"\ndoes not fit: the update needs .* try model\.train=lora\n", tight)


def test_the_command_shows_several_gpus(large):
    options = ["--prompt-tokens", "374", "--image", "448x448", "--device", "H200", "run.gpus=8", "algorithm.kl.coef=0"]

    def invoked(*more: str) -> Any:
        result = CliRunner().invoke(app, ["estimate", f"model.path={large}", *options, *more])
        assert result.exit_code == 0, result.output
        return result

    result = invoked()
    two = "run.gpus=16", "--json"  # machines, with one adapter each instead of eight
    exchange = [
        json.loads(invoked(*two, *more).stdout)["pace"]["seconds"]["exchange"] for more in ([], ["--network", "400"])
    ]
    assert exchange[1] == pytest.approx(8 * exchange[0])
    assert "exchange" in result.output and "controller" in result.output
    for text in ("each of 8 H200, prompts", "as many prompts per GPU; a prediction", "train.layout=whole: a GPU"):
        assert text in result.output
