"""Build an engine from plain settings, in this process or in a child.

Optional engines are imported only when they are built.

    engine = build(Settings(engine="vllm", folder="my-model", dtype="bfloat16"), family)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.engines import Engine
from saccade.engines.settings import Settings
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.registry import Table

Builder = Callable[[Settings, Family, Any], Engine]


def _embedded(settings: Settings, family: Family, model: Any) -> Engine:
    from saccade.engines.embedded import EmbeddedEngine

    if model is None:  # in a child process, over its copy of the weights
        import torch

        from saccade.models.load import DTYPES, load_model

        model = load_model(
            family,
            dtype=DTYPES[settings.dtype],
            device=torch.device(settings.device),
            trust_remote_code=settings.trust_remote_code,
        )
    return EmbeddedEngine(model, family, max_sequences=settings.max_sequences, finite=settings.finite)


def _installed(name: str, engine: Callable[..., Engine]) -> Builder:
    """A row of a plugin: a class that loads the folder of its settings itself."""
    return lambda settings, family, model: engine(settings, family, beside_trainer=model is not None)


BUILDERS: Table[Builder] = Table("engines", {"embedded": _embedded}, _installed)


def build(settings: Settings, family: Family, model: Any = None) -> Engine:
    """Return the engine. `model`: the trainer's, for an engine that shares its weights."""
    if settings.engine != "embedded" and family.spec.section:
        raise ConfigError(
            f"rollout.engine={settings.engine}: it needs all models of a {family.name} folder, but "
            "only one of them is trained; use rollout.engine=embedded"
        )
    if settings.engine != "embedded" and not family.spec.whole:
        raise ConfigError(
            f"rollout.engine={settings.engine}: it cuts images of {family.name} models into other "
            "squares than the trainer does; use rollout.engine=embedded"
        )
    return BUILDERS[settings.engine](settings, family, model)
