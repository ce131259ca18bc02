"""A real engine whose language head follows a script, and an environment that follows another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import Step
from saccade.rollout.collect import collect
from saccade.rollout.episode import EpisodeSetup, Limits
from saccade.types import STATUS_OF_END, Completion, Message, Request, Sample, Sampling

NAME = "qwen2_5_vl"


@dataclass
class Recording:
    """Passes everything on to the engine and writes down what went in and out."""

    engine: EmbeddedEngine
    requests: list[Request] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.engine.submit(request)

    def poll(self) -> list[Completion]:
        done = self.engine.poll()
        self.completions += done
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Scripted:
    """Answers turn after turn with what it was given: a step, or a function that makes one."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps, self.heard, self.closed = list(steps), [], 0

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        return sample.messages

    def step(self, message: Message) -> Step:
        self.heard.append(message.text)
        answer = self.steps[len(self.heard) - 1]
        return answer() if callable(answer) else answer

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="package")
def model(load):
    return load(NAME)


@pytest.fixture(scope="package")
def family(family_of):
    return family_of(NAME)


@pytest.fixture
def engine(model, family) -> Recording:
    return Recording(EmbeddedEngine(model, family))


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture(scope="package")
def play_with(family):
    def groups(engine, samples, environment, *, max_tokens=200, limits=None, seed="0", sampling=None, **options):
        play = EpisodeSetup(
            environment=environment, family=options.pop("family", family),
            sampling=sampling or Sampling(max_tokens=max_tokens), limits=limits or Limits(max_turns=4), seed=seed,
        )  # fmt: skip
        return collect(engine, samples, play, **{"repeats": 1} | options)

    return groups


@pytest.fixture(scope="package")
def check_chain(family):
    """Prefix chain, mask, images: what every episode must keep."""

    def check(engine, trajectory):
        requests, completions = engine.requests, engine.completions
        chain = [*[r.ids for r in requests], trajectory.ids]
        for (before, after), completion in zip(pairwise(chain), completions, strict=True):
            known = np.concatenate([before, completion.ids])
            assert after[: len(known)].tolist() == known.tolist()
        policy = trajectory.policy_mask
        assert trajectory.ids[policy].tolist() == [i for c in completions for i in c.ids.tolist()]
        assert trajectory.logprobs[policy].tolist() == [p for c in completions for p in c.logprobs.tolist()]
        assert (np.isnan(trajectory.logprobs) == ~policy).all() and ((trajectory.versions == -1) == ~policy).all()
        assert [r.first_index for r in requests] == [
            sum(len(c.ids) for c in completions[:turn]) for turn in range(len(requests))
        ]
        inside = np.zeros(len(trajectory.ids), bool)
        for span in trajectory.media:
            assert span.length == family.measure(span.media)[1]
            inside[span.start : span.end] = True
        assert ((trajectory.ids == family.chat.placeholder) == inside).all()
        shown = [media for message in trajectory.messages for media in message.media]
        assert [span.media for span in trajectory.media] == shown
        assert not (inside & policy).any()
        ended = trajectory.end_reason
        assert trajectory.status in {STATUS_OF_END.get(ended), STATUS_OF_END.get(f"{ended}_pending")}

    return check


@pytest.fixture
def saying(model, family):
    """The tokens that one sequence samples. Without `ends` stop strings end all replies but the last."""

    @contextmanager
    def script(*replies: str, ends: bool = True) -> Iterator[list[list[int]]]:
        chat = family.chat
        ids = [[*chat._encode(chat._guard(r)).tolist(), chat.end_of_turn] for r in replies]
        ids = ids if ends else [*(reply[:-1] for reply in ids[:-1]), ids[-1]]
        rest = iter([token for reply in ids for token in reply])

        def change(module, args, logits):
            assert len(logits) == 1
            wanted = torch.zeros_like(logits)
            wanted[:, next(rest)] = 1e4
            return wanted

        handle = model.lm_head.register_forward_hook(change)
        yield ids
        handle.remove()

    return script


@pytest.fixture
def brief(model, family):
    """Replies of random length: the end of turn is likely at every token."""

    def change(module, args, logits):
        likely = torch.zeros_like(logits)
        likely[:, family.chat.end_of_turn] = 4.5
        return logits + likely

    handle = model.lm_head.register_forward_hook(change)
    yield
    handle.remove()
