"""Sokoban in turns: the policy writes moves in the answer tag, and gets a new image and a reward.

The column `level` of a row has its level (see sokoban.py). An image of the initial state is appended
to the question, unless the row has an image.

    saccade rl run.yaml env.name=sokoban_step data.train=levels.jsonl
"""

from collections.abc import Sequence
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import EnvContext, Kind, Step
from saccade.environments.texts import render_parts, render_text
from saccade.media.images import open_media
from saccade.plugins.sokoban import sokoban
from saccade.types import Media, Message, Sample, replace

MOST_MOVES = 50  # per turn
MOST_STEPS = 120  # moves per episode
LONGEST_WORD = 40  # characters of an invalid move that are quoted


class SokobanStep:
    def __init__(self, env: EnvConfig, context: EnvContext) -> None:
        self.env, self.context = env, context
        self.moves = self.turn = 0
        self.calls: list[dict[str, Any]] = []

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        sokoban.require_level(sample)
        self.state = sokoban.start(sample.extra["level"])
        if sample.media:
            return sample.messages
        *before, last = sample.messages
        return (*before, replace(last, parts=(*last.parts, "\n", self._frame())))

    def step(self, message: Message) -> Step:
        self.turn += 1
        answer = self.context.answer(message.text)
        if not answer:
            return Step((), None, True, self._info(end_reason="eos_no_answer"))
        moves, strange = sokoban.read_moves(answer)
        written = [move[:LONGEST_WORD] for move in moves[:MOST_MOVES]]
        noted = {"turn": self.turn, "name": "move", "args": {"moves": written}}
        if strange or len(moves) > MOST_MOVES:
            reason = "moves" if strange else "many_moves"
            text = render_text(reason, word=strange[:LONGEST_WORD], count=len(moves), most=MOST_MOVES)
            self.calls.append(noted | {"ok": False, "reason": reason})
            error = Message(role="user", parts=render_parts("error", k=self.turn, reason=text))
            return Step((error,), -self.env.invalid_call_penalty, False, self._info())
        self.calls.append(noted | {"ok": True, "reason": ""})
        earned = 0.0
        for move in moves:
            self.state, reward = sokoban.move(self.state, move)
            self.moves += 1
            earned += reward
            if self.state.solved or self.moves >= MOST_STEPS:
                return Step((), earned, True, self._info(end_reason="env_done"))
        counts = {"moves": self.moves, "placed": self.state.placed, "boxes": len(self.state.boxes)}
        shown = render_parts("frame", **counts, image=self._frame())
        return Step((Message(role="user", parts=shown),), earned, False, self._info())

    def close(self) -> None:
        pass

    def _frame(self) -> Media:
        least = min(self.env.min_pixels, 28 * 28)
        return open_media(sokoban.draw(self.state), min_pixels=least, max_pixels=self.env.max_pixels)

    def _info(self, **more: Any) -> dict[str, Any]:
        failed = sum(not call["ok"] for call in self.calls)
        counts = {"calls": len(self.calls), "failed": failed, "noop": 0}
        game = {"solved": self.state.solved, "moves": self.moves, "placed": self.state.placed}
        return {"tool_calls": list(self.calls), "tool_counts": counts, **game, **more}


KIND = Kind(
    calls=("action",),
    explain=lambda env, user_tools: render_text("sokoban"),
    rewards=True,
    make=lambda env, context, user: SokobanStep(env, context),
    check_row=sokoban.require_level,
)
