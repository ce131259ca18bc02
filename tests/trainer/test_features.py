"""Features of towers that stand still are computed once per image."""

from dataclasses import replace

import numpy as np
import torch

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, TrainConfig
from saccade.forest.packing import pack
from saccade.models.load import freeze
from saccade.trainer import Scoring
from saccade.trainer.forward_inputs import FeatureCache
from saccade.trainer.local import LocalBackend
from saccade.trainer.losses import PolicyLoss
from saccade.types import Media, MediaSpan

NAME = "qwen2_5_vl"


def span(name: str, length: int = 2) -> MediaSpan:
    media = Media(hash=name, width=1, height=1, min_pixels=1, max_pixels=1, data=b"")
    return MediaSpan(media=media, start=0, length=length, grid=(1, 1, 1))


def test_only_what_is_missing_is_computed():
    asked = []

    def compute(spans):
        asked.append([s.media.hash for s in spans])
        rows = [[ord(s.media.hash)] * 3 for s in spans for _ in range(s.length)]
        return torch.tensor(rows, dtype=torch.float32)

    cache = FeatureCache(max_bytes=4 * 2 * 3 * 4)  # four images
    first = cache.read([span("a"), span("b"), span("a")], compute)
    assert first[:, 0].tolist() == [97, 97, 98, 98, 97, 97]
    assert cache.read([span("b"), span("c")], compute)[:, 0].tolist() == [98, 98, 99, 99]
    assert asked == [["a", "b"], ["c"]]
    cache.read([span("d"), span("e")], compute)  # a was not used for longest
    cache.read([span("b")], compute)
    cache.read([span("a")], compute)
    assert asked[2:] == [["d", "e"], ["a"]]
    cache.clear()
    cache.read([span("b")], compute)
    assert asked[-1] == ["b"]


def batches_of(family, grow):
    group = grow(np.random.default_rng(0), family, images=2)
    (batch,) = pack([group], micro_tokens=9999)
    scales = np.full(len(batch.reads), 1 / len(batch.reads), np.float32)
    return [replace(batch, scales=scales)]


def test_frozen_towers_look_once_at_an_image(family_of, load, grow):
    family, algorithm = family_of(NAME), resolve(AlgorithmConfig(preset="grpo"), max_tokens=64)
    batches = batches_of(family, grow)
    looks = {}
    for train in ("freeze:vision,projector", "freeze:vision"):  # a projector that trains looks on
        model, calls = load(NAME), []
        freeze(model, family, train)
        backend = LocalBackend(model, family, TrainConfig())
        model.model.visual.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        scored = backend.logprobs(batches, Scoring())
        ref = [replace(batches[0], ref_logprobs=scored[0][0])]
        backend.train_step(ref, PolicyLoss(algorithm, Scoring()), lr=0.0)
        backend.logprobs(batches, Scoring())
        looks[train] = len(calls)
    assert looks == {"freeze:vision,projector": 1, "freeze:vision": 3}


def test_a_reference_that_moves_looks_again(family_of, load, grow):
    family = family_of(NAME)
    batches = batches_of(family, grow)
    policy = load(NAME)
    with torch.no_grad():
        policy.model.visual.merger.mlp[2].weight.mul_(3)
    reference, wanted = LocalBackend(load(NAME), family), LocalBackend(policy, family)
    before = reference.logprobs(batches, Scoring())[0][0]
    reference.blend(policy.named_parameters(), 1.0)
    after = reference.logprobs(batches, Scoring())[0][0]
    assert not np.array_equal(before, after)
    assert np.array_equal(after, wanted.logprobs(batches, Scoring())[0][0])
