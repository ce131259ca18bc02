"""Rows with candidates, made ready to be compared: rendered, packed, beside the reference.

The reference is the model that a run starts from. What it thinks of a response is one number, so it
is computed once for all rows and kept beside the runs, or in every step by a model that stays.

    batches, loss = PreferenceBatches(family=family, policy=backend, ...).prepare(samples)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from saccade.config import Config, DataSource
from saccade.data import datasets, prompts
from saccade.data.chats import RowError
from saccade.data.records import content_hash
from saccade.errors import DataError
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.models.files import stamp
from saccade.models.load import pick_dtype
from saccade.plugins.check_data.length_cache import cached_lengths, renderer
from saccade.plugins.preferences.comparison import Comparison, of_step
from saccade.plugins.preferences.preference_rows import chosen_first, label_of
from saccade.plugins.reward_models.reward_card import judged_length, shows_media
from saccade.recipes import model_setup, questions
from saccade.recipes.to_trajectory import compared
from saccade.run.folder import write_whole
from saccade.run.quarantine import decode_error
from saccade.run.training_run import Run
from saccade.trainer import OWN, Reference
from saccade.trainer.local import LocalBackend
from saccade.trainer.losses import PreferenceLoss
from saccade.types import Batch, Group, Message, Sample

BLOCK = 1024  # rows between two writes of the reference's totals
Totals = Callable[[Sequence[Batch], Sequence[Group]], list[np.ndarray]]  # [sequences] per batch


# -- data ------------------------------------------------------------------------------------------


def load_pairs(
    config: Config,
    sources: Sequence[DataSource],
    family: Family,
    *,
    paired: bool,
    judge: Callable[[Sample], object] | None = None,
) -> datasets.Dataset:
    """Candidates of questions that are worded as in RL. Ties are left out: they prefer nothing.

    `judge`: a model that scores reads them, refusing what it cannot use. It looks at media in a
    reply, too, and may want ties.
    """
    instruction = questions.instruction_of(config)

    def word(sample: Sample) -> Sample:
        if len(sample.candidates) < 1 + paired:
            raise RowError(_uncomparable(sample, judged=judge is not None))
        if judge is not None:
            judge(sample)
        elif any(shows_media(candidate) for candidate in sample.candidates):
            raise RowError("a reply holds an image, and the model writes text only")
        sample = chosen_first(sample)
        return prompts.apply(sample, config.prompt, instruction=instruction)

    section = "dpo" if judge is None else "reward_model"
    longest_row = getattr(config, section).max_tokens
    limits, limit = questions.row_limit(config.data, family, longest_row, f"{section}.max_tokens")
    with cached_lengths(config, family, "dialogue", word, family.render_dialogue) as length:

        def side(sample: Sample, candidate: tuple[Message, ...]) -> int:
            if shows_media(candidate):
                return judged_length(word(sample).messages, candidate, family)
            return length(replace(sample, messages=(*sample.messages, *candidate)))

        def longest(sample: Sample) -> int:
            return max(side(sample, c) for c in word(sample).candidates)

        data = datasets.load(sources, limits, length=longest, limit=limit, marks=questions.marks_of(family))
    data = questions.map_samples(data, word)
    return data if judge else datasets.keep(data, _undecided)


def _uncomparable(sample: Sample, *, judged: bool) -> str:
    if sample.candidates:
        instead = "rows need chosen and rejected" if judged else "dpo.loss=kto learns from such rows"
        return f"one labelled response; {instead}"
    if not judged:
        return "nothing to compare; rows need chosen and rejected, or output and label"
    return "nothing to compare; rows need chosen and rejected" + (
        "; reward_model.kind=process learns from a list of labels of steps" if "label" in sample.extra else ""
    )


def _undecided(sample: Sample) -> str | None:
    if is_tie(sample):
        return "a tie prefers neither side"
    return None if label_of(sample) else "no label of the head preference"


def is_tie(sample: Sample) -> bool:
    alike = len(sample.candidates) == 2 and sample.candidates[0] == sample.candidates[1]
    return alike or label_of(sample) == "C"


def mismatched_pairs(samples: Sequence[Sample]) -> dict[str, Sample]:
    """By id: the question of each sample with the response to the next other question."""
    found = {}
    for index, sample in enumerate(samples):
        others = (samples[(index + step) % len(samples)] for step in range(1, len(samples)))
        other = next((o for o in others if o.messages != sample.messages and not decode_error(o)), None)
        if other is None:
            raise DataError(
                "dpo.loss=kto compares with responses to other questions, and all rows ask the same one; add rows"
            )
        found[sample.id] = replace(sample, id=f"{sample.id}~", candidates=other.candidates[:1], desirable=True)
    return found


# -- the reference ---------------------------------------------------------------------------------


def scored(model: Reference, batches: Sequence[Batch]) -> list[np.ndarray]:
    """Log-probs of whole responses."""
    found = model.logprobs(batches, OWN)
    return [
        np.bincount(batch.sequence, weights=new.astype(np.float64), minlength=len(batch.keys))
        for batch, (new, _) in zip(batches, found, strict=True)
    ]


def computed(reference: Reference, batches: Sequence[Batch], groups: Sequence[Group]) -> list[np.ndarray]:
    return scored(reference, batches)


def precomputed(run: Run, config: Config, family: Family, samples: Iterable[Sample]) -> Totals:
    """Every sample is scored once and for all; the reference is loaded only if one is missing."""
    path = Path(config.run.out) / ".cache" / f"reference-{_reference_id(config, family)}.json"
    known: dict[str, list[float]] = json.loads(path.read_text()) if path.is_file() else {}
    # A row with a damaged image is set aside when its turn comes.
    missing = {k: s for s in samples if (k := content_hash(s)) not in known and not decode_error(s)}
    if missing:
        _score_all(run, config, family, missing, known, path)

    def totals(batches: Sequence[Batch], groups: Sequence[Group]) -> list[np.ndarray]:
        found = {
            member.key: total
            for group in groups
            for member, total in zip(group.trajectories, known[content_hash(group.sample)], strict=True)
        }
        return [np.array([found[key] for key in batch.keys]) for batch in batches]

    return totals


def _score_all(
    run: Run, config: Config, family: Family, missing: Mapping[str, Sample], known: dict[str, list[float]], path: Path
) -> None:
    """In blocks, each written before the next: a run that is killed here goes on where it was."""
    reference = LocalBackend(model_setup.load_policy(config, family).model, family)
    keys = list(missing)
    with run.phase("logp_ref"):
        for start in range(0, len(keys), BLOCK):
            block = keys[start : start + BLOCK]
            groups = [compared(missing[key], family) for key in block]
            batches = _packed(groups, family, config.train.micro_tokens)
            flat = iter(np.concatenate(scored(reference, batches)).tolist())
            known |= {key: [next(flat) for _ in group.trajectories] for key, group in zip(block, groups, strict=True)}
            write_whole(path, json.dumps(known))
            run.display.console.progress(min(start + BLOCK, len(keys)), len(keys))


def _reference_id(config: Config, family: Family) -> str:
    """What a total depends on beside the row: weights, how they compute, how rows are rendered."""
    dtype = pick_dtype(config.model.dtype, model_setup.device_of(config))
    what = [stamp(Path(family.path)), str(dtype), config.model.train == "qlora", renderer(family)]
    return hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest()


# -- one step --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreferenceBatches:
    """Makes rows into what `train_step` takes."""

    family: Family
    micro_tokens: int
    policy: LocalBackend
    options: Comparison
    totals: Totals | None  # None: the loss has no reference
    mismatched: Mapping[str, Sample]  # KTO only, by id

    def prepare(self, samples: Sequence[Sample]) -> tuple[list[Batch], PreferenceLoss]:
        batches = self._batches(samples)
        z = 0.0 if self.options.paired else self._z(samples)
        return batches, PreferenceLoss(of_step(self.options, batches, z=z))

    def _batches(self, samples: Sequence[Sample]) -> list[Batch]:
        groups = [compared(sample, self.family) for sample in samples]
        batches = _packed(groups, self.family, self.micro_tokens)
        if self.totals is None:
            return batches
        found = self.totals(batches, groups)
        return [replace(b, ref_totals=t) for b, t in zip(batches, found, strict=True)]

    def _z(self, samples: Sequence[Sample]) -> float:
        """How much likelier than before responses to other questions have become on average."""
        batches = self._batches([self.mismatched[sample.id] for sample in samples])
        now, before = scored(self.policy, batches), [batch.ref_totals for batch in batches]
        gaps = np.concatenate(now) - np.concatenate(before)  # type: ignore[arg-type]
        return max(0.0, float(gaps.mean()))


def _packed(groups: Sequence[Group], family: Family, micro_tokens: int) -> list[Batch]:
    return pack(groups, positions=family.positions, micro_tokens=micro_tokens, whole=True)


def named(found: Mapping[str, float], prefix: str) -> dict[str, float]:
    """What a comparison reports, under a prefix; without pairs the margin is that of the means."""
    values = {n.removeprefix("dpo/"): value for n, value in found.items() if n.startswith("dpo/")}
    values["loss"] = found.get("policy/loss", float("nan"))
    if "margin" not in values and {"reward_chosen", "reward_rejected"} <= values.keys():
        values["margin"] = values["reward_chosen"] - values["reward_rejected"]
    return {f"{prefix}/{name}": value for name, value in values.items()}


def held_out(found: datasets.Dataset, name: str, path: str) -> datasets.Dataset:
    """Rows to compare, under ids that no training row has."""
    found = questions.require_rows(found, f"data.val: {path}")
    return questions.map_samples(found, lambda sample: replace(sample, id=f"{name}/{sample.id}"))
