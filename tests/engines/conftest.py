"""The paged engine on a CPU: the same scheduler, with the kernels in plain torch."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

KERNELS = ("kernels", "truncation", "draws")
NAMES = (*KERNELS, "paged", "graphs")


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Engines built while this is in use page their cache; `budget` is the pool in bytes."""
    from saccade.engines import embedded
    from tests.engines import reference

    for name in NAMES:  # whatever was imported before is put back at the end
        monkeypatch.delitem(sys.modules, f"{embedded.__name__}.{name}", raising=False)
        monkeypatch.delattr(embedded, name, raising=False)
    for name in KERNELS:
        monkeypatch.setitem(sys.modules, f"{embedded.__name__}.{name}", reference)
        monkeypatch.setattr(embedded, name, reference, raising=False)
    from saccade.engines.embedded.paged import PagedCache

    settings = SimpleNamespace(budget=1 << 26)
    monkeypatch.setattr(PagedCache, "_budget", lambda cache: settings.budget)
    monkeypatch.setattr(embedded, "can_page", lambda shape: True)
    yield settings
    for name in NAMES[len(KERNELS) :]:
        sys.modules.pop(f"{embedded.__name__}.{name}", None)
