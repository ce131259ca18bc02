"""Scores on forests are those of single rows, read at the last real token, whatever is packed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.config import TrainConfig
from saccade.forest.packing import pack
from saccade.models.load import hidden_states, load_model
from saccade.plugins.judges.service_protocol import read_samples, request_for
from saccade.plugins.preferences.pairs import candidate_group
from saccade.plugins.reward_models import learned_reward
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_card import RewardCard, reply_trajectory
from saccade.plugins.reward_models.reward_head import RewardHead, attach_reward
from saccade.plugins.reward_models.reward_losses import RatingLoss, of_pairs, ratings, train_ratings
from saccade.plugins.reward_models.reward_model_term import LearnedTerms, conversation_of
from saccade.rewards.reward_sample import RewardSample, reward_sample
from saccade.trainer.local import LocalTrainer
from saccade.types import Message, Sample

FAMILY = "qwen2_5_vl"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(FAMILY)


def said(role, *parts) -> Message:
    return Message(role=role, parts=parts)


@pytest.fixture(scope="module")
def samples(image) -> list[Sample]:
    """A picture in the question, pictures as the candidates, and none."""
    asked = (said("user", image(), "how many objects?"),)
    rows = [
        (asked, (said("assistant", "three of them"),), (said("assistant", "a dog"),)),
        ((said("user", "a red cube"),), (said("assistant", image(84, 56, 1)),), (said("assistant", image(56, 84, 2)),)),
        ((said("user", "2 + 2?"),), (said("assistant", "4"),), (said("assistant", "22, sure"),)),
    ]
    return [Sample(id=f"s{n}", messages=q, candidates=(a, b)) for n, (q, a, b) in enumerate(rows)]


CARD = RewardCard(kind="scalar", heads=("a", "b"))


def model_of(family, pooling: str = "last", heads: int = 2, dtype=torch.float32, **changes):
    model = load_model(family, dtype=dtype, device=CPU)
    if pooling == "attention":
        changes = {"pooling_heads": 4} | changes
    card = replace(CARD, heads=CARD.heads[:heads], pooling=pooling, **changes)
    head = RewardHead(like=model, card=card, seed=1)
    if pooling == "attention":
        torch.nn.init.uniform_(head.query, -3, 3, torch.Generator().manual_seed(0))
    attach_reward(model, head)
    return model


def packed(samples, family, budget: int):
    groups = [candidate_group(sample, family) for sample in samples]
    return pack(groups, micro_tokens=budget, ends=True, whole=True)


def states_of(backend: LocalTrainer, sample: Sample) -> torch.Tensor:
    """Hidden states of one row."""
    [alone] = packed([sample], backend.family, 100_000)
    return backend.hidden_at(alone, np.arange(alone.tokens))


@pytest.mark.parametrize("pooling", ["last", "mean", "attention"])
def test_a_forest_scores_as_single_rows_do(family, samples, pooling) -> None:
    model = model_of(family, pooling)
    backend = LocalTrainer(model, family)
    together = np.concatenate(ratings(backend, packed(samples, family, 100_000)))
    apart = np.concatenate(ratings(backend, packed(samples, family, 1)))
    np.testing.assert_allclose(together, apart, atol=1e-5)
    # By hand: one row, the hidden states of what is judged.
    for index, sample in enumerate(samples):
        read = reply_trajectory("x", 0, sample.messages, sample.candidates[0], family)
        [batch] = packed([sample], family, 100_000)
        hidden = states_of(backend, replace(sample, candidates=sample.candidates[:1], desirable=True))
        assert len(hidden) == len(read.ids)  # up to the very last token
        first = int(np.flatnonzero(read.policy_mask)[0])
        states = hidden[-1:] if pooling == "last" else hidden[first:]
        pooled = states.mean(0)
        if pooling == "attention":
            quarters = zip(states.chunk(4, 1), model.score.query.chunk(4), strict=True)
            pooled = torch.cat([(part @ q / 16**0.5).softmax(0) @ part for part, q in quarters])
        expected = pooled @ model.score.weight.T
        np.testing.assert_allclose(together[2 * index], expected.detach().numpy(), atol=1e-5)
        assert batch.tokens < 2 * len(read.ids)  # the question is packed once


@pytest.mark.parametrize("probe", [0, 1, -1, -2])
def test_the_probed_block_is_read_through_the_final_norm(family, samples, probe) -> None:
    model = load_model(family, dtype=torch.float32, device=CPU)
    [batch] = packed(samples, family, 100_000)
    inputs = LocalTrainer(model, family)._inputs.get(batch)
    decoder, outputs = model.get_decoder(), []
    for block in decoder.layers:
        block.register_forward_hook(lambda module, given, out: outputs.append(out[0]))
    hidden_states(model, family, inputs.ids, inputs.positions, batch.media, inputs.plan)
    card = replace(CARD, probe_layer=probe, head="mlp", bounded=True)
    head = RewardHead(like=model, card=card, seed=1)
    read = decoder.norm(outputs[probe])[torch.from_numpy(batch.ends)]
    expected = head(read, torch.arange(len(read)), len(read))
    attach_reward(model, head)
    [found] = ratings(LocalTrainer(model, family), [batch])
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-6)
    assert len(outputs) == 2 + len(decoder.layers) and 0 < found.min() < found.max() < 1


def test_pooling_reads_every_token_of_every_turn_and_nothing_else(family, samples) -> None:
    """Turns that begin alike: the forest branches where the first one ends."""
    asked = samples[0].messages
    sides = [
        (said("assistant", first), said("user", "sure?"), said("assistant", "it is a dog"))
        for first in ("three", "three of them")
    ]
    sample = Sample(id="s", messages=asked, candidates=tuple(sides))
    model = model_of(family, "mean")
    backend = LocalTrainer(model, family)
    [found] = ratings(backend, packed([sample], family, 100_000))
    for side, scores in zip(sides, found, strict=True):
        read = reply_trajectory("x", 0, asked, side, family)
        assert len(np.unique(np.diff(np.flatnonzero(read.policy_mask)))) == 2  # two turns
        hidden = states_of(backend, replace(sample, candidates=(side,), desirable=True))
        own = hidden[torch.from_numpy(read.policy_mask)]
        expected = own.mean(0) @ model.score.weight.T
        np.testing.assert_allclose(scores, expected.detach().numpy(), atol=1e-5)


def test_gradients_do_not_depend_on_packing(family, samples, keep_float64) -> None:
    labels = {"s0": (1.0, -1.0), "s1": (-1.0, float("nan")), "s2": (0.0, 1.0)}
    row = RatingLoss(loss="bt", heads={"a": 1.0, "b": 0.5}, margin=0.1, tie_coef=0.01)
    row = of_pairs(row, list(labels), labels, {})
    found = []
    for budget in (1, 100_000):
        model = model_of(family, "attention", dtype=torch.float64, head="mlp", bounded=True, probe_layer=-2)
        keep_float64()
        backend = LocalTrainer(model, family, TrainConfig(lr=1e-3))
        steps: list = []
        backend.take_step = lambda *a, b=backend, s=steps, **o: s.append(  # type: ignore[method-assign]
            {n: g.clone() for n, g in b.optimizer.gradients.items()}
        )
        train_ratings(backend, packed(samples, family, budget), row, lr=1e-3)
        found.append(steps[0])
    assert found[0].keys() == found[1].keys() == backend.optimizer.parameters.keys()
    assert {"score.query", "score.inner", "score.gain"} <= found[0].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-6, atol=1e-9)


def test_two_turns_over_a_wire_are_the_same_conversation(samples) -> None:
    added = tuple(said(*turn) for turn in (("assistant", "a"), ("tool", "b"), ("tool", "c"), ("assistant", "d")))
    plain = reward_sample(samples[2], "ad", turns=("a", "d"), observations=("b", "c"))
    mine = replace(plain, replied=added, roles=tuple(m.role for m in added))
    (wired,) = read_samples(json.loads(json.dumps(request_for([mine], request_id="r"))))
    assert conversation_of(wired) == conversation_of(mine)
    one_each = replace(wired, roles=(), observations=["b"])
    assert [m.role for m in conversation_of(one_each)[1]] == ["assistant", "user", "assistant"]
    with pytest.raises(ValueError, match="2 turns and 3 observations; send roles"):
        conversation_of(replace(wired, roles=(), observations=["b"] * 3))


@pytest.mark.parametrize(("changes", "words"), [
    ({"media": ()}, r"shows 1, and 0 came .*reward\.remote\.send_images=true"),
    ({"messages": [{"role": "user", "content": "<video>?"}]}, "<video>.* no request can carry"),
    ({"turns": ["a"], "observations": ["<image>"]}, "observation shows a medium"),
])  # fmt: skip
def test_a_question_that_came_without_its_media_is_not_scored(samples, changes, words) -> None:
    mine = replace(reward_sample(samples[0], "three"), asked=(), prompt="")
    with pytest.raises(ValueError, match=words):
        conversation_of(replace(mine, **changes))


def test_one_bad_sample_costs_its_own_score_and_terms_share_a_forward_pass(family, samples, monkeypatch) -> None:
    """Two terms of one model, and samples of several clients."""
    passes = []

    def counted(backend, batches):
        passes.append(len(batches))
        return ratings(backend, batches)

    monkeypatch.setattr(learned_reward, "ratings", counted)
    card = RewardCard(kind="scalar", heads=("a", "b"), statistics={"a": (0.5, 2.0)})
    model = LearnedReward(LocalTrainer(model_of(family), family), card)
    waiting = LearnedTerms(lambda path: model)
    terms = [{"path": "p", "head": "a"}, {"path": "p", "head": "a", "normalise": True}]
    terms += [{"path": "p", "head": "b"}]
    for term in terms:
        waiting.prepare(term)
    good = reward_sample(samples[2], "four")
    unseen = replace(reward_sample(samples[0], "three"), asked=(), media=())
    plain = RewardSample(id="p", response="four", prompt="2 + 2?")
    futures = [waiting.submit(term, s) for s in (good, unseen, plain) for term in terms]
    waiting.flush()
    scores = [future.result(timeout=0) for future in futures]
    assert [s.kind for s in scores] == ["value"] * 3 + ["error"] * 3 + ["value"] * 3
    assert "0 came with it" in scores[3].reason and len(passes) == 1
    raw, normal, other = (score.value for score in scores[:3])
    assert normal == pytest.approx((raw - 0.5) / 2) and other != raw
    assert [s.value for s in scores[6:]] == pytest.approx([raw, normal, other], abs=1e-5)
