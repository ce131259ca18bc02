"""Decoders of other kinds against transformers."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from saccade.config import TrainConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache
from saccade.engines.embedded.kv_cache import cache_shape, why_no_kernels
from saccade.errors import EnvironmentProblem
from saccade.forest.packing import pack
from saccade.models.heads import find_logit_changes, language_head
from saccade.models.load import load_model
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.types import Message
from tests.engines.asked import requests, trajectories, turn
from tests.engines.decoders import KINDS, asked, build
from tests.models.against import ask
from tests.models.against import theirs as stocks

CPU = torch.device("cpu")
PAGED = ("cohere2", "deepseek_v3", "llama4_text", "gemma4_text", "qwen3_5_text", "qwen3_next", "lfm2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(family, our model, transformers' own) of a kind."""

    @cache
    def loaded(kind):
        family, stock = build(kind, tmp_path_factory.mktemp(kind))
        return family, load_model(family, dtype=torch.float32, device=CPU), stock

    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_forest_is_rows_of_transformers(kind, made):
    """Log-probs of answers, and gradients of all weights, of a forest of two prompts with two answers each."""
    family, model, stock = made(kind)
    requests = asked(family)
    answers = generate(EmbeddedEngine(model, family), requests)
    groups = [trajectories(requests[i : i + 2], answers[i : i + 2]) for i in (0, 2)]
    (batch,) = pack(groups, micro_tokens=1 << 20)
    backend = LocalTrainer(model, family, TrainConfig(), checkpointing=True)
    model.train()
    ours, _ = backend.score(batch, Scoring())
    banned = torch.from_numpy(family.banned)
    theirs = []
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.from_numpy(np.concatenate([request.ids, answer.ids]))[None]
        logits = stock(input_ids=ids, use_cache=False).logits[0, len(request.ids) - 1 : -1]
        scores = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
        theirs.append(scores.gather(1, ids[0, len(request.ids) :, None]).squeeze(1))
        assert np.abs(theirs[-1].detach().numpy() - answer.logprobs).max() < 1e-5
    theirs = torch.cat(theirs)
    assert (ours - theirs).abs().max() < 3e-6 * theirs.abs().max()
    weights = torch.randn(len(ours), generator=torch.Generator().manual_seed(0))
    found = []
    for each, scores in ((model, ours), (stock, theirs)):
        each.zero_grad()
        (scores * weights).sum().backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    for name, wanted in found[1].items():
        # Values of Gemma 4 are normed without a scale, again and again; four streams of 3n correct each other.
        limit = 1e-4 if kind in ("gemma3n_text", "gemma4_text") else 2e-5
        assert (found[0][name] - wanted).abs().max() < limit * max(wanted.abs().max(), 1e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind, made, paged, monkeypatch):
    family, model, stock = made(kind)
    requests, engines = asked(family, repeats=1, temperature=0.0), {}
    for kernels in (True, False) if kind in PAGED else (False,):
        monkeypatch.setattr(kv_cache, "use_kernels", lambda shape, kernels=kernels: kernels)
        engines[kernels] = EmbeddedEngine(model, family)
    for _ in range(2):  # a second turn goes on from the cache of the first
        wanted = stocks(stock, family, requests, 10)
        for kernels, engine in engines.items():
            answers = generate(engine, requests)
            assert [answer.ids.tolist() for answer in answers] == wanted and bool(engine.cache.kernels) == kernels
        added = np.random.default_rng(1).choice(np.flatnonzero(~family.banned), 11)
        turns = zip(requests, answers, strict=True)
        requests = [replace(r, ids=np.concatenate([r.ids, a.ids, added]), first_index=10) for r, a in turns]


