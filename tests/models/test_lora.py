"""Adapters: where they sit, what they leave alone, what transformers and peft make of them."""

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from saccade.config import LoraConfig, TrainConfig
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.load import load_model
from saccade.system.contents import write_files
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.reference import AdapterReference
from tests.models.against import CPU, ask, ours, theirs

peft = pytest.importorskip("peft")

VISION, TEXT = "qwen2_5_vl", "qwen3"
LLM, TOWER = "model.language_model.", "model.visual."
PROJECTOR = TOWER + "merger."
# Of log-probs in fp32, when W x + B (A x) becomes (W + B A) x: about 1e-5 with adapters this large.
ROUNDING = 1e-4


@pytest.fixture
def adapted(family_of, load):
    """A fresh tiny model with adapters; `moved` ones are no longer zero."""

    def made(name, *, moved=False, dtype="float32", **options):
        model = load(name, dtype)
        lora.add(model, family_of(name), LoraConfig(**({"rank": 4} | options)), seed=0)
        if moved:
            move(model)
        return model

    return made


def move(model):
    generator = torch.Generator().manual_seed(1)
    for parameter in lora.adapters(model).values():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.2 * noise.to(parameter.dtype)


@pytest.fixture(scope="session")
def forests(family_of, grow):
    def packed(name):
        family = family_of(name)
        images = int(family.spec.image_token is not None)
        group = grow(np.random.default_rng(0), family, images=images)
        return pack([group], micro_tokens=9999)

    return packed


def scores(model, family, batches):
    backend = LocalTrainer(model, family)
    return np.concatenate([new for new, _ in backend.logprobs(batches, Scoring())])


def targets(model):
    return {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}


def test_targets_are_named_by_tower_prefix_or_pattern(load, adapted):
    linear = {n for n, m in load(VISION).named_modules() if isinstance(m, nn.Linear)}
    llm = {name for name in linear if name.startswith(LLM)}
    tower = {name for name in linear if name.startswith(TOWER)}
    projector = {name for name in tower if name.startswith(PROJECTOR)}
    assert linear == llm | tower | {"lm_head"} and len(llm) == 14
    cases = [
        ({}, llm),
        ({"targets": f"{LLM}layers.0."}, {name for name in llm if ".layers.0." in name}),
        ({"targets": r"re:\.self_attn\."}, {name for name in llm if ".self_attn." in name}),
        ({"vision": True, "exclude": "projector"}, llm | tower - projector),
    ]
    for options, wanted in cases:
        assert targets(adapted(VISION, **options)) == wanted, options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (VISION, {"targets": "q_proj"}, r"targets: 'q_proj' matches no linear.*tower.*re:REGEX"),
        (VISION, {"targets": "llm,"}, "targets: '' matches no linear layer"),
        (VISION, {"targets": "re:self_attn.(q"}, r"targets: 're:self_attn.\(q' is no regular expression"),
        (VISION, {"exclude": "llm"}, "exclude=llm leaves no layer to adapt"),
        (TEXT, {"vision": True}, "vision: a qwen3 has no vision tower"),
    ],
)
def test_what_matches_nothing_is_refused(adapted, name, options, message):
    with pytest.raises(ConfigError, match=f"model.lora.{message}"):
        adapted(name, **options)


