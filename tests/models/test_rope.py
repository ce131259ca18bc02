"""Rows of one batch do not change each other, whatever the model's RoPE does with long rows."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from saccade.config import DataSource, load
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.forest.attention import forest_plan
from saccade.models.families import load_family
from saccade.models.load import hidden_states, load_model
from saccade.plugins.families import tiny
from saccade.plugins.preferences import pairs as preferences
from saccade.recipes import questions
from saccade.recipes.to_trajectory import document
from saccade.types import Message, Rendered, Sample, Sampling
from tests.engines.asked import requests

PRETRAINED = 64
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
ORIGINAL = {"original_max_position_embeddings": PRETRAINED}
# rope type → the model, its rope parameters, what else its config says
TYPES = {
    "default": ("llama", {}, {}),
    "linear": ("llama", {"factor": 4.0}, {}),
    "yarn": ("llama", {"factor": 4.0, **ORIGINAL}, {}),
    "llama3": ("llama", {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}, {}),
    "proportional": ("llama", {"partial_rotary_factor": 0.5}, {}),
    "dynamic": ("llama", {"factor": 4.0}, {"max_position_embeddings": PRETRAINED}),
    "longrope": ("phi3", {**FACTORS, **ORIGINAL}, ORIGINAL),
}
BY_LENGTH = ("dynamic", "longrope")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    def made(kind, **changes):
        model_type, rope, more = TYPES[kind]
        tokenizer = tiny.make_tokenizer(None)
        ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
        config = AutoConfig.for_model(
            model_type,
            **{**tiny.TEXT, "vocab_size": len(tokenizer), **ends, **more, **changes},
            rope_parameters={"rope_type": kind, "rope_theta": 1e4, **rope},
        )
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return load_family(str(folder))

    return made


def model_of(family):
    return load_model(family, dtype=torch.float32, device=torch.device("cpu")).eval()


def rows(family, *lengths):
    return [np.random.default_rng(length).choice(np.flatnonzero(~family.banned), length) for length in lengths]


@torch.no_grad()
def last_row(model, family, packed):
    starts = np.cumsum([0, *map(len, packed)])
    positions = np.concatenate([np.arange(len(row)) for row in packed])[None]
    plan = forest_plan(starts, np.full(len(packed), -1), torch.device("cpu"), torch.float32)
    ids = torch.from_numpy(np.concatenate(packed))
    return hidden_states(model, family, ids, torch.from_numpy(positions), (), plan)[starts[-2] :]


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_as_long_as_allowed_does_not_change_the_row_beside_it(kind, decoder):
    assert set(TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
    family = decoder(kind)
    short, long = rows(family, 40, min(family.max_positions, 100))
    model = model_of(family)
    alone = last_row(model, family, [short])
    assert (last_row(model, family, [long, short]) - alone).abs().max() < 1e-5
    [longer] = rows(family, 100)
    gap = (last_row(model, family, [longer, short]) - alone).abs().max()
    assert gap > 0.1 if kind in BY_LENGTH else gap < 1e-5


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_the_engine_stops_at_the_length_up_to_which_answers_do_not_depend_on_others(kind, decoder):
    family = decoder(kind)
    assert family.max_positions == PRETRAINED
    engine = EmbeddedEngine(model_of(family), family)
    prompts = [
        Rendered(ids=row, sources=np.zeros(len(row), dtype=np.int8), media=()) for row in rows(family, 40, 60, 20)
    ]
    sampling = Sampling(temperature=0.0, max_tokens=4)
    together = generate(engine, requests(prompts, sampling))
    for prompt, completion in zip(prompts, together, strict=True):
        [alone] = generate(engine, requests([prompt], sampling))
        assert alone.ids.tolist() == completion.ids.tolist()
    with pytest.raises(ConfigError, match="64"):
        generate(engine, requests(prompts[1:2], Sampling(max_tokens=5)))


def test_no_training_reads_longer_rows(decoder, tmp_path):
    """Whatever its own limit says: conversations, pairs and pieces of documents."""
    family = decoder("dynamic")
    rows = [
        {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}]} for n in (1, 60)
    ]
    pairs = [{"prompt": "a" * n, "chosen": "b", "rejected": "c"} for n in (1, 60)]
    for name, listed in {"rows": rows, "pairs": pairs}.items():
        text = "".join(json.dumps(row) + "\n" for row in listed)
        (tmp_path / f"{name}.jsonl").write_text(text)
    plain = {"run.out": str(tmp_path), "prompt.instruction": "", "prompt.format": "direct"}
    config = load(plain | {"sft.max_tokens": 4096, "dpo.max_tokens": 4096})
    pairs_of = partial(preferences.load_pairs, paired=True)
    for name, read in {"rows": questions.load_dialogues, "pairs": pairs_of}.items():
        data = read(config, [DataSource(path=str(tmp_path / f"{name}.jsonl"))], family)
        assert len(data.samples) == 1
        assert data.overlong[0].reason.endswith("tokens, the model's own limit of length is 64")
    message = Message(role="user", parts=("a" * 200,))
    group = document(Sample(id="d", messages=(message,)), family, max_tokens=4096)
    assert max(len(t.ids) for t in group.trajectories) == PRETRAINED
