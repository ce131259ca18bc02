"""Solvable levels of Sokoban, made by playing backwards from a solved state: boxes are pulled off their goals.

level = draw_level(Random(0), cells=7, boxes=2)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from PIL import Image

from saccade.plugins.drawn.drawn_sets import Drawing
from saccade.plugins.sokoban.sokoban import MARKS, MOVES, Cell, State, draw

MOST_STATES = 4000  # states searched per level
QUESTION = "Push every box onto a goal. Answer with moves, such as: up, left."


def draw_sokoban_row(rng: Random, index: int, *, cells: int, boxes: int, side: int) -> Drawing:
    state, moves = draw_level(rng, cells, boxes)
    picture = Image.fromarray(draw(state, max(4, side // cells)))
    more = {"level": written(state), "moves": len(moves)}
    return Drawing(picture, QUESTION, ", ".join(moves), f"boxes_{boxes}", more)


def draw_level(rng: Random, cells: int, boxes: int) -> tuple[State, list[str]]:
    """Returns a level, with a border and random inner walls, and a shortest solution."""
    while True:
        inner = [(r, c) for r in range(1, cells - 1) for c in range(1, cells - 1)]
        walls = {*rng.sample(inner, rng.randint(0, len(inner) // 4))}
        floor = [cell for cell in inner if cell not in walls]
        if len(floor) <= boxes:
            continue
        placed = frozenset(rng.sample(floor, boxes))
        every = frozenset((r, c) for r in range(cells) for c in range(cells))
        solved = State(size=(cells, cells), walls=every - {*floor}, goals=placed, boxes=placed, player=floor[0])
        found = _pulled([replace(solved, player=cell) for cell in floor if cell not in placed])
        if hard := [state for state in found if not state.boxes & state.goals]:
            state = rng.choice(hard[-(len(hard) // 4 + 1) :])  # from the quarter that needs the most moves
            chosen, moves = state, []
            while before := found[state]:
                state, name = before
                moves.append(name)
            return chosen, moves


def _pulled(solved: Sequence[State]) -> dict[State, tuple[State, str] | None]:
    """Backward breadth-first search from solved states. Maps each state, nearest first, to (next state, move) on a
    shortest solution; solved states map to None.
    """
    found: dict[State, tuple[State, str] | None] = dict.fromkeys(solved)
    waiting = deque(solved)
    while waiting and len(found) < MOST_STATES:
        state = waiting.popleft()
        for name, (rows, columns) in MOVES.items():
            back, ahead = _shifted(state.player, -rows, -columns), _shifted(state.player, rows, columns)
            if back in state.walls or back in state.boxes:
                continue
            before = [replace(state, player=back)]
            if ahead in state.boxes:
                before.append(replace(state, player=back, boxes=state.boxes - {ahead} | {state.player}))
            for one in before:
                if one not in found:
                    found[one] = (state, name)
                    waiting.append(one)
    return found


def _shifted(cell: Cell, rows: int, columns: int) -> Cell:
    return cell[0] + rows, cell[1] + columns


def written(state: State) -> str:
    """The level as text for `sokoban.parse`."""

    def mark(cell: Cell) -> str:
        wall, floor, goal, placed, box, player, on_goal = [*MARKS]
        if cell == state.player:
            return on_goal if cell in state.goals else player
        if cell in state.boxes:
            return placed if cell in state.goals else box
        return wall if cell in state.walls else goal if cell in state.goals else floor

    return "\n".join("".join(mark((r, c)) for c in range(state.size[1])) for r in range(state.size[0]))
