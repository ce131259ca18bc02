"""Weights that are handed over arrive whole, and nothing of the old ones is left."""

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from saccade.engines import generate
from saccade.errors import EnvironmentProblem
from tests.engines.asked import drain, over_kept_keys

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


class Changed:
    """The trainer's weights under other names, or some of them."""

    def __init__(self, backend, change):
        self.backend, self.change = backend, change

    def weights(self):
        changed = (self.change(name, weight) for name, weight in self.backend.weights())
        return (pair for pair in changed if pair is not None)


def move(backend, seed, part=""):
    """As an optimizer would, in place."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in backend.model.named_parameters():
            if part in name:
                weight.add_(0.02 * torch.randn(weight.shape, generator=draw))


def test_updates_over_the_same_images(engine, backend, ask, gap):
    requests = [ask(f"{n}", n % 3, temperature=0.0) for n in range(4)]
    seen = set()
    for version in range(1, 9):
        move(backend, version, part="visual" if version % 2 else "")
        engine.update_weights(backend, version)
        answers = generate(engine, requests)
        assert gap(requests, answers) < 1e-4, version
        assert {int(v) for a in answers for v in a.versions} == {version}
        seen.add(float(answers[1].logprobs[0]))
    assert len(seen) == 8


def test_after_sleep_weights_wake_then_change_then_the_cache_wakes(engine, backend, ask, gap, monkeypatch):
    """A CPU gives nothing back, but it goes to sleep and wakes as a GPU does."""
    events, requests = list[str](), [ask("a", 1, temperature=0.0)]
    sleep, wake = engine._engine.sleep, engine._engine.wake_up
    monkeypatch.setattr(engine, "sleeps", True)
    monkeypatch.setattr(engine, "_beside", True)
    monkeypatch.setattr(engine._engine, "sleep", lambda level: (events.append(f"sleep {level}"), sleep(level)))
    monkeypatch.setattr(engine._engine, "wake_up", lambda tags: (events.append(f"wake {tags[0]}"), wake(tags)))
    source = Changed(backend, lambda *pair: pair)
    source.weights = lambda: (events.append("weights"), backend.weights())[1]  # type: ignore[method-assign]
    engine.sleep()  # before any trainer has given weights that could be had again
    engine.update_weights(source, 150)
    move(backend, 150)
    assert gap(requests, generate(engine, requests)) > 1e-3
    engine.sleep()
    engine.update_weights(source, 151)
    assert gap(requests, generate(engine, requests)) < 1e-4
    engine.sleep()
    engine.sleep()
    assert gap(requests, generate(engine, requests)) < 1e-4  # nothing was trained in between
    assert events == [
        *("sleep 1", "wake weights", "weights", "wake kv_cache"),
        *("sleep 2", "wake weights", "weights", "wake kv_cache"),
        *("sleep 2", "wake weights", "weights", "wake kv_cache"),
    ]


def test_what_runs_keeps_its_keys_and_nothing_new_reads_them(engine, backend, ask, gap, family):
    engine.update_weights(backend, 160)
    before = deepcopy(backend.model)
    sampling = {"max_tokens": 90, "ignore_eos": True}
    begun = [ask("a", noise=1, **sampling), ask("a2", 2, noise=2, **sampling)]
    begun[0] = replace(begun[0], ids=np.resize(begun[0].ids, 300))  # more than the pages that vLLM shares
    assert engine._engine.vllm_config.cache_config.block_size < 300
    for request in begun:
        engine.submit(request)
    while len(engine.progress("a2")) < 30:
        engine.poll()
    count = len(engine.progress("a"))
    move(backend, 161)
    engine.update_weights(backend, 161)
    after = [replace(request, key=f"{request.key} after") for request in begun]  # prompts that were computed before
    for request in after:
        engine.submit(request)
    done = {answer.key: answer for answer in drain(engine)}
    assert all(set(done[request.key].versions.tolist()) == {160} for request in begun)
    assert all(set(done[request.key].versions.tolist()) == {161} for request in after)
    assert gap(after, [done[request.key] for request in after]) < 1e-4
    kept = done["a"]
    ways = [over_kept_keys(family, (old, backend.model), begun[0], kept, count) for old in (before, backend.model)]
    mixed, recomputed = (np.abs(kept.logprobs - way) for way in ways)
    assert mixed.max() < 1e-4 and recomputed[count:].max() > 1e-2
    # Emptied as soon as nobody needs them.
    move(backend, 162)
    engine.update_weights(backend, 162)
    assert gap(begun, generate(engine, begun)) < 1e-4


def test_the_same_version_is_handed_over_once(engine, backend):
    engine.update_weights(backend, 200)
    passed = []
    engine.update_weights(Changed(backend, lambda *pair: passed.append(pair)), 200)
    assert not passed


DRIFTS = {
    "renamed": (
        lambda n, w: (n.replace("visual.merger.ln_q", "visual.merger.norm"), w),
        r"missing: .*merger\.ln_q\.weight \[64\]; not expected: .*merger\.norm\.weight \[64\]\)",
    ),
    "left out": (
        lambda n, w: None if n.endswith("layers.1.self_attn.k_proj.bias") else (n, w),
        r"missing: .*layers\.1\.self_attn\.k_proj\.bias \[32\]; not expected: none",
    ),
    "of another shape": (
        lambda n, w: (n, w[:-1]) if n.endswith("embed_tokens.weight") else (n, w),
        r"missing: .*embed_tokens\.weight \[272, 64\]; not .*embed_tokens\.weight \[271, 64\]",
    ),
}


@pytest.mark.parametrize("kind", DRIFTS)
def test_names_that_drift_apart_stop_the_engine(engine, backend, ask, gap, kind):
    change, message = DRIFTS[kind]
    with pytest.raises(EnvironmentProblem, match=message):
        engine.update_weights(Changed(backend, change), 300)
    with pytest.raises(EnvironmentProblem, match="nothing more is sampled"):
        engine.submit(ask("a"))
    assert not engine.pending
    engine.update_weights(backend, 301)  # a whole set of weights mends it
    requests = [ask("a", 1, temperature=0.0)]
    assert gap(requests, generate(engine, requests)) < 1e-4


def test_bytes_that_did_not_arrive_are_found(engine, backend):
    name = sorted(engine._places)[0]
    parameter = engine._places[name][0]
    (found,) = engine._engine.collective_rpc(
        lambda worker: dict(worker.model_runner.get_model().named_parameters())[parameter].data
    )
    ask = engine._ask

    def spoil(method, *arguments):
        if method == "saccade_checksums":
            found.add_(1)
        return ask(method, *arguments)

    engine._ask = spoil
    with pytest.raises(EnvironmentProblem, match=rf"other bytes arrived for: \['{name}'"):
        engine.update_weights(backend, len(engine._places) * 16)  # this turn begins with it
    engine._ask = ask
    engine.update_weights(backend, 400)
