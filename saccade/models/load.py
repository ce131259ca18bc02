"""Load a model folder as a module that runs this package's attention, with the configured parts frozen.

model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.forest import attention
from saccade.forest.device_ops import KERNELS, to_device
from saccade.forest.interface import decoder_of, use_in
from saccade.models import experts
from saccade.models.families import FAMILIES, Family
from saccade.models.files import require_intact, require_some
from saccade.models.heads import find_logit_changes, language_head
from saccade.registry import HOOKS
from saccade.types import MediaSpan

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("run.device=cuda, but torch sees no GPU; use run.device=auto")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # Older GPUs emulate bfloat16, many times slower than they compute in float32.
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    return DTYPES[name]


def load_model(
    family: Family,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    by_rows: Any = None,
) -> nn.Module:
    """Load a model; refuses a folder whose tensor names or shapes do not match the architecture. `options` go to
    `from_pretrained`; `seed` initialises a series encoder that the folder does not hold; `by_rows` (`ranks.by_rows`)
    loads only this rank's rows of each weight.
    """
    import transformers

    require_some(Path(family.path))
    require_intact(Path(family.path))
    auto = getattr(transformers, family.spec.auto_class)
    settings = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True, **(options or {})}
    load = partial(auto.from_pretrained, family.path, **settings)
    model, info = load() if by_rows is None else by_rows.read(load, family, device)
    wrong = {kind: sorted(map(str, info.get(f"{kind}_keys", ()))) for kind in ("missing", "unexpected", "mismatched")}
    wrong["unexpected"] = [name for name in wrong["unexpected"] if not name.startswith(family.spec.beside)]
    if listed := "; ".join(f"{kind}: {', '.join(names[:5])}" for kind, names in wrong.items() if names):
        raise EnvironmentProblem(f"{family.path}: the weights do not fit the architecture ({listed})")
    family.spec.prepare(model)
    use_in(model, segments=family.spec.segments)
    model = model.to(device).train()
    if family.name not in FAMILIES:
        with nullcontext() if by_rows is None else by_rows.running(model):
            model.logit_changes = find_logit_changes(model)
            prove = family.spec.prove or _require_same_logits
            prove(model, family)
    for part in [model] if by_rows is None else by_rows.pieces(model):
        KERNELS["fuse"](model, part)
    if family.series is not None:
        HOOKS["attach_series"](model, family, seed=seed)
    return model


@torch.no_grad()
def _require_same_logits(model: Any, family: Family) -> None:
    """Refuse a decoder of the generic family whose logits here differ from transformers': engine and trainer would
    agree on a policy that is not the deployed one.
    """
    ids, what = torch.arange(1, 5, device=model.device), f"{family.path}: a model of type {family.name!r}"
    plan = attention.forest_plan(np.array([0, len(ids)]), np.array([-1]), model.device, model.dtype)
    model.eval()
    try:
        read = language_head(model)(hidden_states(model, family, ids, ids[None], (), plan))
        options = {"position_ids": ids[None], "attention_plan": plan, "use_cache": False}
        logits = model(input_ids=ids[None], **options).logits[0]
    except Exception as error:
        why = f"could not be run here ({type(error).__name__}: {error})"
        raise EnvironmentProblem(f"{what} {why}; use a decoder such as qwen3 or llama") from error
    finally:
        model.train()
    if (read - logits).norm() > 8 * torch.finfo(read.dtype).eps * logits.norm():
        why = "gives other logits here than in transformers"
        raise EnvironmentProblem(f"{what} {why}; use a decoder such as qwen3 or llama")


def hidden_states(
    model: nn.Module,
    family: Family,
    ids: Tensor,
    positions: Tensor,
    media: Sequence[MediaSpan],
    plan: attention.AttentionPlan,
    *,
    places: Tensor | None = None,
    features: Tensor | None = None,
) -> Tensor:
    """ids [T], positions [axes, T] → last hidden states [T, E]. The same call for every family, text or vision.

    `places` are the positions of media tokens; default: those of the spans. `features` [media tokens, E or a multiple]
    replace their embeddings; columns beyond E are added after the first layers (deepstack). Default: computed from
    `media`.
    """
    options: dict[str, Any] = {"input_ids": ids[None]}
    if media:
        if features is None:
            features = family.features(model, media_inputs(family, media, ids.device))
        if places is None:
            spans = [np.arange(span.start, span.end) for span in media]
            places = to_device(np.concatenate(spans), ids.device)
        options = (family.embed or decoder_inputs)(model, ids, places, features)
    position_ids = positions[:, None] if family.axes > 1 else positions
    output = decoder_of(model)(position_ids=position_ids, use_cache=False, attention_plan=plan, **options)
    return output.last_hidden_state.squeeze(0)


def decoder_inputs(
    model: Any, ids: Tensor, places: Tensor, features: Tensor, *, seen: Sequence[int] | None = None
) -> dict[str, Any]:
    """Decoder inputs with features in place of embeddings. `seen`: ids to replace; None: all ids at `places`."""
    rows = model.get_input_embeddings()(ids)
    first, *deeper = features.to(rows.dtype).split(rows.shape[-1], dim=1)
    if seen is not None:
        stands = torch.isin(ids[places], to_device(np.array(seen), ids.device))
        first = torch.where(stands[:, None], first, rows[places])
    options: dict[str, Any] = {"inputs_embeds": rows.index_copy(0, places, first)[None]}
    if deeper:
        options |= {"visual_pos_masks": places, "deepstack_visual_embeds": deeper}
    return options


def media_inputs(family: Family, media: Sequence[MediaSpan], device: torch.device) -> dict[str, Any]:
    """The inputs of `family.features`, on the device."""
    return _moved(family.media(media), device)


def _moved(made: Any, device: torch.device) -> Any:
    if isinstance(made, Mapping):
        return {name: _moved(value, device) for name, value in made.items()}
    return to_device(made, device) if isinstance(made, Tensor) else made


def freeze(model: nn.Module, family: Family, train: str) -> None:
    """Apply model.train: `full`, or `freeze:` with towers, prefixes and re:REGEX. Unmatched patterns are refused."""
    kind, _, listed = train.partition(":")
    if kind == "full" and not listed:
        return
    if kind != "freeze" or not listed:
        raise ConfigError(f"model.train={train!r}: write full, or freeze:vision,projector")
    parameters = dict(model.named_parameters())
    for name in matching("model.train", "parameter", listed, list(parameters), family):
        parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model.train={train!r} freezes everything; leave something to train")


def matching(option: str, what: str, patterns: str, names: Sequence[str], family: Family) -> list[str]:
    """The names that match any of the patterns. A pattern that matches none is refused."""
    found: set[str] = set()
    for pattern in map(str.strip, patterns.split(",")):
        try:
            hits = {name for name in names if _matches(name, pattern, family)}
        except re.error as error:
            raise ConfigError(f"{option}: {pattern!r} is no regular expression: {error}") from None
        if not hits:
            towers = f"a tower ({', '.join(family.spec.towers)}), a prefix or re:REGEX of names such as {names[0]!r}"
            raise ConfigError(f"{option}: {pattern!r} matches no {what}; write {towers}")
        found |= hits
    return [name for name in names if name in found]


def _matches(name: str, pattern: str, family: Family) -> bool:
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    if pattern in family.spec.towers:
        return family.tower_of(name) == pattern
    return pattern != "" and name.startswith(pattern)


@contextmanager
def negated_weight(model: nn.Module, family: Family, tower: str) -> Iterator[str]:
    """Context manager: one matrix of a tower is negated, to probe whether weight changes take effect. The output
    changes for every sample, and undoing it is exact. Yields the matrix's name.
    """
    prefixes = family.spec.towers[tower]
    chosen = -1 if family.reader is None else 0  # with a folder's own processor the last layers may be unused
    name, weight = [
        (name, p)
        for name, p in model.named_parameters()
        if name.startswith(prefixes) and family.tower_of(name) == tower
        if p.ndim > 1 and len(p) > 1 and p.is_floating_point() and ".lora_" not in name
    ][chosen]
    weight.data.neg_()
    try:
        yield name
    finally:
        weight.data.neg_()


def banned_mask(family: Family, device: torch.device) -> Tensor | None:
    return torch.from_numpy(np.asarray(family.banned)).to(device) if family.banned.any() else None


def trainable_table(model: nn.Module, family: Family) -> dict[str, Any]:
    """Parameter counts per tower: {tower: (trained, frozen)}."""
    table: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        trained, frozen = table.get(family.tower_of(name), (0, 0))
        whole = getattr(parameter, "quant_state", None) or parameter  # 4-bit weights are packed two per byte
        count, learns = whole.shape.numel(), parameter.requires_grad
        table[family.tower_of(name)] = (trained + count * learns, frozen + count * (not learns))
    return table


def describe_trained(model: nn.Module, family: Family) -> str:
    adapted = hasattr(model, "peft_config")
    towers = (
        f"{tower} {part:,} in adapters beside {rest:,}"
        if adapted and part and rest
        else f"{tower} {part:,} of {part + rest:,}"
        for tower, (part, rest) in trainable_table(model, family).items()
    )
    text = f"trained weights: {', '.join(towers)}"
    if adapted and (apart := experts.count(model)):
        text += f"; no adapter reaches the {apart:,} of experts, which are no linear layers"
    return text


def gpu_memory() -> dict[str, float]:
    """GiB: the peak of this process since the last call, and what all processes on the GPU hold; {} without one."""
    if not torch.cuda.is_initialized():
        return {}
    peak, (free, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
    torch.cuda.reset_peak_memory_stats()
    return {"mem/gpu_peak_gb": peak / 2**30, "mem/gpu_used_gb": (total - free) / 2**30}
