"""The door: a model's own forward is called and stopped at the moment it calls its decoder. What it hands over is
what any right implementation must hand over: embeddings with pictures merged in, and whatever else this decoder reads.
So nothing here knows how a model merges, scales, or marks. Knows nothing of processors and rows.

    door(model, input_ids=ids, pixel_values=pixels)["inputs_embeds"]

Legend: T packed tokens, E hidden size.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import EnvironmentProblem
from saccade.forest.interface import decoder_of

# What a forward hands to any decoder; the rest is the model's own business and is handed on.
USUAL: tuple[str, ...] = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values")
USUAL += ("use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict")
USUAL += ("labels", "logits_to_keep")
# (where, what the first layers add there): names under which decoders take it. By layer it is a mapping.
DEEPER = (("visual_pos_masks", "deepstack_visual_embeds"), ("vision_mask", "deepstack_features"))


class _Met(Exception):
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)


def door(model: Any, **inputs: Any) -> dict[str, Any]:
    """What a model's own forward hands to its decoder. One that merges pictures inside its decoder is
    stopped at its first layer.
    """
    decoder = decoder_of(model)
    inner = decoder is model.base_model
    target = decoder.layers[0] if inner else decoder
    names = list(inspect.signature(type(target).forward).parameters)[1:]

    def stop(module: Any, arguments: Any, options: Any) -> None:
        raise _Met({**dict(zip(names, arguments, strict=False)), **options})

    hook = target.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        model(**inputs, use_cache=False)
    except _Met as met:
        return {"inputs_embeds": met.options[names[0]]} if inner else met.options
    finally:
        hook.remove()
    raise EnvironmentProblem(f"{type(model).__name__} does not pass through its get_decoder(); use another model")


def picture_features(model: Any, media: Mapping[str, Any]) -> Tensor:
    """[media tokens, E], or a multiple of E: what the first decoder layers add follows. `media`:
    batches of prompts with a picture each, which places of them stand for pictures, types that its
    tensors are widened to, and the places whose rows are wanted, counted through all batches.
    """
    found, added_to = [], getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", ())
    for batch in media["batches"].values():
        inputs = cast(batch["inputs"], model.device, model.dtype)
        met = door(model, **{name: value.to(batch["whole"].get(name, value.dtype)) for name, value in inputs.items()})
        states = met["inputs_embeds"].flatten(0, 1)
        added: Any = next((met[what] for _, what in DEEPER if met.get(what)), [])
        if isinstance(added, Mapping):
            model.deeper_layers, added = list(added), added.values()
        rows = [each.to(states.dtype).reshape(-1, states.shape[-1]) for each in added]
        deeper = [torch.zeros_like(states).index_copy(0, batch["places"], each) for each in rows]
        deeper += [torch.zeros_like(states)] * (len(added_to) - len(deeper))  # of sounds, to which nothing is added
        found.append(torch.cat([states, *deeper], 1))
    return torch.cat(found).index_select(0, media["rows"])


def decoder_inputs(
    model: Any, ids: Tensor, places: Tensor, features: Tensor, media_ids: Tensor, kinds: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Arguments of the decoder for packed ids [T], without positions and attention. `kinds` are more that
    its forward is told of each id. Between the first and the last place of a picture there may be text.
    """
    met = door(model, input_ids=ids[None], **{name: kind[None] for name, kind in kinds.items()})
    embedded = met["inputs_embeds"].squeeze(0)
    first, *deeper = features.to(embedded.dtype).split(embedded.shape[-1], dim=1)
    stands = torch.isin(ids[places], media_ids)[:, None]
    options = {name: value for name, value in met.items() if name not in USUAL and value is not None}
    rows = torch.where(stands, first, embedded[places])
    options["inputs_embeds"] = embedded.index_copy(0, places, rows)[None]
    if deeper:
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device).index_fill(0, places, True)
        parameters = inspect.signature(type(decoder_of(model)).forward).parameters
        where, what = next(names for names in DEEPER if names[1] in parameters)
        layers = getattr(model, "deeper_layers", None)  # where they are named
        options[where] = mask[None] if layers is None else mask[None, :, None]
        options[what] = deeper if layers is None else dict(zip(layers, deeper, strict=True))
    return options


def cast(made: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {n: v.to(device, dtype) if v.is_floating_point() else v.to(device) for n, v in made.items()}
