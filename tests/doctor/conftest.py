"""A healthy model folder, and copies of it to break."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def healthy(tmp_path_factory) -> Path:
    from saccade.models.tiny import build

    return Path(build("qwen2_5_vl", tmp_path_factory.mktemp("healthy") / "model"))


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    return shutil.copytree(healthy, tmp_path / "model")


@pytest.fixture
def found() -> Callable[..., dict[str, list[str]]]:
    """What a check of a model says, by status."""

    def look(check, path: Path, *overrides: str) -> dict[str, list[str]]:
        from saccade.config import load

        by_status: dict[str, list[str]] = {}
        for finding in check(load(None, [f"model.path={path}", *overrides])):
            by_status.setdefault(finding.status, []).append(finding.text)
        return by_status

    return look
