"""The parity probe: a sound engine passes, a broken one is refused with the cause."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.config import TrainConfig
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import EnvironmentProblem, TrainingError
from saccade.plugins.engines import parity
from saccade.trainer.local import LocalTrainer
from saccade.types import Message, Sample, Sampling
from tests.engines import asked
from tests.engines.copies import CopyEngine, remembering

NAME = "qwen2_5_vl"
WARM = Sampling(temperature=0.7, max_tokens=64, stop=("a",))


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(parity, "NEW_TOKENS", 6)


@pytest.fixture
def copy(load):
    return load(NAME)


@pytest.fixture(scope="module")
def samples(image):
    """One row of text, one with a picture, one with two."""
    shown = ((), (image(84, 56, 1),), (image(56, 56, 2), image(56, 56, 3)))
    return [
        Sample(id=str(n), messages=(Message(role="user", parts=(*media, "What is this?")),))
        for n, media in enumerate(shown)
    ]


def probe(engine, backend, samples, sampling=WARM, **options):
    return asked.probe(engine, backend, samples, **{"sampling": sampling, "version": 3, **options})


def state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_sound_engine_agrees_and_every_weight_is_as_before(trained, copy, family, samples):
    mine, theirs = state(trained.model), state(copy)
    engine = CopyEngine(copy, family)
    found = probe(engine, trained, samples)
    assert found.gap < 1e-5 and found.restored < 1e-5
    assert found.by_weight > 0.01 and found.by_picture > 0.01
    assert engine.version == 3 and engine.pending == 0
    assert all(torch.equal(p, mine[name]) for name, p in trained.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in copy.named_parameters())
    assert str(found).startswith("parity: engine and trainer agree to ")
    assert found.metrics()["parity/gap"] == found.gap
    # Truncated sampling is scored on what was kept.
    assert probe(engine, trained, samples, Sampling(temperature=0.7, top_k=5, support=True)).gap < 1e-5


def test_one_request_for_every_replica(trained, copy, family, samples):
    seen = []
    engine = CopyEngine(copy, family, request=lambda r: seen.append(r) or r)
    probe(engine, trained, samples, copies=3)
    first = seen[:6]
    assert len({r.noise for r in first}) == 6
    assert {(len(r.media), r.replica) for r in first} == {(n, r) for n in (1, 2) for r in range(3)}
    assert all(r.sampling.max_tokens == 6 and not r.sampling.stop for r in seen)


def test_a_frozen_tower_is_probed_as_well(load, copy, family, samples):
    model = load(NAME)
    for name, p in model.named_parameters():
        p.requires_grad_(family.tower_of(name) == "llm")
    found = probe(CopyEngine(copy, family), LocalTrainer(model, family, TrainConfig()), samples)
    assert found.by_weight > 0.01


class Half(CopyEngine):
    """Takes a part of the weights."""

    def update_weights(self, source, version):
        super().update_weights(source, version)
        self.model.model.visual.blocks[1].mlp.down_proj.weight.data[::2].neg_()


class Mute(CopyEngine):
    def poll(self):
        return [replace(d, logprobs=np.full_like(d.logprobs, np.nan)) for d in super().poll()]


class Prefixes(CopyEngine):
    """The answer to a prompt stays as it was when the prompt was seen first."""

    def submit(self, request):
        self.kept, self.content = getattr(self, "kept", {}), request.ids.tobytes()
        super().submit(request)

    def poll(self):
        return [self.kept.setdefault(self.content, done) for done in super().poll()]


def stale_pictures(copy, family):
    by_pixels = remembering(family.features, lambda media: media["patches"].numpy().tobytes())
    return CopyEngine(copy, replace(family, features=by_pixels))


def second_for_first(copy, family):
    """Of a second picture of that size only a hundredth is looked at."""
    kept = remembering(family.features, lambda media: str(media["grid_thw"].tolist()))

    def blend(model, media):
        return kept(model, media).lerp(family.features(model, media), 0.01)

    return CopyEngine(copy, replace(family, features=blend))


def plain(request):
    return replace(request, sampling=replace(request.sampling, temperature=1.0))


def unbanned(copy, family):
    engine = CopyEngine(copy, family)
    engine.banned = None
    return engine


def other_weights(copy, family):
    with torch.no_grad():
        copy.model.language_model.layers[0].mlp.down_proj.weight.mul_(1.1)
    return CopyEngine(copy, family)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda *own: CopyEngine(*own, takes=lambda name: not name.startswith("model.visual.")),
            r"wrong weights: none of what was handed over.*visual\.blocks\.1\.mlp\.down_proj\.weight was changed",
        ),
        (Half, "wrong weights: only some of what was handed over"),
        (stale_pictures, r"cache is stale.*from the image under older weights.*rollout\.engine_args"),
        (lambda *own: CopyEngine(*own, request=lambda r: replace(r, media=())), "the image does not reach the eng"),
        (second_for_first, "a second image with what it cached of the first"),
        (lambda *own: CopyEngine(*own, request=plain), "temperatures differ"),
        (unbanned, "banned ids differ"),
        (other_weights, r"other weights than the trainer.*rollout\.parity_max"),
        (Mute, "gives no log-prob"),
    ],
)
def test_a_wrong_engine_is_refused_with_the_cause(trained, copy, family, samples, wrong, message):
    before = state(trained.model)
    with pytest.raises(EnvironmentProblem, match=message) as caught:
        probe(wrong(copy, family), trained, samples)
    assert all(torch.equal(p, before[name]) for name, p in trained.model.named_parameters())
    assert caught.value.exit_code == 3


def test_text_alone_is_probed_with_a_weight_of_the_decoder(family_of, load, samples):
    family = family_of("qwen3")
    backend = LocalTrainer(load("qwen3"), family, TrainConfig())
    found = probe(CopyEngine(load("qwen3"), family), backend, samples[:1])
    assert found.by_picture is None and found.by_weight > 0.01 and found.gap < 1e-5
    assert "parity/by_picture" not in found.metrics()
    with pytest.raises(EnvironmentProblem, match="computed from the prompt under older weights"):
        probe(Prefixes(load("qwen3"), family), backend, samples[:1])


def test_a_wide_limit_hides_no_stale_cache(trained, copy, family, samples):
    """Of two explanations the nearer one counts, however much rounding is allowed."""
    assert probe(CopyEngine(copy, family), trained, samples, limit=100.0).gap < 1e-5
    with pytest.raises(EnvironmentProblem, match="encoder or prefix cache is stale"):
        probe(stale_pictures(copy, family), trained, samples, limit=100.0)


def test_weights_that_are_no_numbers(load, family, samples):
    broken = LocalTrainer(load(NAME), family, TrainConfig())
    name, weight = next(iter(broken.weights()))
    weight.data[0, 0] = torch.nan
    with pytest.raises(TrainingError, match=f"log-probs are not finite, because {name} holds NaN"):
        probe(EmbeddedEngine(broken.model, family), broken, samples)
