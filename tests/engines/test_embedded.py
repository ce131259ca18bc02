"""The embedded engine against transformers' generate and against the trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from saccade.backends import Scoring
from saccade.backends.local import LocalBackend
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.forest import pack
from saccade.types import (
    Completion,
    Group,
    Message,
    Request,
    Sample,
    Sampling,
    Source,
    Trajectory,
)

NAME = "qwen2_5_vl"
FREE = Sampling(temperature=1.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(load):
    return load(NAME)


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(NAME)


@pytest.fixture(scope="module")
def prompts(family, image):
    """Rendered prompts with 0, 1, 2 and 3 images of several sizes."""
    pictures = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    return [
        family.render([Message(role="user", parts=(*pictures[:n], f"What are these {n}?"))])
        for n in range(4)
    ]


def requests(prompts, sampling: Sampling = FREE, repeats: int = 1) -> list[Request]:
    return [
        Request(
            key=f"{i}/{r}",
            ids=prompt.ids,
            media=prompt.media,
            sampling=sampling,
            noise=1000 * i + r,
        )
        for i, prompt in enumerate(prompts)
        for r in range(repeats)
    ]


@contextmanager
def counted(model) -> Iterator[list[tuple[int, int]]]:
    """(tokens, images) of every forward. Images are encoded before the forward that reads them."""
    calls: list[tuple[int, int]] = []
    encoded = [0]

    def note_images(module, args, kwargs):
        encoded[0] += len(kwargs["grid_thw"])

    def note(module, args, kwargs):
        read = kwargs["inputs_embeds"] if "inputs_embeds" in kwargs else kwargs["input_ids"]
        calls.append((read.shape[1], encoded[0]))
        encoded[0] = 0

    handles = [
        model.model.visual.register_forward_pre_hook(note_images, with_kwargs=True),
        model.base_model.register_forward_pre_hook(note, with_kwargs=True),
    ]
    yield calls
    for handle in handles:
        handle.remove()


@contextmanager
def head(model, change) -> Iterator[None]:
    """Change what the language head says."""
    handle = model.lm_head.register_forward_hook(lambda module, args, logits: change(logits))
    yield
    handle.remove()


@contextmanager
def scripted(model, ids: list[int]) -> Iterator[None]:
    """Call after call the head wants the next of these ids."""
    calls = iter(ids)

    def change(logits):
        wanted = torch.zeros_like(logits)
        wanted[:, next(calls)] = 1e4
        return wanted

    with head(model, change):
        yield


def same(a: Completion, b: Completion, limit: float = 1e-5) -> None:
    assert a.ids.tolist() == b.ids.tolist() and a.finish == b.finish, a.key
    assert np.abs(a.logprobs - b.logprobs).max(initial=0) < limit, a.key


# -- against others ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen2",
        "qwen3",
        "llama",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
    ],
)
def test_greedy_tokens_are_those_of_transformers_generate(name, family_of, load, stock, image):
    family, reference = family_of(name), stock(name)
    pictures = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    counts = (0, 1, 2, 3) if name.endswith("_vl") else (0,)
    asked = [
        [Message(role="user", parts=(*pictures[:n], text))] for n in counts for text in ("a", "why")
    ]
    rendered = [family.render(messages) for messages in asked]
    sampling = Sampling(temperature=0.0, max_tokens=12)
    ours = generate(EmbeddedEngine(load(name), family), requests(rendered, sampling))
    banned = np.flatnonzero(family.banned).tolist()
    for prompt, completion in zip(rendered, ours, strict=True):
        ids = torch.from_numpy(prompt.ids)[None]
        vision = dict(family.vision(prompt.media, torch.device("cpu"), torch.float32))
        if vision:
            vision["mm_token_type_ids"] = (ids == family.chat.placeholder).long()
        theirs = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            suppress_tokens=banned,
            **vision,
        )
        assert completion.ids.tolist() == theirs[0, len(prompt) :].tolist()


def trajectories(asked: list[Request], answers: list[Completion]) -> Group:
    members = []
    for repeat, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        n, m = len(request.ids), len(answer.ids)
        members.append(
            Trajectory(
                sample_id="g",
                repeat=repeat,
                ids=np.concatenate([request.ids, answer.ids]),
                sources=np.array([Source.PROMPT] * n + [Source.POLICY] * m, np.int8),
                logprobs=np.concatenate([np.full(n, np.nan), answer.logprobs]).astype(np.float32),
                versions=np.full(n + m, -1, np.int32),
                media=request.media,
                support=answer.support,
            )
        )
    return Group(sample=Sample(id="g", messages=()), uid="g", trajectories=tuple(members))


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}]
)
def test_log_probs_are_those_of_the_trainer(model, family, prompts, changes):
    sampling = replace(FREE, support=True, **changes)
    asked = requests(prompts, sampling, repeats=3)
    answers = generate(EmbeddedEngine(model, family), asked)
    group = trajectories(asked, answers)
    batches = pack([group], positions=family.positions, micro_tokens=150)
    assert len(batches) > 1
    backend = LocalBackend(model, family)
    scored = backend.logprobs(batches, Scoring(temperature=sampling.temperature))
    for batch, (new, _) in zip(batches, scored, strict=True):
        assert np.abs(new - batch.rollout_logprobs).max() < 1e-5
        assert (batch.support is not None) == sampling.truncated


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.0}, {"top_k": 7}, {"top_p": 0.9, "temperature": 0.8}]
)
def test_sampling_does_not_depend_on_batching(model, family, prompts, changes):
    asked = requests(prompts, replace(FREE, support=True, **changes), repeats=3)
    wanted = generate(EmbeddedEngine(model, family), asked)
    assert len({c.ids.tobytes() for c in wanted}) == len(wanted)  # noise differs by key
    shuffled = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
    for slots, order in ((1, asked), (3, asked), (3, shuffled), (512, shuffled)):
        engine = EmbeddedEngine(model, family, max_sequences=slots)
        got = {c.key: c for c in generate(engine, order)}
        assert engine.cache.slots == min(slots, len(asked)) and engine.pending == 0
        for completion in wanted:
            same(got[completion.key], completion)
            assert _support(got[completion.key]) == _support(completion)


def _support(completion: Completion) -> list[list[int]] | None:
    return None if completion.support is None else [ids.tolist() for ids in completion.support]


def test_requests_with_other_settings_share_a_batch(model, family, prompts):
    cut = replace(FREE, top_k=2, max_tokens=5)
    kinds = [FREE, replace(FREE, temperature=0.0), cut, replace(cut, support=True)]
    asked = [
        replace(request, sampling=kind, key=f"{request.key}/{i}")
        for i, kind in enumerate(kinds)
        for request in requests(prompts[:2])
    ]
    together = generate(EmbeddedEngine(model, family), asked)
    for request, completion in zip(asked, together, strict=True):
        same(generate(EmbeddedEngine(model, family), [request])[0], completion)
    assert {len(c.ids) for c in together} == {8, 5}
    assert [c.support is not None for c in together] == [False] * 6 + [True] * 2
    assert [len(ids) for c in together[6:] for ids in c.support] == [2] * 10


def test_noise_continues_where_the_last_turn_stopped(model, family, prompts):
    (request,) = requests(prompts[:1])
    (whole,) = generate(EmbeddedEngine(model, family), [request])
    rest = replace(
        request,
        ids=np.concatenate([request.ids, whole.ids[:3]]),
        first_index=3,
        sampling=replace(FREE, max_tokens=5),
    )
    (tail,) = generate(EmbeddedEngine(model, family), [rest])
    assert tail.ids.tolist() == whole.ids[3:].tolist()


# -- the first token -------------------------------------------------------------------------------

HOT = replace(FREE, first=(10.0, 50), support=True)


@pytest.mark.parametrize("changes", [{}, {"first": (10.0, -1)}, {"top_k": 7}, {"top_p": 0.9}])
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
            assert _support(answer) == [[], *_support(wanted)]
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


def test_a_hot_first_token_does_not_depend_on_batching(model, family, prompts):
    asked = [
        replace(request, sampling=kind, key=f"{request.key}/{i}")
        for i, kind in enumerate([HOT, replace(HOT, top_k=5), FREE, replace(FREE, temperature=10)])
        for request in requests(prompts, repeats=2)
    ]
    wanted = generate(EmbeddedEngine(model, family), asked)
    shuffled = [asked[i] for i in np.random.default_rng(1).permutation(len(asked))]
    for slots in (1, 3, 512):
        engine = EmbeddedEngine(model, family, max_sequences=slots)
        got = {c.key: c for c in generate(engine, shuffled)}
        for completion in wanted:
            same(got[completion.key], completion)
            assert _support(got[completion.key]) == _support(completion)


def test_the_trainer_agrees_on_all_but_the_hot_token(model, family, prompts):
    sampling = replace(HOT, temperature=0.8, top_k=9)
    asked = requests(prompts, sampling, repeats=2)
    group = trajectories(asked, generate(EmbeddedEngine(model, family), asked))
    (batch,) = pack([group], positions=family.positions, micro_tokens=9999)
    ((new, _),) = LocalBackend(model, family).logprobs([batch], Scoring(temperature=0.8))
    gap = np.abs(new - batch.rollout_logprobs)
    first = np.diff(batch.sequence, prepend=-1) > 0
    assert gap[~first].max() < 1e-5 < 1e-2 < gap[first].max() and np.isfinite(new).all()


def test_an_end_of_turn_as_the_hot_token_ends_the_sample(model, family, prompts):
    with scripted(model, [family.chat.end_of_turn]):
        (answer,) = generate(
            EmbeddedEngine(model, family),
            requests(prompts[:1], replace(HOT, top_k=5, ignore_eos=False)),
        )
    assert answer.ids.tolist() == [family.chat.end_of_turn] and answer.finish == "stop"
    assert _support(answer) == [[]]


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
        assert _support(answer) == _support(wanted)


# -- work ------------------------------------------------------------------------------------------


def test_a_group_is_prefilled_once_and_its_images_encoded_once(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    asked = requests(prompts, repeats=4)
    with counted(model) as calls:
        generate(engine, asked)
    assert calls[0] == (sum(len(p) for p in prompts), 0 + 1 + 2 + 3)
    assert calls[1:] == [(16, 0)] * 7  # 16 sequences decode together
    assert len(calls) == FREE.max_tokens


def test_equal_ids_with_another_picture_are_another_prompt(model, family, image):
    asked = []
    for seed in range(2):
        rendered = family.render([Message(role="user", parts=(image(56, 56, seed), "x"))])
        asked += requests([rendered], replace(FREE, temperature=0.0))
    asked = [replace(request, key=str(i)) for i, request in enumerate(asked)]
    assert asked[0].ids.tolist() == asked[1].ids.tolist()
    with counted(model) as calls:
        first, second = generate(EmbeddedEngine(model, family), asked)
    assert calls[0] == (2 * len(asked[0].ids), 2)
    assert np.abs(first.logprobs[0] - second.logprobs[0]) > 1e-4


# -- ends ------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_response_and_stays_in_it(model, family, prompts):
    text = "so: 終わりました!?"  # a stop string of 18 bytes, one token each
    ids = family.chat.tokenizer.encode(text, add_special_tokens=False)
    end = len("so: 終わりました".encode())
    for stop, length in ((("終わりました",), end), (("nothing", "o:"), 3), (("zzz",), len(ids))):
        sampling = Sampling(temperature=0.0, max_tokens=len(ids), stop=stop)
        with scripted(model, ids):
            (answer,) = generate(EmbeddedEngine(model, family), requests(prompts[:1], sampling))
        assert len(answer.ids) == length
        assert answer.finish == ("length" if length == len(ids) else "stop")


def test_a_stop_string_may_be_a_special_token(model, family, prompts):
    end = family.chat.end_of_turn
    for stop, length in ((("<|im_end|>",), 3), (("a<|im_end|>b",), 4), (("ab",), 5)):
        sampling = Sampling(temperature=0.0, max_tokens=5, stop=stop, ignore_eos=True)
        a, b = family.chat.tokenizer.encode("ab", add_special_tokens=False)
        with scripted(model, [b, a, end, b, b]):
            (answer,) = generate(EmbeddedEngine(model, family), requests(prompts[:1], sampling))
        assert len(answer.ids) == length, stop


def test_end_of_turn_ends_the_response_unless_ignored(model, family, prompts):
    end = family.chat.end_of_turn
    for ignore, expected in ((False, [5, end]), (True, [5, end, 6, 7])):
        sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=ignore)
        with scripted(model, [5, end, 6, 7]):
            (answer,) = generate(EmbeddedEngine(model, family), requests(prompts[:1], sampling))
        assert answer.ids.tolist() == expected
        assert answer.finish == ("length" if ignore else "stop")


def test_one_token_is_enough(model, family, prompts):
    answers = generate(
        EmbeddedEngine(model, family), requests(prompts, replace(FREE, max_tokens=1))
    )
    assert [len(a.ids) for a in answers] == [1] * 4 and {a.finish for a in answers} == {"length"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_and_ids_past_the_tokenizer_are_never_sampled(
    model, family, prompts, temperature
):
    banned = torch.from_numpy(family.banned)
    known = len(family.chat.tokenizer)
    assert family.vocabulary > known and banned[known:].all()
    assert banned[family.chat.placeholder]
    sampling = replace(FREE, temperature=temperature)
    asked = requests(prompts, sampling, repeats=2)
    with head(model, lambda logits: logits + 50.0 * banned):
        answers = generate(EmbeddedEngine(model, family), asked)
        assert not any(family.banned[a.ids].any() for a in answers)
        if temperature:  # the trainer's softmax has the same mask
            (batch,) = pack(
                [trajectories(asked, answers)], positions=family.positions, micro_tokens=9999
            )
            ((new, _),) = LocalBackend(model, family).logprobs([batch], Scoring())
            assert np.abs(new - batch.rollout_logprobs).max() < 1e-5


def test_requests_over_the_positions_are_refused_with_what_helps(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    long = requests(prompts[:1], replace(FREE, max_tokens=family.max_positions))[0]
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens"):
        engine.submit(long)
    assert engine.pending == 0
    fits = family.max_positions - len(long.ids)
    engine.submit(replace(long, sampling=replace(FREE, max_tokens=fits)))


def test_a_key_is_taken_until_its_completion(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    (request,) = requests(prompts[:1])
    engine.submit(request)
    engine.submit(request)
    with pytest.raises(AssertionError, match="twice"):
        engine.poll()


# -- live episodes ---------------------------------------------------------------------------------


def turn(request: Request, answer: Completion, family, parts) -> Request:
    """The request of the next turn, after the environment said `parts`."""
    added = family.render_continuation(
        [Message(role="user", parts=parts)], last_id=int(answer.ids[-1])
    )
    before = np.concatenate([request.ids, answer.ids])
    return replace(
        request,
        ids=np.concatenate([before, added.ids]),
        media=(*request.media, *(span.moved(len(before)) for span in added.media)),
        first_index=request.first_index + len(answer.ids),
    )


def play(engine, family, image, request: Request, turns: int) -> list[tuple[Request, Completion]]:
    played = []
    for number in range(turns):
        (answer,) = generate(engine, [request])
        played.append((request, answer))
        parts = (image(84, 56, number), "more") if number % 2 else ("look again",)
        request = turn(request, answer, family, parts)
    return played


def test_a_live_episode_computes_only_what_is_new(model, family, prompts, image):
    engine = EmbeddedEngine(model, family)
    (request,) = requests(prompts[1:2])
    with counted(model) as calls:
        played = play(engine, family, image, replace(request, episode="e"), 4)
    firsts = [calls[i] for i in range(0, len(calls), FREE.max_tokens)]
    lengths = [len(r.ids) for r, _ in played]
    # The last sampled token of a turn is not in the cache yet.
    new = [b - a - FREE.max_tokens + 1 for a, b in pairwise(lengths)]
    assert firsts == [(lengths[0], 1), (new[0], 0), (new[1], 1), (new[2], 0)]
    for asked, answer in played:
        (fresh,) = generate(EmbeddedEngine(model, family), [replace(asked, episode=None)])
        same(fresh, answer)
    assert len(engine.scheduler.kept.live) == 1
    engine.release("e")
    engine.release("e")  # twice is harmless
    assert not engine.scheduler.kept.live and len(engine.cache.free) == engine.cache.slots


def test_the_mode_of_the_modules_is_set_once(model, family, prompts, monkeypatch):
    walks = []
    evaluate = model.eval
    monkeypatch.setattr(model, "eval", lambda: walks.append(1) or evaluate())
    model.train()
    generate(EmbeddedEngine(model, family), requests(prompts))
    assert walks == [1] and not model.training


def test_live_and_fresh_requests_are_admitted_together_and_computed_apart(
    model, family, prompts, image
):
    engine = EmbeddedEngine(model, family)
    asked = [replace(r, episode=f"e{i}") for i, r in enumerate(requests(prompts[:3]))]
    answers = generate(engine, asked)
    second = [
        turn(request, answer, family, (image(56, 56, 5), "and?"))
        for request, answer in zip(asked, answers, strict=True)
    ]
    mixed = [*second[:2], *requests(prompts[3:])]
    mixed = [replace(request, key=f"m{i}") for i, request in enumerate(mixed)]
    with counted(model) as calls:
        got = generate(engine, mixed)
    new = [
        len(b.ids) - len(a.ids) - FREE.max_tokens + 1
        for a, b in zip(asked[:2], second[:2], strict=True)
    ]
    assert calls[:3] == [(len(mixed[2].ids), 3), (sum(new), 2), (3, 0)]
    for request, answer in zip(mixed, got, strict=True):
        (fresh,) = generate(EmbeddedEngine(model, family), [replace(request, episode=None)])
        same(fresh, answer)


def test_an_episode_that_lost_its_slot_gives_the_same(model, family, prompts, image):
    engine = EmbeddedEngine(model, family, max_sequences=1)
    states = [replace(r, episode=f"e{i}") for i, r in enumerate(requests(prompts[:2]))]
    for number in range(3):
        for i, request in enumerate(states):
            (answer,) = generate(engine, [request])
            (fresh,) = generate(EmbeddedEngine(model, family), [replace(request, episode=None)])
            same(fresh, answer)
            states[i] = turn(request, answer, family, (image(56, 56, number), "go on"))
    assert engine.cache.slots == 1 and list(engine.scheduler.kept.live) == ["e1"]


def test_a_conversation_that_was_rewritten_is_computed_again(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    (request,) = requests(prompts[1:2])
    request = replace(request, episode="e")
    generate(engine, [request])
    ids = request.ids.copy()
    ids[-1] = 7
    changed = replace(request, ids=np.concatenate([ids, [8, 9, 10] * 5]))
    (answer,) = generate(engine, [changed])
    (fresh,) = generate(EmbeddedEngine(model, family), [replace(changed, episode=None)])
    same(fresh, answer)
    assert len(engine.scheduler.kept.live) == 1


def test_another_picture_in_the_cached_part_is_computed_again(model, family, image):
    engine = EmbeddedEngine(model, family)
    first = family.render([Message(role="user", parts=(image(56, 56, 0), "x"))])
    other = family.render([Message(role="user", parts=(image(56, 56, 1), "x"))])
    (request,) = requests([first], replace(FREE, temperature=0.0))
    request = replace(request, episode="e")
    (answer,) = generate(engine, [request])
    ids = np.concatenate([request.ids, answer.ids, [4]])
    changed = replace(request, ids=ids, media=other.media)
    (got,) = generate(engine, [changed])
    (fresh,) = generate(EmbeddedEngine(model, family), [replace(changed, episode=None)])
    same(fresh, got)


# -- control ---------------------------------------------------------------------------------------


def test_abort_of_waiting_and_running_requests(model, family, prompts):
    engine = EmbeddedEngine(model, family, max_sequences=1)
    first, second, third = requests(prompts[:3])
    for request in (replace(first, episode="e"), second, third):
        engine.submit(request)
    assert engine.poll() == [] and engine.pending == 3
    engine.abort("0/0")
    engine.abort("1/0")
    engine.abort("unknown")
    done = {c.key: c for c in engine.poll()}
    assert set(done) == {"0/0", "1/0"}
    assert all(c.finish == "aborted" for c in done.values())
    assert 1 <= len(done["0/0"].ids) <= 2 and len(done["1/0"].ids) == 0
    assert not engine.scheduler.kept.live
    rest = []
    while engine.pending:
        rest += engine.poll()
    assert [c.key for c in rest] == ["2/0"]
    same(rest[0], generate(EmbeddedEngine(model, family), [third])[0])


def test_versions_are_recorded_per_token_and_idle_caches_dropped(load, family, prompts, image):
    model = load(NAME)
    engine = EmbeddedEngine(model, family)
    first, second = requests(prompts[:2])
    (answer,) = generate(engine, [replace(first, episode="e")])
    assert answer.versions.tolist() == [0] * 8
    engine.submit(second)
    for _ in range(3):
        engine.poll()
    with torch.no_grad():
        model.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    engine.update_weights(None, version=4)
    assert not engine.scheduler.kept.live
    done = []
    while engine.pending:
        done += engine.poll()
    assert done[0].versions.tolist() == [0] * 3 + [4] * 5
    # The next turn of the idle episode reads nothing that the old weights wrote.
    request = turn(replace(first, episode="e"), answer, family, ("more",))
    (again,) = generate(engine, [request])
    same(again, generate(EmbeddedEngine(model, family), [request])[0])


def test_weights_are_the_trainers_own(load, family, prompts):
    model = load(NAME)
    engine = EmbeddedEngine(model, family)
    asked = requests(prompts[1:2])
    (before,) = generate(engine, asked)
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.mul_(1.5)
    engine.update_weights(None, version=1)
    (after,) = generate(engine, asked)
    same(after, generate(EmbeddedEngine(model, family), asked)[0])
    assert abs(after.logprobs[0] - before.logprobs[0]) > 1e-4


def test_sleep_gives_the_cache_back(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    asked = [replace(r, episode=r.key) for r in requests(prompts)]
    wanted = generate(engine, asked)
    assert engine.cache.keys.numel() > 0
    engine.sleep()
    assert engine.cache.keys.numel() == engine.cache.values.numel() == 0
    assert engine.records.tokens.size == 0 and not engine.scheduler.kept.live
    engine.wake()
    for a, b in zip(generate(engine, asked), wanted, strict=True):
        same(a, b)


def test_the_cache_grows_while_sequences_run(model, family, prompts):
    engine = EmbeddedEngine(model, family)
    short, *others = requests(prompts)
    engine.submit(short)
    engine.poll()
    long = [replace(r, sampling=replace(FREE, max_tokens=80)) for r in others]
    for request in long:
        engine.submit(request)
    done = []
    while engine.pending:
        done += engine.poll()
    for completion, request in zip(sorted(done, key=lambda c: c.key), (short, *long), strict=True):
        same(completion, generate(EmbeddedEngine(model, family), [request])[0])


def test_the_memory_limit_makes_requests_wait(model, family, prompts, monkeypatch):
    from saccade.engines.embedded import cache

    engine = EmbeddedEngine(model, family)
    monkeypatch.setattr(cache, "CPU_CACHE_BYTES", 2 * engine.cache.bytes_per_slot(100) + 1)
    asked = requests(prompts, repeats=2)
    got = generate(engine, asked)
    assert engine.cache.slots == 2
    for a, b in zip(got, generate(EmbeddedEngine(model, family), asked), strict=True):
        same(a, b)


def test_longer_requests_find_fewer_slots_when_those_before_have_ended(
    model, family, prompts, monkeypatch
):
    from saccade.engines.embedded import cache

    engine = EmbeddedEngine(model, family)
    budget = 6 * engine.cache.bytes_per_slot(128)
    monkeypatch.setattr(cache, "CPU_CACHE_BYTES", budget)
    new = 128 - max(map(len, prompts))
    short = [
        replace(r, episode=r.key)
        for r in requests(prompts, replace(FREE, max_tokens=new), repeats=2)
    ]
    long = [
        replace(r, key=f"9/{r.key}", sampling=replace(FREE, max_tokens=new + 150)) for r in short
    ]
    for request in short:
        engine.submit(request)
    done = engine.poll()
    assert engine.cache.slots == 6
    for request in long:
        engine.submit(request)
    while engine.pending:
        done += engine.poll()
        assert engine.cache.keys.nbytes + engine.cache.values.nbytes <= budget
    assert engine.cache.slots == 2
    wanted = generate(EmbeddedEngine(model, family), [*short, *long])
    for a, b in zip(sorted(done, key=lambda c: c.key), wanted, strict=True):
        same(a, b)


def test_training_goes_on_after_generation(load, family, prompts):
    """Inference tensors of the engine must not end up in a graph."""
    from saccade.algorithms.build import resolve
    from saccade.config import AlgorithmConfig, TrainConfig

    model = load(NAME)
    engine = EmbeddedEngine(model, family)
    asked = requests(prompts)
    group = trajectories(asked, generate(engine, asked))
    (batch,) = pack([group], positions=family.positions, micro_tokens=9999)
    ones = np.ones(len(batch.reads), np.float32)
    batch = replace(batch, advantages=ones, scales=ones / len(ones))
    backend = LocalBackend(model, family, TrainConfig())
    algorithm = resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0}), max_tokens=8)
    assert not backend.train_step([batch], algorithm, Scoring(), lr=1e-3).skipped
    engine.update_weights(backend, version=1)
    changed = generate(engine, asked)
    assert changed[0].versions.tolist() == [1] * 8
