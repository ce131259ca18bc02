"""What vLLM samples is what the trainer scores, request by request."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from saccade.engines import generate
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.engines.vllm import VllmEngine, params_of
from saccade.types import Message

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def mixed(ask, **sampling):
    return [ask(f"{n}", n % 4, noise=n + 1, **sampling) for n in range(8)]


def test_a_batch_with_and_without_images(engine, twin, ask, gap):
    requests = mixed(ask, temperature=0.0)
    ours, theirs = generate(twin, requests), generate(engine, requests)
    assert [a.ids.tolist() for a in ours] == [a.ids.tolist() for a in theirs]
    assert gap(requests, theirs) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_include_temperature_and_ban(engine, family, ask, gap, temperature):
    requests = mixed(ask, temperature=temperature, ignore_eos=True, max_tokens=64)
    answers = generate(engine, requests)
    assert gap(requests, answers, temperature) < 1e-4
    drawn = np.concatenate([a.ids for a in answers])
    assert len(drawn) == 8 * 64 and not family.banned[drawn].any()
    assert family.banned.mean() > 0.02  # so often an id would be drawn without the ban
    # Where vLLM has processors of logits, it waits for the ids of a step before the next one.
    model = engine._engine.vllm_config.model_config
    assert not model.logits_processors


def test_the_whole_distribution_is_the_trainers(engine, twin, family, ask):
    """Not only what was drawn: -inf for banned ids, and the rest sums to 1 without them."""
    request = ask("a", 1, temperature=0.7, max_tokens=1)
    params = params_of(request, [])
    params.logprobs, params.flat_logprobs = -1, False
    engine._engine.model_config.max_logprobs = -1
    engine._engine.add_request("all", dict(engine._prompt(request)), params)
    while not (done := engine._engine.step()):
        pass
    (found,) = done[0].outputs[0].logprobs
    logprobs = np.array([found[i].logprob for i in range(family.vocabulary)])
    assert np.isneginf(logprobs[family.banned]).all()
    assert np.exp(logprobs[~family.banned]).sum() == pytest.approx(1.0, abs=1e-5)
    wide = [replace(request, key=f"{n}", noise=n) for n in range(400)]
    drawn = {int(a.ids[0]): float(a.logprobs[0]) for a in generate(twin, wide)}
    assert len(drawn) > 50
    assert max(abs(logprobs[i] - value) for i, value in drawn.items()) < 1e-4


def test_a_turn_ends_with_an_end_of_turn_id_or_at_its_limit(engine, family, ask):
    requests = [ask(f"{n}", noise=n, max_tokens=48) for n in range(32)]
    answers = generate(engine, requests)
    ends = [int(a.ids[-1]) in family.chat.eos_ids for a in answers]
    assert [a.finish == "stop" for a in answers] == ends and 0 < sum(ends) < 32
    assert all(len(a.ids) == 48 for a in answers if a.finish == "length")


def test_stop_strings_stay_in_the_response(engine, twin, ask, family):
    (whole,) = generate(engine, [ask("a", 1, temperature=0.0, max_tokens=12)])
    text = family.chat.decode(whole.ids[4:6], special=True)
    request = ask("a", 1, temperature=0.0, max_tokens=12, stop=(text,))
    (cut,), (ours,) = generate(engine, [request]), generate(twin, [request])
    assert cut.finish == "stop" and cut.ids.tolist() == ours.ids.tolist()
    assert family.chat.decode(cut.ids, special=True).endswith(text)


def test_noise_decides_and_the_batch_does_not(engine, ask):
    alone = generate(engine, [ask("a", 1, noise=5)])[0].ids
    among = generate(engine, [ask(f"{n}", n % 3, noise=n) for n in range(4)] + [ask("a", 1, noise=5)])
    other, later = (
        generate(engine, [ask("a", 1, noise=noise, index=index)])[0].ids for noise, index in ((6, 0), (5, 12))
    )
    assert among[-1].ids.tolist() == alone.tolist()
    assert other.tolist() != alone.tolist() and later.tolist() != alone.tolist()


def test_truncated_sampling_gives_the_logprobs_of_what_is_kept(engine, twin, ask):
    greedy = generate(twin, [ask("a", temperature=0.0)])[0].ids
    (first,) = generate(engine, [ask("a", noise=1, top_k=1)])
    assert first.ids.tolist() == greedy.tolist() and not first.logprobs.any()
    assert not engine.capabilities().support


def test_aborted_requests_come_back_with_their_tokens(engine, ask):
    options = {"max_tokens": 40, "ignore_eos": True}
    whole = generate(engine, [ask("a", 1, noise=2, **options)])[0]
    engine.submit(ask("a", 1, noise=2, **options))
    engine.submit(ask("b", noise=3, **options))
    done = []
    while len(engine.progress("a")) < 5:
        done += engine.poll()
    engine.abort("a")
    engine.abort("nobody")
    while engine.pending:
        done += engine.poll()
    cut, other = sorted(done, key=lambda answer: answer.key)
    n = len(cut.ids)
    assert (cut.key, cut.finish, n) == ("a", "aborted", 5)
    assert cut.ids.tolist() == whole.ids[:n].tolist()
    assert cut.logprobs == pytest.approx(whole.logprobs[:n], abs=1e-5)
    assert (other.finish, len(other.ids)) == ("length", 40)


def test_a_prompt_that_vllm_reads_differently_is_refused(engine, ask):
    request = ask("odd", 1)
    span = request.media[0]
    ids = np.insert(request.ids, span.start, request.ids[span.start])
    wrong = replace(request, ids=ids, media=(replace(span, length=span.length + 1),))
    with pytest.raises(EnvironmentProblem, match=rf"odd.* {len(ids) - 1} .* {len(ids)}, token \d+ is the first"):
        engine.submit(wrong)
    assert not engine.pending


def test_more_images_than_the_engine_was_built_for_are_refused(engine, family, image, ask):
    shown = [image(56, 56, seed=n) for n in range(5)]
    rendered = family.render((Message(role="user", parts=(*shown, "how many?")),))
    with pytest.raises(ConfigError, match=r"request many: vllm refuses it: .*4"):
        engine.submit(replace(ask("many"), ids=rendered.ids, media=rendered.media))
    assert not engine.pending and len(generate(engine, [ask("a", 3)])) == 1


def test_what_the_engine_was_not_built_for_is_refused(engine, ask, image):
    with pytest.raises(ConfigError, match="512"):
        engine.submit(ask("long", max_tokens=512))
    with pytest.raises(ConfigError, match="first_tokens=True"):
        engine.submit(ask("hot", first=(9.0, -1)))
    request = ask("wide", 1)
    media = replace(request.media[0].media, width=2000, height=1000, max_pixels=1_500_000)
    wide = replace(request, media=(replace(request.media[0], media=media),))
    with pytest.raises(ConfigError, match=r"1500000 pixels.* 1003520; raise data\.max_pixels"):
        engine.submit(wide)
    assert not engine.pending


def test_a_folder_without_weights_is_refused_before_vllm_starts(settings, family, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr("saccade.plugins.engines.vllm._build", lambda *a: built.append(a))
    with pytest.raises(EnvironmentProblem, match="safetensors"):
        VllmEngine(replace(settings, folder=str(tmp_path)), family)
    assert not built


def test_caches_that_outlive_the_weights_are_named(engine, probe, monkeypatch):
    """The parity probe passes in test_served_kinds; with the caches left alone it says so."""
    monkeypatch.setattr(engine, "_invalidates", False)
    with pytest.raises(EnvironmentProblem, match="encoder or prefix cache is stale"):
        probe()
