"""Build an engine from plain settings, in this process or in a child.

Optional engines are imported only when they are built.

    engine = build(Settings(engine="vllm", folder="my-model", dtype="bfloat16"), family)
"""

from collections.abc import Callable
from typing import Any

from saccade.engines import Engine, Settings
from saccade.errors import ConfigError
from saccade.models.families import Family
from saccade.registry import Table

# Engines of plugins: (settings, family, beside_trainer) → an engine that loads `settings.folder` itself.
ENGINES: Table[Callable[..., Any]] = Table("engines", {})


def build(settings: Settings, family: Family, model: Any = None) -> Engine:
    """Return the engine. `model`: the trainer's, for an engine that shares its weights."""
    name = settings.engine
    if name != "embedded":
        if family.spec.section:
            why = f"it needs all models of a {family.name} folder, but only one of them is trained"
            raise ConfigError(f"rollout.engine={name}: {why}; use rollout.engine=embedded")
        return ENGINES[name](settings, family, beside_trainer=model is not None)
    from saccade.engines.embedded import EmbeddedEngine

    if model is None:  # in a child process, over its copy of the weights
        import torch

        from saccade.models.load import DTYPES, load_model

        dtype, device = DTYPES[settings.dtype], torch.device(settings.device)
        model = load_model(family, dtype=dtype, device=device, trust_remote_code=settings.trust_remote_code)
    return EmbeddedEngine(model, family, max_sequences=settings.max_sequences, check_nan=settings.check_nan)
