"""A bounded cache of decoded pixels, shared by all threads.

DECODED.get(media)
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from saccade.media.kinds import decode
from saccade.types import Media, root_hash

Item = TypeVar("Item")
Made = TypeVar("Made")


class ImageCache:
    """An LRU cache of decoded images, or of what `make` returns for them.

    Each array is computed once, however many threads request it. Cached arrays never exceed `max_bytes` in total (a
    larger array is returned but not cached); arrays that callers hold or compute come on top. Arrays are shared, hence
    read-only.
    """

    def __init__(
        self, max_bytes: int, make: Callable[[Media], np.ndarray] = decode, key: Callable[..., Any] = attrgetter("key")
    ) -> None:
        self.max_bytes, self.make, self.key = max_bytes, make, key
        self.bytes = 0
        self._entries: OrderedDict[Any, Future[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, media: Media) -> np.ndarray:
        key = self.key(media)
        with self._lock:
            entry = self._entries.get(key)
            first = entry is None
            if entry is None:
                entry = self._entries[key] = Future()
            self._entries.move_to_end(key)
        if first:
            self._fill(key, entry, media)
        return entry.result()

    def peek(self, key: Any) -> np.ndarray | None:
        """The cached array of that key; None if it is not there."""
        with self._lock:
            entry = self._entries.get(key)
        return entry.result() if entry is not None and entry.done() else None

    def get_all(self, media: Sequence[Media]) -> list[np.ndarray]:
        """The arrays of several media; missing ones are computed in parallel threads."""
        return in_threads(self.get, media)

    def _fill(self, key: Any, entry: Future[np.ndarray], media: Media) -> None:
        try:
            pixels = self.make(media)
        except BaseException as error:
            with self._lock:
                del self._entries[key]
            entry.set_exception(error)
            return
        pixels.setflags(write=False)
        with self._lock:
            entry.set_result(pixels)
            self.bytes += pixels.nbytes
            while self.bytes > self.max_bytes:
                oldest = next(key for key, other in self._entries.items() if other.done())
                self.bytes -= self._entries.pop(oldest).result().nbytes


def in_threads(work: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """Run `work` on all items in a thread pool; results in order."""
    return list(_workers().map(work, items))


def in_background(prepare: Callable[..., Any], *args: Any) -> None:
    """Run `prepare` in a background thread to fill a cache; its errors are raised again on a later request."""
    _background_pool().submit(prepare, *args)


def drop_background() -> None:
    """Cancel background work that has not begun; the process would wait for it at exit."""
    if _background_pool.cache_info().currsize:
        _background_pool().shutdown(wait=False, cancel_futures=True)
        _background_pool.cache_clear()


@cache
def _background_pool() -> ThreadPoolExecutor:
    """Only two threads: background threads compete for the GIL with the one that launches GPU kernels. With eight of
    them each of its calls waits three to five times as long. Images that are needed now do not queue here.
    """
    return ThreadPoolExecutor(2, thread_name_prefix="ahead")


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="images")


def _decode_once(media: Media) -> np.ndarray:
    """Decode; a crop of an image that is already cached is cut from it."""
    whole = DECODED.peek((root_hash(media.hash, media.box), None))
    if media.box is None or whole is None:
        return decode(media)
    x0, y0, x1, y1 = media.box
    return whole[y0:y1, x0:x1].copy()


# Images decoded by this process, shared by the vision tower and the stored rollouts. The key leaves out the pixel
# budget, which only matters for resizing.
DECODED = ImageCache(512 << 20, make=_decode_once, key=lambda media: media.key[:2])
