"""`run.trace`: one step under the profiler, with the phases as ranges."""

import gzip
import json

from saccade.recipes import rl, sft
from saccade.run.loggers import read_metrics


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


def test_a_shorter_run_has_its_last_step_traced_which_changes_no_number(tmp_path, sft_config):
    losses = {}
    for name, trace in (("with", True), ("without", False)):
        sft.run(sft_config(tmp_path, run__trace=trace, run__name=name, run__max_steps=2))
        losses[name] = [row.get("sft/loss") for row in read_metrics(tmp_path / name)]
    assert losses["with"] == losses["without"]
    (path,) = (tmp_path / "with").glob("trace-*")
    assert path.name == "trace-step-2.json.gz" and "update" in ranges(path)
    assert not list((tmp_path / "without").glob("trace-*"))