@pytest.mark.parametrize(("package", "extra"), [("peft", "lora"), ("bitsandbytes", "qlora")])
def test_a_missing_package_comes_with_its_install_line(monkeypatch, adapted, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(lora, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(EnvironmentProblem, match=rf"{package}.*pip install .*\[{extra}\]"):
        lora.require(package, extra)


def test_a_fresh_or_silent_adapter_is_the_base_model(adapted, load, family_of, forests, name=VISION):
    family, batches = family_of(name), forests(name)
    base = scores(load(name), family, batches)
    model = adapted(name)
    assert (scores(model, family, batches) == base).all()
    move(model)
    assert np.abs(scores(model, family, batches) - base).max() > 0.01
    with pytest.raises(RuntimeError), lora.without_adapters(model):
        assert (scores(model, family, batches) == base).all()
        raise RuntimeError  # after which it is on again
    assert np.abs(scores(model, family, batches) - base).max() > 0.01


def test_a_reference_is_the_policy_without_adapters_or_with_older_ones(adapted, load, family_of, forests, tmp_path):
    family, batches = family_of(VISION), forests(VISION)
    policy = LocalTrainer(adapted(VISION), family, TrainConfig())
    reference = AdapterReference(policy)

    def read(who):
        return np.concatenate([new for new, _ in who.logprobs(batches, Scoring())])

    base = scores(load(VISION), family, batches)
    move(policy.model)
    now = read(policy)
    assert (read(reference) == base).all() and (read(policy) == now).all()
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == policy.optimizer.parameters.keys()
    reference.blend(policy.weights(), 1.0)
    move(policy.model)
    later = read(policy)
    assert (read(reference) == now).all() and (read(policy) == later).all()
    assert np.abs(later - now).max() > 0.01
    write_files(tmp_path, reference.state_files())
    resumed = AdapterReference(policy)
    resumed.load_state(tmp_path)
    assert (read(resumed) == now).all()


def test_stock_transformers_and_peft_load_what_is_written(adapted, family_of, stock, tensors, tmp_path, image):
    """Greedy tokens of the merged folder, of base + adapter through peft, and of the model."""
    family = family_of(VISION)
    model = adapted(VISION, moved=True, vision=True)
    write_files(tmp_path, lora.files(model))
    assert tensors(tmp_path).keys() == tensors(family.path).keys()
    written = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}
    assert not list(tmp_path.glob("adapter_*"))
    prompt = family.render(ask(image(84, 56, 0), "how many?"))
    auto = getattr(transformers, family.spec.auto_class)
    merged, info = auto.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    through_peft = peft.PeftModel.from_pretrained(
        auto.from_pretrained(family.path, dtype=torch.float32), str(tmp_path / "adapter")
    )
    (mine,) = ours(model, family, [prompt], 12)
    assert [theirs(other, family, [prompt], 12) for other in (merged, through_peft)] == [[mine]] * 2
    assert theirs(stock(VISION), family, [prompt], 12) != [mine]


def test_a_stored_adapter_comes_back_and_must_fit(adapted, load, family_of, tmp_path):
    model = adapted(TEXT, moved=True)
    write_files(tmp_path, lora.files(model))
    settings = {"seed": 5, "stored": tmp_path / "adapter"}
    again = load(TEXT)
    lora.add(again, family_of(TEXT), LoraConfig(rank=4), **settings)
    one, other = lora.adapters(model), lora.adapters(again)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(EnvironmentProblem, match=r"not those of this model.*model\.lora\.rank"):
        lora.add(load(TEXT), family_of(TEXT), LoraConfig(rank=2), **settings)
    with pytest.raises(ConfigError, match="holds no adapter to continue from"):
        lora.add(load(TEXT), family_of(TEXT), LoraConfig(), seed=0, stored=tmp_path / "state")


def test_over_four_bit_weights(family_of, forests, stock, tmp_path, name=VISION):
    """Only the language model is packed; what is written are whole weights, with the outputs of the packed ones."""
    pytest.importorskip("bitsandbytes")
    family, batches = family_of(name), forests(name)
    options = lora.four_bit_options(family, torch.float32, CPU)
    model = load_model(family, dtype=torch.float32, device=CPU, options=options)
    packed = {n for n, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(packed) == 14 and {family.tower_of(name) for name in packed} == {"llm"}
    lora.add(model, family, LoraConfig(rank=4, exclude=r"re:\.mlp\."), seed=0)
    assert len(targets(model)) == 8
    base = scores(load_model(family, dtype=torch.float32, device=CPU), family, batches)
    fresh = scores(model, family, batches)
    assert 1e-4 < np.abs(fresh - base).max() < 1  # nf4 rounds, and is still the same model
    move(model)
    assert np.abs(scores(model, family, batches) - fresh).max() > 0.01
    write_files(tmp_path, lora.files(model))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    written = load_model(replace(family, path=str(tmp_path)), dtype=torch.float32, device=CPU)
    gap = scores(written, family, batches) - scores(model, family, batches)
    assert np.abs(gap).max() < ROUNDING
    assert sum(t.numel() for _, t in lora.merged(model)) == stock(name).num_parameters()
