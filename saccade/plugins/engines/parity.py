"""Check before step 1 that the trainer and an engine with a copy of its weights have the same policy.

An engine only samples, so every check is a comparison of log-probs: the trainer scores what the engine
sampled, under the expected conditions and under conditions that would explain a gap (older weights,
another image, another temperature). The condition that fits names the cause. The weights are restored
afterwards.

    compare(config, engine, policy, samples, version=0).metrics()
    probe(engine, policy, samples, sampling=Sampling(), limit=1e-4, version=0)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

import numpy as np

from saccade.config import Config
from saccade.engines import Engine, generate, nonfinite_error
from saccade.errors import EnvironmentProblem
from saccade.forest.packing import pack
from saccade.media.kinds import open_any
from saccade.media.pixel_cache import DECODED
from saccade.recipes.run_parts import rollout_sampling
from saccade.run.quarantine import decode_error
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.types import Completion, Group, Media, Rendered, Request, Sample, Sampling, Source, Trajectory

PROMPTS, NEW_TOKENS = 2, 16
LOOKED_AT = 256  # rows that are searched for prompts with images
LIMITS = {"float32": 1e-4, "bfloat16": 0.05}  # largest mean |gap|, by the dtype that computes
NOTHING = 1e-6  # smaller changes count as none
NO_STEP = -1  # a version that training never has: what is cached under it is never read again
ANOTHER, UNSEEN = 0xFF, 0x55  # the bits of every pixel that are flipped

STALE = "its encoder or prefix cache is stale: it reuses what it computed from the {} under older weights"
NO_CACHE = "switch those caches off with rollout.engine_args, or use rollout.engine=embedded"
EMPTY_TOWER = "look at the {} tower of model.path: its output may be zero"
SAME_DRAW = "let it give the log-probs of the distribution that it draws from (temperature, bans)"
SCORING = (  # what an engine may leave out: (cause, temperature, ban)
    ("temperatures differ: the engine's log-probs leave out rollout.temperature", True, False),
    ("banned ids differ: the engine draws among ids that the trainer bans", False, True),
    ("the engine's log-probs leave out both rollout.temperature and the banned ids", True, True),
)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Mean absolute differences of log-probs, each for the prompt where it is largest."""

    gap: float  # between engine and trainer
    restored: float  # the same after weights were changed and restored
    by_weight: float  # between the trainer with and without one changed weight
    by_picture: float | None  # between the trainer with the image and with another one; None without images
    limit: float

    def __str__(self) -> str:
        picture = "" if self.by_picture is None else f", another image by {self.by_picture:.2g}"
        agreed = f"parity: engine and trainer agree to {self.gap:.2g} (limit {self.limit:g})"
        return f"{agreed}; a changed weight moves both by {self.by_weight:.2g}{picture}"

    def metrics(self) -> dict[str, float]:
        return {f"parity/{name}": value for name, value in asdict(self).items() if value is not None}


def compare(config: Config, engine: Engine, policy: LocalTrainer, samples: Sequence[Sample], *, version: int) -> Parity:
    """Return the gaps; raises if one is too large."""
    limit = config.rollout.parity_max or LIMITS[str(policy.dtype).removeprefix("torch.")]
    sampling, copies = rollout_sampling(config), max(1, config.rollout.replicas)
    return probe(engine, policy, samples, sampling=sampling, limit=limit, version=version, copies=copies)


