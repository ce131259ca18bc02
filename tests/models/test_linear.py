"""Decoders with recurrent layers, beside what tests/engines/test_decoders compares with transformers."""

import inspect
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as own

from saccade.config import LoraConfig, TrainConfig
from saccade.config import load as load_config
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.engines.embedded.kv_cache import cache_shape, why_no_kernels
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.forest.attention import forest_plan, paths
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.families import load_family
from saccade.models.load import hidden_states, load_model
from saccade.plugins.estimate import shapes
from saccade.plugins.families import tiny_kinds
from saccade.plugins.linear.delta_rule import OPTIONS, delta_rule
from saccade.plugins.linear.gated_layers import patch_layers
from saccade.plugins.linear.torch_step import chunk_gradients
from saccade.plugins.ranks.layouts import require_heads
from saccade.system.contents import write_files
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from tests.engines.asked import same, trajectories
from tests.engines.decoders import asked, build
from tests.models import against
from tests.models.against import CPU, ask

# A root and branches of one token and of two, fewer than a convolution reads; one of more than a chunk.
SIZES, PARENTS = [5, 3, 1, 70, 2, 1, 2], np.array([-1, 0, 1, 0, 2, -1, 5])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(family, our model, transformers' own)"""
    family, stock = build("qwen3_5_text", tmp_path_factory.mktemp("linear"))
    return family, load_model(family, dtype=torch.float32, device=CPU), stock


def test_branches_begin_where_their_parents_end(made):
    family, model, stock = made
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    ids = torch.from_numpy(np.random.default_rng(0).choice(np.flatnonzero(~family.banned), starts[-1]))
    rows = [np.concatenate([np.arange(*starts[node : node + 2]) for node in path]) for path in paths(PARENTS)]
    positions = torch.zeros(len(ids), dtype=torch.int64)
    for row in rows:
        positions[row] = torch.arange(len(row))
    plan = forest_plan(starts, PARENTS, CPU, torch.float32)
    with torch.no_grad():
        found = model.lm_head(hidden_states(model, family, ids, positions[None], (), plan))
        for row in rows:
            wanted = stock(input_ids=ids[row][None], use_cache=False).logits[0]
            assert (found[row] - wanted).abs().max() < 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("forgets", [0.0, 0.2, 30.0])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 1, 200, 64, 63, 65]])
def test_the_rule_in_chunks_is_that_of_transformers(lengths, forgets):
    """Forward and every gradient, from states, for keys that are much alike."""
    draw = torch.Generator().manual_seed(0)
    sizes, tokens, heads, wide, high = np.array(lengths), sum(lengths), 3, 16, 24
    q, k = (torch.randn((tokens, heads, wide), generator=draw) + shift for shift in (0, 1))
    v, states = (
        torch.randn((n, heads, *more, high), generator=draw) for n, more in ((tokens, ()), (len(sizes), (wide,)))
    )
    decay, share = (torch.rand((tokens, heads), generator=draw) * scale for scale in (-forgets, 1))
    ends = torch.tensor([0, *sizes.cumsum()])
    found = []
    for ours in (True, False):
        every = [x.clone().requires_grad_() for x in (q, k, v, decay, share, states)]
        if ours:
            out, after = delta_rule(every[:5], sizes, ends, every[5])
        else:
            rows = []
            for n, (a, b) in enumerate(pairwise(ends)):
                *three, gone, part = (x[None, a:b] for x in every[:5])
                options = {"g": gone, "beta": part, "initial_state": every[5][n : n + 1], **OPTIONS}
                rows.append(inspect.unwrap(own)(*three, **options))
            out, after = torch.cat([o[0] for o, _ in rows]), torch.cat([s for _, s in rows])
        (out.square().sum() + after.square().sum()).backward()
        found.append([out, after, *(x.grad for x in every)])
    for n, (mine, theirs) in enumerate(zip(*found, strict=True)):
        assert (mine - theirs).norm() <= (1e-6 if n < 2 else 1e-5) * theirs.norm(), n


