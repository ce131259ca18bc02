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
# that it keeps are asked for; shared: tokens that its prefix group reads for it.
NAMES = (*("token", "length", "position", "index", "key", "remaining", "stops", "top_k", "support"), "shared")
FIELDS = len(NAMES)
TOKEN, LENGTH, POSITION, INDEX, KEY, REMAINING, STOPS, TOP_K, SUPPORT, SHARED = range(FIELDS)
# Rows for which one kernel reads both matrices of a gate; for more, two products are as fast.
FEW_ROWS = 64
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def bucket(rows: int) -> int:
    """Batch sizes that are captured: a few of them, and little padding."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 128) * 128)


def fields_of(sequences: SequenceOf[Sequence], tokens: np.ndarray) -> dict[str, np.ndarray]:
    """All fields but `shared`; `tokens`: the last one of each sequence."""
    requests = [s.request for s in sequences]
    cached = np.array([s.cached for s in sequences])
    return {
        "token": tokens,
        "length": cached,
        "position": cached + np.array([s.ahead for s in sequences]),
        "index": np.array([r.first_index for r in requests]) + np.array([s.sampled for s in sequences]),
        "key": np.array([r.noise for r in requests], dtype=np.int64),
        "remaining": np.array([s.remaining for s in sequences]),
        "stops": np.array([not r.sampling.ignore_eos for r in requests]),
        "top_k": np.array([r.sampling.top_k for r in requests]),
        "support": np.array([r.sampling.support and cuts(r.sampling) for r in requests]),
    }


def temperature_top_p_of(sequences: SequenceOf[Sequence]) -> np.ndarray:
    """Temperature and top_p of each, [2, B]."""
    settings = [s.request.sampling for s in sequences]
    return np.array([[x.temperature for x in settings], [x.top_p for x in settings]], np.float32)


def pack_rows(fields: dict[str, np.ndarray], padded: int) -> np.ndarray:
    count = len(fields["token"])
    packed = np.zeros((FIELDS, padded), dtype=np.int64)
    packed[LENGTH] = -1
    for line, name in enumerate(NAMES):
        packed[line, :count] = fields[name]
    return packed


def members_of(group: int) -> int:
    """Rows whose common beginning one program reads, of `group` query heads for each key head:
    their queries make up one tile.
    """
    return min(16, max(1, 64 // group))


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
