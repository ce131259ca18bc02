"""Loads rows with candidates and packs them so that both candidates of a pair share one forest.

load_pairs(config, config.data.train, family, paired=True).samples
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from saccade.config import Config, DataSource
from saccade.data import datasets
from saccade.data.chats import RowError
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.plugins.preferences.preference_losses import CHOSEN, REJECTED
from saccade.plugins.preferences.preference_rows import chosen_first, label_of
from saccade.plugins.reward_models.reward_card import reply_trajectory, shows_media
from saccade.recipes import questions
from saccade.types import Group, Message, Sample

RowCheck = Callable[[Sample], object]  # raises RowError for a row that it cannot use


def load_pairs(
    config: Config, sources: Sequence[DataSource], family: Family, *, paired: bool, check: RowCheck | None = None
) -> datasets.Dataset:
    """Load rows with candidates, their questions worded as in RL, the better candidate first, without ties.

    With `check` the rows are for a reward model: it checks each row, replies may contain media, and ties stay.
    """
    ask = questions.wording(config)

    def word(sample: Sample) -> Sample:
        if len(sample.candidates) < 1 + paired:
            has = "one labelled response" if sample.candidates else "nothing to compare"
            other = "reward_model.kind=process learns from steps" if check else "dpo.loss=kto learns from single ones"
            raise RowError(f"{has}; rows need chosen and rejected, or {other}")
        if check is not None:
            check(sample)
        elif any(shows_media(candidate) for candidate in sample.candidates):
            raise RowError("a reply holds an image, and the model writes text only")
        sample = chosen_first(sample)
        return ask(sample)

    def measure(length: questions.Length) -> questions.Length:
        def side(sample: Sample, candidate: tuple[Message, ...]) -> int:
            if shows_media(candidate):
                return len(reply_trajectory("", 0, word(sample).messages, candidate, family).ids)
            return length(replace(sample, messages=(*sample.messages, *candidate)))

        return lambda sample: max(side(sample, c) for c in word(sample).candidates)

    limit = "dpo.max_tokens" if check is None else "reward_model.max_tokens"
    read = ("dialogue", family.render_dialogue)
    data = questions.load_worded(config, sources, family, word, limit=limit, read=read, measure=measure)
    return data if check else datasets.leave_out(data, _undecided)


def _undecided(sample: Sample) -> str | None:
    if is_tie(sample):
        return "a tie prefers neither side"
    return None if label_of(sample) else "no label of the head preference"


def is_tie(sample: Sample) -> bool:
    alike = len(sample.candidates) == 2 and sample.candidates[0] == sample.candidates[1]
    return alike or label_of(sample) == "C"


def held_out(found: datasets.Dataset, name: str, path: str) -> datasets.Dataset:
    """The rows of a validation set, under ids that no training row has; refuses an empty set."""
    found = questions.require_rows(found, f"data.val: {path}")
    return questions.map_samples(found, lambda sample: replace(sample, id=f"{name}/{sample.id}"))


def candidate_group(sample: Sample, family: Family) -> Group:
    """The candidates of a sample as a group that shares its prompt; `repeat` is CHOSEN or REJECTED."""
    sides = {None: [CHOSEN, REJECTED], True: [CHOSEN], False: [REJECTED]}[sample.desirable]
    replies = zip(sides, sample.candidates, strict=True)
    members = (reply_trajectory(sample.id, side, sample.messages, reply, family) for side, reply in replies)
    return Group(sample=sample, uid=sample.id, trajectories=tuple(members))


def pack_groups(groups: Sequence[Group], micro_tokens: int, *, ends: bool = False, dp_size: int = 1) -> list[Batch]:
    """Pack groups, with both sides of a pair in the same batch."""
    return pack(groups, micro_tokens=micro_tokens, ends=ends, whole=True, dp_size=dp_size)
