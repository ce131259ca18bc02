"""A model without its weights, built on the meta device, and how large it is while it trains.

model = empty_model(family)
size = size_of(model, family, config.model.lora, element=2, train="full")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saccade.config import ADAPTED, LoraConfig
from saccade.errors import EnvironmentProblem
from saccade.models import lora
from saccade.models.families import Family
from saccade.models.flops import NF4, Training, training_of
from saccade.models.load import freeze
from saccade.models.shapes import Shape, shape_of
from saccade.plugins.series.series_tower import Encoder


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    shape: Shape
    training: Training
    weights: float  # bytes
    trained: int  # weights
    largest: int  # weights of the largest trained tensor
    head_tied: bool
    head_trained: bool


def empty_model(family: Family, *, trust_remote_code: bool = False) -> Any:
    """The model of a folder's config: modules without memory for their weights."""
    import torch
    import transformers

    if "audio" in family.spec.towers:
        raise EnvironmentProblem(
            f"{family.path}: the memory of a {family.name} is not known, as what a tower that "
            "hears keeps was never measured; estimate a model without one, such as qwen2_5_vl"
        )
    remote = {"trust_remote_code": trust_remote_code}
    settings = transformers.AutoConfig.from_pretrained(family.path, **remote)
    try:
        with torch.device("meta"):
            model = getattr(transformers, family.spec.auto_class).from_config(settings, **remote)
            if family.series is not None:
                model.series = Encoder(family.series, settings.get_text_config())
    except Exception as error:
        raise EnvironmentProblem(
            f"{family.path}: a {family.name} cannot be built without its weights, so nothing can "
            f"be estimated ({type(error).__name__}: {error}); use a decoder such as qwen3 or llama"
        ) from error
    family.spec.prepare(model)
    return model


def size_of(model: Any, family: Family, settings: LoraConfig, *, element: int, train: str) -> ModelSize:
    """The size of an empty model that trains as `train` says."""
    model.requires_grad_(True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    trained = _trained(model, family, settings, train)
    packed = _linear(model, family) if train == "qlora" else 0
    weights += sum(trained.values()) if train in ADAPTED else 0
    head = model.get_output_embeddings().weight
    return ModelSize(
        shape=shape_of(model, family.tower_of),
        training=training_of(model, trained, family.tower_of),
        weights=element * (weights - packed) + NF4 * packed,
        trained=sum(trained.values()),
        largest=max(trained.values()),
        head_tied=head is model.get_input_embeddings().weight,
        head_trained=head.requires_grad and train not in ADAPTED,
    )


def _linear(model: Any, family: Family) -> int:
    """Weights that `lora.four_bit` packs: experts are no linear layers."""
    import torch

    return sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != lora.HEAD and family.tower_of(name) == "llm"
    )


def _trained(model: Any, family: Family, settings: LoraConfig, train: str) -> dict[str, int]:
    """Parameters that are trained: name → how many numbers."""
    if train not in ADAPTED:
        freeze(model, family, train)
        return {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    found = {}
    for name in lora.target_names(model, family, settings):
        layer = model.get_submodule(name)
        found[f"{name}.lora_A"] = layer.in_features * settings.rank
        found[f"{name}.lora_B"] = layer.out_features * settings.rank
    return found


def full_rank(model: Any, family: Family, settings: LoraConfig) -> int:
    """The rank of the largest matrix that gets an adapter: a higher one adds nothing."""
    layers = map(model.get_submodule, lora.target_names(model, family, settings))
    return max(min(layer.in_features, layer.out_features) for layer in layers)
