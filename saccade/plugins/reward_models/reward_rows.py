"""Training rows of reward models: pairs with one label per head (`PairRows`), or chains of steps with a label per step
(`StepRows`). Both classes have the same methods, so one loop trains both.

    rows = rows_of(config, family)
    batches, loss = rows.prepare(rows.load(config.data.train).samples)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import Config, DataSource
from saccade.data import datasets
from saccade.data.chats import RowError, parse_json
from saccade.data.sources import set_names
from saccade.errors import ConfigError, DataError
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.plugins.preferences import pairs
from saccade.plugins.preferences.mappings import MAIN, number_of
from saccade.plugins.reward_models import reward_card, reward_losses
from saccade.plugins.reward_models.reward_card import REWARD_FILE, RewardCard, read_card
from saccade.plugins.reward_models.reward_head import RewardHead, attach_reward
from saccade.plugins.reward_models.reward_losses import FIRST_LOG_KAPPA, RatingLoss, StepsLoss
from saccade.recipes import questions
from saccade.types import Group, Message, Sample, Trajectory

SIDES = {"A": 1.0, "B": -1.0, "C": 0.0}  # label → number: the first is better, the second is better, a tie


# -- pairs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairRows:
    config: Config
    family: Family
    row: RatingLoss

    def load(self, sources: Sequence[DataSource]) -> datasets.Dataset:
        """Load the rows that label at least one of the heads."""
        check_row = lambda sample: (self._labels(sample), margin_of(sample))  # noqa: E731
        data = pairs.load_pairs(self.config, sources, self.family, paired=True, check=check_row)
        return datasets.leave_out(data, self._unlabelled)

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise ConfigError if there is a head by which no training row prefers a side."""
        _trained(self.family.path, self._card)
        labels = np.array([self._labels(sample) for sample in samples])
        found = sorted({name for s in samples for name in s.extra.get("labels") or (MAIN,)})
        for name, said in zip(self.row.heads, labels.T, strict=True):
            if not (np.abs(said) == 1).any():
                has = f"{(said == 0).sum()} rows call it a tie, rows label {', '.join(found)}; add rows, or remove it"
                raise ConfigError(f"reward_model.heads: no row says which side is better by {name}: {has}")

    def card(self, stored: Path | None, samples: Sequence[Sample]) -> RewardCard:
        """The card of the checkpoint, else that of the config; without statistics, which are measured in training."""
        found = (read_card(stored) if stored else None) or self._card
        return replace(found, statistics={}, statistics_step=None)

    def attach(self, model: Any, *, card: RewardCard, stored: Path | None) -> None:
        """Add the head, loaded from a checkpoint or initialised at random."""
        scale = FIRST_LOG_KAPPA if self.row.loss == "hps" else 0.0
        start, seed = stored or _trained(self.family.path, card), self.config.run.seed
        attach_reward(model, RewardHead(like=model, card=card, seed=seed, first_log_scale=scale, stored=start))
        reward_card.write_card(model, card)

    def prepare(self, samples: Sequence[Sample], dp_size: int = 1) -> tuple[list[Batch], RatingLoss]:
        groups = [pairs.candidate_group(sample, self.family) for sample in samples]
        batches = pairs.pack_groups(groups, self.config.train.micro_tokens, ends=True, dp_size=dp_size)
        labels = {sample.id: self._labels(sample) for sample in samples}
        own = {s.id: m for s in samples if (m := margin_of(s)) is not None}
        return batches, reward_losses.of_pairs(self.row, [s.id for s in samples], labels, own)

    def _labels(self, sample: Sample) -> tuple[float, ...]:
        """Per head: 1 if the first candidate is better, -1 if the second is, 0 for a tie, NaN for no label."""
        given = sample.extra.get("labels")
        if given is None:
            given = {MAIN: "C" if pairs.is_tie(sample) else "A"}
        if not isinstance(given, Mapping) or not all(given.get(name) in (None, *SIDES) for name in self.row.heads):
            raise RowError(f"labels {given!r}: write A, B, or C for a tie, for each head")
        return tuple(SIDES.get(given.get(name) or "", nan) for name in self.row.heads)

    def _unlabelled(self, sample: Sample) -> str | None:
        if any(map(isfinite, self._labels(sample))):
            return None
        given = sample.extra.get("labels")
        said = [MAIN] if given is None else [name for name, side in given.items() if side]
        heads = ", ".join(self.row.heads)
        return f"it labels {', '.join(said) or 'nothing'}, and reward_model.heads are {heads}"

    @property
    def _card(self) -> RewardCard:
        own = self.config.reward_model
        shared = {name: getattr(own, name) for name in ("pooling", "probe_layer", "head", "bounded")}
        pooling_heads = own.pooling_heads if own.pooling == "attention" else 1
        return RewardCard(kind="scalar", heads=tuple(own.heads), pooling_heads=pooling_heads, **shared)


