"""What every test shares: one thread per process, no network, the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported anywhere: two workers with a thread each are faster than two with many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository; tests that need it are skipped without it."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder of real data beside the repository")
    return folder
