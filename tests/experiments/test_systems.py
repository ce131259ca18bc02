"""The same run, carried out otherwise: from nothing on a CPU, and what its page says of learning curves."""

from pathlib import Path

from experiments.pages import read
from experiments.systems import run
from experiments.systems.page import inside, same


def learned(*values: float, length: float = 9.0) -> dict:
    curves = {"reward/accuracy": values, "length/response_mean": [length] * len(values)}
    return {"curves": {name: [[n, 0.0, value] for n, value in enumerate(of, 1)] for name, of in curves.items()}}


def test_it_runs_from_nothing_and_arms_begin_with_the_same_rollouts(tmp_path: Path) -> None:
    run.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "embedded", "ahead"])
    found = read(tmp_path / "results")
    assert found["embedded"][0]["steps"] == 2 and found["embedded"][0]["rollouts"] == 64
    assert same(found["ahead"][0], found["embedded"][0]) >= 1
    assert found["ahead"][0]["curves"]["mismatch/ess"]
    assert "| `rollout.ahead=1` | 1 |" in (tmp_path / "RESULTS.md").read_text()


def test_curves_are_the_same_up_to_the_first_step_that_differs() -> None:
    first = learned(0.1, 0.2, 0.3, 0.4)
    assert same(first, first) == 4
    assert same(learned(0.1, 0.2, 0.0, 0.4), first) == 2
    assert same(learned(0.1, 0.2, 0.3, 0.4, length=8.0), first) == 0


def test_a_mean_is_inside_where_the_interval_of_the_other_curve_holds_it() -> None:
    first = {seed: learned(*[value] * 9) for seed, value in enumerate((0.4, 0.5, 0.6))}  # 0.5 ± 0.248
    assert inside({0: learned(*[0.74] * 9)}, first) == 1.0
    assert inside({0: learned(*[0.76] * 9)}, first) == 0.0