def _trained(folder: str, wanted: RewardCard) -> Path | None:
    """Returns `folder` if it holds a trained head, else None. Refuses a head that differs from the `wanted` card."""
    if not (Path(folder) / REWARD_FILE).is_file():
        return None
    card = read_card(folder)
    found = asdict(replace(card, statistics={}, statistics_step=None)) if card else {}
    if found != asdict(wanted):
        differ = [f"{n}: {v}" for n, v in found.items() if v != asdict(wanted)[n]]
        has = ", ".join(differ) or "it has no card"
        helps = f"set reward_model as there, or remove {REWARD_FILE} from a copy"
        raise ConfigError(f"model.path: {folder} is a trained reward model ({has}), whose head would be lost; {helps}")
    return Path(folder)


def margin_of(sample: Sample) -> float | None:
    """The number in the row's column `margin`, or None."""
    given = sample.extra.get("margin")
    found = number_of(given)
    if given not in (None, "") and (found is None or not 0 <= found < inf):
        raise RowError(f"margin {given!r}: write a number from 0 on, such as 0.5, or remove it")
    return found


# -- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRows:
    config: Config
    family: Family
    tokens: tuple[int, ...]

    def load(self, sources: Sequence[DataSource]) -> datasets.Dataset:
        """Load rows. Chats are worded as in RL; a single text is read unchanged."""
        config, family = self.config, self.family
        ask = questions.wording(config)

        def word(sample: Sample) -> Sample:
            if is_chat(sample):
                sample = ask(sample)
            self._labels(sample)
            return sample

        # The placeholder is in the cache key: a row with a cached length is not checked for its placeholders again.
        mark = config.reward_model.placeholder.encode().hex()
        read = (f"steps-{mark}", lambda messages: self._read("", messages).ids[:-1])
        return questions.load_worded(config, sources, family, word, limit="reward_model.max_tokens", read=read)

    def check(self, samples: Sequence[Sample]) -> None:
        _trained(self.family.path, RewardCard(kind="process"))
        if len({is_chat(sample) for sample in samples}) > 1:
            raise DataError("some rows are chats and some are single texts; train on one kind")

    def card(self, stored: Path | None, samples: Sequence[Sample]) -> RewardCard:
        own, chat = self.config.reward_model, is_chat(samples[0])
        return RewardCard(kind="process", placeholder=own.placeholder, tokens=own.tokens, chat=chat)

    def attach(self, model: Any, *, card: RewardCard, stored: Path | None) -> None:
        """Store the card only: a process reward model has no head of its own, it uses the language head."""
        reward_card.write_card(model, card)

    def prepare(self, samples: Sequence[Sample], dp_size: int = 1) -> tuple[list[Batch], StepsLoss]:
        groups = [Group(sample=s, uid=s.id, trajectories=(self._read(s.id, s.messages),)) for s in samples]
        batches = pack(groups, micro_tokens=self.config.train.micro_tokens, dp_size=dp_size)
        labels = {sample.id: self._labels(sample) for sample in samples}
        count = sum(len(labels[sample.id]) for sample in samples)  # not over `labels`: a sample may occur twice
        return batches, StepsLoss(labels=labels, count=count, tokens=self.tokens)

    def _read(self, sample_id: str, messages: Sequence[Message]) -> Trajectory:
        placeholder = self.config.reward_model.placeholder
        read = reward_card.steps_trajectory(sample_id, messages, self.family, placeholder)
        wanted = sum(message.text.count(placeholder) for message in messages)
        if read.response_length != wanted:
            shown = f"the tokenizer shows {read.response_length} of {wanted} placeholders {placeholder!r}"
            raise RowError(f"{shown}; put blanks around them, or choose another reward_model.placeholder")
        return read

    def _labels(self, sample: Sample) -> np.ndarray:
        """[steps, tokens]: the target probability of each verdict token."""
        own, given = self.config.reward_model, sample.extra.get("label")
        if isinstance(given, str) and given.lstrip().startswith("["):
            given = parse_json(given, "column 'label'")
        marks = sum(message.text.count(own.placeholder) for message in sample.messages)
        if not isinstance(given, list | tuple | np.ndarray) or not len(given):
            raise RowError("no list of labels in the column label; process rows have one per step")
        if marks != len(given):
            raise RowError(f"{marks} placeholders {own.placeholder!r} but {len(given)} labels")
        return np.array([_label(value, own.tokens) for value in given])


