"""Ranks on a GPU: nccl with a rank alone, and two ranks that have the GPU in common, through gloo."""

import socket
import subprocess
import sys
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from tests.gpu.test_update import DEVICE, NAME, algorithm, batches  # noqa: E402, F401


@pytest.fixture
def nccl(tmp_path):
    """A group of one, as `rank_process` makes it."""
    from torch import distributed

    from saccade.plugins.ranks.sequence import group_of

    options = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    distributed.init_process_group("cpu:gloo,cuda:nccl", **options)
    yield
    distributed.destroy_process_group()
    group_of.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["whole", "sharded", "sequence"])
def test_a_rank_alone_trains_as_one_process_does(family_of, batches, nccl, layout, dtype):  # noqa: F811
    from saccade.config import TrainConfig
    from saccade.models.load import load_model
    from saccade.plugins.ranks.by_rows import ByRows
    from saccade.plugins.ranks.divided import DividedOptimizer
    from saccade.plugins.ranks.sequence import SequenceTrainer
    from saccade.plugins.ranks.sharded import ShardedTrainer
    from saccade.trainer import Scoring
    from saccade.trainer.local import LocalTrainer
    from saccade.trainer.losses import PolicyLoss
    from saccade.trainer.optimizer import Optimizer

    family, found = family_of(NAME), []
    kinds = {"whole": LocalTrainer, "sharded": ShardedTrainer, "sequence": partial(SequenceTrainer, size=1)}
    divided, fused = ByRows(torch.distributed.group.WORLD) if layout == "sharded" else None, []
    for kind, optimizer, by_rows in ((LocalTrainer, Optimizer, None), (kinds[layout], DividedOptimizer, divided)):
        model = load_model(family, dtype=dtype, device=DEVICE, by_rows=by_rows)
        fused.append([name for name, module in model.named_modules() if hasattr(type(module), "plain")])
        backend = kind(model, family, TrainConfig(eps=1e-3), optimizer=optimizer, checkpointing="auto")
        for _ in range(3):
            update = backend.train_step(batches, PolicyLoss(algorithm(), Scoring()), lr=1e-3)
            assert not update.skipped
        found.append({n: getattr(p, "full_tensor", lambda p=p: p)().float() for n, p in model.named_parameters()})
    alone, ours = found
    assert alone.keys() == ours.keys()
    assert fused[0] == fused[1] and bool(fused[0]) == (dtype == torch.bfloat16)
    error = 1e-5 if dtype == torch.float32 else 4e-3
    for name, weight in alone.items():
        torch.testing.assert_close(ours[name], weight, atol=error, rtol=error, msg=name)


OPTIONS = [{}, {"train.layout": "sharded"}, {"train.sequence_parallel": 2}]
OPTIONS += [{"train.layout": "sharded", "train.offload": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_ranks_on_one_gpu_have_the_numbers_of_one_process(rl_config, tensors, tmp_path, monkeypatch, options):
    from saccade.plugins.ranks import launchers
    from saccade.recipes import rl
    from tests.ranks.test_ranks import STORED, require_alike, require_same_weights, sampled

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(launchers, "PORT", port)
    monkeypatch.setenv("SACCADE_TOKEN", "of this run")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a machine without a network may not know its own name
    more = STORED | {"run.device": "cuda", "model.dtype": "float32", "algorithm.kl.coef": 0.05}
    rl.run(rl_config(tmp_path, run__name="one", run__max_steps=3) | more)
    command = [sys.executable, "-m", "saccade", "rank", f"127.0.0.1:{port}"]
    started = [subprocess.Popen(command) for _ in range(2)]
    shared = rl_config(tmp_path, run__name="two", run__max_steps=3, run__gpus=2, run__launcher="join")
    try:
        rl.run(shared | more | options)
        assert [process.wait(60) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    one, two = tmp_path / "one", tmp_path / "two"
    assert sampled(two) == sampled(one)
    require_alike(two, one, near=1e-4)
    require_same_weights(*(tensors(run / "checkpoints" / "step-3") for run in (two, one)))
