"""The device-side state of a batch of decoding sequences: int64 fields [FIELDS, B]; temperature and
top_p [2, B] are separate. An idle row has length -1.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from saccade.engines.embedded.sampling import truncates
from saccade.engines.embedded.sequences import Sequence

# token: the next input id; length: tokens before it in the pages; position: its position id; index:
# number of the token to sample, for its noise; key: seed of the noise; remaining: tokens still to sample;
# stops: whether an end-of-turn id ends the row; top_k: of truncated sampling; support: whether to
# return the ids that truncated sampling keeps; shared: tokens that its prefix group reads for it; row:
# its row in the states of recurrent layers.
FIELDS = 11
TOKEN, LENGTH, POSITION, INDEX, KEY, REMAINING, STOPS, TOP_K, SUPPORT, SHARED, ROW = range(FIELDS)
# Up to this many rows, one kernel reads gate_proj and up_proj; for more, two matrix products are as fast.
FEW_ROWS = 64
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def bucket(rows: int) -> int:
    """Batch size to pad `rows` to: few sizes have to be captured, with little padding."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 128) * 128)


def rows_of(
    sequences: SequenceOf[Sequence], tokens: np.ndarray, shared: np.ndarray, states: np.ndarray, padded: int
) -> np.ndarray:
    """[FIELDS, padded], with idle rows after the sequences. [B] arrays: `tokens`, the last ones; `shared`, tokens that
    prefix groups read; `states`, rows of recurrent states.
    """
    rows = []
    for s, token, alike, row in zip(sequences, *(x.tolist() for x in (tokens, shared, states)), strict=True):
        request, how = s.request, s.request.sampling
        place = (token, s.cached, s.cached + s.rope_delta, request.first_index + s.sampled, request.noise, s.remaining)
        rows.append((*place, not how.ignore_eos, how.top_k, how.support and truncates(how), alike, row))
    packed = np.zeros((FIELDS, padded), dtype=np.int64)
    packed[LENGTH] = -1
    packed[:, : len(rows)] = np.array(rows).T
    return packed


def members_of(group: int, size: int = 128) -> int:
    """Most rows for which one program reads the common prefix, with `group` query heads per key head of
    this `size`. Their queries form one tile, which has half as many rows for heads larger than 256.
    """
    return min(16, max(1, (64 if size <= 256 else 32) // group))


def find_prefix_groups(
    table: np.ndarray, lengths: np.ndarray, *, page: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find adjacent rows whose first pages are the same. Returns [3, groups] (first row, number of rows,
    which is at most `most`, shared tokens) and the shared tokens of each row [B].
    """
    full = lengths // page
    alike = np.cumprod(table[1:] == table[:-1], axis=1).sum(1)  # equal leading pages of adjacent rows
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
