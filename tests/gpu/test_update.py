"""The update on a GPU: it does not wait, it plans its memory, and its gradients stay."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda")
NAME = "qwen2_5_vl"


def algorithm():
    from saccade.algorithms.build import resolve
    from saccade.config import AlgorithmConfig

    return resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0}), max_tokens=64)


@pytest.fixture
def batches(family_of, grow):
    from saccade.forest.packing import pack

    family = family_of(NAME)
    rng = np.random.default_rng(0)
    groups = [grow(rng, family, uid=f"g{i}", images=i) for i in range(3)]
    packed = pack(groups, micro_tokens=100)
    tokens = sum(batch.target_count for batch in packed)
    assert len(packed) > 2
    return [replace(b, scales=np.full(b.target_count, 1 / tokens, np.float32)) for b in packed]


def backend_of(family, dtype=torch.bfloat16, **options):
    from saccade.config import TrainConfig
    from saccade.models.load import load_model
    from saccade.trainer.local import LocalTrainer

    model = load_model(family, dtype=dtype, device=DEVICE)
    return LocalTrainer(model, family, TrainConfig(), **options)


def gradients(backend, batches, monkeypatch):
    from saccade.trainer import Scoring
    from saccade.trainer.losses import PolicyLoss

    seen = {}
    monkeypatch.setattr(backend.optimizer, "step", lambda lr, norm: seen.update(backend.optimizer.gradients))
    means = backend.train_step(batches, PolicyLoss(algorithm(), Scoring()), lr=0.0).metrics.means()
    return means, {name: gradient.clone() for name, gradient in seen.items()}


def distance(got, wanted):
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    return torch.stack([(got[n] - g).norm() for n, g in wanted.items()]).norm() / whole


def test_half_precision_follows_single_precision(family_of, batches, monkeypatch):
    family = family_of(NAME)
    _, exact = gradients(backend_of(family, torch.float32), batches, monkeypatch)
    for wanted in (False, True, "auto"):
        backend = backend_of(family, checkpointing=wanted)
        for _ in range(2):  # the plan has learned something before the second
            means, got = gradients(backend, batches, monkeypatch)
            assert distance(got, exact) < 0.05 and means["mem/oom_splits"] == 0
            assert {g.dtype for g in got.values()} == {torch.float32}


def test_the_micro_batches_never_wait_for_the_gpu(family_of, batches):
    from saccade.trainer import Scoring
    from saccade.trainer.losses import PolicyLoss

    backend = backend_of(family_of(NAME), checkpointing="auto")
    backend.train_step(batches, PolicyLoss(algorithm(), Scoring()), lr=1e-6)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = backend.sum_gradients(batches, PolicyLoss(algorithm(), Scoring()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == len(batches) > 1


def test_layers_recompute_only_when_memory_is_short(family_of, batches, monkeypatch):
    from saccade.trainer import checkpointing

    backend = backend_of(family_of(NAME), checkpointing="auto")
    layers = sum(len(kind.layers) for kind in backend.recompute.kinds)
    _, kept = gradients(backend, batches, monkeypatch)
    _, kept = gradients(backend, batches, monkeypatch)
    assert backend.recompute.keeping == layers == 4
    costs = {k.of_media: k.cost(1000, 1000) for k in backend.recompute.kinds}
    assert costs.keys() == {False, True} and min(costs.values()) > 1000 * 64 * 2
    unplanned = backend.recompute.margin * checkpointing.total_bytes(backend.recompute.device)
    monkeypatch.setattr(checkpointing, "free_gpu_bytes", lambda *_: unplanned + backend.recompute.overhead[0] * 1.0)
    _, again = gradients(backend, batches, monkeypatch)
    assert backend.recompute.keeping == 0
    assert distance(again, kept) < 0.01
    text = backend.recompute.kinds[-1]
    last = batches[-1]
    spent, tokens, media_tokens = backend.recompute.overhead
    here = sum(span.length for span in last.media)
    room = spent * max(1.0, last.tokens / tokens, here / media_tokens)
    room += 1.5 * text.cost(last.tokens, here)
    monkeypatch.setattr(checkpointing, "free_gpu_bytes", lambda *_: unplanned + room)
    gradients(backend, [last], monkeypatch)
    assert [layer.gradient_checkpointing for layer in text.layers] == [True, False]


def test_memory_that_runs_out_costs_time_and_changes_nothing(family_of, batches, monkeypatch):
    """In the middle of backward: again with every layer recomputed, then in halves."""
    backend = backend_of(family_of(NAME), checkpointing="auto")
    for _ in range(2):
        _, wanted = gradients(backend, batches, monkeypatch)
    fired = []

    def in_backward(module, args, output):
        if len(fired) < 2:
            output.register_hook(lambda g: fired.append(1) or out_of_memory())
        return output

    def out_of_memory():
        raise torch.OutOfMemoryError("simulated")

    layer = backend.model.model.language_model.layers[0]
    handle = layer.register_forward_hook(in_backward)
    means, got = gradients(backend, batches, monkeypatch)
    handle.remove()
    assert fired == [1, 1] and means["mem/oom_splits"] == 1
    assert distance(got, wanted) < 0.01


def test_frozen_towers_look_once_at_an_image(family_of, batches):
    from saccade.config import TrainConfig
    from saccade.models.load import freeze, load_model
    from saccade.trainer import Scoring
    from saccade.trainer.local import LocalTrainer
    from saccade.trainer.losses import PolicyLoss

    family = family_of(NAME)
    model = load_model(family, dtype=torch.bfloat16, device=DEVICE)
    freeze(model, family, "freeze:vision,projector")
    backend = LocalTrainer(model, family, TrainConfig())
    calls = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    first = backend.logprobs(batches, Scoring())
    seen = len(calls)
    backend.train_step(batches, PolicyLoss(algorithm(), Scoring()), lr=0.0)
    second = backend.logprobs(batches, Scoring())
    assert 0 < seen == len(calls)
    for (a, _), (b, _) in zip(first, second, strict=True):
        assert np.array_equal(a, b)


def test_the_clock_of_an_update_waits_for_the_optimizer(rl_config, tmp_path):
    """Else its kernels would count as a part of the next phase."""
    from saccade.config import load
    from saccade.run.training_run import Run

    with Run(load(rl_config(tmp_path)), "rl", {}) as run, run.phase("update"):
        torch.cuda._sleep(100_000_000)
        assert not torch.cuda.current_stream().query()
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16"])
def test_state_in_main_memory_changes_no_bit_and_takes_little_of_the_gpu(kind, monkeypatch):
    from saccade.config import TrainConfig
    from saccade.plugins.offload import host_state
    from saccade.trainer.optimizer import Optimizer

    monkeypatch.setattr(host_state, "CHUNK", 1 << 20)
    found, each = [], 12 if kind == "adamw" else 6
    for offload in (False, True):
        torch.manual_seed(0)
        shapes = {"matrix": (4096, 8191), "bias": (4097,), "unused": (4096, 64)}  # 35 chunks
        named = {n: torch.nn.Parameter(torch.randn(s, device=DEVICE, dtype=torch.bfloat16)) for n, s in shapes.items()}
        before = torch.cuda.memory_allocated()
        optimizer = Optimizer(named.items(), TrainConfig(optimizer=kind, offload=offload), lr_scale=lambda name: 1.0)
        held, peaks = torch.cuda.memory_allocated() - before, []
        for _ in range(5):
            optimizer.begin()
            optimizer.start_micro_batch()
            sum((named[n] * torch.randn(shapes[n], device=DEVICE)).sum() for n in ("matrix", "bias")).backward()
            optimizer.end_micro_batch()
            norm = optimizer.norm()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            optimizer.step(1e-2, norm=norm)
            peaks.append(torch.cuda.max_memory_allocated() - start)
        state = {name: tensor.cpu() for name, tensor in optimizer.state().items()}
        found.append(state | {n: p.detach().cpu() for n, p in named.items()})
        if not offload:
            assert held > each * 4096 * 8191
            continue
        pinned = [tensor for tensor in optimizer.state().values() if tensor.ndim]
        assert held < 1e5 and len(pinned) == 9 and all(tensor.is_pinned() for tensor in pinned)
        working = 0 if kind == "adamw" else 12 * 4  # numbers in fp32, of one chunk
        assert max(peaks) < (host_state.SLOTS * each + working) * host_state.CHUNK + 1e6
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
