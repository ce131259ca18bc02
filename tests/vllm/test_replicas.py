"""vLLM in processes of its own behind one queue."""

import os
import signal
from importlib.util import find_spec

import pytest

from saccade.engines import generate

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
        requests = [ask(f"{n}", n % 4, noise=n + 1, ignore_eos=True, max_tokens=120) for n in range(12)]
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
