"""Every preset and add-on takes two steps on the GPU, in bfloat16 and in float32."""

from math import isfinite

import pytest

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.config.schema.presets import ADD_ONS, PRESETS
from saccade.recipes import rl

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS = [*PRESETS, *(("grpo", name) for name in ADD_ONS)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preset", ROWS)
def test_two_steps(preset, dtype, tmp_path, rl_config):
    row = resolve(AlgorithmConfig(preset=preset), max_tokens=6)
    config = rl_config(tmp_path, run__max_steps=2, run__device="cuda", model__dtype=dtype)
    config["algorithm.preset"] = preset
    config["train.samples_per_prompt"] = min(4, row.samples_per_prompt)
    config["train.prompts_per_step"] = max(4, 12 // row.samples_per_prompt)
    if row.estimator.components:
        config["reward.terms"] = [*config["reward.terms"], {"verifier": "length", "args": {"target": 3}}]
    last = rl.run(config)
    assert isfinite(last["policy/loss"]) and last["guard/nonfinite"] == 0
    assert last["mismatch/mult_prob_error"] < (1.05 if dtype == "bfloat16" else 1.0001)


def test_a_reference_that_waits_in_main_memory_scores_the_same(tmp_path, rl_config):
    copied = {"algorithm.kl.coef": 0.1, "algorithm.kl.update": "copy", "algorithm.kl.update_every": 2}
    found = []
    for offload in (False, True):
        config = rl_config(tmp_path / str(offload), run__max_steps=2, run__device="cuda", train__offload=offload)
        last = rl.run(config | copied)
        found.append({name: last[name] for name in ("policy/kl_ref", "policy/loss", "policy/grad_norm")})
    assert found[0] == found[1] and found[0]["policy/kl_ref"] > 0


def test_the_memory_of_a_step_is_logged(tmp_path, rl_config):
    last = rl.run(rl_config(tmp_path, run__max_steps=2, run__device="cuda"))
    peaks = {name: value for name, value in last.items() if name.startswith("mem/gpu_peak_gb/")}
    assert {"mem/gpu_peak_gb/rollout", "mem/gpu_peak_gb/update"} <= peaks.keys()
    assert last["mem/gpu_peak_gb"] == max(peaks.values())
    assert min(last["mem/gpu_reserved_gb"], last["mem/gpu_used_gb"], last["mem/gpu_used_gb/rollout"]) > 0
