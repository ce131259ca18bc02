"""Tokens of one age: from nothing on a CPU."""

from pathlib import Path

from experiments.pages import read
from experiments.staleness import run


def test_tokens_are_as_old_as_the_arm_says(tmp_path: Path) -> None:
    run.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "now", "age_1_unweighed"])
    found = read(tmp_path / "results")
    ages = {arm: [age for _, _, age in runs[0]["curves"].get("data/staleness_mean", [])] for arm, runs in found.items()}
    assert ages == {"cold": [], "now": [0, 0], "age_1_unweighed": [0, 1]}
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| 1, unweighed | 1 |" in page and "1, unweighed: " in page
