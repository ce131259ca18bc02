"""Sokoban: what lies under things is remembered, and every turn shows its frame."""

import gzip

import numpy as np
import pytest

from saccade.config import EnvConfig
from saccade.environments import EnvContext, build
from saccade.media.images import decode
from saccade.plugins.sokoban.sokoban import COLOURS, draw, move, parse, read_moves
from saccade.plugins.verifiers.extract import extract
from saccade.types import Message, Sample

CORRIDOR = "#####\n#@$.#\n#####"
YARD = ["#######", "#.   .#", "# $ $ #", "#  @  #", "#######"]


def play(state, *moves):
    total = 0.0
    for name in moves:
        state, reward = move(state, name)
        total += reward
    return state, total


def test_pushes_of_boxes():
    solved, total = play(parse(CORRIDOR), "right")
    assert solved.solved and total == pytest.approx(10.9)
    same, total = play(parse(CORRIDOR), "left")
    assert same == parse(CORRIDOR) and total == pytest.approx(-0.1)
    assert play(parse("#####\n#@$$ #\n#####"), "right")[0].player == (1, 1)
    assert play(parse("####\n#@$#\n####"), "right")[0].boxes == {(1, 2)}
    assert play(parse("$@"), "left", "right", "up")[0].boxes == {(0, 0)}  # no wall around it


def test_goals_under_boxes_and_players_are_remembered():
    state = parse("######\n#+* .#\n######")
    assert len(state.goals) == 3 and state.placed == 1
    moved, total = play(state, "right")
    assert moved.placed == 0 and total == pytest.approx(-1.1)
    back, total = play(moved, "right")
    assert back.solved and total == pytest.approx(10.9)
    grid = parse([[0, 0, 0, 0, 0, 0], [0, 6, 3, 1, 2, 0], [0, 0, 0, 0, 0, 0]])
    assert grid == state


def test_levels_and_moves_that_are_none():
    for level in ("", "###", "#@.#", "#@@$.#", "#@$x#"):
        with pytest.raises(ValueError, match="a level has"):
            parse(level)
    for cell in (7, -1, True, 2.5, None):
        with pytest.raises(ValueError, match=r"a level has no cells .* integers are 0 to 6"):
            parse([[5, 4, cell]])
    assert parse(np.array([[5, 4, 2]])).goals == parse("@$.").goals
    assert read_moves("Up, R  left,D") == (["up", "right", "left", "down"], "")
    assert read_moves("right, jump")[1] == "jump"


def test_pictures_show_every_piece():
    picture = draw(parse(YARD), 28)
    assert picture.shape == (140, 196, 3) and picture.dtype == np.uint8
    assert tuple(picture[14, 14]) == COLOURS["wall"]
    assert tuple(picture[42, 42]) == COLOURS["goal"]
    assert tuple(picture[70, 70]) == COLOURS["box"]
    assert tuple(picture[98, 98]) == COLOURS["player"]


def test_real_levels_are_read(shared):
    with gzip.open(shared / "sokoban" / "boxoban.valid.txt.gz", "rt") as file:
        text = file.read()
    levels = [block.split("\n", 1)[1] for block in text.strip("\n").split("\n\n")]
    states = [parse(level) for level in levels]
    assert len(states) == 200
    assert {(len(s.boxes), len(s.goals), s.size) for s in states} == {(4, 4, (10, 10))}


@pytest.fixture
def start():
    def begun(level, **options):
        context = EnvContext(answer=lambda text: extract(text, ["answer_tag"]) or None)
        environment = build(EnvConfig(name="sokoban_step", **options), context)
        sample = Sample(id="s", messages=(Message(role="user", parts=("Push.",)),), extra={"level": level})
        return environment, environment.reset(sample, 0)

    return begun


def turn(environment, moves: str):
    return environment.step(Message(role="assistant", parts=(f"<answer>{moves}</answer>",)))


def test_turn_by_turn(start):
    environment, (asked,) = start(YARD)
    assert asked.parts[0] == "Push." and (decode(asked.media[0]) == draw(parse(YARD))).all()
    first = turn(environment, "left, up")
    assert first.reward == pytest.approx(-0.2) and not first.done
    assert "After 2 moves, 0 of 2 boxes are on goals." in first.messages[0].text
    state, _ = play(parse(YARD), "left", "up")
    assert (decode(first.messages[0].media[0]) == draw(state)).all()
    wrong = turn(environment, "left, jump")
    assert "jump is no move" in wrong.messages[0].text and not wrong.messages[0].media
    assert turn(environment, ", ".join(["up"] * 51)).info["tool_calls"][-1]["reason"] == "many_moves"
    assert wrong.info["moves"] == 2 and wrong.info["tool_counts"]["failed"] == 1
    end = environment.step(Message(role="assistant", parts=("I give up",)))
    assert end.done and end.info["end_reason"] == "eos_no_answer"


def test_the_end_of_a_game(start):
    solved = turn(start(CORRIDOR)[0], "r, up, up")
    assert solved.done and solved.reward == pytest.approx(10.9) and solved.info["solved"]
    assert solved.info["end_reason"] == "env_done" and solved.info["moves"] == 1
    environment, _ = start(YARD)
    for _ in range(2):
        assert not turn(environment, " ".join(["down"] * 50)).done
    last = turn(environment, " ".join(["down"] * 50))
    assert last.done and last.info["moves"] == 120 and not last.info["solved"]
    with pytest.raises(ValueError, match="solved at its start"):
        start("#####\n#@ *#\n#####")
    with pytest.raises(ValueError, match="level: the row has no such column"):
        build(EnvConfig(name="sokoban_step"), EnvContext(answer=lambda text: None)).reset(
            Sample(id="s", messages=(Message(role="user", parts=("x",)),)), 0
        )
