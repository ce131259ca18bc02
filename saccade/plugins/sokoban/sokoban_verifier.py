"""The Sokoban verifier: plays the moves in the answer tag on the level of the row.

The level is the column `level`: text, rows of integers, or a `.npy` file.

    >>> level = "#####\\n#@$.#\\n#####"
    >>> sample = RewardSample(id="a", response="<answer>right</answer>", extra={"level": level})
    >>> sokoban(sample).value, round(sokoban(sample, mode="return").value, 1)
    (1.0, 10.9)
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from saccade.plugins.sokoban import sokoban as game
from saccade.plugins.verifiers.extract import Scope, answer_of, score_of
from saccade.plugins.verifiers.response_shape import check_think_answer
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

MODES = ("solved", "progress", "return", "lmmr1")
MOST_STEPS = 120
LONGEST = 2000  # characters of an answer that are read


def sokoban(sample: RewardSample, mode: str = "solved", max_actions: int = 50, scope: Scope = "after_think") -> Score:
    """Modes: `solved` 0 or 1; `progress` the share of boxes on goals; `return` the highest running sum of
    move rewards; `lmmr1` that plus bonuses for format, moves and thought. The part `accuracy` is `solved`.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {', '.join(MODES)}, not {mode!r}")
    if not 0 < max_actions <= MOST_STEPS:
        raise ValueError(f"max_actions is 1 to {MOST_STEPS}, not {max_actions}")
    text = answer_of(sample, ("answer_tag",), scope)
    if sample.extra.get("level") is None:
        return Score(kind="error", reason="no_level: the row has no column `level`")
    state = game.start(sample.extra["level"])
    moves, strange = game.read_moves((text or "")[:LONGEST])
    shaped = mode != "lmmr1" or check_think_answer(sample)
    if not moves or strange or not shaped:
        missed = {"accuracy": 0.0, "format": 0.0}
        reason = "format" if text else "no_answer"
        return Score(kind="value", value=0.0, reason=reason, parts=missed, extracted=text)
    moves, earned, best = moves[:max_actions], 0.0, 0.0
    for move in moves:
        if state.solved:
            break
        state, reward = game.move(state, move)
        earned += reward
        best = max(best, earned)
    values = {"solved": float(state.solved), "progress": state.placed / len(state.boxes), "return": best}
    if mode == "lmmr1":
        thought = sample.text.partition("<think>")[2].partition("</think>")[0].split()
        values["lmmr1"] = best + 0.5 + _action_bonus(moves) + min(0.2, 0.001 * sum(len(word) > 1 for word in thought))
    parts = {"accuracy": float(state.solved), "format": 1.0, **values}
    return replace(score_of(text, state.solved, "unsolved"), value=values[mode], parts=parts)


def _action_bonus(moves: Sequence[str]) -> float:
    """Grows to 1 at twenty moves, then falls slowly; a pattern of 1 to 5 moves repeated 8 times earns at most 0."""
    count = len(moves)
    bonus = 0.05 * count if count < 20 else 1 - 0.2 * ((count - 20) / 30) ** 2
    letters = "".join(move[0] for move in moves)
    return min(0.0, bonus - 0.2) if re.search(r"(.{1,5})\1{7}", letters) else bonus


VERIFIER = Verifier(function=sokoban, needs_answer=False, check_row=game.require_level)
