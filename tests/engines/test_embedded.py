"""The embedded engine against transformers' generate and against the trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, sampling
from saccade.forest.packing import pack
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.types import Message, Sampling
from tests.engines.asked import FREE, NAME, counted, head, play, requests, same, scripted, support_of, trajectories
from tests.models.against import ask, ours, theirs

SEEING = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "internvl", "llava"]


@pytest.mark.parametrize("name", [*SEEING, "qwen3", "llama", "mixtral"])
def test_greedy_tokens_are_those_of_transformers_generate(name, family_of, load, stock, image):
    family = family_of(name)
    pictures = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    counts = (0, 1, 3) if family.spec.image_token else (0,)
    prompts = [family.render(ask(*pictures[:n], text)) for n in counts for text in ("a", "why")]
    assert ours(load(name), family, prompts, 12) == theirs(stock(name), family, prompts, 12)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}])
def test_log_probs_are_those_of_the_trainer(model, family, prompts, changes):
    how = replace(FREE, support=True, **changes)
    asked = requests(prompts, how, repeats=3)
    answers = generate(EmbeddedEngine(model, family), asked)
    group = trajectories(asked, answers)
    batches = pack([group], micro_tokens=150)
    assert len(batches) > 1
    backend = LocalTrainer(model, family)
    scored = backend.logprobs(batches, Scoring(temperature=how.temperature))
    for batch, (new, _) in zip(batches, scored, strict=True):
        assert np.abs(new - batch.rollout_logprobs).max() < 1e-5
        assert (batch.support is not None) == how.truncated


@pytest.mark.parametrize("changes", [{"first": (10.0, 50)}, {"top_k": 7}, {"top_p": 0.9, "temperature": 0.8}])
def test_sampling_does_not_depend_on_batching(model, family, prompts, changes, monkeypatch):
    asked = requests(prompts, replace(FREE, support=True, **changes), repeats=3)
    wanted = generate(EmbeddedEngine(model, family), asked)
    assert len({c.ids.tobytes() for c in wanted}) == len(wanted)  # noise differs by key
    shuffled = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
    monkeypatch.setattr(sampling, "SORTED", 2)  # rows at a time
    for slots, order in ((1, asked), (3, shuffled)):
        engine = EmbeddedEngine(model, family, max_sequences=slots)
        got = {c.key: c for c in generate(engine, order)}
        assert engine.cache.pages.count == min(slots, len(asked)) and engine.pending == 0
        for completion in wanted:
            same(got[completion.key], completion)
            assert support_of(got[completion.key]) == support_of(completion)


def test_a_group_is_prefilled_once_and_its_images_encoded_once(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    asked = requests(prompts, repeats=4)
    with counted(model) as calls:
        generate(engine, asked)
    assert calls[0] == (sum(len(p) for p in prompts), 0 + 1 + 2 + 3)
    assert calls[1:] == [(16, 0)] * 7  # 16 sequences decode together
    assert len(calls) == FREE.max_tokens


@pytest.mark.parametrize("kernels", [False, True])
def test_requests_that_begin_alike_read_that_once_and_their_own_rest(load, family, prompts, kernels, request):
    """A group whose answers were interrupted at several lengths, two at the same token, and one before its first."""
    if kernels:
        request.getfixturevalue("paged")
    model = load(NAME)
    whole = requests(prompts[2:], replace(FREE, max_tokens=21), repeats=8)
    asked, rests = [], [0, 1, 2, 5, 5, 9, 14, 20] * 2
    for one, answer, begun in zip(whole, answers := generate(EmbeddedEngine(model, family), whole), rests, strict=True):
        ids, left = np.concatenate([one.ids, answer.ids[:begun]]), replace(one.sampling, max_tokens=21 - begun)
        asked.append(replace(one, ids=ids, first_index=begun, sampling=left, opening=len(one.ids)))
    engine = EmbeddedEngine(model, family)
    with counted(model) as calls:
        got = generate(engine, asked)
    assert calls[:2] == [(sum(map(len, prompts[2:])), 2 + 3), (sum(rests), 0)]
    for one, answer, begun in zip(got, answers, rests, strict=True):
        assert one.ids.tolist() == answer.ids[begun:].tolist()
        assert np.abs(one.logprobs - answer.logprobs[begun:]).max() < 1e-5
    pages = engine.cache.pages
    assert pages.free == pages.count and not engine.scheduler.jobs


def test_equal_ids_with_another_picture_are_another_prompt(model, family, image):
    asked = []
    for seed in range(2):
        rendered = family.render([Message(role="user", parts=(image(56, 56, seed), "x"))])
        asked += requests([rendered], replace(FREE, temperature=0.0))
    asked = [replace(request, key=str(i)) for i, request in enumerate(asked)]
    assert asked[0].ids.tolist() == asked[1].ids.tolist()
    engine = EmbeddedEngine(model, family)
    with counted(model) as calls:
        first, second = generate(engine, asked)
    assert calls[0] == (2 * len(asked[0].ids), 2)
    assert np.abs(first.logprobs[0] - second.logprobs[0]) > 1e-4


def test_a_stop_string_ends_the_response_and_stays_in_it(model, family, prompts):
    text = "so: 終わりました"  # a stop string of 18 bytes, one token each
    ids = family.chat.tokenizer.encode(text, add_special_tokens=False)
    ids, end = [*ids, family.chat.end_of_turn, *ids[:2]], len(ids)
    for stop, length in (
        (("終わりました",), end), (("nothing", "o:"), 3), (("<|im_end|>",), end + 1), (("z",), end + 3),
    ):  # fmt: skip
        how = Sampling(temperature=0.0, max_tokens=len(ids), stop=stop, ignore_eos=True)
        with scripted(model, ids):
            (answer,) = generate(EmbeddedEngine(model, family), requests(prompts[:1], how))
        assert len(answer.ids) == length
        assert answer.finish == ("length" if length == len(ids) else "stop")


def test_end_of_turn_ends_the_response_unless_ignored(model, family, prompts):
    end = family.chat.end_of_turn
    for ignore, expected in ((False, [5, end]), (True, [5, end, 6, 7])):
        how = Sampling(temperature=0.0, max_tokens=4, ignore_eos=ignore)
        with scripted(model, [5, end, 6, 7]):
            (answer,) = generate(EmbeddedEngine(model, family), requests(prompts[:1], how))
        assert answer.ids.tolist() == expected
        assert answer.finish == ("length" if ignore else "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_and_ids_past_the_tokenizer_are_never_sampled(model, family, prompts, temperature):
    banned = torch.from_numpy(family.banned)
    known = len(family.chat.tokenizer)
    assert family.vocabulary > known and banned[known:].all()
    assert banned[family.chat.placeholder]
    asked = requests(prompts, replace(FREE, temperature=temperature), repeats=2)
    with head(model, lambda logits: logits + 50.0 * banned):
        answers = generate(EmbeddedEngine(model, family), asked)
        assert not any(family.banned[a.ids].any() for a in answers)
        if temperature:  # the trainer's softmax has the same mask
            (batch,) = pack([trajectories(asked, answers)], micro_tokens=9999)
            ((new, _),) = LocalTrainer(model, family).logprobs([batch], Scoring())
            assert np.abs(new - batch.rollout_logprobs).max() < 1e-5


HOT = replace(FREE, first=(10.0, 50), support=True)


@pytest.mark.parametrize("changes", [{}, {"top_k": 7}])
def test_a_hot_first_token_leaves_the_others_as_they_were(model, family, prompts, changes):
    asked = requests(prompts, replace(HOT, **changes), repeats=3)
    answers = generate(EmbeddedEngine(model, family), asked)
    for request, answer in zip(asked, answers, strict=True):
        ordinary = replace(request.sampling, first=None, max_tokens=7)
        ids = np.concatenate([request.ids, answer.ids[:1]])
        rest = replace(request, ids=ids, first_index=1, sampling=ordinary)
        (wanted,) = generate(EmbeddedEngine(model, family), [rest])
        assert answer.ids[1:].tolist() == wanted.ids.tolist()
        assert np.abs(answer.logprobs[1:] - wanted.logprobs).max() < 1e-5
        if ordinary.truncated:  # nothing is cut away where the trainer scores the first token
            assert support_of(answer) == [[], *support_of(wanted)]
        else:
            assert answer.support is None


@pytest.mark.parametrize(("temperature", "top_k"), [(10.0, -1), (3.0, 4)])
def test_the_first_log_prob_is_that_of_the_draw(model, family, prompts, temperature, top_k):
    """top_p of the others does not touch the first; banned ids are banned for it too."""
    sampling = replace(FREE, top_p=0.5, max_tokens=1, first=(temperature, top_k))
    alike = replace(FREE, temperature=temperature, top_k=top_k, max_tokens=1)
    asked = requests(prompts, sampling, repeats=16)
    with head(model, lambda logits: logits + 50.0 * torch.from_numpy(family.banned)):
        hot = generate(EmbeddedEngine(model, family), asked)
        wanted = generate(EmbeddedEngine(model, family), requests(prompts, alike, repeats=16))
    for a, b in zip(hot, wanted, strict=True):
        same(a, b)
    assert not any(family.banned[a.ids].any() for a in hot)
    assert len({int(a.ids[0]) for a in hot[:16]}) > (10 if top_k < 0 else 1)


def test_the_trainer_agrees_on_all_but_the_hot_token(model, family, prompts):
    sampling = replace(HOT, temperature=0.8, top_k=9)
    asked = requests(prompts, sampling, repeats=2)
    group = trajectories(asked, generate(EmbeddedEngine(model, family), asked))
    (batch,) = pack([group], micro_tokens=9999)
    ((new, _),) = LocalTrainer(model, family).logprobs([batch], Scoring(temperature=0.8))
    gap = np.abs(new - batch.rollout_logprobs)
    first = np.diff(batch.sequence, prepend=-1) > 0
    assert gap[~first].max() < 1e-5 < 1e-2 < gap[first].max() and np.isfinite(new).all()


def test_only_the_first_turn_starts_hot(model, family, prompts, image):
    engine = EmbeddedEngine(model, family)
    sampling = replace(HOT, top_k=5)
    (request,) = requests(prompts[1:2], sampling)
    first, *later = play(engine, family, image, replace(request, episode="e"), 3)
    assert [len(ids) for ids in first[1].support] == [0] + [5] * 7
    for asked, answer in later:
        ordinary = replace(asked, episode=None, sampling=replace(sampling, first=None))
        (wanted,) = generate(EmbeddedEngine(model, family), [ordinary])
        same(wanted, answer)
        assert support_of(answer) == support_of(wanted)