def probe(
    engine: Engine,
    policy: LocalTrainer,
    samples: Sequence[Sample],
    *,
    sampling: Sampling,
    limit: float,
    version: int,
    copies: int = 1,
) -> Parity:
    """Return the gaps, or raise with the cause of one that is too large. `version`: of the weights
    that both have now; `copies`: how often each prompt is sent, once to every replica.
    """
    pictures_first = sorted(samples[:LOOKED_AT], key=lambda sample: not sample.media)
    chosen = [*islice((sample for sample in pictures_first if decode_error(sample) is None), PROMPTS)]
    prompts = [policy.family.render(sample.messages) for sample in chosen for _ in range(copies)]
    seen = [prompt for prompt in prompts if prompt.media]
    length = min(NEW_TOKENS, sampling.max_tokens)
    sampling = replace(sampling, max_tokens=length, stop=(), ignore_eos=True, first=None)
    bench = _Bench(engine=engine, policy=policy, sampling=sampling, limit=limit, replicas=copies)

    answers = bench.ask(prompts)
    others = bench.ask([_with_pictures(prompt, ANOTHER) for prompt in seen])
    gap, by_picture = bench.gap(answers), None
    if np.isnan(gap) and np.isnan(np.concatenate(bench.score(answers))).any():
        raise nonfinite_error(policy.weights())
    bench.judge_sight(answers, others)
    bench.judge_gap(answers, gap)
    if seen:
        by_picture = bench.judge_picture(answers, others)
    by_weight = bench.judge_weight(seen or prompts, "vision" if seen else "llm", version)
    restored = bench.gap(bench.ask(prompts))
    facts = f"the gap was {gap:.2g} and is {restored:.2g}"
    require(restored <= limit, "the engine does not come back to weights that it had before", facts, NO_CACHE)
    return Parity(gap=gap, restored=restored, by_weight=by_weight, by_picture=by_picture, limit=limit)


@dataclass(frozen=True, kw_only=True)
class _Bench:
    engine: Engine
    policy: LocalTrainer
    sampling: Sampling
    limit: float
    replicas: int

    def ask(self, prompts: Sequence[Rendered]) -> list[Trajectory]:
        """Return the engine's samples with log-probs; the n-th prompt always has the same sampling noise."""
        requests = []
        for n, prompt in enumerate(prompts):
            request = Request(key=f"parity/{n}", ids=prompt.ids, media=prompt.media, sampling=self.sampling)
            requests.append(replace(request, noise=n + 1, replica=n % self.replicas))
        return list(map(trajectory, requests, generate(self.engine, requests)))

    def score(self, answers: Sequence[Trajectory], scoring: Scoring | None = None) -> list[np.ndarray]:
        """The trainer's log-probs of what the engine sampled, each answer in a batch of its own."""
        sample, batches = Sample(id="parity", messages=()), []
        for answer in answers:
            batches += pack([Group(sample=sample, trajectories=(answer,))], micro_tokens=len(answer.ids))
        scoring = scoring or Scoring(temperature=self.sampling.temperature)
        return [logprobs for logprobs, _ in self.policy.logprobs(batches, scoring)]

    def gap(self, answers: Sequence[Trajectory], scoring: Scoring | None = None) -> float:
        engine = [answer.logprobs[answer.policy_mask] for answer in answers]
        return _apart(engine, self.score(answers, scoring))

    def judge_sight(self, answers: Sequence[Trajectory], others: Sequence[Trajectory]) -> None:
        """Refuse an engine whose answers do not depend on the image."""
        for one, other in zip(answers, others, strict=False):
            same = np.array_equal(one.ids, other.ids)
            moved = not same or np.nanmax(np.abs(one.logprobs - other.logprobs)) > NOTHING
            facts = "what it samples is the same for another image"
            require(moved, "the image does not reach the engine", facts, "use rollout.engine=embedded")

    def judge_gap(self, answers: Sequence[Trajectory], gap: float) -> None:
        if gap <= self.limit:
            return
        facts = f"mean |gap| of log-probs {gap:.2g}, limit {self.limit:g}"
        missing = "the engine gives no log-prob for some of what it sampled"
        require(not np.isnan(gap), missing, facts, "use rollout.engine=embedded")
        for cause, plain, unbanned in SCORING:
            scoring = Scoring(temperature=1.0 if plain else self.sampling.temperature, ban=not unbanned)
            require(not self.gap(answers, scoring) <= self.limit, cause, facts, SAME_DRAW)
        cause = "the engine has other weights than the trainer, or reads the prompt differently"
        fix = "load both from the same model.path; if model.dtype=float32 closes the gap, raise rollout.parity_max"
        require(False, cause, facts, fix)

    def judge_picture(self, answers: Sequence[Trajectory], others: Sequence[Trajectory]) -> float:
        """Require that another image changes the log-probs of engine and trainer alike."""
        before = [replace(other, media=one.media) for one, other in zip(answers, others, strict=False)]
        gap, kept = self.gap(others), self.gap(before)
        moved = _apart(self.score(others), self.score(before))
        facts = f"the trainer moves by {moved:.2g}, gap {gap:.2g}, to the first image {kept:.2g}"
        same = "another image changes nothing in the trainer either"
        require(moved > NOTHING, same, facts, EMPTY_TOWER.format("vision"))
        require(gap <= kept, "the engine answers a second image with what it cached of the first", facts, NO_CACHE)
        cause = "the engine reads a second image differently from the trainer"
        require(gap <= self.limit, cause, facts, "use rollout.engine=embedded")
        return moved

    def judge_weight(self, prompts: Sequence[Rendered], tower: str, version: int) -> float:
        """Require that one changed weight changes the log-probs of engine and trainer alike, on prompts
        that the engine has seen.
        """
        with self.policy.negated(tower) as name:
            self.engine.update_weights(self.policy, version=NO_STEP)
            again, fresh = self.ask(prompts), self.ask(list(map(_unseen, prompts)))
            scores, gap, gap_unseen = self.score(again), self.gap(again), self.gap(fresh)
        self.engine.update_weights(self.policy, version=version)
        kept, moved = self.gap(again), _apart(scores, self.score(again))
        facts = (
            f"{name} was changed: the trainer moves by {moved:.2g}; gap {gap:.2g}, to the weights "
            f"before {kept:.2g}, on prompts not seen before {gap_unseen:.2g}"
        )
        require(moved > NOTHING, "a changed weight changes nothing in the trainer", facts, EMPTY_TOWER.format(tower))
        arrived = gap <= self.limit and gap <= kept
        stale = not arrived and gap_unseen <= self.limit and gap_unseen < gap
        require(not stale, STALE.format("image" if prompts[0].media else "prompt"), facts, NO_CACHE)
        how = "none of" if kept <= self.limit else "only some of"
        cause = f"wrong weights: {how} what was handed over arrived in the engine"
        require(arrived, cause, facts, "use rollout.engine=embedded, or another release of the engine")
        return moved


