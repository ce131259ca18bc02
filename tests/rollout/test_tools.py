"""Episodes with tools, token by token; in most the engine is scripted, and ends where a real one would."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config import EnvConfig
from saccade.environments import stop_strings
from saccade.models.families import Family
from saccade.rollout.env_setup import environments
from saccade.rollout.episode import Limits
from saccade.types import Completion, Message, Request, Sample, Sampling, Trajectory

CROP = {"name": "crop", "min_pixels": 3136, "max_pixels": 28 * 28 * 16}

LEAST = "min_turn_tokens"


@dataclass
class Script:
    """An engine that says what it is told: texts of one episode after the other, turn by turn."""

    family: Family
    replies: Sequence[str]
    version: int = 0
    requests: list[Request] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        self.requests.append(request)

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def poll(self) -> list[Completion]:
        request = self.waiting.pop(0)
        chat, sampling = self.family.chat, request.sampling
        text = self.replies[len(self.completions) % len(self.replies)]
        ids = [*chat._encode(chat._guard(text)).tolist(), chat.end_of_turn]
        said = [chat.decode(ids[:n]) for n in range(len(ids) + 1)] if sampling.stop else []
        ends = [n for n, t in enumerate(said) if any(stop in t for stop in sampling.stop)]
        ids = ids[: ends[0]] if ends else ids
        finish = "length" if len(ids) > sampling.max_tokens else "stop"
        ids = np.array(ids[: sampling.max_tokens], np.int64)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        versions = np.zeros(len(ids), np.int32)
        done = Completion(key=request.key, ids=ids, logprobs=logprobs, versions=versions, finish=finish)
        self.completions.append(done)
        return [done]

    def release(self, episode: str) -> None:
        self.released.append(episode)


def call(*numbers, source="original_image") -> str:
    return f"<grounding>{json.dumps({'bbox_2d': list(numbers), 'source': source})}</grounding>"


@pytest.fixture(scope="module")
def question(image) -> Sample:
    return Sample(id="s", messages=(Message(role="user", parts=(image(280, 140, 2), "Where?")),))


@pytest.fixture(scope="module")
def play(family, question, play_with) -> Callable:
    def played(replies, *, engine=None, on_limit=None, **limits):
        config = EnvConfig(**CROP)
        engine = engine or Script(family, replies)
        make = environments(config, order=("answer_tag",), unit=family.unit)
        how = {"sampling": Sampling(max_tokens=120, stop=stop_strings(config)), "on_limit": on_limit}
        return engine, play_with(engine, [question], make, limits=Limits(**{"max_turns": 8} | limits), **how)

    return played


def test_every_end_has_its_reason(play, family, question, check_chain):
    look, wrong, answer = call(0, 0, 0.5, 1), call(2, 2, 3, 3), "<answer>7</answer>"
    prompt = len(family.render(question.messages))
    (_, (group,)) = play([look, answer])
    (whole,) = group.trajectories
    assert whole.ids[whole.policy_mask].tolist()[-1] == family.chat.end_of_turn
    observed = int(np.flatnonzero(whole.policy_mask)[-len(answer) - 1])  # where the answer begins
    tight = observed + 20
    cases = [
        ([look, answer], {}, "answered", "ok", 2),
        (["nothing to say"], {}, "eos_no_answer", "void", 1),
        ([look], {"max_turns": 3}, "max_turns", "overturn", 3),
        ([look], {"max_images": 2}, "max_images", "overturn", 2),
        ([wrong], {"max_tool_errors": 2}, "tool_errors", "void", 3),
        ([wrong], {"max_tool_errors": 0}, "tool_errors", "void", 1),
        (["x" * 200], {"max_turn_tokens": 50}, "turn_length", "truncated", 1),
        (["x" * 200], {"max_total_tokens": prompt + 60}, "token_budget", "truncated", 1),
        ([look], {"max_total_tokens": observed - 10}, "token_budget", "overturn", 1),
        ([look], {"max_total_tokens": tight, LEAST: 21}, "token_budget", "overturn", 1),
        ([look, "x"], {"max_total_tokens": tight, LEAST: 20}, "eos_no_answer", "void", 2),
    ]  # fmt: skip
    for replies, limits, reason, status, turns in cases:
        engine, (group,) = play(replies, **limits)
        (t,) = group.trajectories
        assert (t.end_reason, t.status, t.turns) == (reason, status, turns), (replies, limits)
        check_chain(engine, t)
        assert len(t.ids) <= limits.get("max_total_tokens", 10**6)
        assert len(t.info.get("tool_calls", ())) <= turns


EDGES = st.floats(-0.2, 1.2).map(lambda edge: round(edge, 2))
SOURCES = st.sampled_from(["original_image", "image_1", *[f"observation_{n}" for n in range(4)]])
REPLIES = st.one_of(
    st.builds(lambda a, b, c, d, s: call(a, b, c, d, source=s), EDGES, EDGES, EDGES, EDGES, SOURCES),
    st.builds(lambda a, c, s: call(a, 0, c, 1, source=s), EDGES, EDGES, SOURCES),
    st.text(alphabet="<>/grounding{}[]0.5,'\" \n", max_size=30).map(lambda t: f"<grounding>{t}</grounding>"),
    st.sampled_from(["<answer>7</answer>", "<|image_pad|><|im_end|>", "", "x" * 90, "<grounding>"]),
    st.text(max_size=20),
)
LEAST_AND_MOST = {"max_turns": (1, 6), "max_images": (1, 5), "max_total_tokens": (60, 900)}
LEAST_AND_MOST |= {"min_turn_tokens": (1, 60), "max_turn_tokens": (1, 120)}
ERRORS = {"max_tool_errors": st.none() | st.integers(0, 2)}
LIMITS = st.fixed_dictionaries({name: st.integers(*ends) for name, ends in LEAST_AND_MOST.items()} | ERRORS)


@settings(deadline=None, max_examples=40)
@given(replies=st.lists(REPLIES, min_size=1, max_size=6), limits=LIMITS)
def test_random_episodes_keep_prefix_chain_mask_and_images(play, family, check_chain, replies, limits):
    engine, (group,) = play(replies, **limits)
    (t,) = group.trajectories
    check_chain(engine, t)
    prompt = len(family.render(group.sample.messages))
    assert len(t.ids) <= max(limits["max_total_tokens"], prompt)
    assert len(t.media) <= max(1, limits["max_images"]) and t.turns <= limits["max_turns"]
    assert all(len(c.ids) <= limits["max_turn_tokens"] for c in engine.completions)
    noted = t.info.get("tool_calls", [])
    numbers = [c["observation"] for c in noted if c["observation"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(t.media) in (len(numbers) + 1, len(numbers))  # the last one may not have fitted
    # Each observation names the number that it was given, and its parent is the picture it names.
    made = {0: t.media[0].media} | dict(zip(numbers, [s.media for s in t.media[1:]], strict=False))
    for c in noted:
        if c["ok"] and c["observation"] in made:
            media = made[c["observation"]]
            source = int(c["source"].rpartition("_")[2]) if "observation" in c["source"] else 0
            assert media.parent == made[source].hash and list(media.box) == c["pixels"]


@settings(deadline=None, max_examples=15)
@given(replies=st.lists(REPLIES, min_size=1, max_size=6), limits=LIMITS)
def test_an_episode_under_a_smaller_limit_is_the_beginning_of_a_longer_one(play, replies, limits):
    """Every field is that of an episode which was played with the smaller limit."""
    marked = {}
    marks = frozenset(range(1, limits["max_turns"]))
    _, (group,) = play(replies, on_limit=lambda _, t: marked.setdefault(t.turns, t), **limits, smaller_turns=marks)
    (whole,) = group.trajectories
    assert marked.keys() <= marks
    for turns in marks:
        _, (alone,) = play(replies, **limits | {"max_turns": turns})
        (wanted,) = alone.trajectories
        found = marked.get(turns, whole)
        for each in fields(Trajectory):
            np.testing.assert_equal(getattr(found, each.name), getattr(wanted, each.name))


def test_a_turn_is_computed_from_the_cache_of_the_turns_before(engine, family, play, saying):
    """Prefilled tokens: the prompt once, then only what each observation adds."""
    computed = []
    handle = engine.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["position_ids"].shape[-1]), with_kwargs=True
    )
    looks = [call(0, 0, 0.5, 1), call(0, 0, 0.5, 1, source="observation_1")]
    with saying(*looks, "<answer>7</answer>", ends=False):
        _, (group,) = play([], engine=engine)
    handle.remove()
    (t,) = group.trajectories
    assert (t.end_reason, t.turns, len(t.media)) == ("answered", 3, 3)
    sampled = t.response_length
    prefills = [n for n in computed if n > 1]
    assert len(prefills) == 3 and prefills[0] == t.prompt_length
    # Of a turn all but its last token is in the cache; everything else is prefilled exactly once.
    assert sum(prefills) == len(t.ids) - sampled + 2
    assert sum(computed) == len(t.ids) - 1
    assert sum(prefills) < sum(len(r.ids) for r in engine.requests) / 2
