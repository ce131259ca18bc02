"""Sokoban: levels, moves, rewards and images. Pure functions over a frozen state.

Level text: `#` wall, blank floor, `.` goal, `$` box, `*` box on goal, `@` player, `+` player on
goal; or a grid of integers (0 wall, 1 floor, 2 goal, 3 box on goal, 4 box, 5 player, 6 player on
goal). Goals stay under boxes and the player.

    >>> moved, reward = move(start("#####\\n#@$.#\\n#####"), "right")
    >>> moved.solved, round(reward, 1)
    (True, 10.9)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from saccade.types import Sample

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LETTERS = {name[0]: name for name in MOVES}
MARKS = "# .*$@+"  # in the order of the integers
STEP, ONTO_GOAL, OFF_GOAL, SOLVED = -0.1, 1.0, -1.0, 10.0
LARGEST = 64  # rows or columns
COLOURS = {
    "wall": (92, 84, 78),
    "floor": (236, 230, 216),
    "goal": (214, 69, 65),
    "box": (190, 132, 62),
    "placed": (74, 148, 86),
    "player": (52, 98, 178),
}

Cell = tuple[int, int]  # row, column


@dataclass(frozen=True, kw_only=True)
class State:
    size: Cell
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def placed(self) -> int:
        return len(self.boxes & self.goals)

    @property
    def solved(self) -> bool:
        return self.boxes <= self.goals


def parse(level: str | Sequence[Any]) -> State:
    """Parse a level: text, rows of text, rows of integers, or a `.npy` file of these. Raises ValueError
    if it is invalid.
    """
    if isinstance(level, str) and level.endswith(".npy"):
        level = np.load(level, allow_pickle=False)
    rows = level.strip("\n").split("\n") if isinstance(level, str) else list(level)
    if rows and not isinstance(rows[0], str):
        rows = ["".join(_mark(cell) for cell in row) for row in rows]
    cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    if strange := sorted(set(cells.values()) - set(MARKS)):
        raise ValueError(f"a level has no cells {', '.join(map(repr, strange))}; use {MARKS!r}")
    found = {mark: frozenset(at for at, m in cells.items() if m == mark) for mark in MARKS}
    players, boxes = found["@"] | found["+"], found["$"] | found["*"]
    size = (len(rows), max(map(len, rows), default=0))
    if len(players) != 1 or not boxes or max(size) > LARGEST:
        raise ValueError(
            f"a level has one player, a box and at most {LARGEST} rows and columns; this one has "
            f"{len(players)} players, {len(boxes)} boxes and {size[0]}x{size[1]} cells"
        )
    goals = found["."] | found["*"] | found["+"]
    return State(size=size, walls=found["#"], goals=goals, boxes=boxes, player=next(iter(players)))


def start(level: str | Sequence[Any]) -> State:
    """Parse a level to play. Raises ValueError also if it is already solved: any move would count as success."""
    state = parse(level)
    if state.solved:
        raise ValueError("a level is solved at its start: every box stands on a goal")
    return state


def require_level(sample: Sample) -> None:
    """Raise ValueError for a row whose level is missing, invalid or already solved: it teaches nothing."""
    level = sample.extra.get("level")
    if level is None:
        raise ValueError("level: the row has no such column, so there is nothing to play")
    try:
        start(level)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"level: {error}") from None


def _mark(number: Any) -> str:
    if isinstance(number, bool) or number not in range(len(MARKS)):
        raise ValueError(f"a level has no cells {number!r}; integers are 0 to {len(MARKS) - 1}")
    return MARKS[int(number)]


def read_moves(text: str) -> tuple[list[str], str]:
    """Returns the moves, separated by commas or blanks, and the first word that is no move (else empty)."""
    words = [word for word in re.split(r"[,\s]+", text.strip().lower()) if word]
    moves = [LETTERS.get(word, word) for word in words]
    return moves, next((word for word in moves if word not in MOVES), "")


def move(state: State, name: str) -> tuple[State, float]:
    """Returns the state after a move and the reward. A blocked move changes nothing and costs a step."""
    rows, columns = MOVES[name]
    to = (state.player[0] + rows, state.player[1] + columns)
    behind = (to[0] + rows, to[1] + columns)
    pushes = to in state.boxes
    if not _free(to, state) or (pushes and (behind in state.boxes or not _free(behind, state))):
        return state, STEP
    if not pushes:
        return replace(state, player=to), STEP
    after = replace(state, player=to, boxes=state.boxes - {to} | {behind})
    gained = ONTO_GOAL * (behind in state.goals) + OFF_GOAL * (to in state.goals)
    return after, STEP + gained + SOLVED * after.solved


def _free(cell: Cell, state: State) -> bool:
    return 0 <= cell[0] < state.size[0] and 0 <= cell[1] < state.size[1] and cell not in state.walls


def draw(state: State, cell: int = 28) -> np.ndarray:
    """Draw the state: [rows · cell, columns · cell, 3] uint8; `cell` in pixels."""
    picture = np.empty((state.size[0] * cell, state.size[1] * cell, 3), np.uint8)
    picture[:] = COLOURS["floor"]
    ring = _disc(cell, 0.22)
    body = np.zeros((cell, cell), bool)
    body[cell // 7 : -(cell // 7), cell // 7 : -(cell // 7)] = True
    layers = (
        (state.walls, np.ones((cell, cell), bool), "wall"),
        (state.goals, ring, "goal"),
        (state.boxes - state.goals, body, "box"),
        (state.boxes & state.goals, body, "placed"),
        ({state.player}, _disc(cell, 0.38), "player"),
    )
    for cells, shape, colour in layers:
        for row, column in cells:
            part = picture[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
            part[shape] = COLOURS[colour]
    return picture


def _disc(cell: int, radius: float) -> np.ndarray:
    middle = (np.arange(cell) + 0.5) / cell - 0.5
    return middle[:, None] ** 2 + middle[None] ** 2 < radius**2
