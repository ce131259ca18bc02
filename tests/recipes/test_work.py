"""FLOPs in the metrics of a run, and what they say against the clock."""

from dataclasses import replace

import pytest

from saccade.config import load
from saccade.plugins.estimate import estimate
from saccade.plugins.estimate.work import rates
from saccade.recipes import rl
from saccade.system import devices


def test_a_step_counts_its_phases_and_recomputed_layers_apart(tmp_path, rl_config):
    rows = {
        mode: rl.run(rl_config(tmp_path, run__max_steps=1, run__name=mode, model__checkpointing=mode))
        for mode in ("on", "off")
    }
    last = rows["off"]
    counted = {name: value for name, value in last.items() if name.startswith(("flops/", "bytes/"))}
    assert counted.keys() == {"flops/rollout", "flops/logp_ref", "flops/update", "flops/recomputed", "bytes/rollout"}
    assert counted["flops/recomputed"] == 0
    # The reference runs the forward of the same forests, and looks at equal pictures once.
    assert counted["flops/update"] / 3 == pytest.approx(counted["flops/logp_ref"], rel=0.15)
    assert not [name for name in last if name.startswith(("perf/mfu", "perf/bandwidth"))]
    assert rows["on"]["flops/update"] == rows["off"]["flops/update"]
    share = rows["on"]["flops/recomputed"] / rows["on"]["flops/update"]
    assert 0.1 < share < 1 / 3  # less than a forward: the head and the last matrices are not


@pytest.mark.parametrize(
    "changes",
    [
        {"model__train": "freeze:vision,projector", "algorithm__preset": "ppo"},
        {"model__train": "lora", "model__lora": {"rank": 4}, "algorithm__old": "recompute"},
        {"model__train": r"freeze:re:language_model\.layers\.0\.|embed|visual"},
        {"algorithm__preset": "remax"},
    ],
    ids=["critic", "lora", "upper-half", "greedy-baseline"],
)
def test_an_estimate_counts_what_a_run_counts(tmp_path, rl_config, changes):
    config = rl_config(
        tmp_path, run__max_steps=1, rollout__ignore_eos=True, train__epochs_per_batch=2, model__checkpointing="on",
        **changes,
    )  # fmt: skip
    last = rl.run(config)
    pace = estimate(load(config, command="rl"), devices.current_device("cpu")).pace
    foretold = pace.tflop | {"recomputed": pace.recomputed}
    assert foretold == pytest.approx({name: last[f"flops/{name}"] for name in foretold}, rel=0.01)
    assert len(foretold) == len([name for name in last if name.startswith("flops/")])


def test_shares_of_a_known_device():
    counted = {"flops/rollout": 400.0, "flops/update": 1400.0, "flops/recomputed": 300.0}
    counted |= {"bytes/rollout": 6000.0, "reward/mean": 1.0}
    times = {"time/rollout": 4.0, "time/update": 3.0, "time/step": 8.0}
    found = rates(counted, times, devices.lookup("NVIDIA H200"))
    assert found == {
        "perf/mfu_rollout": pytest.approx(100 / 989),
        "perf/mfu_update": pytest.approx(1400 / 3 / 989),
        "perf/bandwidth_rollout": pytest.approx(1.5 / 4.8),
    }
    eight = rates(counted, times, replace(devices.lookup("NVIDIA H200"), count=8))
    assert eight == {name: pytest.approx(value / 8) for name, value in found.items()}
