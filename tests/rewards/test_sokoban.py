from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.plugins.sokoban.sokoban_verifier import sokoban
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

LEVEL = "#####\n#@$.#\n#####"
TWO = "########\n#@$. $.#\n########"


def score(moves: str, level: Any = LEVEL, words: int = 0, **args: Any) -> Score:
    thought = f"<think>{'word ' * words}</think>" if words else ""
    sample = RewardSample(id="a", response=f"{thought}<answer>{moves}</answer>", extra={"level": level})
    return sokoban(sample, **args)


@pytest.mark.parametrize(
    ("moves", "mode", "expected"),
    [
        ("right", "solved", 1),
        ("right", "return", 10.9),
        ("right", "lmmr1", 11.5),
        ("left", "solved", 0),
        ("left", "return", 0),
        ("right,jump", "solved", 0),
        ("right,jump", "lmmr1", 0),
        ("R", "solved", 1),
        ("RIGHT", "solved", 1),
        ("up left, right", "solved", 1),  # what is blocked is a step without effect
        ("up left, right", "return", 10.7),
        ("right left left", "solved", 1),  # ends when solved
        ("", "solved", 0),
    ],
)
def test_the_level_of_one_push(moves: str, mode: str, expected: float) -> None:
    assert score(moves, words=50, mode=mode).value == pytest.approx(expected)


def test_a_word_that_is_no_move_is_a_fault_of_format() -> None:
    wrong = score("right,jump")
    assert (wrong.reason, wrong.parts) == ("format", {"accuracy": 0, "format": 0})
    assert score("right", mode="lmmr1").value == 0  # no thought, no shape
    assert score("right", words=50, mode="lmmr1").parts["accuracy"] == 1


def test_progress_counts_boxes_on_goals() -> None:
    assert score("right", TWO, mode="progress").value == 0.5
    assert score("right", TWO, mode="return").value == pytest.approx(0.9)
    assert score("left", TWO, mode="progress").value == 0


def test_the_best_moment_counts_and_goals_under_boxes_are_remembered() -> None:
    """A box that starts on its goal is pushed off, with another one still to place."""
    level = "#######\n#@*  .#\n#  $  #\n#######"
    off = score("right", level, mode="return")
    assert (off.value, off.parts["progress"]) == (0, 0)
    there_and_back = score("right down left down", level, mode="progress")
    assert there_and_back.value == 0


def test_levels_as_grids_and_files(tmp_path: Path) -> None:
    grid = [[0, 0, 0, 0, 0], [0, 5, 4, 2, 0], [0, 0, 0, 0, 0]]
    np.save(tmp_path / "level.npy", np.array(grid))
    for level in (grid, np.array(grid), str(tmp_path / "level.npy"), LEVEL.split("\n")):
        assert score("right", level).value == 1
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        score("right", str(tmp_path / "objects.npy"))
    assert score("right", None).kind == "error"


def test_a_level_that_is_solved_already_pays_for_nothing() -> None:
    with pytest.raises(ValueError, match="solved at its start"):
        score("left", "#####\n#@ *#\n#####")


def test_only_the_first_actions_are_played() -> None:
    assert score("left " * 49 + "right").value == 1
    assert score("left " * 50 + "right").value == 0
    assert score("left " * 60 + "right", max_actions=120).value == 1


@pytest.mark.parametrize(
    ("moves", "bonus"),
    [
        ("left up " * 3, 0.3),
        ("left " * 7, 0.35),
        ("left " * 8, 0.0),  # eight in a row: min(0, 0.4 - 0.2)
        ("left up left down " * 5, 1.0),
        ("left up left down " * 8, 0.0),
        ("left left up down left down " * 7, 1 - 0.2 * (22 / 30) ** 2),  # a six-gram may repeat
    ],
)
def test_action_bonus(moves: str, bonus: float) -> None:
    assert score(moves, TWO, words=10, mode="lmmr1").value == pytest.approx(0.5 + bonus + 0.01)


def test_the_thought_bonus_has_a_cap() -> None:
    few, many = (score("right", words=n, mode="lmmr1").value for n in (200, 5000))
    assert few == many == pytest.approx(10.9 + 0.5 + 0.05 + 0.2)
