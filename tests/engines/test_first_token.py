"""A first token that is drawn hotter than the others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.forest.packing import pack
from saccade.trainer import Scoring
from saccade.trainer.local import LocalBackend
from tests.engines.asked import FREE, head, play, requests, same, support_of, trajectories

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
    ((new, _),) = LocalBackend(model, family).logprobs([batch], Scoring(temperature=0.8))
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
