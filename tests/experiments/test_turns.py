"""Searching for longer than in training: from nothing on a CPU, and what its page says of seeds."""

from pathlib import Path

import pytest

from experiments.pages import read
from experiments.turns import run
from experiments.turns.page import LIMITS, broken_row, summary, within


def measured(right: float, cut_off: float, silent: float = 0.0) -> dict:
    values = {"val/val/accuracy": right} | {f"val/val/accuracy_within_{limit}_turns": right for limit in LIMITS}
    values |= {"val/val/turns/end/turn_length": cut_off, "val/val/turns/end/eos_no_answer": silent}
    return {"curves": {name: [[80, 0.0, value]] for name, value in values.items()}}


def test_it_runs_from_nothing_and_one_base_serves_all_seeds(tmp_path: Path) -> None:
    run.main(["--tiny", "--out", str(tmp_path), "--seeds", "1", "--arms", "masked", "ahead1"])
    found = read(tmp_path / "results")
    seeds = {"read": [0], "chat": [0], "cold": [1], "masked": [1], "ahead1": [1]}
    assert {arm: [*runs] for arm, runs in found.items()} == seeds
    assert found["masked"][1]["rollouts"] == 12
    assert max(age for *_, age in found["ahead1"][1]["curves"]["data/staleness_mean"]) > 0
    assert within(found["masked"])[4].keys() == {1}
    assert "| RL, over-turn masking | 1 |" in (tmp_path / "RESULTS.md").read_text()


def test_the_page_says_whether_intervals_overlap() -> None:
    masked = {seed: measured(right, 0.1) for seed, right in enumerate((0.60, 0.62, 0.64))}
    apart = {seed: measured(right, 0.0) for seed, right in enumerate((0.44, 0.45, 0.46))}
    wide = {seed: measured(right, 0.0) for seed, right in enumerate((0.30, 0.45, 0.60))}
    assert summary({"masked": masked, "unmasked": apart}).endswith("intervals that do not overlap.")
    assert summary({"masked": masked, "unmasked": wide}).endswith("intervals that overlap.")
    assert summary({}).endswith("too few seeds.")


def test_broken_episodes_are_those_of_both_kinds() -> None:
    runs = {0: measured(0.6, 0.13, 0.16), 1: measured(0.5, 0.40, 0.03), 2: measured(0.7, 0.03, 0.01)}
    label, right, lost, _, r = broken_row("masked", runs)
    assert (label, right, lost) == ("RL, over-turn masking", "60 50 70", "29 43 4")
    assert float(r) == pytest.approx(-0.99)
