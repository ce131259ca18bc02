"""Which pages of a pool belong to which sequence: bookkeeping on numpy arrays, without tensors.

A sequence in a slot has a list of pages. Sequences that begin alike share full pages, counted by
reference; a partial last page is copied, because each sequence goes on writing in it. So a page has
at most one writer, and a sequence that shares it reads only what was there before.

    pages = Pages(page=16)
    pages.grow(100)
    pages.extend(np.array([0]), np.array([40]))     # slot 0 can hold 40 tokens: three pages
    pages.fork(pages.of(0), 40, 1)                  # slot 1 shares two of them
"""

import numpy as np

POOL_SHARE = 0.8  # of the memory that is free when the pool grows; the rest is for activations


class Pages:
    """table [slots, columns]: the pages of each slot; held [slots]: how many it has."""

    def __init__(self, *, page: int, lowest_first: bool = False) -> None:
        """`page`: tokens of a page. `lowest_first`: take the lowest free page, not the one that was
        freed last.
        """
        self.page, self.lowest_first = page, lowest_first
        self.references = np.zeros(0, dtype=np.int32)  # of each page
        self._stack = np.zeros(0, dtype=np.int32)  # the free pages are its first `free`
        self.free = 0
        self.table = np.zeros((0, 0), dtype=np.int32)
        self.held = np.zeros(0, dtype=np.int64)

    @property
    def count(self) -> int:
        return len(self.references)

    def pages_for(self, tokens: int | np.ndarray) -> int | np.ndarray:
        return -(-tokens // self.page)

    def grow(self, count: int) -> None:
        """Add free pages, up to `count` pages in all."""
        added = np.arange(self.count, count, dtype=np.int32)[::-1]  # low numbers are taken first
        self.references = np.concatenate([self.references, np.zeros(len(added), dtype=np.int32)])
        stack = np.zeros(count, dtype=np.int32)
        stack[: len(added)] = added
        stack[len(added) : len(added) + self.free] = self._stack[: self.free]
        self._stack, self.free = stack, len(added) + self.free

    def reshape(self, slots: int, tokens: int) -> None:
        """Enlarge the table for this many slots, each with this many tokens."""
        columns = int(self.pages_for(tokens))
        if slots > self.table.shape[0] or columns > self.table.shape[1]:
            shape = (max(slots, self.table.shape[0]), max(columns, self.table.shape[1]))
            table, held = np.zeros(shape, dtype=np.int32), np.zeros(shape[0], dtype=np.int64)
            table[: self.table.shape[0], : self.table.shape[1]] = self.table
            held[: len(self.held)] = self.held
            self.table, self.held = table, held

    # -- pages without a slot --

    def take(self, count: int) -> np.ndarray:
        assert count <= self.free, "more pages than are free"
        self.free -= count
        taken = self._stack[self.free : self.free + count].copy()
        self.references[taken] = 1
        return taken

    def share(self, numbers: np.ndarray) -> np.ndarray:
        self.references[numbers] += 1
        return numbers

    def drop(self, numbers: np.ndarray) -> None:
        self.references[numbers] -= 1
        assert (self.references[numbers] >= 0).all(), "a page was given back twice"
        unused = numbers[self.references[numbers] == 0]
        self._stack[self.free : self.free + len(unused)] = unused
        self.free += len(unused)
        if self.lowest_first:
            self._stack[: self.free][::-1].sort()

    # -- pages of slots --

    def of(self, slot: int) -> np.ndarray:
        return self.table[slot, : self.held[slot]].copy()

    def lacking(self, slots: np.ndarray, tokens: np.ndarray) -> int:
        """Number of pages that all slots together lack to hold their tokens."""
        return int(np.maximum(self.pages_for(tokens) - self.held[slots], 0).sum())

    def extend(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        missing = np.maximum(self.pages_for(tokens) - self.held[slots], 0)
        numbers = self.take(int(missing.sum()))
        offsets = np.arange(len(numbers)) - np.repeat(np.cumsum(missing) - missing, missing)
        self.table[np.repeat(slots, missing), np.repeat(self.held[slots], missing) + offsets] = numbers
        self.held[slots] += missing

    def fork(self, numbers: np.ndarray, tokens: int, slot: int) -> tuple[int, int] | None:
        """Let the empty `slot` begin with the first `tokens` tokens in pages `numbers`. If the last page is
        partial, returns that page and the page to copy it to.
        """
        assert self.held[slot] == 0
        full = tokens // self.page
        begun = tokens % self.page > 0
        own = self.take(1) if begun else np.zeros(0, dtype=np.int32)
        mine = np.concatenate([self.share(numbers[:full]), own])
        self.attach(slot, mine)
        return (int(numbers[full]), int(own[0])) if begun else None

    def attach(self, slot: int, numbers: np.ndarray) -> None:
        self.table[slot, : len(numbers)] = numbers
        self.held[slot] = len(numbers)

    def detach(self, slot: int) -> np.ndarray:
        """Take the pages from a slot and return them, still referenced."""
        numbers = self.of(slot)
        self.held[slot] = 0
        return numbers

    def places(self, slots: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Indices in the pool of tokens first … first + count - 1 of each slot, slot after slot."""
        owner = np.repeat(np.arange(len(slots)), count)
        index = np.arange(len(owner)) + (first - (count.cumsum() - count))[owner]
        page = self.table[slots[owner], index // self.page].astype(np.int64)
        return page * self.page + index % self.page
