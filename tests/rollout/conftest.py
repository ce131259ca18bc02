"""A real engine whose language head follows a script, and an environment that follows another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import Step
from saccade.types import Completion, Message, Request, Sample

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


@pytest.fixture
def saying(model, family):
    """One sequence at a time: sampled token after sampled token is taken from these replies.
    Without `ends` only the last one has an end of turn: stop strings end the others.
    """

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
