"""Decoders of other kinds on a GPU: flash calls against dense masks, kernels against torch, engine against trainer."""

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from saccade.engines import generate  # noqa: E402
from saccade.engines.embedded import EmbeddedEngine, kv_cache  # noqa: E402
from saccade.forest.attention import _dense_plan, blocks_at, forest_plan  # noqa: E402
from saccade.forest.interface import segment_attention  # noqa: E402
from saccade.forest.packing import pack  # noqa: E402
from saccade.models.load import load_model  # noqa: E402
from saccade.trainer import Scoring  # noqa: E402
from saccade.trainer.local import LocalTrainer  # noqa: E402
from tests.engines.asked import trajectories  # noqa: E402
from tests.engines.decoders import KINDS, asked, build  # noqa: E402
from tests.gpu.test_engine import alike  # noqa: E402

DEVICE = torch.device("cuda")


def random_tree(rng, nodes=7):
    sizes = rng.integers(1, 40, nodes)
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])
    return np.concatenate([[0], sizes.cumsum()]), parents


def test_vision_segments_agree_with_a_loop():
    boundaries = torch.tensor([0, 5, 21, 22, 64], device=DEVICE)
    q, k, v = (torch.randn(64, 2, 80, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    fast = segment_attention(q, k, v, boundaries, 80**-0.5)
    exact = segment_attention(q.float(), k.float(), v.float(), boundaries, 80**-0.5)
    assert (fast.float() - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("sizes", [(64, 64), (192, 128), (24, 16), (512, 512)])
@pytest.mark.parametrize("kind", ["", "windows", "all"])
@pytest.mark.parametrize("window", [None, 16, -24])
def test_flash_calls_agree_with_dense_masks_and_their_gradients(sizes, kind, window):
    rng = np.random.default_rng(0)
    for _ in range(3):
        starts, parents = random_tree(rng)
        tokens = int(starts[-1])
        runs = [np.arange(start, max(start, end - 3)) for start, end in pairwise(starts)]
        shown = np.isin(np.arange(tokens), np.concatenate(runs)).astype(int)
        blocks = blocks_at(kind, shown, {"image": 1})
        shapes = [(tokens, 4, sizes[0]), (tokens, 2, sizes[0]), (tokens, 2, sizes[1])]
        inputs = [torch.randn(s, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        exact_inputs = [x.detach().float().requires_grad_() for x in inputs]
        fast = forest_plan(starts, parents, DEVICE, torch.bfloat16, blocks=blocks)(0, *inputs, 0.1, window)
        exact = _dense_plan(starts, parents, DEVICE, blocks)(0, *exact_inputs, 0.1, window)
        assert (fast.float() - exact).norm() / exact.norm() < 0.01
        weight = torch.randn_like(exact)
        fast.backward(weight.to(fast.dtype))
        exact.backward(weight)
        for got, wanted in zip(inputs, exact_inputs, strict=True):
            assert (got.grad.float() - wanted.grad).norm() / wanted.grad.norm() < 0.02


@pytest.fixture(scope="module")
def family_of_kind(tmp_path_factory):
    return lambda kind: build(kind, tmp_path_factory.mktemp(kind))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_draw_the_tokens_of_plain_torch(kind, family_of_kind, monkeypatch):
    """In full precision, over windows, chunks, layers of different sizes, keys larger than values."""
    family = family_of_kind(kind)
    model = load_model(family, dtype=torch.float32, device=DEVICE)
    requests = asked(family, lengths=(5, 21, 300), repeats=6, max_tokens=40)
    answers = []
    for kernels in (True, False):
        monkeypatch.setattr(kv_cache, "use_kernels", lambda shape, on=kernels: on)
        answers.append(generate(EmbeddedEngine(model, family), requests))
    assert alike(*answers, limit=1e-3) == 1


def test_a_step_that_waits_for_the_gpu_is_not_captured(family_of_kind):
    """Gemma 3n makes tensors from numbers in the middle of its layers."""
    for kind, captured in (("mistral", True), ("gemma3n_text", False)):
        family = family_of_kind(kind)
        engine = EmbeddedEngine(load_model(family, dtype=torch.bfloat16, device=DEVICE), family)
        generate(engine, asked(family))
        assert bool(engine.graphs._captured) == captured, kind


@pytest.mark.parametrize("kind", KINDS)
def test_in_half_precision_log_probs_are_those_of_the_trainer(kind, family_of_kind):
    family = family_of_kind(kind)
    model = load_model(family, dtype=torch.bfloat16, device=DEVICE)
    engine = EmbeddedEngine(model, family)
    assert engine.cache.kernels
    requests = asked(family, lengths=(5, 21, 300), repeats=6, max_tokens=40)
    answers = generate(engine, requests)
    groups = [trajectories(requests[i : i + 6], answers[i : i + 6]) for i in (0, 6, 12)]
    (batch,) = pack(groups, micro_tokens=99_999)
    ((new, _),) = LocalTrainer(model, family).logprobs([batch], Scoring())
    gap = np.abs(new - batch.rollout_logprobs)
    assert gap.mean() < 0.03, gap.max()
