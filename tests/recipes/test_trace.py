"""`run.trace`: one step under the profiler, with the phases as ranges."""

import gzip
import json

from saccade.recipes import rl


def ranges(path):
    """Names of the ranges that code of ours has opened, in order of time."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    mine = [e for e in events if e.get("cat") == "user_annotation"]
    return [e["name"] for e in sorted(mine, key=lambda e: e["ts"])]


def test_the_third_step_is_traced_with_its_phases(tmp_path, rl_config):
    rl.run(rl_config(tmp_path, run__trace=True))
    (path,) = (tmp_path / "run").glob("trace-*")
    assert path.name == "trace-step-3.json.gz"
    phases = ["rollout", "pack", "logp_ref", "advantage", "update"]
    assert [name for name in ranges(path) if name in phases] == phases
    assert f"trace {path}" in (tmp_path / "run" / "log.txt").read_text()
