"""The state of the sequences that decode together, as the device reads it: int64 fields [FIELDS,
B], and temperature and top_p [2, B]. An idle row has length -1.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from saccade.engines.embedded.sampling import cuts
from saccade.engines.embedded.sequences import Sequence

# token: to be read next; length: tokens before it in the pages; position: its position id; index:
# of the token that will be drawn, in its noise; key: of the noise; remaining: tokens still to draw;
# stops: whether an end-of-turn id ends it; top_k: of truncated sampling; support: whether the ids
# that it keeps are asked for; shared: tokens that its prefix group reads for it; row: where recurrent
# layers keep its state.
FIELDS = 11
TOKEN, LENGTH, POSITION, INDEX, KEY, REMAINING, STOPS, TOP_K, SUPPORT, SHARED, ROW = range(FIELDS)
# Rows for which one kernel reads both matrices of a gate; for more, two products are as fast.
FEW_ROWS = 64
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def bucket(rows: int) -> int:
    """Batch sizes that are captured: a few of them, and little padding."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 128) * 128)


def rows_of(
    sequences: SequenceOf[Sequence], tokens: np.ndarray, shared: np.ndarray, states: np.ndarray, padded: int
) -> np.ndarray:
    """[FIELDS, padded], with idle rows behind the sequences; `tokens`: the last one of each; `states`: the rows of
    their states.
    """
    rows = []
    for s, token, alike, row in zip(sequences, *(x.tolist() for x in (tokens, shared, states)), strict=True):
        request, how = s.request, s.request.sampling
        place = (token, s.cached, s.cached + s.ahead, request.first_index + s.sampled, request.noise, s.remaining)
        rows.append((*place, not how.ignore_eos, how.top_k, how.support and cuts(how), alike, row))
    packed = np.zeros((FIELDS, padded), dtype=np.int64)
    packed[LENGTH] = -1
    packed[:, : len(rows)] = np.array(rows).T
    return packed


def members_of(group: int, size: int = 128) -> int:
    """Rows whose common beginning one program reads, of `group` query heads for each key head of this
    size: their queries make up one tile, of half as many where heads are large.
    """
    return min(16, max(1, (64 if size <= 256 else 32) // group))


def find_prefix_groups(
    table: np.ndarray, lengths: np.ndarray, *, page: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours that begin with the same pages: [3, groups] of first row, rows (at most `most`),
    and shared tokens; and the shared tokens of each row [B].
    """
    full = lengths // page
    alike = np.cumprod(table[1:] == table[:-1], axis=1).sum(1)  # leading pages of two neighbours
    alike = np.minimum(alike, np.minimum(full[1:], full[:-1]))
    shared = np.zeros(len(table), dtype=np.int64)
    found = []
    first = 0
    for row in range(1, len(table) + 1):
        if row < len(table) and alike[row - 1] and row - first < most:
            continue
        if row - first > 1:
            tokens = int(alike[first : row - 1].min()) * page
            found.append((first, row - first, tokens))
            shared[first:row] = tokens
        first = row
    return np.array(found, dtype=np.int64).reshape(-1, 3).T, shared
