"""The embedded engine on a GPU: kernels against float64, tokens against those without kernels."""

import gc
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from saccade.config import LoraConfig  # noqa: E402
from saccade.engines import generate  # noqa: E402
from saccade.engines.embedded import EmbeddedEngine, kv_cache  # noqa: E402
from saccade.engines.embedded.sampling import sample  # noqa: E402
from saccade.forest.attention import first_seen  # noqa: E402
from saccade.forest.packing import pack  # noqa: E402
from saccade.models import lora  # noqa: E402
from saccade.models.load import load_model  # noqa: E402
from saccade.plugins.gpu import decode_state as fields  # noqa: E402
from saccade.trainer import Scoring  # noqa: E402
from saccade.trainer.local import LocalTrainer  # noqa: E402
from saccade.types import Message, Request, Sampling  # noqa: E402
from tests.engines.asked import count_evictions, trajectories  # noqa: E402
from tests.engines.asked import requests as requests_for  # noqa: E402
from tests.engines.reference import attention, places_of  # noqa: E402

DEVICE = torch.device("cuda")
FREE = Sampling(temperature=1.0, max_tokens=24, ignore_eos=True)


# -- kernels -----------------------------------------------------------------------------------


def pools(layers, pages, page, heads, sizes, dtype):
    made = [
        tuple(torch.randn(pages, page, heads, size, device=DEVICE, dtype=dtype) for size in sizes)
        for _ in range(layers)
    ]
    addresses = [[k.data_ptr(), v.data_ptr()] for k, v in made]
    return made, torch.tensor(addresses, device=DEVICE)


# Of keys and of values, those of latent attention first; in full precision only small ones fit.
SIZES = [(192, 128), (24, 16), (96, 96), (64, 64), (256, 256), (512, 512), (8, 40)]
TOLERANCE = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


