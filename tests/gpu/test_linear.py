"""Recurrent layers on a GPU: flash-linear-attention against plain torch, a forest against its rows. That the engine
draws with the log-probs of the trainer is in test_windows.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from saccade.config import TrainConfig  # noqa: E402
from saccade.engines import generate  # noqa: E402
from saccade.engines.embedded import EmbeddedEngine  # noqa: E402
from saccade.forest.packing import pack  # noqa: E402
from saccade.models.load import load_model  # noqa: E402
from saccade.plugins.linear import delta_rule as rules  # noqa: E402
from saccade.trainer import Scoring  # noqa: E402
from saccade.trainer.local import LocalTrainer  # noqa: E402
from tests.engines import reference  # noqa: E402
from tests.engines.asked import trajectories  # noqa: E402
from tests.engines.decoders import asked, build  # noqa: E402

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [5, 1, 200, 64, 130]])
@pytest.mark.parametrize("training", [True, False])
def test_the_fast_rule_is_the_slow_one_with_its_gradients(lengths, training):
    pytest.importorskip("fla")
    assert rules._learns(DEVICE)
    sizes, tokens, heads, wide, high = np.array(lengths), sum(lengths), 4, 64, 128
    q, k = (torch.randn(tokens, heads, wide, device=DEVICE) for _ in range(2))
    v = torch.randn(tokens, heads, high, device=DEVICE)
    decay, share = -0.2 * torch.rand(tokens, heads, device=DEVICE), torch.rand(tokens, heads, device=DEVICE)
    states = torch.randn(len(lengths), heads, wide, high, device=DEVICE)
    ends = torch.tensor([0, *sizes.cumsum()], device=DEVICE)
    half = [x.bfloat16() for x in (q, k, v)]
    found = []
    for fast in (True, False):
        given = [x.detach().to(torch.bfloat16 if fast else torch.float32) for x in half]
        every = [x.clone().requires_grad_(training) for x in (*given, decay, share.bfloat16().float(), states)]
        with torch.set_grad_enabled(training):
            out, after = rules.delta_rule(every[:5], sizes, ends, every[5])
        if training:
            (out.float().square().sum() + after.square().sum()).backward()
        found.append([out, after, *(x.grad for x in every if training)])
    for got, wanted in zip(*found, strict=True):
        assert (got.float() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_of_each_row_is_plain_torch(dtype, silu):
    """Convolution, rule and norm, as they are on a CPU; idle rows change nothing."""
    from saccade.plugins.gpu import step_kernels

    key_heads, heads, size, wide, width, count = 4, 8, 128, 128, 4, 9
    channels = 2 * key_heads * size + heads * wide
    rows, lengths = torch.tensor([3, 0, 0, 8, 5]), torch.tensor([4, -1, 7, 0, 2])
    shapes = [(5, channels), (channels, 1, width), (5, heads), (5, heads), (5, heads, wide), (wide,)]
    x, weight, share, decay, gate, gain = (torch.randn(shape).to(dtype) for shape in shapes)
    tails, states = torch.randn(count, width - 1, channels).to(dtype), torch.randn(count, heads, size, wide)
    A_log, dt_bias = torch.linspace(-4, 2, heads), torch.randn(heads)
    found = []
    for kernels, device in ((step_kernels, DEVICE), (reference, torch.device("cpu"))):
        tail, state = tails.to(device, copy=True), states.to(device, copy=True)
        at, there = (torch.tensor([kept.data_ptr()], device=device) for kept in (tail, state))
        where = {"rows": rows.to(device), "lengths": lengths.to(device)}
        given = [each.to(device) for each in (share, decay, A_log, dt_bias)]
        mixed = kernels.convolve_step(x.to(device), weight.to(device), None, tails=at, **where, silu=silu)
        shape = (key_heads, heads, size, wide)
        out = kernels.delta_step(mixed, *given, heads=shape, states=there, **where)
        out = kernels.gate_step(out, gate.to(device), gain.to(device), 1e-6)
        found.append([each.float().cpu() for each in (mixed, out, tail, state)])
    untouched = [1, 2, 4, 6, 7]
    assert torch.equal(found[0][3][untouched], states[untouched]) and not found[0][1][1].any()
    for got, wanted in zip(*found, strict=True):
        assert (got - wanted).norm() < (1e-5 if dtype == torch.float32 else 0.02) * wanted.norm()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_a_forest_in_half_precision_rounds_no_more_than_its_rows(kind, tmp_path):
    """Log-probs and gradients, with branches that begin with states; on the GPU with what is installed."""
    family, _ = build(kind, tmp_path)
    requests = asked(family, lengths=(5, 150), repeats=4, max_tokens=100)
    answers = generate(EmbeddedEngine(load_model(family, dtype=torch.float32, device=DEVICE), family), requests)
    groups = [trajectories(requests[i : i + 4], answers[i : i + 4]) for i in (0, 4)]
    found = []
    for dtype, budget in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 1 << 20)):
        model, scores = load_model(family, dtype=dtype, device=DEVICE), []
        backend = LocalTrainer(model, family, TrainConfig(), checkpointing=True)
        for batch in pack(groups, micro_tokens=budget):
            new, _ = backend.score(batch, Scoring())
            new.float().sum().backward()
            scores.append(new.detach().float().sum().item())
        found.append((sum(scores), [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]))
    (exact, wanted), (rows, rounded), (forest, packed) = ((score, torch.cat(every)) for score, every in found)
    assert abs(forest - exact) < 0.01 * abs(exact) and abs(rows - exact) < 0.01 * abs(exact)
    assert (packed - wanted).norm() < 1.5 * (rounded - wanted).norm() < 0.3 * wanted.norm()