def _label(value: Any, tokens: Sequence[str]) -> list[float]:
    if isinstance(value, str) and value.strip() in tokens:
        return [float(token == value.strip()) for token in tokens]
    soft = len(tokens) == 2
    if not (soft and isinstance(value, int | float) and 0 <= value <= 1):
        raise RowError(f"label {value!r}: write one of {', '.join(tokens)}{', or a probability' if soft else ''}")
    return [float(value), 1.0 - float(value)]


def is_chat(sample: Sample) -> bool:
    return sample.messages[-1].role == "assistant"


# -- either ----------------------------------------------------------------------------------------

Rows = PairRows | StepRows  # by the kind of reward model


def rows_of(config: Config, family: Family) -> Rows:
    if config.reward_model.kind == "process":
        tokens = reward_card.verdict_ids(family, config.reward_model.tokens)
        return StepRows(config=config, family=family, tokens=tokens)
    return PairRows(config=config, family=family, row=reward_losses.from_config(config.reward_model))


def held_out(config: Config, rows: Rows) -> dict[str, datasets.Dataset]:
    """The rows of data.val by set, under ids that no training row has."""
    named = zip(set_names(config.data.val), config.data.val, strict=True)
    return {name: pairs.held_out(rows.load([source]), name, source.path) for name, source in named}


# -- numbers ---------------------------------------------------------------------------------------


def with_prefix(found: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The objective's metrics under a prefix, and under PREFIX/HEAD where there are several heads."""
    heads = [name.removesuffix("/accuracy") for name in found if name.endswith("/accuracy")]
    values = {f"{prefix}/loss": found.get("policy/loss", nan)}
    for head in heads:
        inner = f"{prefix}/{head}" if len(heads) > 1 else prefix
        own = {n.removeprefix(f"{head}/"): v for n, v in found.items() if n.startswith(f"{head}/")}
        if own.pop("square", None) is not None:
            own["std"] = _deviation(found, head)
        values |= {f"{inner}/{name}": value for name, value in own.items()}
    if len(heads) > 1:
        values[f"{prefix}/accuracy"] = float(np.mean([found[f"{h}/accuracy"] for h in heads]))
    return values


def with_statistics(card: RewardCard, found: Mapping[str, float], step: int) -> RewardCard:
    """The card with (mean, std) of each head's scores, for reward terms with `normalise`, and with the step of the
    weights that gave them, as a later checkpoint may still hold these statistics.
    """
    scored = [head for head in card.heads if isfinite(found.get(f"{head}/square", nan))]
    statistics = {head: (found[f"{head}/mean"], _deviation(found, head)) for head in scored}
    return replace(card, statistics=statistics, statistics_step=step) if statistics else card


def _deviation(found: Mapping[str, float], head: str) -> float:
    return max(0.0, found[f"{head}/square"] - found[f"{head}/mean"] ** 2) ** 0.5
