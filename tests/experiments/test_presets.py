"""Presets side by side: from nothing with a random model, and what the page says of numbers that are known."""

import json
from pathlib import Path

from experiments.pages import best_rates, read
from experiments.presets import run
from experiments.presets.page import compared, rates_of, reached, write_page


def test_presets_run_from_nothing_with_equal_rollouts(tmp_path: Path) -> None:
    run.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "grpo", "dapo"])
    found, trials = read(tmp_path / "results"), read(tmp_path / "results" / "dev")
    assert found.keys() == {"cold", "grpo", "dapo"} and trials.keys() == {"cold", "grpo@5e-4", "dapo@5e-4"}
    assert {runs[0]["rollouts"] for arm, runs in found.items() if arm != "cold"} == {16}
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| `dapo` | **0.0** |" in page and "Every arm draws 16 rollouts" in page
    assert (tmp_path / "presets.svg").read_text().count("<circle") == 2


def stored(accuracy: float, *, passing: bool = False) -> dict:
    """A run of 100 rollouts, from 30 % right; one that is `passing` drew 160, and was validated after each 40."""
    steps = [0, 1, 2, 3, 4] if passing else [0, 4]
    curves = {"rollouts": [[step, step, (40 if passing else 25) * step] for step in (1, 2, 3, 4)]}
    right = {step: accuracy - 0.1 * (4 - step) if step else 0.3 for step in steps}
    curves["val/val/accuracy"] = [[step, 10.0 * step, right[step]] for step in steps]
    curves["val/val/items"] = [[step, 10.0 * step, 600] for step in steps]
    curves["time/validation"] = [[step, 10.0 * step, 2.0] for step in steps]
    about = {"began": 0.0, "seconds": 60, "device": "CPU", "commit": "abc", "at_once": 2, "steps": 4}
    return {**about, "rollouts": 160 if passing else 100, "curves": curves}


def test_the_page_calls_what_is_beyond_chance_and_counts_rollouts_that_were_dropped(tmp_path: Path) -> None:
    around = (0.0, 0.01, -0.01, 0.02, 0.0)
    arms = {"grpo": 0.6, "ppo": 0.7, "rloo": 0.61, "dapo": 0.75}
    found = {arm: [stored(mean + off, passing=arm == "dapo") for off in around] for arm, mean in arms.items()}
    found["rloo"] = [stored(0.6 + off) for off in around[::-1]]
    trials = {"grpo@1e-6": 0.4, "grpo@1e-5": 0.5, "grpo@1e-4": 0.2, "ppo@1e-4": 0.5}
    (tmp_path / "dev").mkdir()
    for arm, runs in found.items():
        for seed, one in enumerate(runs):
            (tmp_path / f"{arm}-{seed}.json").write_text(json.dumps(one))
    for arm, accuracy in trials.items():
        (tmp_path / "dev" / f"{arm}-100.json").write_text(json.dumps(stored(accuracy)))

    assert best_rates(rates_of(read(tmp_path / "dev"))) == {"grpo": "1e-5", "ppo": "1e-4"}
    dapo = reached(stored(0.8, passing=True), 100)
    assert (round(dapo.accuracy), dapo.rollouts, dapo.seconds) == (60, 80, 16.0)  # not the 80 % of 160 rollouts
    rows = {row.preset: row for row in compared(read(tmp_path))}
    verdicts = {"ppo": "better", "grpo": "", "rloo": "", "dapo": "worse"}
    assert {preset: row.verdict for preset, row in rows.items()} == verdicts
    assert next(iter(rows)) == "ppo" and [*rows][-1] == "dapo"
    assert rows["ppo"].chance < 1e-4 and rows["rloo"].chance > 0.5
    assert rows["ppo"].point == "0.94"  # 38 seconds for 40.4 points
    write_page(tmp_path, tmp_path / "RESULTS.md", tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "From 30.0 % right: GRPO reaches 60.4" in page
    assert "2 differ from GRPO beyond chance, in points: better: ppo (+10.0 ± 0.0); worse: dapo (-5.0 ± 0.0)" in page
