"""Real vLLM on a CPU over a tiny vision model. One engine at a time lives in a process."""

from dataclasses import replace

import numpy as np
import pytest

from saccade.types import Group, Message, Request, Sample, Sampling

NAME = "qwen2_5_vl"


@pytest.fixture(scope="session", autouse=True)
def nothing_remembered(tmp_path_factory):
    """What vLLM learned of models in earlier runs of the tests would hide that it cannot now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def family(family_of, request):
    return family_of(getattr(request.module, "NAME", NAME))


@pytest.fixture(scope="module")
def backend(load, family):
    """The trainer's side; tests may change its weights, as training does."""
    from saccade.trainer.local import LocalTrainer

    return LocalTrainer(load(family.name), family)


@pytest.fixture(scope="module")
def settings(family):
    from saccade.engines import Settings

    return Settings(engine="vllm", folder=family.path, dtype="float32", max_length=512, max_sequences=32, max_images=4)


@pytest.fixture(scope="module")
def engine(settings, family):
    from saccade.engines.builders import build

    made = build(settings, family)
    yield made
    made.close()


@pytest.fixture(scope="module")
def twin(backend, family):
    """The embedded engine over the trainer's weights."""
    from saccade.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(backend.model, family)


@pytest.fixture(scope="module")
def ask(family, image):
    """A request about `images` pictures of several sizes."""

    def made(key, images=0, *, noise=0, index=0, **sampling):
        shown = [image(*size, seed=images) for size in ((56, 84), (200, 130), (300, 77))[:images]]
        rendered = family.render((Message(role="user", parts=(*shown, f"{key[:1]} how many?")),))
        return Request(
            key=key, ids=rendered.ids, media=rendered.media, sampling=Sampling(**{"max_tokens": 12} | sampling),
            noise=noise, first_index=index,
        )  # fmt: skip

    return made


@pytest.fixture(scope="module")
def gap(backend, family):
    """The largest difference between an engine's log-probs and the trainer's."""
    from saccade.forest.packing import pack
    from saccade.plugins.engines.parity import trajectory
    from saccade.trainer import Scoring

    def largest(requests, answers, temperature=1.0):
        members = tuple(
            replace(trajectory(request, answer), sample_id=f"{request.key}#{n}")
            for n, (request, answer) in enumerate(zip(requests, answers, strict=True))
        )
        groups = [Group(sample=Sample(id=m.sample_id, messages=()), trajectories=(m,)) for m in members]
        batches = pack(groups, micro_tokens=1 << 20)
        backend.forget_features()  # weights were changed behind its back
        found = {}
        for batch, (scores, _) in zip(
            batches, backend.logprobs(batches, Scoring(temperature=temperature)), strict=True
        ):
            for n, key in enumerate(batch.keys):
                found[key[0]] = scores[batch.sequence == n]
        return max(float(np.abs(found[m.sample_id] - m.logprobs[m.policy_mask]).max()) for m in members)

    return largest


@pytest.fixture(scope="module")
def probe(engine, backend, image):
    from tests.engines import asked

    shown = ((image(84, 56, 1),), (image(56, 56, 2), image(56, 56, 3)))
    samples = [
        Sample(id=str(n), messages=(Message(role="user", parts=(*media, "what?")),)) for n, media in enumerate(shown)
    ]
    sampling = Sampling(temperature=0.8, max_tokens=16)
    return lambda: asked.probe(engine, backend, samples, sampling=sampling)
