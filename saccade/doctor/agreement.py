"""Does everyone who computes with a model get the same numbers? On two prompts: rows packed, padded
and one by one; the embedded engine and the trainer, also with a changed weight and with another
picture; and so with a foreign engine, where the config asks for one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from saccade.backends import Scoring
from saccade.backends.local import LocalBackend
from saccade.config import Config
from saccade.data.synthetic import TEACHING_COLOURS, counting_split
from saccade.doctor.finding import AS_IT_SAYS, Finding, failure, ok
from saccade.engines import Engine, generate, parity
from saccade.engines.weights import not_finite
from saccade.errors import EnvironmentProblem
from saccade.forest import attention
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.recipes.engines import make_engine
from saccade.recipes.models import family_of, load_policy
from saccade.recipes.parity_check import compare
from saccade.types import Batch, Group, Message, Request, Sample, Sampling, Trajectory

REPEATS = 2  # answers of a prompt, which share it in a forest


def check(config: Config) -> Iterator[Finding]:
    family = family_of(config, config.model.path)
    policy = load_policy(config, family, train="full")
    backend, samples = LocalBackend(policy.model, family), questions(family)
    rollout = config.rollout.model_copy(update={"engine": "embedded", "replicas": 0})
    own = config.model_copy(update={"rollout": rollout})
    engine = make_engine(own, policy)
    yield rows_agree(backend, engine, samples)
    yield engine_agrees(own, engine, backend, samples)
    if config.rollout.engine not in ("embedded", "http") or config.rollout.replicas:
        with (
            tempfile.TemporaryDirectory(prefix="saccade-doctor-") as logs,
            closing(make_engine(config, policy, logs=Path(logs))) as foreign,
        ):
            yield engine_agrees(config, foreign, backend, samples)


def questions(family: Family) -> list[Sample]:
    """Two prompts, with pictures where the model sees; of different lengths."""
    if family.spec.image_token is not None:
        return counting_split(2, seed=0, colours=TEACHING_COLOURS)
    texts = ("Name a colour.", "How many legs do three spiders and a cat have together?")
    return [
        Sample(id=str(n), messages=(Message(role="user", parts=(text,)),))
        for n, text in enumerate(texts)
    ]


def engine_agrees(
    config: Config, engine: Engine, backend: LocalBackend, samples: Sequence[Sample]
) -> Finding:
    name = f"parity {config.rollout.engine}"
    try:
        return ok(name, str(compare(config, engine, backend, samples, version=0)))
    except EnvironmentProblem as error:
        return failure(name, str(error), AS_IT_SAYS)


def rows_agree(backend: LocalBackend, engine: Engine, samples: Sequence[Sample]) -> Finding:
    """A forest, padded rows through transformers' own attention, and each row alone."""
    family, sampling = backend.family, Sampling(max_tokens=8, ignore_eos=True)
    groups = []
    for sample in samples:
        prompt = family.render(sample.messages)
        requests = [
            Request(
                key=f"{sample.id}/{n}",
                ids=prompt.ids,
                media=prompt.media,
                sampling=sampling,
                noise=n,
            )
            for n in range(REPEATS)
        ]
        answers = map(parity.trajectory, requests, generate(engine, requests))
        groups.append(Group(sample=sample, trajectories=tuple(answers)))
    members = [member for group in groups for member in group.trajectories]
    alone = [Group(sample=samples[0], trajectories=(member,)) for member in members]
    packed = _scores(backend, _packed(family, groups))
    if not np.isfinite(packed).all():
        raise not_finite(backend.weights())
    ways = {
        "padded": padded(backend, members),
        "one by one": _scores(backend, [b for group in alone for b in _packed(family, [group])]),
    }
    gaps = {way: float(np.abs(packed - found).mean()) for way, found in ways.items()}
    limit = parity.LIMITS[str(backend.dtype).removeprefix("torch.")]
    text = ", ".join(f"{way} {gap:.2g}" for way, gap in gaps.items())
    text = f"log-probs of packed rows against {text} (mean gap, limit {limit:g})"
    if all(gap <= limit for gap in gaps.values()):
        return ok("rows", text)
    return failure(
        "rows",
        text,
        "this model does not keep packed rows apart or reads positions its own way; use a family "
        "of docs/architecture.md, or model.dtype=float32 if it is rounding",
    )


def _packed(family: Family, groups: Sequence[Group]) -> list[Batch]:
    return pack(groups, positions=family.positions, micro_tokens=1 << 30)


def _scores(backend: LocalBackend, batches: Sequence[Batch]) -> np.ndarray:
    scored = backend.logprobs(batches, Scoring())
    return np.concatenate([logprobs for logprobs, _ in scored])


@torch.no_grad()
def padded(backend: LocalBackend, members: Sequence[Trajectory]) -> np.ndarray:
    """Log-probs by transformers' own forward: its attention, its positions."""
    model, family = backend.model, backend.family
    longest = max(len(member.ids) for member in members)

    def table(values: Sequence[np.ndarray]) -> Tensor:
        rows = [np.pad(row, (0, longest - len(row))) for row in values]
        return torch.from_numpy(np.stack(rows)).to(backend.device)

    kinds = [np.zeros(len(member.ids), np.int64) for member in members]
    for kind, member in zip(kinds, members, strict=True):
        for span in member.media:
            kind[span.start : span.end] = 1
    spans = [span for member in members for span in member.media]
    vision = dict(family.vision(spans, backend.device, backend.dtype))
    if vision and family.axes > 1:  # positions on several axes are found by them
        vision["mm_token_type_ids"] = table(kinds)
    model.eval().config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    try:
        logits = model(
            input_ids=table([member.ids for member in members]),
            attention_mask=table([np.ones(len(member.ids), np.int64) for member in members]),
            use_cache=False,
            **vision,
        ).logits
    finally:
        attention.use_in(model)
    logits = logits.float()[..., : family.vocabulary]
    if backend.banned is not None:
        logits = logits.masked_fill(backend.banned, -torch.inf)
    scores = logits.log_softmax(-1).cpu().numpy()
    found = []
    for row, member in enumerate(members):
        places = np.flatnonzero(member.policy_mask)
        found.append(scores[row, places - 1, member.ids[places]])
    return np.concatenate(found)
