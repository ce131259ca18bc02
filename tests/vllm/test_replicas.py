"""vLLM in processes of its own behind one queue, also beside ranks that train."""

import os
import signal
from importlib.util import find_spec

import pytest

from saccade.engines import generate
from saccade.plugins.engines.replicas.replica_pool import Replicas
from saccade.recipes import rl
from saccade.run.loggers import read_metrics
from tests.ranks.test_ranks import STABLE, STORED, sampled
from tests.ranks.test_side_by_side import AHEAD, LONG, Watched
from tests.vllm.test_rl import ENGINE

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def test_kill_9_of_a_process_amid_a_rollout_loses_nothing(settings, backend, ask, gap, tmp_path, said):
    """Weights that the folder does not have: whoever starts again is given them."""
    import torch

    from saccade.plugins.engines.replicas.replica_pool import start_replicas

    pool = start_replicas(settings, 2, logs=tmp_path)
    try:
        with torch.no_grad():
            for index, parameter in enumerate(backend.model.parameters()):
                parameter.mul_(1.0 + 0.02 * (index % 5))
        pool.update_weights(backend, version=5)
        lengths = [120 if n % 3 else 20 for n in range(12)]  # when the first are done, both have others to do
        requests = [ask(f"{n}", n % 4, noise=n + 1, ignore_eos=True, max_tokens=k) for n, k in enumerate(lengths)]
        undisturbed = generate(pool, requests)
        assert gap(requests, undisturbed) < 1e-4

        for request in requests:
            pool.submit(request)
        done = pool.poll()
        os.kill(pool._working[0].child.popen.pid, signal.SIGKILL)  # type: ignore[union-attr]
        while pool.pending:
            done += pool.poll()
        found = {completion.key: completion for completion in done}
        assert len(done) == len(found) == 12 and len(said) == 1
        for wanted in undisturbed:
            assert found[wanted.key].ids.tolist() == wanted.ids.tolist()
            assert set(found[wanted.key].versions.tolist()) == {5}
        while len(pool._working) < 2:
            pool.poll()
        assert gap(requests, generate(pool, requests)) < 1e-4
    finally:
        pool.close()


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_two_ranks_train_and_hand_their_weights_over(layout, tmp_path, rl_config, monkeypatch):
    """The sharded run with kill -9 of vLLM amid the second rollout."""
    killed = []
    hand_out = Replicas._hand_out

    def killing(pool):
        hand_out(pool)
        if layout == "sharded" and type(pool) is Replicas and pool.version == 1 and pool._tasks and not killed:
            killed.append(pool._working[0].child.popen.pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Replicas, "_hand_out", killing)
    several = {"run.gpus": 2, "rollout.replicas": 1, "train.layout": layout, "run.max_steps": 3}
    rl.run(rl_config(tmp_path) | ENGINE | STORED | several)
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(rows) == 3 and max(row["mismatch/logp_gap_max"] for row in rows) < 1e-4
    assert all(row["policy/grad_norm"] > 0 for row in rows) and len(sampled(tmp_path / "run")) == 48
    deaths = (tmp_path / "run" / "log.txt").read_text().count("engine-0 died and starts again")
    assert deaths == len(killed) == (layout == "sharded")


@pytest.mark.parametrize(("replicas", "keep"), [(0, False), (1, False), (1, True)])
def test_rollouts_run_ahead_of_training(replicas, keep, tmp_path, rl_config, monkeypatch):
    """In a process of its own vLLM goes on while the trainer trains, and with its keys when weights change."""
    watched = Watched(monkeypatch)
    kept = {"rollout__at_update": "keep_keys"} if keep else {}
    rl.run(rl_config(tmp_path, **LONG, rollout__replicas=replicas, **kept) | ENGINE | STABLE)
    assert watched.require_sound() == AHEAD and watched.slept == 0
    assert any(watched.under_way.values()) == (replicas > 0)
    assert any(watched.handed_over.values()) == keep
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    fresh = [row["mismatch/logp_gap_max"] for row in rows if "mismatch/logp_gap_max" in row]
    assert fresh and max(fresh) < 1e-4  # of tokens that the newest weights sampled
