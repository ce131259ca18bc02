"""Cold-start data: assistant turns are played in the environment, what it answers becomes the rest.

So the observations that a policy learns from are those that it meets in RL, word by word, and a
trajectory whose calls cannot be read or whose last turn holds no answer is set aside. The turns are
those of the rows, where they hold some (trajectories of another model or system), or those of a
scripted searcher, where the rows are scenes of `saccade data visual-search`.

    saccade data coldstart scenes/train.jsonl coldstart env.max_pixels=12544 env.min_pixels=12544
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from saccade.config import Config, DataSource, load
from saccade.data import datasets
from saccade.data.dialogues import dialogue_row
from saccade.data.search_expert import demonstration
from saccade.environments import Environment, Step
from saccade.errors import ConfigError, DataError
from saccade.rewards.formats import FORMATS
from saccade.rewards.sample import reward_sample
from saccade.rewards.verifiers import VERIFIERS
from saccade.rollout import hosting
from saccade.types import Message, Sample


def run(
    config: Config,
    source: Path,
    out: Path,
    *,
    turns: int = 6,
    mistakes: float = 0.05,
    verifier: str | None = None,
) -> dict[str, int]:
    """Writes OUT/train.jsonl and OUT/images; returns how many rows were written, and how many were
    set aside for which reason. With a verifier, only right answers stay.
    """
    if config.env.name == "single_turn":
        config = load(config, ["env.name=crop"])
    if verifier is not None and verifier not in VERIFIERS:
        raise ConfigError(f"--verifier {verifier}: unknown; choose one of {', '.join(VERIFIERS)}")
    path = out / "train.jsonl"
    if path.exists():
        raise ConfigError(f"{path} exists; give a new folder, nothing is overwritten")
    make = hosting.environments(config.env, order=FORMATS[config.prompt.format].order)
    rows = datasets.load([DataSource(path=str(source))], config.data).samples
    counts: Counter[str] = Counter()
    out.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for index, sample in enumerate(rows):
            rng = np.random.default_rng((config.run.seed, index))
            question, texts = _turns(sample, rng, turns, mistakes)
            played, reason = play(question, texts, make(), most=turns)
            if not reason and verifier is not None:
                right = VERIFIERS[verifier].function(reward_sample(sample, texts[-1]))
                reason = "" if right.kind == "value" and right.value >= 1 else "wrong"
            counts[reason or "written"] += 1
            if not reason:
                file.write(json.dumps(dialogue_row(played, out), ensure_ascii=False) + "\n")
    if not counts["written"]:
        raise DataError(f"{source}: no row became a trajectory: {dict(counts)}")
    return dict(counts)


def play(
    sample: Sample, texts: Sequence[str], environment: Environment, *, most: int
) -> tuple[Sample, str]:
    """The whole conversation, and why it must not be learned from (empty: nothing against it)."""
    messages = list(environment.reset(sample, 0))
    if len(texts) > most:
        return sample, "too_many_turns"
    for number, text in enumerate(texts, 1):
        reply = Message(role="assistant", parts=(text,))
        step = Step(*environment.step(reply))
        messages.append(reply)
        if step.done and number == len(texts) and step.info.get("end_reason") == "answered":
            return replace(sample, messages=tuple(messages)), ""
        if step.done:
            return sample, "answer_before_the_end" if number < len(texts) else "no_answer"
        messages += step.messages
    return sample, "no_answer"


def _turns(
    sample: Sample, rng: np.random.Generator, turns: int, mistakes: float
) -> tuple[Sample, list[str]]:
    """The question, and what an assistant wrote or a searcher would write."""
    written = [m.text for m in sample.messages if m.role == "assistant"]
    if written:
        first = next(i for i, m in enumerate(sample.messages) if m.role == "assistant")
        return replace(sample, messages=sample.messages[:first]), written
    if not {"level", "grid", "box", "framed"} <= set(sample.extra):
        raise DataError(
            f"row {sample.id} holds no assistant turn and is no visual-search scene; give "
            "trajectories, or the output of `saccade data visual-search`"
        )
    return sample, demonstration(sample, rng, turns=turns, mistakes=mistakes)