@pytest.mark.parametrize("forgets", [0.2, 60.0])
def test_a_step_of_the_fast_backward_is_what_it_stands_for(forgets, monkeypatch):
    """Against autograd through each chunk: segments that end inside one, more chunks than are taken at once."""
    monkeypatch.setattr("saccade.plugins.linear.torch_step.AT_ONCE", 2)
    draw, lengths, size, heads, wide, high = torch.Generator().manual_seed(1), [3, 20, 8, 1], 8, 2, 6, 10
    indices = torch.tensor([(n, c) for n, length in enumerate(lengths) for c in range(-(-length // size))])
    ends, chunks = torch.tensor([0, *np.cumsum(lengths)]), len(indices)
    shapes = {"q": wide, "k": wide, "w": wide, "v": high, "do": high, "dv": high, "u": high}
    given = {n: torch.randn((1, sum(lengths), heads, d), generator=draw) for n, d in shapes.items()}
    given |= {n: torch.randn((1, chunks, heads, wide, high), generator=draw) for n in ("h", "dh")}
    gone = [-forgets * torch.rand((length, heads), generator=draw) for length in lengths]
    pieces = [piece.cumsum(0) for row in gone for piece in row.split(size)]
    given["g"] = torch.cat(pieces)[None]
    learned = {name: given[name].requires_grad_() for name in ("q", "k", "w", "g")}
    total = torch.zeros(())
    for number, (segment, place) in enumerate(indices.tolist()):
        start = int(ends[segment]) + place * size
        at = slice(start, min(start + size, int(ends[segment + 1])))
        q, k, w, v, u, do, dv = (given[n][0, at].transpose(0, 1) for n in ("q", "k", "w", "v", "u", "do", "dv"))
        g, state = given["g"][0, at].T, given["h"][0, number]
        apart = (g[:, :, None] - g[:, None]).masked_fill(torch.ones(g.shape[1], g.shape[1]).triu(1).bool(), -torch.inf)
        out = 0.5 * (g.exp2()[..., None] * q @ state + (q @ k.mT * apart.exp2()) @ v)
        after = g[:, -1].exp2()[:, None, None] * state + ((g[:, -1:] - g).exp2()[..., None] * k).mT @ v
        total = total + (do * out).sum() + (given["dh"][0, number] * after).sum() + (dv * (u - w @ state)).sum()
    total.backward()
    with torch.no_grad():
        found = chunk_gradients(**given, scale=0.5, cu_seqlens=ends, chunk_indices=indices, chunk_size=size)
    wanted = [learned[name].grad for name in ("q", "k", "w")] + [learned["g"].grad / np.log(2)]
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).norm() < 1e-6 * theirs.norm()


def test_few_slots_and_turns_that_wait_draw_the_same(made):
    """Two at a time: prompts are computed again, states lie in pages that others had, turns are kept meanwhile."""
    family, model, _ = made
    crowded, roomy = (EmbeddedEngine(model, family, max_sequences=n) for n in (2, 64))
    questions = asked(family, lengths=(5, 21, 40), repeats=3)
    rng = np.random.default_rng(1)
    for _ in range(3):
        first, second = generate(crowded, questions), generate(roomy, questions)
        for one, other in zip(first, second, strict=True):
            same(one, other)
        added = rng.choice(np.flatnonzero(~family.banned), 3)
        questions = [
            replace(q, ids=np.concatenate([q.ids, a.ids, added]), first_index=q.first_index + len(a.ids))
            for q, a in zip(questions, first, strict=True)
        ]
        questions.append(replace(questions[0], key=f"new {len(questions)}", episode=None))
    shape = roomy.cache.shape
    assert shape.state_bytes == 2 * 4 * (4 * 16 * 32 + 3 * (2 * 2 * 16 + 4 * 32))
    assert roomy.cache.states.bytes == roomy.cache.state_rows * shape.state_bytes
    assert [layer.key_heads for layer in shape.layers] == [0, 1]


def test_a_state_at_another_token_is_no_beginning(made):
    family, model, _ = made
    engine = EmbeddedEngine(model, family)
    generate(engine, asked(family, repeats=1))
    engine.cache.states.lengths += 1
    with pytest.raises(AssertionError, match="a state stands at another token"):
        request = asked(family, repeats=1)[0]
        turn = engine.scheduler.prefix_cache.turns[request.episode]
        generate(engine, [replace(request, ids=np.append(turn.ids, turn.ids[:3]))])


def test_adapters_and_recomputation(made, tmp_path):
    """On every projection; a step moves them, gradients are the same when layers run twice, transformers loads it."""
    pytest.importorskip("peft")
    family, _, stock = made
    model = load_model(family, dtype=torch.float32, device=CPU)
    requests = asked(family)
    answers = generate(EmbeddedEngine(model, family), requests)
    (batch,) = pack([trajectories(requests, answers)], micro_tokens=1 << 20)
    lora.add(model, family, LoraConfig(rank=4), seed=0)
    named = {name.split(".")[-3] for name in lora.adapters(model)}
    assert named >= {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"}
    for parameter in lora.adapters(model).values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    found = []
    for checkpointing in (False, True):
        backend = LocalTrainer(model, family, TrainConfig(), checkpointing=checkpointing)
        assert [len(kind.layers) for kind in backend.recompute.kinds] == [2, 1]  # each keeps as much as it keeps
        model.train().zero_grad()
        scores, _ = backend.score(batch, Scoring())
        scores.sum().backward()
        found.append({name: p.grad.clone() for name, p in lora.adapters(model).items()})
    assert all(torch.equal(found[0][name], found[1][name]) and found[0][name].any() for name in found[0])
    write_files(tmp_path / "saved", lora.files(model))
    again = type(stock).from_pretrained(tmp_path / "saved", dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.from_numpy(requests[0].ids)
    plan = forest_plan(np.array([0, len(ids)]), np.array([-1]), CPU, torch.float32)
    with torch.no_grad():
        mine = model.lm_head(hidden_states(model, family, ids, torch.arange(len(ids))[None], (), plan))
        theirs, before = (each(input_ids=ids[None]).logits[0] for each in (again, stock))
    assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max() < (mine - before).abs().max()


def test_the_work_and_memory_of_recurrent_layers(made, family_of):
    family, model, _ = made
    found = shapes.shape_of(model, family.tower_of)
    assert found.pair_flops == {None: 4 * 64} and found.state_bytes == 2 * 4 * 4 * 16 * 32
    assert found.kv_bytes(4) == pytest.approx(cache_shape(model, family).bytes_per_token)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert found.text.weights + found.head_weights == pytest.approx(linear)
    assert "heads" not in why_no_kernels(replace(cache_shape(model, family), dtype=torch.bfloat16))


def test_short_convolutions_keep_their_last_tokens(tmp_path):
    """In a cache that is too small for all of them, as in one with room; turns go on from them."""
    family, _ = build("lfm2", tmp_path)
    model = load_model(family, dtype=torch.float32, device=CPU)
    shape, questions = cache_shape(model, family), asked(family, lengths=(1, 21), repeats=3)
    assert shape.state_bytes == 3 * 4 * 2 * 64 and shapes.shape_of(model, family.tower_of).pair_flops == {None: 4 * 64}
    crowded, roomy = (EmbeddedEngine(model, family, max_sequences=n) for n in (2, 64))
    for _ in range(2):
        first, second = generate(crowded, questions), generate(roomy, questions)
        for one, other in zip(first, second, strict=True):
            same(one, other)
        questions = [
            replace(q, ids=np.concatenate([q.ids, a.ids, a.ids[:2]]), first_index=q.first_index + len(a.ids))
            for q, a in zip(questions, first, strict=True)
        ]
    config = load_config({"train.sequence_parallel": 2, "run.gpus": 2, "model.path": family.path})
    with pytest.raises(ConfigError, match=r"a lfm2 has recurrent layers.*use train.sequence_parallel=1"):
        require_heads(config, family)


def test_what_is_not_served_is_refused(made):
    family, model, _ = made
    config = load_config({"train.sequence_parallel": 2, "run.gpus": 2, "model.path": family.path})
    with pytest.raises(ConfigError, match=r"a qwen3_5_text has recurrent layers.*use train.sequence_parallel=1"):
        require_heads(config, family)
    layer = model.model.layers[0].linear_attn
    own, layer.activation = layer.activation, "gelu"
    with pytest.raises(EnvironmentProblem, match=r"layers.0.linear_attn .*is not computed as in Qwen3.5"):
        patch_layers(model)
    layer.activation = own


def test_a_decoder_without_any_attention_generates(tmp_path):
    folder = tiny_kinds.build("qwen3_5_text", tmp_path, layer_types=["linear_attention"] * 3)
    family = load_family(folder)
    model, stock = load_model(family, dtype=torch.float32, device=CPU), AutoModelForCausalLM.from_pretrained(folder)
    prompt = family.render(ask("another one"))
    (drawn,) = against.ours(model, family, [prompt])
    ids = torch.tensor([*prompt.ids, *drawn])[None]
    logits = stock(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # its `generate` fails
    assert logits.masked_fill(torch.from_numpy(family.banned), -torch.inf).argmax(-1).tolist() == drawn
