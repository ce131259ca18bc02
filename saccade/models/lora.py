"""LoRA: peft adapters inside a model whose own weights stay frozen, optionally in 4 bits.

The adapters are injected in place, so the module tree stays that of transformers: trainer, engine and families run
it like any other model. Saved are the model with merged adapters, and the adapters alone in peft's format.

    add(model, family, LoraConfig(rank=16), seed=0)
    with without_adapters(model): ...      # the model as it was
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saccade.config import LoraConfig
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.models.files import require_same
from saccade.models.load import matching
from saccade.registry import HOOKS
from saccade.system.contents import File, on_host, pretrained, tensor_file

FOLDER = "adapter"  # inside a checkpoint; at the root, transformers would apply it to the merged weights
WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's default adapter name
HEAD = "lm_head"


def add(model: nn.Module, family: Family, config: LoraConfig, *, seed: int, stored: Path | None = None) -> None:
    """Add adapters to the target layers, initially without effect or loaded from the folder `stored`. All other
    weights are frozen.
    """
    require("peft", "lora")
    import peft

    names = target_names(model, family, config)
    dtype = next(model.parameters()).dtype
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=names,
        base_model_name_or_path=family.path,
    )
    with torch.random.fork_rng(devices=[]), _without_renaming():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model, adapter_name=NAME)
    assert sorted(names) == sorted(dict(_layers(model))), "peft adapted other layers than asked"
    for _, layer in _layers(model):
        # In the model's dtype, also over 4-bit weights: products in fp32 would be many times slower.
        # The optimizer's fp32 master weights preserve small updates.
        layer.lora_A.to(dtype)
        layer.lora_B.to(dtype)
    if stored is not None:
        _load_adapters(model, stored)
    whole: Any = model
    if getattr(model, "hf_quantizer", None) is not None:  # saved weights are not quantised
        whole.hf_quantizer = None
        del whole.config.quantization_config


@contextmanager
def _without_renaming() -> Iterator[None]:
    """Turn off a renaming in which peft takes linear layers of mixtures for the experts of transformers 4."""
    from peft.utils import transformers_weight_conversion as peft_names

    own = peft_names.convert_peft_config_for_transformers
    peft_names.convert_peft_config_for_transformers = lambda *names, **options: None
    try:
        yield
    finally:
        peft_names.convert_peft_config_for_transformers = own


def target_names(model: nn.Module, family: Family, config: LoraConfig) -> list[str]:
    """The linear layers that get an adapter. A pattern that matches none is refused."""
    whole: Any = model
    head = whole.get_output_embeddings()  # may be tied; log-probs are computed from its weight
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
        if family.tower_of(name) != "series"  # small enough to be trained in full
        if not type(module).__module__.startswith("transformers.")  # such as routers, which return more than a product
    ]
    if config.vision and "vision" not in family.spec.towers:
        raise ConfigError(f"model.lora.vision: a {family.name} has no vision tower; remove it, or use a vision model")
    if config.targets == "all-linear":
        towers = ("llm", "vision", "projector") if config.vision else ("llm",)
        chosen = [name for name in linear if family.tower_of(name) in towers]
    else:
        chosen = matching("model.lora.targets", "linear layer", config.targets, linear, family)
    if config.exclude:
        dropped = set(matching("model.lora.exclude", "linear layer", config.exclude, chosen, family))
        chosen = [name for name in chosen if name not in dropped]
    if not chosen:
        raise ConfigError(f"model.lora.exclude={config.exclude} leaves no layer to adapt; try model.lora.exclude=")
    return chosen


def four_bit_options(family: Family, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Options of `from_pretrained` that store the language model's linear layers as nf4 and compute in `dtype`. Head
    and vision tower are small and are not quantised.
    """
    require("bitsandbytes", "qlora")
    from bitsandbytes.nn import modules
    from transformers import BitsAndBytesConfig

    # On some CPUs the first forward without gradients would repack weights, in bf16, and training would use those.
    modules.has_avx512bf16 = lambda: False
    others = [p.rstrip(".") for tower, prefixes in family.spec.towers.items() if tower != "llm" for p in prefixes]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[HEAD, *others],  # applies to 4-bit layers, too, despite its name
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        how = f"pip install -c constraints.txt -e '.[{extra}]'"
        raise EnvironmentProblem(f"model.train={extra} needs the package {package}, which is not installed; run: {how}")


# -- adapters of a model ---------------------------------------------------------------------------


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained weights, by the names that peft gives them in its files."""
    return {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if f".{NAME}." in name
    }


def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the model's parameters with the adapters merged in: 4-bit weights are dequantised, sharded ones gathered
    (a collective of all ranks that hold a shard). One at a time, so that no second copy of the model is in memory.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    for name, parameter in _base_parameters(model):
        weight = _unpacked(parameter)
        if name in layers:
            weight = _with_adapter(weight, layers[name])
        yield name.replace(".base_layer.", "."), weight


def merged_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and bytes of each parameter of `merged`, without computing it."""
    for name, parameter in _base_parameters(model):
        whole = getattr(parameter, "quant_state", None) or parameter
        yield name.replace(".base_layer.", "."), tuple(whole.shape), whole.shape.numel() * whole.dtype.itemsize


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    adapted = is_adapted(model)
    return ((name, p) for name, p in model.named_parameters() if not (adapted and f".{NAME}." in name))


@torch.no_grad()
def _with_adapter(weight: Tensor, layer: Any) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    low, high = (part[NAME].weight.to(wide) for part in (layer.lora_A, layer.lora_B))
    return (weight.to(wide) + high @ low * layer.scaling[NAME]).to(weight.dtype)


def _unpacked(parameter: nn.Parameter) -> Tensor:
    if hasattr(parameter, "device_mesh"):
        return HOOKS["gathered"](parameter)
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager: the model computes without its adapters."""
    for _, layer in _layers(model):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in _layers(model):
            layer.enable_adapters(True)


@contextmanager
def with_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: the model computes with these adapter weights."""
    mine = copy_adapters(model)
    _set_adapters(model, tensors)
    try:
        yield
    finally:
        _set_adapters(model, mine)


def copy_adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in adapters(model).items()}


@torch.no_grad()
def _set_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in adapters(model).items():
        parameter.copy_(tensors[name])


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    if not is_adapted(model):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


# -- files -----------------------------------------------------------------------------------------


def files(model: Any, *, copy: bool = False) -> list[File]:
    """The merged model as a Hugging Face folder, and in `adapter/` the adapters in peft's format."""
    state = whole_state(model, copy=copy)
    tensors = {name: on_host(p, copy=copy) for name, p in adapters(model).items()}
    return [
        ("", pretrained(model, state)),
        (FOLDER, model.peft_config[NAME].save_pretrained),  # settings, which never change
        (f"{FOLDER}/{WEIGHTS}", tensor_file(tensors, {"format": "pt"})),
    ]


def whole_state(model: nn.Module, *, copy: bool) -> dict[str, Tensor]:
    """The state dict of the merged model, in main memory."""
    buffers = dict(model.named_buffers())
    state = {name: on_host(buffer, copy=copy) for name, buffer in model.state_dict().items() if name in buffers}
    return state | {name: on_host(weight, copy=copy) for name, weight in merged(model)}


def _load_adapters(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        hint = "it was not written with model.train=lora: start a new run with it as model.path"
        raise ConfigError(f"{folder.parent} holds no adapter to continue from; {hint}")
    stored = load_file(folder / WEIGHTS)
    hint = "use the model.lora.rank and targets that it was trained with"
    require_same(str(folder / WEIGHTS), adapters(model).items(), stored.items(), hint)
    _set_adapters(model, stored)
