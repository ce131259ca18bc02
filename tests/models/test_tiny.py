"""Tiny models: folders that stock transformers reads, the same ones from the same seed."""

import pytest
import torch

from saccade.errors import ConfigError
from saccade.models.families import FAMILIES, load_family
from saccade.plugins.families import tiny_kinds
from saccade.plugins.families.tiny import CONFIGS, build


def test_every_family_has_a_tiny_model(stock):
    assert set(CONFIGS) == {*FAMILIES, "internvl", "llava"}  # two with files as in published folders
    for name in CONFIGS:
        count = sum(p.numel() for p in stock(name).parameters())
        assert 50_000 < count < 500_000, name


def test_a_seed_gives_the_same_weights_and_leaves_the_random_state_alone(tmp_path):
    state = torch.random.get_rng_state()
    folders = [build("qwen3", tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(3)]
    assert weights[0] == weights[1] != weights[2] and len(set(folders)) == 3


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl", "llava"])
def test_a_closed_vocabulary_has_one_token_per_word(tmp_path, name):
    words = ["how", "many", "three", "<answer>", "</answer>", "?"]
    family = load_family(build(name, tmp_path, words=words))
    ids = family.chat.tokenizer.encode("how many? <answer>three</answer>", add_special_tokens=False)
    assert [family.chat.tokenizer.decode([i]) for i in ids] == [
        "how", "many", "?", "<answer>", "three", "</answer>"
    ]  # fmt: skip
    assert family.decode(ids) == "how many ? <answer> three </answer>"


def test_what_cannot_be_built_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="use qwen3"):
        build("qwen2", tmp_path, words=["how"])  # a closed vocabulary would not survive
    with pytest.raises(ConfigError, match=r"expected one of qwen2_vl.*, gemma3,"):
        tiny_kinds.build("gpt5", tmp_path)


def test_phrases_are_single_tokens_and_decode_to_their_text(tmp_path):
    phrases = ["<think>", "Not here.", '<grounding>{"bbox_2d": ', "[0.25, 0, 0.5, 0.25]", "[0.25, 0"]
    family = load_family(build("qwen2_5_vl", tmp_path, phrases=phrases))
    text = '<think>Not here.<grounding>{"bbox_2d": [0.25, 0, 0.5, 0.25] é'
    ids = family.chat.tokenizer.encode(text)
    assert len(ids) == 4 + len(" é".encode()) and family.decode(ids) == text
