"""Requests to the embedded engine, and what looks at how it answers them."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, DynamicCache

from saccade.engines import generate
from saccade.plugins.engines import parity
from saccade.plugins.engines.parity import trajectory
from saccade.types import Group, Message, Request, Sample, Sampling

NAME = "qwen2_5_vl"
FREE = Sampling(temperature=1.0, max_tokens=8, ignore_eos=True)


def requests(prompts, sampling=FREE, repeats=1):
    return [
        Request(key=f"{i}/{r}", ids=prompt.ids, media=prompt.media, sampling=sampling, noise=1000 * i + r)
        for i, prompt in enumerate(prompts)
        for r in range(repeats)
    ]


@contextmanager
def counted(model):
    """(tokens, images) of every forward. Images are encoded before the forward that reads them."""
    calls = []
    encoded = [0]

    def note_images(module, args, kwargs):
        encoded[0] += len(kwargs["grid_thw"])

    def note(module, args, kwargs):
        read = kwargs["inputs_embeds"] if "inputs_embeds" in kwargs else kwargs["input_ids"]
        calls.append((read.shape[1], encoded[0]))
        encoded[0] = 0

    handles = [
        model.model.visual.register_forward_pre_hook(note_images, with_kwargs=True),
        model.get_decoder().register_forward_pre_hook(note, with_kwargs=True),
    ]
    yield calls
    for handle in handles:
        handle.remove()


@contextmanager
def head(model, change):
    """Change what the language head says."""
    handle = model.lm_head.register_forward_hook(lambda module, args, logits: change(logits))
    yield
    handle.remove()


@contextmanager
def scripted(model, ids):
    """Call after call the head wants the next of these ids."""
    calls = iter(ids)

    def change(logits):
        wanted = torch.zeros_like(logits)
        wanted[:, next(calls)] = 1e4
        return wanted

    with head(model, change):
        yield


def same(a, b, limit=1e-05):
    assert a.ids.tolist() == b.ids.tolist() and a.finish == b.finish, a.key
    assert np.abs(a.logprobs - b.logprobs).max(initial=0) < limit, a.key


def trajectories(asked, answers):
    members = tuple(
        replace(trajectory(*pair), sample_id="g", repeat=repeat)
        for repeat, pair in enumerate(zip(asked, answers, strict=True))
    )
    return Group(sample=Sample(id="g", messages=()), uid="g", trajectories=members)


@torch.no_grad()
def over_kept_keys(family, models, request, answer, count):
    """Log-probs of an answer, computed by transformers alone: its first `count` tokens with the weights of the first
    of two models, the others with those of the second, over the keys and values that the first one made.
    """
    plain = AutoModelForImageTextToText.from_pretrained(family.path, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.concatenate([request.ids, answer.ids]))[None]
    asked, cache, logits = len(request.ids), DynamicCache(), []
    cut = asked + count - 1  # the last token is read when the next one is drawn
    for model, part in zip(models, (slice(0, cut), slice(cut, ids.shape[1] - 1)), strict=True):
        plain.load_state_dict(model.state_dict())
        places = torch.arange(ids.shape[1])[part].expand(3, 1, -1)
        logits += [plain(ids[:, part], position_ids=places, past_key_values=cache, use_cache=True).logits[0]]
    logits = torch.cat(logits)[asked - 1 :].masked_fill(torch.from_numpy(family.banned), -torch.inf)
    return logits.log_softmax(-1).gather(1, ids[0, asked:, None])[:, 0].numpy()


def support_of(completion):
    return None if completion.support is None else [ids.tolist() for ids in completion.support]


def turn(request, answer, family, parts):
    """The request of the next turn, after the environment said `parts`."""
    added = family.render_continuation([Message(role="user", parts=parts)], last_id=int(answer.ids[-1]))
    before = np.concatenate([request.ids, answer.ids])
    return replace(
        request,
        ids=np.concatenate([before, added.ids]),
        media=(*request.media, *(span.moved(len(before)) for span in added.media)),
        first_index=request.first_index + len(answer.ids),
    )


def play(engine, family, image, request, turns):
    played = []
    for number in range(turns):
        (answer,) = generate(engine, [request])
        played.append((request, answer))
        parts = (image(84, 56, number), "more") if number % 2 else ("look again",)
        request = turn(request, answer, family, parts)
    return played


def drain(engine):
    """Whatever an engine still has to finish."""
    done = []
    while engine.pending:
        done += engine.poll()
    return done


def probe(engine, backend, samples, **options):
    return parity.probe(engine, backend, samples, **({"limit": 1e-4, "version": 0} | options))


def too_small_for(model, most):
    """From now on there is no memory for a forward over more tokens."""

    def check(module, arguments, options):
        if options["position_ids"].shape[-1] > most:
            raise torch.OutOfMemoryError("simulated")

    model.model.language_model.register_forward_pre_hook(check, with_kwargs=True)


def count_evictions(engine):
    """How many sequences lose their pages at each step from now on."""
    lost, allocate_pages = [], engine.scheduler.allocate_pages

    def noted(ready, steps_of):
        before = len(ready)
        steps = allocate_pages(ready, steps_of)
        lost.append(before - len(ready))
        return steps

    engine.scheduler.allocate_pages = noted
    return lost
