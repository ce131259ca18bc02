"""A cache of token lengths on disk, so that later runs do not render every row again at start-up.

A length depends on the messages, on the sizes and pixel budgets of their images, and on family, tokenizer
and template; all of these are in the key, so entries never become stale.

    with cached_lengths(config.run, family, "prompt", ask, family.render) as length:
        datasets.load(sources, config.data, length=length)
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path

from saccade.config import RunConfig
from saccade.models.families import Family
from saccade.registry import HOOKS
from saccade.run.folder import write_whole
from saccade.types import Media, Message, Sample

Length = Callable[[Sample], int]
Ask = Callable[[Sample], Sample]


@contextmanager
def cached_lengths(
    run: RunConfig, family: Family, kind: str, ask: Ask, render: Callable[[Sequence[Message]], Sized]
) -> Iterator[Length]:
    """Yields a cached length function. `ask` words a row; `render`, named by `kind`, turns messages into tokens."""
    path = Path(run.out) / ".cache" / f"{kind}-lengths-{renderer(family)}.json"
    lengths: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    before = len(lengths)
    untried = family.series is not None  # render the first row with media even if cached: checks its encoder

    def length(sample: Sample) -> int:
        nonlocal untried
        messages = ask(sample).messages
        key = _content(messages)
        if key not in lengths or (untried and sample.media):
            lengths[key] = len(render(messages))
            untried = untried and not sample.media
        return lengths[key]

    yield length
    if len(lengths) > before:
        write_whole(path, json.dumps(lengths))


def renderer(family: Family) -> str:
    """A digest of everything that determines how messages become tokens."""
    tokenizer = Path(family.path) / "tokenizer.json"
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{family.name}\0{family.chat.template}\0".encode())
    if family.series is not None:
        digest.update(HOOKS["series_fingerprint"](family.series))
    digest.update(tokenizer.read_bytes() if tokenizer.is_file() else family.path.encode())
    return digest.hexdigest()


def _content(messages: tuple[Message, ...]) -> str:
    def size(part: Media) -> tuple[object, ...]:
        return part.kind, part.width, part.height, part.min_pixels, part.max_pixels

    said = [(m.role, [part if isinstance(part, str) else size(part) for part in m.parts]) for m in messages]
    return hashlib.blake2b(repr(said).encode(), digest_size=12).hexdigest()
