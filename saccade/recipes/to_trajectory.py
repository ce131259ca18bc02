"""Rows that somebody else has written, as trajectories: which of their tokens are trained.

dialogue(sample, family, "assistant")      # a conversation
document(sample, family, max_tokens=2048)  # plain text, in pieces
compared(sample, family)                   # a question with its candidates
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saccade.models.families import Family
from saccade.plugins.preferences.comparison import CHOSEN, REJECTED
from saccade.plugins.reward_models.reward_card import from_turn, judged, written
from saccade.types import Group, Rendered, Sample, Source, Trajectory


def dialogue(sample: Sample, family: Family, loss_on: str) -> Group:
    rendered = family.render_dialogue(sample.messages)
    sources = TRAINED[loss_on](rendered.sources, family.chat.is_text(rendered.ids))
    return _group(sample, [written(sample.id, 0, rendered, sources, sample.messages)])


def document(sample: Sample, family: Family, max_tokens: int) -> Group:
    """Pieces of at most `max_tokens`, and no longer than the model can read; the last one ends with
    an end of text.
    """
    max_tokens = min(max_tokens, family.max_positions)
    ids = family.chat.encode_document("".join(message.text for message in sample.messages))
    starts = range(0, max(1, len(ids) - 1), max_tokens)  # a piece of one token predicts nothing
    pieces = [ids[start : start + max_tokens] for start in starts]
    sources = [np.full(len(piece), Source.POLICY, np.int8) for piece in pieces]
    rendered = [Rendered(ids=i, sources=s) for i, s in zip(pieces, sources, strict=True)]
    return _group(
        sample,
        [
            written(sample.id, n, r, _all(r.sources, np.ones(len(r), bool)), sample.messages)
            for n, r in enumerate(rendered)
        ],
    )


def compared(sample: Sample, family: Family) -> Group:
    """The candidates of a sample, which share its prompt; their repeat is the side they are on."""
    sides = [CHOSEN, REJECTED]
    if sample.desirable is not None:
        sides = [CHOSEN if sample.desirable else REJECTED]
    members = [
        judged(sample.id, side, sample.messages, candidate, family)
        for side, candidate in zip(sides, sample.candidates, strict=True)
    ]
    return _group(sample, members)


def _group(sample: Sample, trajectories: Sequence[Trajectory]) -> Group:
    return Group(sample=sample, uid=sample.id, trajectories=tuple(trajectories))


def _all(sources: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    trained = is_text.copy()
    trained[0] = False  # nothing stands before it to predict it from
    return np.where(trained, Source.POLICY, Source.PROMPT)


TRAINED = {
    "assistant": lambda sources, is_text: sources,
    "last_turn": lambda sources, is_text: from_turn(sources, -1),
    "all": _all,
}
