"""Cold-start data: assistant turns are replayed in the environment, which supplies the observations.

The observations in the data are therefore exactly those of RL. A trajectory whose last turn has no answer, or
that answers right after a failed call, is skipped. The turns come from the rows, if they have assistant turns
(trajectories of another model or system), or from a scripted searcher, if the rows are scenes of
`saccade data visual-search`.

    saccade data coldstart scenes/train.jsonl coldstart env.max_pixels=12544 env.min_pixels=12544
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade import __version__
from saccade.config import Config, DataSource, EnvConfig, load
from saccade.data import datasets
from saccade.environments import KINDS, Environment, Step, stop_strings
from saccade.errors import ConfigError, DataError
from saccade.plugins.check_data.canonical_rows import dialogue_row
from saccade.plugins.drawn.drawn_sets import chosen, count_lines, finished_file, flags, write_card
from saccade.plugins.visual_search.search_expert import AGAIN, NUMBERS, call, demonstration
from saccade.recipes.run_parts import answer_places
from saccade.rewards.reward_sample import reward_sample
from saccade.rewards.verifiers import VERIFIERS
from saccade.rollout import env_setup
from saccade.rollout.env_setup import EnvironmentCall, Failed
from saccade.system.disk import require_new
from saccade.types import STATUS_OF_END, Message, Sample


def run(
    config: Config, source: Path, out: Path, *, turns: int = 6, mistakes: float = 0.05, verifier: str | None = None
) -> dict[str, int]:
    """Write OUT/train.jsonl, its card and OUT/images; returns the numbers of rows written and skipped, by reason. With
    a verifier, only trajectories with right answers are written.
    """
    if config.env.name == "single_turn":
        config = load(config, ["env.name=crop"])
    if verifier is not None and verifier not in VERIFIERS:
        raise ConfigError(f"--verifier {verifier}: unknown; choose one of {', '.join(VERIFIERS)}")
    path = out / "train.jsonl"
    require_new(out, "OUT", inside=path.name, other="folder")
    make = env_setup.environments(config.env, order=answer_places(config.prompt))
    rows = datasets.load([DataSource(path=str(source))], config.data).samples
    _warn(config, rows)
    counts = Counter[str]()
    out.mkdir(parents=True, exist_ok=True)
    with finished_file(path) as file:
        for index, sample in enumerate(rows):
            rng = np.random.default_rng((config.run.seed, index))
            question, texts, planned = _turns(sample, rng, turns, mistakes, config.env)
            seconds = config.env.step_timeout
            try:
                played, reason = replay(question, texts, make(), most=turns, planned=planned, seconds=seconds)
            except (Failed, TimeoutError) as error:  # errors in the user's environment or tools
                played, reason = sample, "env_error"
                if not counts[reason]:
                    print(f"row {sample.id}: the environment failed: {error}")
            if not reason and verifier is not None:
                right = VERIFIERS[verifier].function(reward_sample(sample, texts[-1]))
                reason = "" if right.kind == "value" and right.value >= 1 else "wrong"
            counts[reason or "written"] += 1
            if not reason:
                file.write(json.dumps(dialogue_row(played, out), ensure_ascii=False) + "\n")
        if not counts["written"]:
            raise DataError(f"{source}: no row became a trajectory: {dict(counts)}")
    made = f"{counts['written']:,} conversations that saccade {__version__}"
    options = {"turns": turns, "mistakes": mistakes, "verifier": verifier}
    command = ["coldstart", str(source), out.name, *chosen(config), *flags(options)]
    what = f"{made} played from {source} with run.seed={config.run.seed}"
    write_card(path, what, command, source=source, facts=count_lines(counts))
    return dict(counts)


def replay(
    sample: Sample, texts: list[str], world: Environment, *, most: int, planned: int | None = None, seconds: float = 60
) -> tuple[Sample, str]:
    """Returns (whole conversation, reason to skip it or ""). `planned`: number of calls that fail on purpose, if known;
    `seconds`: timeout of a step. Raises the exceptions of a user's environment.
    """
    if len(texts) > most:
        return sample, "too_many_turns"
    try:
        messages = list(_await_result(world.reset(sample, 0), seconds))
        info: dict[str, Any] = {}
        for number, text in enumerate(texts, 1):
            reply = Message(role="assistant", parts=(text,))
            step = Step(*_await_result(world.step(reply), seconds))
            info |= step.info
            messages.append(reply)
            if step.done and number < len(texts):
                return sample, "answer_before_the_end"
            reason = step.info.get("end_reason", "env_done")
            if step.done and STATUS_OF_END.get(reason) == "ok":
                calls = [each for each in info.get("tool_calls", ()) if isinstance(each, Mapping)]
                failed = [not each.get("ok", True) for each in calls]
                blind = failed[-1:] == [True] or (planned is not None and sum(failed) > planned)
                return replace(sample, messages=tuple(messages)), "failed_call" if blind else ""
            messages += step.messages
        return sample, "no_answer"
    finally:
        closed: Any = world.close
        with suppress(Failed, TimeoutError):  # a failing close does not matter: the episode is over
            _await_result(closed(), seconds)


def _await_result(outcome: Any, seconds: float) -> Any:
    """The result of an environment's step, waiting for one in another process; raises the environment's error."""
    if isinstance(outcome, EnvironmentCall):
        outcome.seconds = seconds
        while not outcome.done():
            time.sleep(0.001)
        outcome = outcome.outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _turns(
    sample: Sample, rng: np.random.Generator, turns: int, mistakes: float, env: EnvConfig
) -> tuple[Sample, list[str], int | None]:
    """Returns (question, assistant turns, number of calls that are wrong on purpose or None if unknown)."""
    written = [m.text for m in sample.messages if m.role == "assistant"]
    if written:
        first = next(i for i, m in enumerate(sample.messages) if m.role == "assistant")
        return replace(sample, messages=sample.messages[:first]), written, None
    if not {"level", "grid", "box", "framed"} <= set(sample.extra):
        raise DataError(f"row {sample.id} has no assistant turn and is no scene of `saccade data visual-search`")
    if env.name in KINDS and "zoom" not in KINDS[env.name].tools:
        raise ConfigError(f"env.name={env.name}: the scripted searcher zooms; try env.name=crop")
    if env.coordinates not in NUMBERS:
        forms = " or ".join(NUMBERS)
        raise ConfigError(f"env.coordinates={env.coordinates}: the scripted searcher writes {forms}; use one of them")
    named = env.call == "tool_call" or (env.name in KINDS and "</grounding>" not in stop_strings(env))
    write = partial(call, coordinates=env.coordinates, named=named)
    texts = demonstration(sample, rng, turns=turns, mistakes=mistakes, write=write)
    return sample, texts, sum(AGAIN in text for text in texts)


def _warn(config: Config, rows: Sequence[Sample]) -> None:
    """Warn if pixel budgets of the rows differ from env.min_pixels and env.max_pixels and these are not set: tools use
    the latter, so the difference is probably a mistake.
    """
    env, usual = config.env, (config.data.min_pixels, config.data.max_pixels)
    own = {(m.min_pixels, m.max_pixels) for row in rows for m in row.media} - {usual}
    if own and not {"min_pixels", "max_pixels"} <= env.model_fields_set:
        least, most = min(own)
        print(
            f"images of tools get {env.min_pixels} to {env.max_pixels} pixels, rows ask for {least} to {most}; "
            f"to have them alike, set env.min_pixels={least} env.max_pixels={most} here and in RL"
        )