@pytest.mark.parametrize("seed", range(36))
def test_decode_attention_of_any_shape_is_that_of_float64(seed, monkeypatch):
    """Also with rows behind their prefix groups, and with long rows alone divided, as for many rows."""
    from saccade.plugins.gpu import kernels

    rng = np.random.default_rng(seed)
    dtype = [torch.bfloat16, torch.float16, torch.float32][seed % 3]
    sizes = SIZES[1:4] if dtype == torch.float32 else SIZES
    size, value_size = sizes[seed // 3 % len(sizes)]
    key_heads, group = int(rng.integers(1, 9)), int(rng.integers(1, 21))
    page = int(rng.choice([8, 16, 32, 64]))
    front, back = (int(2 ** rng.integers(0, 6)) for _ in range(2))
    if seed % 2:  # rows are many
        back = 1 if seed % 16 < 8 else max(2, back)
        monkeypatch.setattr(kernels, "TOGETHER", 0)
    heads, splits = key_heads * group, (front, back)
    window = [None, 40, 900, -256][seed // 2 % 4]
    lengths = np.array([0, 1, page - 1, page, -1, 700, *rng.integers(0, 1500, 14)])
    columns = 1500 // page + 2
    table = rng.permutation(len(lengths) * columns).reshape(-1, columns)
    for first, rows, tokens in ((6, 7, 640), (13, 2, 64)):  # one is too large for some tiles
        table[first : first + rows, : tokens // page] = table[first, : tokens // page]
        lengths[first : first + rows] += tokens
        lengths = np.minimum(lengths, 1500)
    lengths[8] = -1  # it ended while its family went on
    members = fields.members_of(group, size)
    prefix_groups, shared = fields.find_prefix_groups(
        table, np.where(lengths < 0, 640, lengths), page=page, most=members
    )
    if members > 1:
        assert prefix_groups.shape[1] >= 2 and shared[6] == shared[7] == 640 and shared[13] == 64
    table = torch.from_numpy(table).to(DEVICE, torch.int32)
    made, bases = pools(2, table.numel(), page, key_heads, (size, value_size), dtype)
    shapes = (heads, size), (key_heads, size), (key_heads, value_size)
    q, k, v = (torch.randn(len(lengths), *shape, device=DEVICE, dtype=dtype) for shape in shapes)
    keys, values = (x.flatten(0, 1).clone() for x in made[1])
    model_json = np.zeros((3, len(lengths) // 2), dtype=np.int64)
    model_json[:, : prefix_groups.shape[1]] = prefix_groups
    got = kernels.decode_attention(
        q, k, v, bases=bases, layer=1, table=table, lengths=torch.from_numpy(lengths).to(DEVICE),
        shared=torch.from_numpy(shared).to(DEVICE), prefix_groups=torch.from_numpy(model_json).to(DEVICE), page=page,
        scale=size**-0.5, splits=splits, window=window,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        if length < 0:
            assert not got[row].any()
            continue
        places = places_of(table[row].cpu(), page, length + 1).to(DEVICE)
        keys[places[-1]], values[places[-1]] = k[row], v[row]
        seen = places[max(0, first_seen(length, window)) :] if window else places
        wanted = attention(q[row], keys[seen], values[seen], size**-0.5)
        error = (got[row].double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype], (row, length)
    for pool, expected in zip(made[1], (keys, values), strict=True):
        assert torch.equal(pool.flatten(0, 1), expected)  # nothing else was written


def test_pages_are_written_and_copied():
    from saccade.plugins.gpu import kernels

    made, bases = pools(3, 50, 16, 3, (96, 64), torch.bfloat16)
    before = [(k.clone(), v.clone()) for k, v in made]
    places = torch.randperm(50 * 16, device=DEVICE)[:70]
    k, v = (torch.randn(70, 3, size, device=DEVICE, dtype=torch.bfloat16) for size in (96, 64))
    kernels.write_pages(k, v, bases=bases, layer=2, places=places)
    for old, new in zip(before[2], (k, v), strict=True):
        old.flatten(0, 1)[places] = new
    here, there = torch.randperm(50, device=DEVICE)[:20].view(2, 10)
    words = torch.tensor([[16 * 3 * size // 2 for size in (96, 64)]] * 3, device=DEVICE)
    kernels.copy_pages(here, there, bases=bases, words=words)
    for (old_k, old_v), (new_k, new_v) in zip(before, made, strict=True):
        old_k[there], old_v[there] = old_k[here], old_v[here]
        assert torch.equal(old_k, new_k) and torch.equal(old_v, new_v)


@pytest.mark.parametrize("vocabulary", [300, 4096, 151_936])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_fused_draws_are_those_of_the_sampler(vocabulary, temperature):
    from saccade.plugins.gpu import sampling_kernels

    torch.manual_seed(vocabulary)
    logits = (torch.randn(64, vocabulary, device=DEVICE) * 3).bfloat16()
    banned = torch.rand(vocabulary, device=DEVICE) < 0.3
    keys = torch.randint(0, 1 << 62, (64,), device=DEVICE)
    index = torch.randint(0, 5000, (64,), device=DEVICE)
    rows = torch.randint(0, 64, (64,), device=DEVICE)
    sampling = Sampling(temperature=temperature)
    wanted = sample(logits[rows], sampling, banned=banned, keys=keys, index=index)
    heat = torch.full((64,), temperature, device=DEVICE)
    ids, logprobs = sampling_kernels.draw(logits, temperature=heat, keys=keys, index=index, banned=banned, rows=rows)
    same = ids == wanted.ids
    assert same.float().mean() > 0.98  # bf16 logits tie now and then when nothing shakes them
    assert (logprobs - wanted.logprobs)[same].abs().max() < 1e-4
    assert not banned[ids].any()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocabulary", [50, 4097, 151_936])
def test_logits_that_are_no_numbers_give_ids_that_exist(vocabulary, temperature):
    """A model that diverged is stopped by its log-probs, not by an id past the vocabulary."""
    from saccade.plugins.gpu import sampling_kernels

    logits = torch.randn(6, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    logits[0], logits[1], logits[2, ::3] = torch.nan, -torch.inf, torch.nan
    logits[3, -1], logits[4, :-1] = torch.nan, -torch.inf
    count = torch.arange(6, device=DEVICE)
    heat = torch.full((6,), temperature, device=DEVICE)
    state = torch.zeros(fields.FIELDS, 6, dtype=torch.int64, device=DEVICE)
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.5)):
        state[fields.TOP_K] = top_k
        share = torch.full_like(heat, top_p)
        floors = sampling_kernels.cut(logits, temperature=heat, top_p=share, state=state, banned=None)
        ids, logprobs = sampling_kernels.draw(
            logits, temperature=heat, keys=count, index=count, banned=None, floors=floors
        )
        assert ((ids >= 0) & (ids < vocabulary)).all()
        assert logprobs[:2].isnan().all() and logprobs[4:].isfinite().all()
        assert ids[4] == vocabulary - 1 and logprobs[4].abs() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [50, 300, 8192, 151_936])
def test_what_is_cut_away_is_what_sorting_cuts_away(vocabulary, dtype):
    from saccade.plugins.gpu import sampling_kernels

    torch.manual_seed(vocabulary)
    count = 48
    logits = (torch.randn(count, vocabulary, device=DEVICE) * 3).to(dtype)
    logits[7] = 1.5  # nothing but ties
    logits[8, vocabulary // 2 :] = -torch.inf
    banned = torch.rand(vocabulary, device=DEVICE) < 0.3
    heat = torch.rand(count, device=DEVICE) + 0.3
    state = torch.ones(fields.FIELDS, count, dtype=torch.int64, device=DEVICE)
    top_k = state[fields.TOP_K]
    top_k[:16], top_k[16:32] = -1, torch.arange(1, 17)
    top_k[32:] = torch.randint(1, vocabulary + 9, (count - 32,), device=DEVICE)
    top_p = torch.rand(count, device=DEVICE) * 0.98 + 0.01
    top_p[20:40] = 1.0
    heat[3], state[fields.LENGTH, 4] = 0.0, -1  # greedy, idle: nothing is cut away
    state[fields.SUPPORT, 5] = 0
    rows = {"state": state, "banned": banned}
    floors = sampling_kernels.cut(logits, temperature=heat, top_p=top_p, **rows)
    keys = torch.randint(0, 1 << 62, (count,), device=DEVICE)
    noise = {"keys": keys, "index": torch.arange(count, device=DEVICE)}
    ids, logprobs = sampling_kernels.draw(logits, temperature=heat, banned=banned, floors=floors, **noise)
    cursor = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kept = torch.full((count * vocabulary,), -1, dtype=torch.int32, device=DEVICE)
    spans = torch.zeros((3, 2, 64), dtype=torch.int64, device=DEVICE)
    rows |= {"floors": floors, "step_index": torch.ones(1, dtype=torch.int32, device=DEVICE)}
    sampling_kernels.keep(logits, ids, out=(cursor, kept, spans), **rows)
    close = 0
    for row in range(count):
        first, length = spans[1, :, row].tolist()
        if row in (4, 5):
            assert length == 0
            continue
        found = kept[first : first + length].long()
        sampling = Sampling(temperature=heat[row].item(), top_k=top_k[row].item(), top_p=top_p[row].item())
        here = slice(row, row + 1)
        drawn = sample(logits[here], sampling, banned=banned, keys=keys[here], index=noise["index"][here])
        if drawn.kept is None:
            assert length == int((~banned & (logits[row] > -torch.inf)).sum())
            continue
        other = int((drawn.kept[0] ^ torch.isin(torch.arange(vocabulary, device=DEVICE), found)).sum())
        assert (found.diff() > 0).all() and other <= (0 if top_p[row] == 1 else 2), row
        close += bool(other)  # sums of masses are rounded in another order
        if not other and ids[row] == drawn.ids[0]:
            assert abs(logprobs[row] - drawn.logprobs[0]) < 1e-4
        assert ids[row] in found
    assert close <= 6 and int(cursor) == int(spans[1, 1].sum())
    few = kept[: int(cursor) - 1]
    sampling_kernels.keep(logits, ids, out=(cursor.zero_(), few, spans), **rows)
    assert int((ids < 0).sum()) == 1  # one found no room any more


def test_rows_advance_and_end():
    from saccade.plugins.gpu import sampling_kernels

    state = torch.zeros(fields.FIELDS, 200, dtype=torch.int64, device=DEVICE)
    state[fields.LENGTH] = torch.arange(200) - 1
    state[fields.REMAINING] = torch.arange(200) % 3 + 1
    state[fields.STOPS] = torch.arange(200) % 2
    ids = torch.arange(200, device=DEVICE) % 7
    ids[50:60] = -1  # wait for the next burst
    step_index = torch.ones(1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, 256, dtype=torch.int64, device=DEVICE), torch.zeros(3, 256, device=DEVICE)
    eos = torch.tensor([3, 5], device=DEVICE)
    length = state[fields.LENGTH].clone()
    ends = (state[fields.REMAINING] == 1) | ((state[fields.STOPS] == 1) & torch.isin(ids, eos))
    sampling_kernels.advance(ids, -ids.float(), state=state, eos=eos, step_index=step_index, out=out)
    idle = (length < 0) | (ids < 0)
    assert torch.equal(out[0][1, :200], torch.where(idle, -1, ids))
    assert torch.equal(state[fields.LENGTH], torch.where(idle | ends, -1, length + 1))
    assert torch.equal(state[fields.TOKEN], ids.clamp_min(0)) and step_index.item() == 2
    assert (state[fields.POSITION] == 1).all() and (state[fields.INDEX] == 1).all()


# -- the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family(family_of):
    return family_of("qwen2_5_vl")


@pytest.fixture(scope="module")
def model(family):
    return load_model(family, dtype=torch.bfloat16, device=DEVICE)


@pytest.fixture(scope="module")
def asked(family, image):
    pictures = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    rendered = [
        family.render([Message(role="user", parts=(*pictures[: n % 4], f"What are {n}?" * n))]) for n in range(6)
    ]
    return requests_for(rendered, FREE, 4)


def plain(model, family, requests, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "use_kernels", lambda shape: False)
        return generate(EmbeddedEngine(model, family), requests)


def alike(got, wanted, limit=0.06):
    """The share of equal completions; equal tokens have close log-probs. After a tie in bf16 everything differs."""
    for a, b in zip(got, wanted, strict=True):
        n = min(len(a.ids), len(b.ids))
        differ = np.flatnonzero(a.ids[:n] != b.ids[:n])
        n = differ[0] if len(differ) else n
        assert np.abs(a.logprobs[:n] - b.logprobs[:n]).max(initial=0) < limit, a.key
    return float(np.mean([a.ids.tolist() == b.ids.tolist() for a, b in zip(got, wanted, strict=True)]))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"temperature": 0.0}, {"top_k": 5, "support": True}, {"top_p": 0.8, "support": True}, {"first": (5.0, 20)},
        {"ignore_eos": False}, {"stop": ("e", "zz")},
    ],
)  # fmt: skip
def test_tokens_are_those_without_kernels(model, family, asked, changes, monkeypatch):
    requests = [replace(r, sampling=replace(FREE, **changes)) for r in asked]
    engine = EmbeddedEngine(model, family)
    assert engine.cache.kernels
    got = generate(engine, requests)
    wanted = plain(model, family, requests, monkeypatch)
    assert alike(got, wanted) > 0.5
    assert [c.support is None for c in got] == [c.support is None for c in wanted]
    assert engine.cache.pages.free == engine.cache.pages.count


DENSE = ("qwen2", "qwen3", "llama", "qwen2_vl", "qwen3_vl", "internvl", "llava")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def with_and_without_kernels(family, dtype, monkeypatch, *, adapted=False):
    model = load_model(family, dtype=dtype, device=DEVICE)
    if adapted:
        lora.add(model, family, LoraConfig(rank=4), seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    prompts = [family.render([Message(role="user", parts=("Why? " * n,))]) for n in (1, 9)]
    requests = [
        Request(key=f"{i}/{r}", ids=p.ids, sampling=FREE, noise=10 * i + r)
        for i, p in enumerate(prompts)
        for r in range(6)
    ]
    engine = EmbeddedEngine(model, family)
    assert engine.cache.kernels and len(engine.projections.layers) == len(engine.cache.shape.layers)
    return generate(engine, requests), plain(model, family, requests, monkeypatch)


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_every_family_decodes_over_pages(name, family_of, monkeypatch):
    """In full precision with the very tokens that it draws without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "use_kernels", lambda shape: True)
        got, wanted = with_and_without_kernels(family_of(name), torch.float32, patch)
    assert alike(got, wanted, limit=1e-3) == 1


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_decode_over_pages(name, dtype, family_of, monkeypatch):
    pytest.importorskip("peft")
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "use_kernels", lambda shape: True)
        got, wanted = with_and_without_kernels(family_of(name), dtype, patch, adapted=True)
    limits = {"limit": 1e-3} if dtype == torch.float32 else {}
    assert alike(got, wanted, **limits) >= (1 if dtype == torch.float32 else 0.5)


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_in_half_precision_up_to_ties(name, family_of, monkeypatch):
    """Where two experts are nearly equal, rounding decides between them: such a log-prob is another."""
    got, wanted = with_and_without_kernels(family_of(name), torch.bfloat16, monkeypatch)
    if name in DENSE:
        assert alike(got, wanted) > 0.5
    gaps = []
    for a, b in zip(got, wanted, strict=True):
        differ = np.flatnonzero(a.ids != b.ids)
        n = differ[0] if len(differ) else len(a.ids)
        gaps += np.abs(a.logprobs[:n] - b.logprobs[:n]).tolist()
    assert len(gaps) > 100 and np.mean(np.array(gaps) < 0.06) > 0.95


def test_log_probs_are_those_of_the_trainer(model, family, asked):
    answers = generate(EmbeddedEngine(model, family), asked)
    group = trajectories(asked, answers)
    (batch,) = pack([group], micro_tokens=99_999)
    ((new, _),) = LocalTrainer(model, family).logprobs([batch], Scoring())
    gap = np.abs(new - batch.rollout_logprobs)
    assert gap.mean() < 0.01 and gap.max() < 0.1


def test_sequences_that_lose_their_pages_go_on_with_the_same_tokens(family, asked, monkeypatch):
    """In full precision exactly so: no draw of these is a tie."""
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: True)
    model = load_model(family, dtype=torch.float32, device=DEVICE)
    wanted = generate(EmbeddedEngine(model, family), asked)
    engine = EmbeddedEngine(model, family)
    lost = count_evictions(engine)
    monkeypatch.setattr(kv_cache.KVCache, "_budget", lambda self: 40 * self.bytes_per_page)
    got = generate(engine, asked)
    assert engine.cache.pages.count == 40 == engine.cache.pages.free
    assert sum(lost) and alike(got, wanted, limit=1e-3) == 1


def test_graphs_outlive_the_pool_and_follow_the_weights(family, asked):
    model = load_model(family, dtype=torch.bfloat16, device=DEVICE)
    engine = EmbeddedEngine(model, family)
    first = generate(engine, asked)
    captured = list(engine.graphs._captured.values())
    engine.sleep()
    elsewhere = torch.empty(1 << 24, device=DEVICE)  # the pool cannot come back to its address
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    engine.update_weights(None, version=1)
    again = generate(engine, asked)
    assert list(engine.graphs._captured.values()) == captured
    fresh = generate(EmbeddedEngine(model, family), asked)
    assert [a.ids.tolist() for a in again] == [a.ids.tolist() for a in fresh]
    assert [a.ids.tolist() for a in again] != [a.ids.tolist() for a in first]
    assert all((a.versions == 1).all() for a in again) and len(elsewhere)
    weight = model.lm_head.weight
    weight.data = weight.data.clone()  # one that moved
    engine.update_weights(None, version=2)
    assert not engine.graphs._captured
    assert alike(generate(engine, asked), fresh) > 0.9


def test_graphs_are_captured_again_for_longer_sequences(model, family, asked, monkeypatch):
    from saccade.plugins.gpu import graphs

    monkeypatch.setattr(graphs, "COLUMNS", 2)
    engine = EmbeddedEngine(model, family)
    lengths = (2, 8, 200, 8)
    for length in lengths:
        requests = [replace(r, sampling=replace(FREE, max_tokens=length)) for r in asked]
        got = generate(engine, requests)
        assert all(len(c.ids) == length for c in got)
    assert engine.graphs.table.shape[1] >= 200 // kv_cache.PAGE
    assert alike(got, plain(model, family, requests, monkeypatch)) > 0.5


def test_a_batch_shrinks_through_all_sizes(family, image, monkeypatch):
    """Each size is captured when it first comes up, after larger ones, and after the pool has been given back."""
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: True)
    model = load_model(family, dtype=torch.float32, device=DEVICE)
    text = "What is this? " * 20
    prompts = [family.render([Message(role="user", parts=(image(56, 56, n), f"{n} {text}"))]) for n in range(12)]
    requests = [
        Request(
            key=f"{i}/{r}", ids=p.ids, media=p.media, sampling=replace(FREE, max_tokens=4 + 20 * i), noise=100 * i + r
        )
        for i, p in enumerate(prompts)
        for r in range(16)
    ]
    engine = EmbeddedEngine(model, family)
    small = generate(engine, requests[:3])
    engine.sleep()
    elsewhere = torch.empty(1 << 24, device=DEVICE)
    got = generate(engine, requests)
    sizes = [shape.rows for shape in engine.graphs._captured]
    assert len(sizes) > 6 and sizes.index(max(sizes)) < sizes.index(32) and len(elsewhere)
    assert alike(small, got[:3]) == 1
    assert alike(got, plain(model, family, requests, monkeypatch), limit=1e-3) == 1


def test_memory_stays_constant(model, family, asked):
    gc.collect()  # engines of other tests
    engine = EmbeddedEngine(model, family)
    used = []
    for round in range(50):
        few = asked[: 4 + 4 * (round % 5)]
        generate(engine, [replace(r, sampling=replace(FREE, max_tokens=4)) for r in few])
        engine.sleep()
        used.append(torch.cuda.memory_allocated())
    assert len(set(used[10:])) == 1, used


def test_turns_continue_from_their_pages(model, family, asked, monkeypatch):
    engine = EmbeddedEngine(model, family)
    requests = [replace(r, episode=r.key) for r in asked[::4]]
    for turn in range(3):
        answers = generate(engine, requests)
        computed = [s.cached for s in engine.scheduler.prefix_cache.turns.values()]
        assert len(computed) == len(requests) and min(computed) > 20 * (turn + 1)
        fresh = plain(model, family, [replace(r, episode=None) for r in requests], monkeypatch)
        assert alike(answers, fresh) > 0.4
        requests = [
            replace(
                r, ids=np.concatenate([r.ids, a.ids, np.arange(40, 50 + turn)]), first_index=r.first_index + len(a.ids)
            )
            for r, a in zip(requests, answers, strict=True)
        ]
    for request in requests:
        engine.release(request.episode)
    assert engine.cache.pages.free == engine.cache.pages.count
