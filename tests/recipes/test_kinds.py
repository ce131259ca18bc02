"""Models without a family of their own in every kind of training: a critic, a reward model, adapters, frozen towers."""

import json

import pytest

from saccade.config import load
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.estimate import estimate
from saccade.plugins.families import tiny_kinds
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.plugins.reward_models import reward_training
from saccade.recipes import rl
from saccade.system import devices


@pytest.fixture(scope="module", params=["smolvlm", "gemma3"])
def config(request, tmp_path_factory, rl_config):
    """Two small steps of a tiny model."""
    folder = tiny_kinds.build(request.param, tmp_path_factory.mktemp(request.param), words=WORDS)
    return lambda out, **more: rl_config(out, **{"model__path": folder, "run__max_steps": 2} | more)


def last(out):
    return out / "run" / "checkpoints" / "step-2"


def test_a_critic_learns_beside_a_policy_with_a_frozen_tower(config, tmp_path, tensors, numbers):
    options = config(tmp_path, model__train="freeze:vision", algorithm__preset=["ppo"])
    rl.run(options)
    start, found = tensors(options["model.path"]), tensors(last(tmp_path))
    moved = {name for name, tensor in found.items() if (tensor != start[name]).any()}
    assert moved and not any("vision" in name for name in moved)
    assert any("projector" in name or "connector" in name for name in moved)
    assert (last(tmp_path) / "state" / "critic" / "weights.safetensors").is_file()
    for row in numbers(tmp_path / "run"):
        assert row["critic/loss"] > 0 and row["mismatch/logp_gap_max"] < 1e-5 and row["flops/values"] > 0


@pytest.mark.parametrize(
    ("config", "train"), [("smolvlm", "lora"), ("smolvlm", "qlora"), ("gemma3", "lora")], indirect=["config"]
)
def test_adapters_in_the_decoder_learn_and_are_merged(train, config, tmp_path, tensors, numbers):
    pytest.importorskip("bitsandbytes" if train == "qlora" else "peft")
    options = config(tmp_path, model__train=train, algorithm__kl={"coef": 0.05}, train__samples_per_prompt=8)
    rl.run(options)
    start, found, adapters = (tensors(f) for f in (options["model.path"], last(tmp_path), last(tmp_path) / "adapter"))
    assert found.keys() == start.keys() and adapters and not any("vision" in name for name in adapters)
    moved = {name.partition("layers.")[2] for name, tensor in found.items() if (tensor != start[name]).any()}
    assert moved == {f"{name.partition('layers.')[2].rpartition('.lora_')[0]}.weight" for name in adapters}
    rows = numbers(tmp_path / "run")
    assert rows[-1]["policy/kl_ref"] > 1e-4 and all(row["mismatch/logp_gap_max"] < 1e-5 for row in rows)


def test_a_reward_model_learns_and_scores_rollouts(config, tmp_path, scenes, numbers):
    rows = [json.loads(line) for line in (scenes / "train.jsonl").read_text().splitlines()]
    pairs = scenes / "kinds.jsonl"
    pairs.write_text("".join(json.dumps(row | {"chosen": row["answer"], "rejected": "none"}) + "\n" for row in rows))
    options = config(tmp_path, data__train=str(pairs), run__name="rm")
    reward_training.run({name: options[name] for name in options if not name.startswith(("rollout", "reward"))})
    losses = [row["rm/loss"] for row in numbers(tmp_path / "rm")]
    assert losses[-1] < losses[0]
    learned = {"verifier": "model", "args": {"path": str(tmp_path / "rm" / "checkpoints" / "step-2")}}
    rl.run(config(tmp_path, run__max_steps=1, reward__terms=[learned]))
    assert numbers(tmp_path / "run")[-1]["reward/model"] != 0


def test_memory_and_seconds_come_from_modules_without_weights(config, tmp_path, tensors):
    options = config(tmp_path) | {"model.lora.rank": 2}
    whole, adapted = (
        estimate(load(options | {"model.train": train}), devices.lookup("H200"), prompt_tokens=99, image=(112, 112))
        for train in ("full", "lora")
    )
    (weights,) = (item.gib for item in whole.memory.items if item.name == "weights")
    assert weights * 2**30 / 2 == sum(tensor.numel() for tensor in tensors(options["model.path"]).values())
    assert whole.memory.fits and whole.pace.seconds["update"] > 0
    assert whole.pace.tflop["update"] > adapted.pace.tflop["update"] > 0


@pytest.mark.parametrize("config", ["smolvlm"], indirect=True)
def test_an_estimate_of_another_family_names_both(config, tmp_path):
    other = load(config(tmp_path) | {"model.family": "qwen2_5_vl"})
    said = r"model.family=qwen2_5_vl, but the folder holds a model of type 'smolvlm' .*leave model.family out"
    with pytest.raises(EnvironmentProblem, match=said):
        estimate(other, devices.lookup("H200"), prompt_tokens=99, image=(112, 112))


def test_a_family_that_is_not_known_is_refused(rl_config, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no family nonsense; use one of qwen2_vl, .*, generic"):
        rl.run(rl_config(tmp_path, model__family="nonsense"))
