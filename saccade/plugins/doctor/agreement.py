"""Checks that log-probs of a model agree, on two prompts: packed rows with transformers' own forward and with
single rows; the trainer with the embedded engine, also after a weight change and with another image; and the
same with vLLM, SGLang or replicas, if configured.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from saccade.engines import Engine, generate, nonfinite_error
from saccade.forest import interface
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.plugins.engines import parity
from saccade.plugins.families import proof
from saccade.plugins.quickstart.counting import TEACHING_COLOURS, counting_split
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.types import Group, Media, Message, Request, Sample, Sampling, Trajectory

REPEATS = 2  # answers per prompt, which share it in a forest
FIX = (
    "this model does not keep packed rows apart or reads positions its own way; use a family of "
    "docs/architecture.md, or model.dtype=float32 if it is rounding"
)


def questions(family: Family) -> list[Sample]:
    """Two prompts of different lengths, with images if the model reads images."""
    if family.spec.image_token is not None:
        return counting_split(2, seed=0, colours=TEACHING_COLOURS)
    texts = ("Name a colour.", "How many legs do three spiders and a cat have together?")
    return [Sample(id=str(n), messages=(Message(role="user", parts=(text,)),)) for n, text in enumerate(texts)]


def rows_agree(trainer: LocalTrainer, engine: Engine) -> Iterator[tuple[str, ...]]:
    """Compare packed rows with transformers' own forward and with single rows. A family that uses the folder's own
    processor (`reader`) runs the comparisons of its proof instead.
    """
    if trainer.family.reader is not None:
        yield from unlimited(trainer.family)
        started = time.perf_counter()
        for row in proof.comparisons(trainer.model, trainer.family):
            status = "warning" if row.kind else "failure"
            yield ("ok", str(row)) if row.agrees else (status, str(row), row.advice)
        yield "ok", f"compared with transformers in {time.perf_counter() - started:.1f} s"
        return
    family, sampling = trainer.family, Sampling(max_tokens=8, ignore_eos=True)
    groups = []
    for sample in questions(family):
        prompt = family.render(sample.messages)
        asked: Any = {"ids": prompt.ids, "media": prompt.media, "sampling": sampling}
        requests = [Request(key=f"{sample.id}/{n}", noise=n, **asked) for n in range(REPEATS)]
        answers = map(parity.trajectory, requests, generate(engine, requests))
        groups.append(Group(sample=sample, trajectories=tuple(answers)))
    members = [member for group in groups for member in group.trajectories]
    alone = [Group(sample=groups[0].sample, trajectories=(member,)) for member in members]
    packed = scores(trainer, groups)
    if not np.isfinite(packed).all():
        raise nonfinite_error(trainer.weights())
    ways = {
        "transformers": by_transformers(trainer, members),
        "one by one": np.concatenate([scores(trainer, [group]) for group in alone]),
    }
    gaps = {way: float(np.abs(packed - found).mean()) for way, found in ways.items()}
    limit = parity.LIMITS[str(trainer.dtype).removeprefix("torch.")]
    text = ", ".join(f"{way} {gap:.2g}" for way, gap in gaps.items())
    text = f"log-probs of packed rows against {text} (mean gap, limit {limit:g})"
    yield ("ok", text) if max(gaps.values()) <= limit else ("failure", text, FIX)


def unlimited(family: Family) -> Iterator[tuple[str, str]]:
    """A note if no pixel budget makes a picture cheaper."""
    if not family.reader.scales and family.reader.budget is None:
        _, tokens = family.measure(Media(hash="", width=640, height=480, path=""))
        text = f"data.max_pixels makes no image cheaper: one of 640x480 always has {tokens} tokens"
        yield "note", f"{text}, as its image processor config says"


def scores(trainer: LocalTrainer, groups: Sequence[Group]) -> np.ndarray:
    """Log-probs of all members, packed into one forest."""
    batches = pack(groups, micro_tokens=1 << 30)
    return np.concatenate([logprobs for logprobs, _ in trainer.logprobs(batches, Scoring())])


@torch.no_grad()
def by_transformers(trainer: LocalTrainer, members: Sequence[Trajectory]) -> np.ndarray:
    """Log-probs from transformers' own forward, with its attention and its positions."""
    model, family, device = trainer.model, trainer.family, trainer.device
    found = []
    model.eval().config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    try:
        for member in members:
            vision = dict(family.vision(member.media, device, trainer.dtype))
            if vision and family.axes > 1:  # transformers derives multi-axis positions from these
                kinds = (~family.chat.is_text(member.ids)).astype(int)
                vision["mm_token_type_ids"] = torch.from_numpy(kinds)[None].to(device)
            ids = torch.from_numpy(member.ids)[None].to(device)
            logits = model(input_ids=ids, use_cache=False, **vision).logits[0].float()[:, : family.vocabulary]
            if trainer.banned is not None:
                logits = logits.masked_fill(trainer.banned, -torch.inf)
            places = np.flatnonzero(member.policy_mask)
            found.append(logits.log_softmax(-1).cpu().numpy()[places - 1, member.ids[places]])
    finally:
        interface.use_in(model, segments=family.spec.segments)
    return np.concatenate(found)
