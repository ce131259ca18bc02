"""Turns rows of a data set into trajectories, and marks which of their tokens are trained.

dialogue(sample, family, "assistant")      # a conversation
document(sample, family, max_tokens=2048)  # plain text, in pieces
"""

from collections.abc import Sequence

import numpy as np

from saccade.models.families import Family
from saccade.types import Group, Message, Rendered, Sample, Source, Trajectory


def dialogue(sample: Sample, family: Family, loss_on: str) -> Group:
    rendered = family.render_dialogue(sample.messages)
    sources = TRAINED[loss_on](rendered.sources, family.chat.is_text(rendered.ids))
    return _group(sample, [written(sample.id, 0, rendered, sources, sample.messages)])


def document(sample: Sample, family: Family, max_tokens: int) -> Group:
    """Pieces of at most `max_tokens` tokens or the model's positions; the last one ends with the end-of-text token."""
    max_tokens = min(max_tokens, family.max_positions)
    ids = family.chat.encode_document("".join(message.text for message in sample.messages))
    pieces: list[Trajectory] = []
    for start in range(0, max(1, len(ids) - 1), max_tokens):  # a piece of one token predicts nothing
        piece = ids[start : start + max_tokens]
        sources = _all(np.full(len(piece), Source.POLICY, np.int8), np.ones(len(piece), bool))
        rendered = Rendered(ids=piece, sources=sources)
        pieces.append(written(sample.id, len(pieces), rendered, sources, sample.messages))
    return _group(sample, pieces)


def from_turn(sources: np.ndarray, first: int) -> np.ndarray:
    """Mark only the assistant turns from index `first` on as trained; a negative index counts from the end."""
    policy = np.flatnonzero(sources == Source.POLICY)
    starts = policy[np.diff(policy, prepend=-2) > 1]
    earlier = (sources == Source.POLICY) & (np.arange(len(sources)) < starts[first])
    return np.where(earlier, Source.PROMPT, sources)


def written(
    sample_id: str, repeat: int, rendered: Rendered, sources: np.ndarray, messages: tuple[Message, ...]
) -> Trajectory:
    """A trajectory of text that no policy sampled: log-probs are NaN, versions -1."""
    return Trajectory(
        sample_id=sample_id,
        repeat=repeat,
        ids=rendered.ids,
        sources=sources,
        logprobs=np.full(len(rendered), np.nan, np.float32),
        versions=np.full(len(rendered), -1, np.int32),
        media=rendered.media,
        messages=messages,
    )


def _group(sample: Sample, trajectories: Sequence[Trajectory]) -> Group:
    return Group(sample=sample, uid=sample.id, trajectories=tuple(trajectories))


def _all(sources: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    trained = is_text.copy()
    trained[0] = False  # there is no token before it to predict it from
    return np.where(trained, Source.POLICY, Source.PROMPT)


TRAINED = {
    "assistant": lambda sources, is_text: sources,
    "last_turn": lambda sources, is_text: from_turn(sources, -1),
    "all": _all,
}
