"""AdamW against torch's own, in fp32, with masters and in bf16; the learning rate; state in main memory, bit by bit."""

import math
from pathlib import Path

import pytest
import torch
from pytest import approx
from safetensors.torch import load_file
from torch import nn

from saccade.config import TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.plugins.offload import host_state
from saccade.plugins.offload.eight_bits import BLOCK, decode, encode
from saccade.system.contents import write_files
from saccade.trainer.optimizer import Optimizer, lr_factor
from saccade.trainer.optimizer_files import load_optimizer, optimizer_file

STEPS = 20


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (8, 4), "bias": (8,), "vision": (3, 3)}
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """Around a mean, so that there is somewhere to go."""
    generator = torch.Generator().manual_seed(hash((len(name), step)))
    return 0.05 + 0.1 * torch.randn(shape, generator=generator)


def run(kind: str, dtype: torch.dtype, *, lr: float = 1e-2, grad_norm: float = 1e9, steps=STEPS):
    mine = parameters(dtype)
    config = TrainConfig(optimizer=kind, weight_decay=0.1, grad_norm=grad_norm)
    scale = {"vision": 0.1}
    optimizer = Optimizer(mine.items(), config, lr_scale=lambda n: scale.get(n, 1.0))
    for step in range(steps):
        optimizer.begin()
        backward(optimizer, {n: gradient(n, p.shape, step).to(dtype) for n, p in mine.items()})
        optimizer.step(lr, norm=optimizer.norm())
    return mine, optimizer


def backward(optimizer: Optimizer, gradients: dict[str, torch.Tensor], added=frozenset()) -> None:
    """A micro-batch with these gradients."""
    optimizer.start_micro_batch(added)
    sum((optimizer.parameters[n] * g).sum() for n, g in gradients.items()).backward()
    optimizer.end_micro_batch()