def require(holds: bool | np.bool_, cause: str, facts: str, fix: str) -> None:
    if not holds:
        raise EnvironmentProblem(f"rollout.engine: {cause} ({facts}); {fix}")


def trajectory(request: Request, answer: Completion) -> Trajectory:
    """A prompt and what was sampled, as the trainer scores it."""
    asked, sampled = len(request.ids), len(answer.ids)
    return Trajectory(
        sample_id=request.key,
        repeat=0,
        ids=np.concatenate([request.ids, answer.ids]),
        sources=np.repeat(np.array([Source.PROMPT, Source.POLICY], np.int8), [asked, sampled]),
        logprobs=np.concatenate([np.full(asked, np.nan, np.float32), answer.logprobs]),
        versions=np.concatenate([np.full(asked, -1, np.int32), answer.versions]),
        media=request.media,
        support=answer.support,
    )


def _apart(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest mean absolute difference; NaN, which exceeds every limit, if a log-prob is missing."""
    return float(np.max([np.abs(a - b).mean() for a, b in zip(one, other, strict=True)]))


def _with_pictures(prompt: Rendered, bits: int) -> Rendered:
    """The same prompt with other images of the same sizes."""

    def turned(media: Media) -> Media:
        made = DECODED.get(media)
        other = np.roll(made, bits * 100) if media.kind == "audio" else made ^ np.uint8(bits)
        return open_any(media.kind, other, {name: getattr(media, name) for name in ("fps", "min_pixels", "max_pixels")})

    return replace(prompt, media=tuple(replace(span, media=turned(span.media)) for span in prompt.media))


def _unseen(prompt: Rendered) -> Rendered:
    """A prompt like this one that shares nothing with what an engine may have cached of it."""
    if prompt.media:
        return _with_pictures(prompt, UNSEEN)
    return Rendered(ids=prompt.ids[1:], sources=prompt.sources[1:])
