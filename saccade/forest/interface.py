"""The attention function that is registered with transformers, so that its model classes run unchanged.
The plan (attention.py) that a forward passes as keyword `attention_plan` decides what it computes:
training passes a forest plan, the embedded engine one that reads its cache. Only the decoder uses it;
towers keep transformers' own attention and masks, except those that pass the boundaries of their
segments. Knows nothing of images or rollouts.

    use_in(model)
    decoder_of(model)(input_ids=ids, attention_plan=plan)
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from saccade.errors import EnvironmentProblem
from saccade.forest.attention import HALF, Window, varlen

# transformers runs a vision tower's attention in one call only if the name contains "flash"; with such
# a name decoders would refuse rows longer than a chunk.
DECODER, TOWER = "saccade", "saccade_flash"
READ = ("scaling", "sliding_window", "attention_plan", "cu_seq_lens_q", "max_length_q")  # keywords that are used
# Other keywords of models, which do not change the result here: a plan knows its tokens, and segments of keys
# are those of queries. Any further keyword is refused.
HARMLESS = (
    *("position_ids", "cache_position", "is_causal", "cu_seq_lens_k", "max_length_k"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
)


def decoder_of(model: Any) -> Any:
    """The layers of the language model, without a head."""
    decoder = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def use_in(model: Any, *, segments: bool = False) -> None:
    """Register the attention function; forwards of the decoder then need a plan. `segments`: the towers
    pass segment boundaries and use it, too; otherwise they keep transformers' own attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    decoder = decoder_of(model)
    # In a composite model only the decoder may set the flag.
    if not any(getattr(part, "_supports_attention_backend", False) for part in (model, decoder)):
        why = "computes its own attention, so packed rows would leak into each other"
        hint = "use a model whose class sets _supports_attention_backend"
        raise EnvironmentProblem(f"{type(model).__name__} {why}; {hint}")
    for name in (DECODER, TOWER):
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, _window_of)
    # Set on the config after loading: transformers would look for a flash-attn package under such a
    # name otherwise.
    if segments:
        model.config._attn_implementation = TOWER
    attend_by(decoder, DECODER)
    for module in decoder.modules():
        # transformers computes this temperature from the index in the packed batch. It is 1 below
        # `floor_scale` tokens, to which the family limits rows, so it can be switched off.
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False


def attend_by(decoder: Any, name: str) -> None:
    """Set the attention implementation of a decoder; towers with configs nested in its own keep theirs."""
    inside = [getattr(decoder.config, part, None) for part in decoder.config.sub_configs]
    before = [(part, part._attn_implementation) for part in inside if part is not None]
    decoder.config._attn_implementation = name
    for part, own in before:
        part._attn_implementation = own


def _window_of(*args: Any, local_size: int | None = None, config: Any = None, **kwargs: Any) -> Window:
    """Returns the window in place of a mask: a plan needs no mask, and not every model passes `sliding_window`."""
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    return -local_size if chunked else local_size  # type: ignore[operator]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    scale, window, plan, boundaries, longest = (options.pop(name, None) for name in READ)
    _refuse_unknown(module, options)
    if isinstance(attention_mask, int):
        window = attention_mask
    # Not x[0], whose backward would copy the gradient into a tensor of zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if boundaries is not None:
        out = segment_attention(q, k, v, boundaries, scale, longest)
    else:
        assert plan is not None, "a forward of the text half needs attention_plan="
        out = plan(module.layer_idx, q, k, v, scale, window)
    return out.unsqueeze(0), None


def _refuse_unknown(module: torch.nn.Module, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is None or value is False or name in HARMLESS or (name == "dropout" and value == 0):
            continue
        what = f"{type(module).__name__} passes {name}= to its attention, which would be computed without it"
        also = ", or set its attention_dropout to 0" if name == "dropout" else ""
        raise EnvironmentProblem(f"{what}; use another model{also}")


# -- segments: the vision tower --------------------------------------------------------------------


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float, longest: int | None = None
) -> Tensor:
    """Full attention inside each segment [boundaries[i], boundaries[i+1])."""
    if q.is_cuda and q.dtype in HALF:
        cu = boundaries.to(torch.int32)
        longest = int((cu[1:] - cu[:-1]).max()) if longest is None else int(longest)
        return varlen(q, k, v, (cu, cu), (longest, longest), scale, window=None, causal=False)
    starts = boundaries.cpu().numpy()
    lengths, out = np.diff(starts), torch.empty_like(q)
    if len(lengths) and (lengths == lengths[0]).all():  # most towers: a view instead of copies
        q, k, v = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        index = torch.from_numpy(starts[rows][:, None] + np.arange(length)).to(q.device)
        part_q, part_k, part_v = (x[index].transpose(1, 2) for x in (q, k, v))
        out = out.index_put((index,), sdpa(part_q, part_k, part_v, scale=scale).transpose(1, 2))
    return out