def test_what_layers_keep_is_found(made):
    def rows(kind):
        family, model, _ = made(kind)
        return cache_shape(model, family).layers

    assert rows("deepseek_v3") == ((2, 2, 24, 16, 0), (2, 2, 24, 16, 1))
    assert rows("gemma4_text") == ((2, 2, 32, 32, 0), (2, 1, 64, 64, 1)) * 2
    assert [layer.source for layer in rows("gemma3n_text")] == [0, 1, 0, 1]
    shape = replace(cache_shape(*made("deepseek_v3")[1::-1]), dtype=torch.bfloat16)
    assert "heads" not in why_no_kernels(shape)
    odd = replace(shape, layers=(shape.layers[0]._replace(value_size=12),))
    assert why_no_kernels(odd) == "its heads of 12 are no multiple of 8 up to 512"
    family, model, _ = made("gemma4_text")
    engine = EmbeddedEngine(model, family)
    assert engine.cache.shape.bytes_per_token == 4 * 2 * (2 * 32 + 64)  # two of its four layers
    generate(engine, asked(family))
    assert engine.cache.keys[2] is engine.cache.keys[0] and engine.cache.values[3] is engine.cache.values[1]


def test_changes_of_logits_are_found_or_refused(made):
    found = {kind: made(kind)[1].logit_changes for kind in ("cohere2", "granite", "gemma3_text", "deepseek_v3")}
    assert list(found.values()) == [("logit_scale",), ("logits_scaling",), ("final_logit_softcapping",), ()]
    _, model, _ = made("granite")
    assert language_head(model).out_features == model.lm_head.out_features
    half = model.to(torch.bfloat16)
    assert find_logit_changes(half) == ("logits_scaling",)
    own = type(model).forward

    def twice(change, **options):
        output = own(model, **options)
        output.logits = change(output.logits)
        return output

    for change in (torch.square, lambda logits: 1.01 * logits):  # also one that bfloat16 would round away
        model.forward = partial(twice, change)
        with pytest.raises(EnvironmentProblem, match=r"GraniteForCausalLM changes its logits .*supported: output_mul"):
            find_logit_changes(model)
    del model.forward
    model.float()


def test_a_temperature_that_counts_places_limits_rows(made):
    family, model, _ = made("llama4_text")
    assert family.max_positions == 4095
    assert not any(getattr(module, "attn_temperature_tuning", False) for module in model.modules())


@pytest.mark.parametrize("kernels", [False, True])
def test_pictures_see_themselves_both_ways(kernels, family_of, load, stock, image, paged, monkeypatch):
    """As a family may say: in two turns of the engine, in the trainer, and in transformers with a mask of its own."""
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: kernels)
    family, model = replace(family_of("llava"), blocks="all"), load("llava")
    backend, banned = LocalTrainer(model, family), torch.from_numpy(family.banned)
    prompt = family.render([Message(role="user", parts=(image(56, 56, 1), "and", image(84, 56, 2), "?"))])
    engine = EmbeddedEngine(model, family)
    questions = [replace(r, episode=r.key) for r in requests([prompt, family.render(ask("no picture"))], repeats=2)]
    for _ in range(2):
        answers = generate(engine, questions)
        for batch in pack([trajectories(questions, answers)], micro_tokens=1 << 20):
            ((scored, _),) = backend.logprobs([batch], Scoring())
            assert np.abs(scored - batch.rollout_logprobs).max() < 1e-5
        request, answer = questions[0], answers[0]
        ids = torch.from_numpy(np.concatenate([request.ids, answer.ids]))
        mask = torch.ones(len(ids), len(ids)).tril().bool()
        for span in request.media:
            mask[span.start : span.end, span.start : span.end] = True
        vision = family.vision(request.media, CPU, torch.float32)
        with torch.no_grad():
            logits = stock("llava")(input_ids=ids[None], attention_mask=mask[None, None], **vision).logits[0]
        scores = logits[len(request.ids) - 1 : -1].masked_fill(banned, -torch.inf).log_softmax(-1)
        wanted = scores.gather(1, ids[len(request.ids) :, None]).squeeze(1).numpy()
        assert np.abs(wanted - answer.logprobs).max() < 1e-5
        questions = [turn(r, a, family, (image(56, 84, 3), "again")) for r, a in zip(questions, answers, strict=True)]
