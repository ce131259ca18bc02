import json
from functools import cache

import pytest

from saccade.plugins.estimate.batch_plan import empty_model
from saccade.plugins.families import tiny
from tests.estimate.works import SIZES, VISION


@pytest.fixture(scope="session")
def models():
    return {}


@pytest.fixture(autouse=True)
def built_once(models, monkeypatch):
    """Every estimate of a folder looks at the same empty model."""

    def known(family, **options):
        key = (family.path, family.name)
        return models[key] if key in models else models.setdefault(key, empty_model(family))

    monkeypatch.setattr("saccade.plugins.estimate.empty_model", known)


@pytest.fixture(scope="session")
def shaped(tmp_path_factory):
    """Folders with the config of a Qwen2.5-VL and no weights, by its size."""

    @cache
    def build(size):
        folder, text = tmp_path_factory.mktemp(size), SIZES[size]
        tiny.build("qwen2_5_vl", folder)
        described = json.loads((folder / "config.json").read_text())
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        sections = [half // 4, 3 * half // 8, 3 * half // 8]
        described["text_config"] |= text
        described["text_config"]["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
        described["text_config"]["rope_parameters"]["mrope_section"] = sections
        described["vision_config"] |= VISION | {"out_hidden_size": text["hidden_size"]}
        described["tie_word_embeddings"] = text["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(described))
        (folder / "model.safetensors").unlink()
        return str(folder)

    return build


@pytest.fixture(scope="session")
def large(shaped):
    return shaped("3b")
