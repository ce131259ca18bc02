"""What the Triton kernels of the embedded engine compute, in plain torch: with them it runs on a
CPU, and against them the kernels are held on a GPU. Memory is read through the same addresses.
"""

import ctypes

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import softplus

from saccade.engines.embedded.sampling import allowed_ids, sample
from saccade.forest.attention import first_seen
from saccade.forest.logprobs import sampling_logits
from saccade.plugins.gpu import decode_state as fields
from saccade.plugins.linear.delta_rule import delta_rule
from saccade.types import Sampling

WORD = 4


def pool(bases, layer, which, tokens, like):
    """[tokens, G, D] at the address of the keys (0) or values (1) of a layer."""
    heads, size = like.shape[1:]
    count = tokens * heads * size * like.element_size()
    buffer = (ctypes.c_byte * count).from_address(int(bases[layer, which]))
    return torch.frombuffer(buffer, dtype=like.dtype).view(tokens, heads, size)


def places_of(table, page, count):
    index = torch.arange(count)
    return table[index // page].long() * page + index % page


def attention(q, k, v, scale):
    """One query [H, D] over keys [n, G, D] and values [n, G, V], in float64."""
    groups = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    weights = (torch.einsum("hd,nhd->hn", q.double(), k) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def check_prefix_groups(table, shared, prefix_groups, page):
    """What a prefix group reads for its rows is the same for all of them, and whole pages."""
    told = torch.zeros_like(shared)
    for first, count, tokens in prefix_groups.T.tolist():
        pages = table[first : first + count, : tokens // page]
        assert tokens % page == 0 and (pages == pages[:1]).all()
        told[first : first + count] = tokens
    assert torch.equal(told, shared)


def decode_attention(q, k, v, *, bases, layer, table, lengths, shared, prefix_groups, page, scale, splits, window=None):
    check_prefix_groups(table, shared, prefix_groups, page)
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    tokens = (int(table.max()) + 1) * page
    keys, values = (pool(bases, layer, which, tokens, like) for which, like in enumerate((k, v)))
    for row, length in enumerate(lengths.tolist()):
        if length >= 0:
            places = places_of(table[row], page, length + 1)
            keys[places[-1]], values[places[-1]] = k[row], v[row]
            seen = places[max(0, first_seen(length, window)) :] if window else places
            out[row] = attention(q[row], keys[seen], values[seen], scale).to(q.dtype)
    return out


def write_pages(k, v, *, bases, layer, places):
    for which, new in enumerate((k, v)):
        pool(bases, layer, which, int(places.max()) + 1, new)[places] = new


def copy_pages(source, target, *, bases, words):
    for base, length in zip(bases.flatten().tolist(), words.flatten().tolist(), strict=True):
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            count = length * WORD
            ctypes.memmove(base + there * count, base + here * count, count)


def kept_at(address, row, shape, dtype):
    """What lies in a row of a layer's states."""
    count = int(np.prod(shape)) * dtype.itemsize
    buffer = (ctypes.c_byte * count).from_address(int(address) + int(row) * count)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def convolve_step(x, weight, bias, *, tails, rows, lengths, silu=True):
    out, width = torch.zeros_like(x), weight.shape[-1]
    for n in (lengths >= 0).nonzero().flatten().tolist():
        tail = kept_at(tails, rows[n], (width - 1, x.shape[1]), x.dtype)
        seen = torch.cat([tail, x[n : n + 1]])
        made = (seen.T * weight[:, 0]).sum(1) + (0 if bias is None else bias)
        out[n] = functional.silu(made) if silu else made
        tail.copy_(seen[1:])
    return out


def delta_step(mixed, share, decay, A_log, dt_bias, *, heads, states, rows, lengths):
    key_heads, count, size, wide = heads
    out = mixed.new_zeros((len(mixed), count, wide))
    for n in (lengths >= 0).nonzero().flatten().tolist():
        state = kept_at(states, rows[n], (count, size, wide), torch.float32)
        q, k, v = mixed[n : n + 1].split([key_heads * size, key_heads * size, count * wide], -1)
        q, k = (x.view(1, key_heads, size).repeat_interleave(count // key_heads, 1) for x in (q, k))
        gone = -A_log.float().exp() * softplus(decay[n : n + 1].float() + dt_bias)
        given = q, k, v.view(1, count, wide), gone, share[n : n + 1].sigmoid()
        found, after = delta_rule(given, np.ones(1, np.int64), torch.tensor([0, 1], device=mixed.device), state[None])
        out[n] = found[0]
        state.copy_(after[0])
    return out


def gate_step(x, gate, weight, epsilon):
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (weight * normed.to(x.dtype) * functional.silu(gate.float())).to(x.dtype)


def cut(logits, *, temperature, top_p, state, banned):
    """Found by sorting; a level is the place of a logit among the different ones of its row."""
    floors = torch.tensor([[-1], [logits.shape[1]]]).repeat(1, len(temperature))
    rows = (temperature, state[fields.TOP_K], top_p, state[fields.LENGTH])
    for row, (heat, k, p, length) in enumerate(zip(*(x.tolist() for x in rows), strict=True)):
        if heat > 0 and length >= 0 and (k > 0 or p < 1):
            kept = allowed_ids(sampling_logits(logits[row : row + 1], heat, banned), k, p)[0]
            levels = levels_of(logits[row])
            floors[0, row] = levels[kept].min()
            floors[1, row] = (kept & (levels == floors[0, row])).nonzero().max()
    return floors


def levels_of(logits):
    return logits.unique(return_inverse=True)[1]


def within(logits, floors, banned):
    levels = torch.stack([levels_of(row) for row in logits])
    low, last = floors[:, :, None]
    kept = (levels > low) | ((levels == low) & (torch.arange(logits.shape[1]) <= last))
    return kept if banned is None else kept & ~banned


def draw(logits, *, temperature, keys, index, banned, rows=None, floors=None):
    lines = logits if rows is None else logits[rows]
    if floors is not None:
        lines = lines.masked_fill(~within(lines, floors, None), -torch.inf)
    ids = torch.zeros(len(temperature), dtype=torch.int64)
    logprobs = torch.zeros(len(temperature))
    for heat in set(temperature.tolist()):
        some = temperature == heat
        sampling = Sampling(temperature=heat)
        drawn = sample(lines[some], sampling, banned=banned, keys=keys[some], index=index[some])
        ids[some], logprobs[some] = drawn.ids, drawn.logprobs
    return ids, logprobs


def keep(logits, ids, *, floors, state, banned, step_index, out):
    masks, (cursor, kept, spans) = within(logits, floors, banned), out
    for row in ((state[fields.SUPPORT] != 0) & (state[fields.LENGTH] >= 0)).nonzero().flatten().tolist():
        found = masks[row].nonzero().flatten()
        first = cursor.item()
        cursor += len(found)
        spans[step_index.item(), :, row] = torch.tensor([first, len(found)])
        if first + len(found) > len(kept):
            ids[row] = -1
        else:
            kept[first : first + len(found)] = found


def advance(ids, logprobs, *, state, eos, step_index, out):
    count = len(ids)
    running = (state[fields.LENGTH] >= 0) & (ids >= 0)
    out[0][step_index.item(), :count] = torch.where(running, ids, -1)
    out[1][step_index.item(), :count] = logprobs
    state[fields.REMAINING] -= 1
    ends = state[fields.REMAINING] <= 0
    ends |= (state[fields.STOPS] != 0) & torch.isin(ids, eos)
    state[fields.TOKEN] = ids.clamp_min(0)
    state[fields.LENGTH] = torch.where(running & ~ends, state[fields.LENGTH] + 1, -1)
    state[fields.POSITION] += 1
    state[fields.INDEX] += 1
    step_index += 1