def torch_adamw(lr: float = 1e-2, dtype: torch.dtype = torch.float32, rounded=torch.float32):
    theirs = parameters(rounded)
    theirs = {n: nn.Parameter(p.detach().to(dtype)) for n, p in theirs.items()}
    decay = {"matrix": 0.1, "bias": 0.0, "vision": 0.1}  # biases and norms do not decay
    groups = [
        {"params": [p], "lr": lr * (0.1 if n == "vision" else 1), "weight_decay": decay[n]} for n, p in theirs.items()
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        for name, p in theirs.items():
            p.grad = gradient(name, p.shape, step).to(rounded).to(dtype)
        adam.step()
    return theirs


def test_it_is_torch_adamw_and_bf16_weights_are_rounded_fp32_masters():
    mine, _ = run("adamw", torch.float32)
    halves, _ = run("adamw", torch.bfloat16)
    for name, wanted in torch_adamw().items():
        assert (mine[name] - wanted).abs().max() < 1e-6, name
    for name, wanted in torch_adamw(rounded=torch.bfloat16).items():
        assert torch.equal(halves[name], wanted.bfloat16()), name


def test_kahan_follows_fp32_where_plain_bf16_stands_still():
    lr = 1e-4  # far below the spacing of bf16 numbers near 1
    start = parameters(torch.bfloat16)["matrix"].float()
    exact = torch_adamw(lr, rounded=torch.bfloat16)["matrix"]
    kahan, optimizer = run("adamw_bf16", torch.bfloat16, lr=lr)
    plain = torch_adamw(lr, dtype=torch.bfloat16, rounded=torch.bfloat16)["matrix"]
    held = kahan["matrix"].float() + optimizer.state()["lost/matrix"].float()
    way = (exact - start).norm()
    assert (held - exact).norm() < 0.02 * way
    assert (plain.float() - exact).norm() > 0.5 * way
    assert (kahan["matrix"].float() - exact).norm() < (plain.float() - exact).norm()


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16", "adamw_8bit"])
def test_a_step_without_gradients_changes_nothing_and_state_of_another_model_is_refused(kind, tmp_path):
    mine, optimizer = run(kind, torch.float32, steps=1)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    weights = {name: p.detach().clone() for name, p in mine.items()}
    optimizer.begin()
    optimizer.step(1e-2, norm=optimizer.norm())
    assert all(torch.equal(before[name], now) for name, now in optimizer.state().items())
    assert all(torch.equal(weights[name], p) for name, p in mine.items())
    write_files(tmp_path, [optimizer_file(optimizer, copy=False)])
    other = Optimizer([("other", nn.Parameter(torch.ones(2)))], TrainConfig(optimizer=kind), lr_scale=lambda n: 1.0)
    with pytest.raises(EnvironmentProblem, match="of other parameters"):
        load_optimizer(other, tmp_path)


def test_gradients_of_micro_batches_add_up_in_fp32():
    p = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = Optimizer([("p", p)], TrainConfig(), lr_scale=lambda n: 1.0)
    optimizer.begin()
    backward(optimizer, {"p": torch.ones_like(p)})
    for _ in range(4):
        backward(optimizer, {"p": torch.full_like(p, 2.0**-9)})
    assert optimizer.gradients["p"].item() == 1 + 2.0**-7 and p.grad is None


@pytest.mark.parametrize("large", [1, 2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_repeated_micro_batch_adds_only_what_its_first_try_did_not(monkeypatch, dtype, large):
    monkeypatch.setattr("saccade.trainer.optimizer.LARGE", large)
    p, q = nn.Parameter(torch.zeros(2, 2, dtype=dtype)), nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = Optimizer([("p", p), ("q", q)], TrainConfig(), lr_scale=lambda n: 1.0)
    optimizer.begin()
    backward(optimizer, {"p": torch.ones_like(p)})

    def fails(gradient):
        raise torch.OutOfMemoryError("simulated")

    q_before = q.clone()  # its gradient comes after that of p
    q_before.register_hook(fails)
    optimizer.start_micro_batch()
    with pytest.raises(torch.OutOfMemoryError):
        ((p * 5).sum() + 0 * q_before.sum()).backward()
    added = optimizer.drop_micro_batch()
    assert added <= ({"p"} if large < 10 else set()) and p.grad is None and q.grad is None
    backward(optimizer, {"p": torch.full_like(p, 5.0), "q": torch.full_like(q, 7.0)}, added)
    assert optimizer.gradients["p"].tolist() == [[6, 6], [6, 6]]
    assert optimizer.gradients["q"].tolist() == [7]
    assert optimizer.gradients["p"].dtype == torch.float32
    assert optimizer.norm(["p"]).item() == 12.0 and optimizer.norm([]).item() == 0.0


def test_the_global_norm_is_clipped():
    def moments(grad_norm: float) -> dict[str, torch.Tensor]:
        return run("adamw", torch.float32, grad_norm=grad_norm, steps=1)[1].state()

    norm = math.sqrt(sum(gradient(n, p.shape, 0).square().sum() for n, p in parameters().items()))
    free, clipped = moments(1e9), moments(norm / 4)
    for name in parameters():
        assert clipped[f"exp_avg/{name}"].tolist() == [
            approx(row, rel=1e-5) for row in (free[f"exp_avg/{name}"] / 4).tolist()
        ]
    untouched = moments(norm * 4)
    assert torch.equal(untouched["exp_avg/matrix"], free["exp_avg/matrix"])


def lrs(schedule: str, *, warmup: float = 0, min_lr: float = 0.0) -> list[float]:
    train = TrainConfig(schedule=schedule, warmup=warmup, min_lr=min_lr)
    return [lr_factor(i, 10, train) for i in range(11)]


def test_schedules():
    assert lrs("constant") == [1.0] * 11
    assert lrs("linear") == approx([1 - i / 10 for i in range(11)])
    assert lrs("cosine", min_lr=0.2) == approx([0.2 + 0.4 * (1 + math.cos(math.pi * i / 10)) for i in range(11)])
    assert lrs("linear", warmup=4)[:5] == approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert lrs("linear", warmup=0.4)[:5] == approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert lrs("cosine_with_min_lr")[10] == approx(0.1)
    for warmup in (0, 0.01, 0.5, 1, 50):  # every update moves
        assert all(0 < lr <= 1 for lr in lrs("linear", warmup=warmup)[:10])
    assert lr_factor(7, 10, TrainConfig(schedule="linear", warmup=2), updates_per_step=4) == 1


CHUNK = 128
SHAPES = {"matrix": (37, 23), "bias": (7,), "tower": (5, 3, 11), "head": (200,)}  # 851 numbers are in eight chunks
KINDS = pytest.mark.parametrize("kind", ["adamw", "adamw_bf16", "adamw_8bit"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "CHUNK", CHUNK)


def made(kind: str, dtype: torch.dtype, *, offload: bool) -> Optimizer:
    draw = torch.Generator().manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in SHAPES.items()}
    config = TrainConfig.model_validate({"optimizer": kind, "weight_decay": 0.1, "offload": offload})
    return Optimizer(named.items(), config, lr_scale=lambda name: 0.1 if name == "tower" else 1.0)


def train(optimizer: Optimizer, *steps: int) -> None:
    """Every other step has no gradient for the tower, as one without images."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        optimizer.begin()
        optimizer.start_micro_batch()
        used = [p for name, p in optimizer.parameters.items() if name != "tower" or step % 2]
        torch.stack([(p * torch.randn(p.shape, generator=draw).to(p.dtype)).sum() for p in used]).sum().backward()
        optimizer.end_micro_batch()
        optimizer.step(1e-2, norm=optimizer.norm())


def require_equal(one: Optimizer, other: Optimizer) -> None:
    pairs = ((one.parameters, other.parameters), (one.state(), other.state()))
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]) and tensor.shape == theirs[name].shape, name


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_updates_are_equal_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    beside, away = (made(kind, dtype, offload=offload) for offload in (False, True))
    start = away.parameters["matrix"].detach().clone()
    for step in range(5):
        train(beside, step)
        train(away, step)
        require_equal(beside, away)
    assert not torch.equal(start, away.parameters["matrix"])


@KINDS
def test_a_run_goes_on_with_its_state_elsewhere_and_a_copy_stays_as_it_was(kind: str, tmp_path: Path) -> None:
    for offload in (False, True):
        first, second = (made(kind, torch.bfloat16, offload=one) for one in (offload, not offload))
        train(first, 0, 1)
        folder = tmp_path / str(offload)
        now = {name: tensor.clone() for name, tensor in first.state().items()}
        later = [optimizer_file(first, copy=True)]
        write_files(folder, [optimizer_file(first, copy=False)])
        with torch.no_grad():
            for name, parameter in second.parameters.items():
                parameter.copy_(first.parameters[name])
        load_optimizer(second, folder)
        train(first, 2, 3)
        train(second, 2, 3)
        require_equal(first, second)
        write_files(folder / "later", later)
        stored = load_file(folder / "later" / "optimizer.safetensors")
        assert stored.keys() == now.keys() and all(torch.equal(stored[name], now[name]) for name in now)


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16"])
def test_an_update_has_few_chunks_at_once(kind: str) -> None:
    away = made(kind, torch.bfloat16, offload=True)
    held, gradients = away._rule.stored, {name: torch.ones(shape) for name, shape in SHAPES.items()}
    tensors = [state for pieces in held.pieces(gradients) for piece in pieces for state in piece.state.values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert len(storages) == host_state.SLOTS * 3 and max(storages.values()) == CHUNK * tensors[0].itemsize
    assert storages.keys().isdisjoint(t.untyped_storage().data_ptr() for t in away.state().values())


def test_moments_of_eight_bits_are_near_and_small() -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, generator=draw) * torch.randn(1000, generator=draw).exp()
    numbers[100], numbers[128:192] = 0.0, 0.0  # one, and a whole block
    for key, values, near in (("exp_avg", numbers, 0.06), ("exp_avg_sq", numbers**2, 0.03)):
        codes, scales = encode(key, values)
        found = decode(key, codes, scales)
        assert (codes.itemsize, len(codes), len(scales)) == (1, 1000, 16)
        largest = torch.tensor([block.abs().max() for block in values.split(BLOCK)]).repeat_interleave(BLOCK)[:1000]
        assert torch.equal(found[values.abs() == largest], values[values.abs() == largest])  # exact
        close = values.abs() > largest / 100
        assert ((found - values).abs() <= near * values.abs())[close].all()
        assert torch.equal(found == 0, values == 0) or key == "exp_avg"
        assert all(torch.equal(*pair) for pair in zip(encode(key, found), (codes, scales), strict=True))  # stays so
    # A run of 100 updates ends 3 % from where fp32 does; bytes of state for each number are 4.125 instead of 12.
    exact, small = (made(kind, torch.bfloat16, offload=False) for kind in ("adamw", "adamw_8bit"))
    start = small.parameters["matrix"].detach().float()
    for one in (exact, small):
        train(one, *range(100))
    held = small.parameters["matrix"].float() + small.state()["lost/matrix"].float()
    wanted = exact.state()["master/matrix"]
    assert (held - wanted).norm() < 0.05 * (wanted - start).norm()
    bytes_of = lambda one: sum(t.nbytes for key, t in one.state().items() if key.endswith("/head"))  # noqa: E731
    assert (bytes_of(small), bytes_of(exact)) == (200 * 4 + 2 * 4 * 4, 200 * 12 + 4)


def test_an_empty_weight_has_empty_memory() -> None:
    found = host_state.host_zeros(0, torch.bfloat16, torch.device("cpu"))
    assert found.dtype == torch.bfloat16 and found.view(0, 5).shape == (0, 5)


def test_too_little_main_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "free_host_bytes", lambda: 1000)
    with pytest.raises(EnvironmentProblem, match=r"takes 16\.9 kB of main memory, and 1\.0 kB are free; try"):
        made("adamw", torch.bfloat16, offload=True)
