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
    """What the checks of a stage of a model say, by status."""

    def look(stage: int, path: Path, *overrides: str) -> dict[str, list[str]]:
        from saccade.config import load
        from saccade.plugins.doctor import look_in_turn, model_checks

        checks = model_checks(load(None, [f"model.path={path}", *overrides]))[stage]
        by_status: dict[str, list[str]] = {}
        for finding in look_in_turn([checks]):
            by_status.setdefault(finding.status, []).append(finding.text)
        return by_status

    return look
