from functools import cache
from pathlib import Path

import pytest

from saccade.plugins.estimate.batch_plan import empty_model
from saccade.plugins.families import tiny

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def models():
    return {}


@pytest.fixture(autouse=True)
def built_once(models, monkeypatch):
    """Every estimate of a folder looks at the same empty model."""

    def known(family, **options):
        key = (family.path, family.name)
        return models[key] if key in models else models.setdefault(key, empty_model(family))

    monkeypatch.setattr("saccade.plugins.estimate.batch_plan.empty_model", known)


@pytest.fixture(scope="session")
def shaped(tmp_path_factory):
    """Folders with the config of a Qwen2.5-VL and no weights, by its size."""

    @cache
    def build(size):
        folder = tmp_path_factory.mktemp(size)
        tiny.build("qwen2_5_vl", folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(BENCHMARKS))
            from model import SIZES, enlarge

        enlarge(folder, SIZES[size])
        return str(folder)

    return build


@pytest.fixture(scope="session")
def large(shaped):
    return shaped("3b")
