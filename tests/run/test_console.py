"""The display leads with what matters, and measures the phases."""

import io
import logging

import pytest

from saccade.run.console import Console, PhaseClock, step_line

STEP = {
    "policy/grad_norm": 0.8312, "reward/mean": 0.4123, "reward/accuracy": 0.38, "group/dead_frac": 0.25,
    "length/response_mean": 11.23, "time/step": 0.214, "time/share/rollout": 0.61, "time/share/update": 0.3,
    "time/bottleneck": "rollout", "val/six/accuracy": 0.7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "total", "metrics", "line"),
    [
        (12, 350, STEP, "step 12/350  reward 0.412  acc 0.380  dead 25%  len 11.2  grad 0.831  time 0.21s  "
                        "bottleneck rollout 61%  val/six 0.700"),
        (3, None, {"sft/loss": 1.25, "time/step": 12.4}, "step 3  loss 1.2500  time 12s"),
        (1, 2, {"reward/mean": 0.5, "reward/abstain_rate": 0.32, "reward/error_rate": 0.004},
         "step 1/2  abstain 32%  error <1%  reward 0.500"),
        (1, 2, {"reward/abstain_rate": 0.7, "reward/error_rate": 0.3, "group/dead_frac": 1.0},
         "step 1/2  nothing could be scored  abstain 70%  error 30%  dead 100%"),
    ],
)  # fmt: skip
def test_the_line_of_a_step(step, total, metrics, line):
    assert step_line(step, total, metrics) == line


def test_a_pipe_gets_one_line_per_step_and_notes(tmp_path):
    out, log = io.StringIO(), tmp_path / "log.txt"
    with Console("rl", "counting", file=out, log=log) as console:
        console.total = 2
        logging.getLogger("saccade.somewhere").info("hello [bold]")
        logging.getLogger("saccade").warning("100% of it")
        for step in (1, 2):
            with console.phase("rollout"):
                console.progress(1, 4)
            console.step(step, {"reward/mean": 0.5})
    logging.getLogger("saccade").warning("nobody listens any more")
    assert out.getvalue() == "hello [bold]\nWARNING: 100% of it\nstep 1/2  reward 0.500\nstep 2/2  reward 0.500\n"
    logged = log.read_text().splitlines()
    assert [line[20:] for line in logged] == out.getvalue().splitlines()
    assert logged[0][4] == "-" and logged[0][13] == ":"


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    out = io.StringIO()
    with Console("rl", "counting", file=out, log=tmp_path / "gone" / "log.txt") as console:
        console.note("first")
        console.note("second")
    assert out.getvalue().count("is left out from here") == 1
    assert "first\n" in out.getvalue() and "second\n" in out.getvalue()


def test_a_terminal_gets_a_live_display():
    out = io.StringIO()
    with Console("rl", "counting", file=out, live=True) as console:
        console.total = 350
        with console.phase("rollout"):
            console.progress(37, 64)
            console._display.live.refresh()
        console.note("a note <b>[i]")
        for step in (1, 2):
            console.step(step, STEP)
        console._display.live.refresh()
    shown = out.getvalue()
    for text in ("saccade rl · counting", "rollout  37/64", "a note <b>[i]", "step 2/350"):
        assert text in shown, text
    for text in ("0.412", "25%", "rollout 61%", "■", "left", "▁▁"):
        assert text in shown, text


def test_a_nested_phase_pauses_the_outer_one():
    seconds = [0.0]
    clock = PhaseClock(lambda: seconds[0])
    with clock.phase("rollout"):
        seconds[0] += 3
        with clock.phase("reward_wait"):
            assert clock.open[-1] == "reward_wait"
            seconds[0] += 1
    with clock.phase("rollout"):  # the same phase twice adds up
        seconds[0] += 2
    seconds[0] += 4
    assert clock.lap() == {
        **{"time/step": 10.0, "time/rollout": 5.0, "time/reward_wait": 1.0, "time/other": 4.0},
        **{"time/share/rollout": 0.5, "time/share/reward_wait": 0.1, "time/share/other": 0.4},
        "time/bottleneck": "rollout",
    }
    with clock.phase("save"):  # which is open when a lap ends
        seconds[0] += 1
        assert clock.lap()["time/save"] == 1
        seconds[0] += 2
    seconds[0] += 3
    assert clock.lap()["time/bottleneck"] == "other" and clock.open == []
    assert clock.lap() == {"time/step": 0.0, "time/other": 0.0}
