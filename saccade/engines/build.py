"""One engine from plain settings. The same record builds it here or in a process of its own.

Optional engines are imported only when they are asked for.

    engine = build(Settings(engine="vllm", folder="my-model", dtype="bfloat16"), family)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.engines import Engine
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
    tensor_parallel: int = 1
    memory_share: float = 0.6
    lora_rank: int = 0  # adapters that may be loaded; 0: none
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)


def _embedded(settings: Settings, family: Family, model: Any) -> Engine:
    from saccade.engines.embedded import EmbeddedEngine

    assert model is not None, "the embedded engine samples from a model"
    return EmbeddedEngine(model, family, max_sequences=settings.max_sequences)


BUILDERS: Mapping[str, Callable[[Settings, Family, Any], Engine]] = {"embedded": _embedded}


def build(settings: Settings, family: Family, model: Any = None) -> Engine:
    """`model`: the trainer's own, for an engine that shares its weights."""
    return BUILDERS[settings.engine](settings, family, model)
