"""The local backend: ratio, memory, non-finite steps, towers, state, balance of experts, cached features."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, TrainConfig
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.models.load import freeze
from saccade.system.contents import write_files
from saccade.trainer import Scoring, local
from saccade.trainer.forward_inputs import FeatureCache
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Media, MediaSpan

ON_POLICY = resolve(AlgorithmConfig(preset="grpo", kl={"coef": 0}), max_tokens=64)
SCORING = Scoring()
POLICY = PolicyLoss(ON_POLICY, SCORING)
NAME = "qwen2_5_vl"


@pytest.fixture(scope="module")
def batches(family_of, grow) -> list[Batch]:
    """Two forests of one step."""
    family = family_of(NAME)
    rng = np.random.default_rng(0)
    groups = [grow(rng, family, uid=f"g{i}", images=i) for i in range(2)]
    packed = [b for g in groups for b in pack([g], micro_tokens=9999)]
    tokens = sum(batch.target_count for batch in packed)
    return [replace(b, scales=np.full(b.target_count, 1 / tokens, np.float32)) for b in packed]


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(wanted)
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= 1e-6 * whole, name


def snapshot(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].nan_to_num(7.0), b[n].nan_to_num(7.0)) for n in a)


def test_scoring_agrees_with_training_and_knows_the_ban(family_of, load, batches):
    backend = LocalTrainer(load(NAME), family_of(NAME))
    ((new, entropy), _) = backend.logprobs(batches, SCORING)
    assert new.dtype == np.float32 and (new < 0).all() and (entropy > 0).all()
    ((free, _), _) = backend.logprobs(batches, Scoring(ban=False))
    assert (free < new).all()  # the banned ids take some of the mass
    assert not any(p.requires_grad for p in backend.model.parameters())
    with pytest.raises(AssertionError, match="only scores"):
        backend.train_step(batches, POLICY, lr=0.0)


def out_of_memory_once(*_args):
    raise torch.OutOfMemoryError("simulated")


@pytest.mark.parametrize("large", [1, 10**9])  # gradients that are added at once
def test_out_of_memory_in_the_middle_of_backward_leaves_nothing_behind(
    family_of, load, batches, monkeypatch, measured, large
):
    monkeypatch.setattr("saccade.trainer.optimizer.LARGE", large)
    model = load(NAME)
    backend = LocalTrainer(model, family_of(NAME), TrainConfig())
    _, wanted = measured(backend, batches, POLICY)
    fired = []

    def in_backward(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if len(fired) < 2:  # the first forest, and then its first half
            hidden.register_hook(lambda gradient: fired.append(1) or out_of_memory_once())
        return output

    handle = model.model.language_model.layers[0].register_forward_hook(in_backward)
    means, got = measured(backend, batches, POLICY)
    handle.remove()
    assert fired == [1, 1] and means["mem/oom_splits"] == 2 and means["policy/ratio_mean"] == 1.0
    assert_equal(got, wanted)


def test_a_backend_that_nobody_needs_gives_its_memory_back(family_of, load, batches, monkeypatch):
    monkeypatch.setattr("saccade.trainer.optimizer.LARGE", 1)  # every gradient is added by a hook
    backend = LocalTrainer(load(NAME), family_of(NAME), TrainConfig())
    backend.train_step(batches, POLICY, lr=1e-4)
    left = [weakref.ref(backend.model), weakref.ref(backend.optimizer)]
    del backend
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_one_sequence_that_does_not_fit_is_an_error(family_of, load, batches):
    model = load(NAME)
    backend = LocalTrainer(model, family_of(NAME), TrainConfig())
    model.model.language_model.layers[0].register_forward_pre_hook(out_of_memory_once)
    with pytest.raises(torch.OutOfMemoryError):
        backend.train_step(batches, POLICY, lr=0.0)


def test_rows_without_media_teach_a_tower_that_trains_alone_nothing(family_of, load, batches, measured):
    family, model = family_of(NAME), load(NAME)
    freeze(model, family, "freeze:llm")
    backend = LocalTrainer(model, family, TrainConfig())
    text, shown = batches
    assert not text.media and shown.media
    both, alone = (measured(backend, some, POLICY) for some in (batches, [shown]))
    assert both[0]["policy/grad_norm"] == alone[0]["policy/grad_norm"] > 0
    assert_equal(both[1], alone[1])
    before = snapshot(model)
    update = backend.train_step([text], POLICY, lr=1e-3)
    assert update.metrics.means()["policy/grad_norm"] == 0 and not update.skipped
    assert same(before, snapshot(model))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "adamw_bf16")])
def test_a_restored_backend_continues_bit_for_bit(family_of, load, batches, tmp_path, dtype, kind):
    family, config = family_of(NAME), TrainConfig(optimizer=kind)
    few = batches if dtype == "float32" else batches[:1]  # a CPU may be slow in bf16

    def step(backend: LocalTrainer) -> None:
        assert not backend.train_step(few, POLICY, lr=1e-3).skipped

    first = LocalTrainer(load(NAME, dtype), family, config)
    step(first)
    step(first)
    write_files(tmp_path, first.state_files())
    weights = snapshot(first.model)
    step(first)
    second = LocalTrainer(load(NAME, dtype), family, config)
    second.model.load_state_dict(weights, strict=False)
    second.load_state(tmp_path)
    step(second)
    assert same(snapshot(first.model), snapshot(second.model))
    assert same(first.optimizer.state(), second.optimizer.state())
    assert dict(second.weights()).keys() == weights.keys()


ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture
def step(family_of, load, grow, measured):
    """(metrics, gradients) of an update whose policy loss is 0: what is left is the balance."""

    def taken(name="mixtral", *, coef, budget=9999, checkpointing=False, scale=0.0):
        family = family_of(name)
        rng = np.random.default_rng(0)
        groups = [grow(rng, family, uid=f"g{i}", images=0) for i in range(2)]
        batches = [
            replace(b, scales=np.full(b.target_count, scale, np.float32)) for b in pack(groups, micro_tokens=budget)
        ]
        train = TrainConfig(aux_coef=coef)
        backend = LocalTrainer(load(name), family, train, checkpointing=checkpointing)
        return *measured(backend, batches, POLICY), batches

    return taken


def test_it_is_the_loss_of_transformers_weighed_by_tokens(step, stock):
    metrics, gradients, packed = step(coef=0.5)
    assert len(packed) == 1
    assert 2.0 < metrics["moe/aux_loss"] < 4.0
    # A forest of one sequence can be run as a row by others.
    single, found, batches = step(coef=0.5, budget=1)
    assert len(batches) > 1
    total, share = 0.0, sum(b.tokens for b in batches)
    model = stock("mixtral")
    model.zero_grad()
    for b in batches:
        aux = model(torch.from_numpy(b.ids)[None], output_router_logits=True).aux_loss
        (0.5 * aux * b.tokens / share).backward()
        total += aux.item() * b.tokens / share
    assert single["moe/aux_loss"] == pytest.approx(total, rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "lm_head" not in name:
            assert torch.allclose(found[name], parameter.grad, atol=1e-6), name
    model.zero_grad()
    assert gradients[ROUTER].norm() > 1e-3
    assert not torch.allclose(gradients[ROUTER], found[ROUTER], atol=1e-6)  # packed otherwise


def test_recomputed_layers_have_the_same_gradient(step):
    _, wanted, _ = step(coef=0.1, scale=0.01)
    metrics, found, _ = step(coef=0.1, scale=0.01, checkpointing=True)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    told, plain, _ = step(coef=0.0, scale=0.01)
    assert not torch.allclose(plain[ROUTER], wanted[ROUTER], atol=1e-5)
    assert metrics["moe/aux_loss"] > 2.0 and "moe/aux_loss" not in told


def test_a_forest_that_did_not_fit_counts_once(step, monkeypatch):
    plain, calls = local.with_balance, []

    def failing(*arguments):
        found = plain(*arguments)
        if calls.append(1) or len(calls) == 1:
            raise torch.OutOfMemoryError
        return found

    monkeypatch.setattr(local, "with_balance", failing)
    metrics, _, _ = step(coef=0.1)
    # Halves repeat a trunk that they share, so that they weigh a little more.
    assert 2.0 < metrics["moe/aux_loss"] < 4.0 and metrics["mem/oom_splits"] == 1


def span(name: str, length: int = 2) -> MediaSpan:
    media = Media(hash=name, width=1, height=1, min_pixels=1, max_pixels=1, data=b"")
    return MediaSpan(media=media, start=0, length=length, grid=(1, 1, 1))


def test_only_what_is_missing_is_computed():
    asked = []

    def compute(spans):
        asked.append([s.media.hash for s in spans])
        rows = [[ord(s.media.hash)] * 3 for s in spans for _ in range(s.length)]
        return torch.tensor(rows, dtype=torch.float32)

    cache = FeatureCache(max_bytes=4 * 2 * 3 * 4)  # four images
    first = cache.read([span("a"), span("b"), span("a")], compute)
    assert first[:, 0].tolist() == [97, 97, 98, 98, 97, 97]
    assert cache.read([span("b"), span("c")], compute)[:, 0].tolist() == [98, 98, 99, 99]
    assert asked == [["a", "b"], ["c"]]
    cache.read([span("d"), span("e")], compute)  # a was not used for longest
    cache.read([span("b")], compute)
    cache.read([span("a")], compute)
    assert asked[2:] == [["d", "e"], ["a"]]
    cache.clear()
    cache.read([span("b")], compute)
    assert asked[-1] == ["b"]


def test_frozen_towers_look_once_at_an_image(family_of, load, batches):
    family, algorithm = family_of(NAME), resolve(AlgorithmConfig(preset="grpo"), max_tokens=64)
    looks = {}
    for train in ("freeze:vision,projector", "freeze:vision"):  # a projector that trains looks on
        model, calls = load(NAME), []
        freeze(model, family, train)
        backend = LocalTrainer(model, family, TrainConfig())
        model.model.visual.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        scored = backend.logprobs(batches, SCORING)
        ref = [replace(b, ref_logprobs=new) for b, (new, _) in zip(batches, scored, strict=True)]
        backend.train_step(ref, PolicyLoss(algorithm, SCORING), lr=0.0)
        backend.logprobs(batches, SCORING)
        looks[train] = len(calls)
    assert looks == {"freeze:vision,projector": 1, "freeze:vision": 3}


def test_a_reference_that_moves_looks_again(family_of, load, batches):
    family, policy, shown = family_of(NAME), load(NAME), batches[1:]
    with torch.no_grad():
        policy.model.visual.merger.mlp[2].weight.mul_(3)
    reference, wanted = LocalTrainer(load(NAME), family), LocalTrainer(policy, family)
    before = reference.logprobs(shown, SCORING)[0][0]
    reference.blend(policy.named_parameters(), 1.0)
    after = reference.logprobs(shown, SCORING)[0][0]
    assert not np.array_equal(before, after)
    assert np.array_equal(after, wanted.logprobs(shown, SCORING)[0][0])
