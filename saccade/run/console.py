"""Shows the progress of a run: one plain line per step, or the live display of a plugin on a terminal.

Also holds the run's phase timer, because the display names the current phase. Knows metric names, not how they are
computed. Calls inside a step are cheap: a display reads the state when it draws.

    with Console("rl", "counting") as console:
        logging.getLogger("saccade").info("shown above the display, and in the log file")
        with console.phase("rollout"): ...
        console.step(1, {"reward/mean": 0.4} | console.clock.lap())
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from saccade.registry import HOOKS
from saccade.run.messages import shown_by
from saccade.run.metrics import MEASURE

Row = Mapping[str, float | str]
Cells = list[tuple[str, str]]  # label and text
Columns = tuple[tuple[str, str, Callable[[float], str]], ...]  # label, metric, how it is shown


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# The columns of a step line, in order; a column without its metric is left out.
LOST = (("abstain", "reward/abstain_rate"), ("error", "reward/error_rate"))  # only if above 0
COLUMNS: Columns = (
    ("reward", "reward/mean", lambda v: f"{v:.3f}"),
    ("acc", "reward/accuracy", lambda v: f"{v:.3f}"),
    ("dead", "group/dead_frac", percent),
    ("loss", "sft/loss", lambda v: f"{v:.4f}"),
    ("loss", "dpo/loss", lambda v: f"{v:.4f}"),
    ("right", "dpo/accuracy", percent),
    ("margin", "dpo/margin", short),
    ("loss", "rm/loss", lambda v: f"{v:.4f}"),
    ("right", "rm/accuracy", percent),
    ("gap", "rm/gap", short),
    ("len", "length/response_mean", lambda v: f"{v:.1f}"),
    ("grad", "policy/grad_norm", short),
    ("time", "time/step", lambda v: f"{v:.2f}s" if v < 10 else f"{v:.0f}s"),
)
NEARLY_ALL = 1 - 1e-9  # of shares, up to rounding of their sum


def step_line(step: int, total: int | None, metrics: Row) -> str:
    """`step 12/350  reward 0.412  acc 0.380  dead 25%  …  bottleneck rollout 61%`."""
    cells = [f"step {step}/{total}" if total else f"step {step}"]
    if sum(number(metrics, name) or 0.0 for _, name in LOST) >= NEARLY_ALL:
        cells.append("nothing could be scored")
    shown = leading_cells(metrics) + validation_cells(metrics)
    return "  ".join([*cells, *(f"{label} {text}" for label, text in shown)])


def unscored(metrics: Row, named: tuple[tuple[str, str], ...]) -> Cells:
    """`abstain 32%`, `error 5%`: the shares without a score, if above 0."""
    found = ((label, number(metrics, name)) for label, name in named)
    return [(label, percent(v) if v >= 0.01 else "<1%") for label, v in found if v]


def leading_cells(metrics: Row) -> Cells:
    """The shares without a score, the columns, and the phase that took longest."""
    shown = unscored(metrics, LOST) + column_cells(COLUMNS, metrics)
    name = metrics.get("time/bottleneck")
    share = number(metrics, f"time/share/{name}")
    if name is not None:
        shown.append(("bottleneck", str(name) if share is None else f"{name} {percent(share)}"))
    return shown


def column_cells(columns: Columns, metrics: Row) -> Cells:
    return [(label, show(value)) for label, name, show in columns if (value := number(metrics, name)) is not None]


def validation_cells(metrics: Row) -> Cells:
    return [
        (name.removesuffix("/accuracy"), f"{value:.3f}")
        for name in metrics
        if MEASURE.fullmatch(name) and (value := number(metrics, name)) is not None
    ]


def number(metrics: Row, name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or isinstance(value, str) else float(value)


class PhaseClock:
    """Seconds per phase since the last lap. A nested phase pauses the one around it, and time outside all phases is
    `other`, so the phases of a step add up to the step. One thread only.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._mark = self._lap_began = now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`with clock.phase("rollout"):` counts its body under that name."""
        self._charge()
        self.open.append(name)
        try:
            yield
        finally:
            self._charge()
            self.open.pop()

    def lap(self) -> dict[str, float | str]:
        """Seconds, shares and the bottleneck of the step that ends here; the next step begins."""
        self._charge()
        total = self._mark - self._lap_began
        seconds, self._seconds, self._lap_began = self._seconds, {}, self._mark
        seconds["other"] = total - sum(seconds.values())
        lap: dict[str, float | str] = {"time/step": total}
        lap |= {f"time/{name}": value for name, value in seconds.items()}
        if total > 0:
            lap |= {f"time/share/{name}": value / total for name, value in seconds.items()}
            lap["time/bottleneck"] = max(seconds, key=seconds.__getitem__)
        return lap

    def _charge(self) -> None:
        """Book the time since the last mark on the innermost open phase."""
        now = self._now()
        if self.open:
            name = self.open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now


class Console:
    """The phase timer of one run, and the state that a display draws."""

    def __init__(
        self, command: str, name: str, *, log: Path | None = None, file: IO[str] | None = None, live: bool | None = None
    ) -> None:
        """`log`: file to append notes and step lines to. `live`: draw a live display; None: if `file` is a terminal."""
        self.clock = PhaseClock()
        self.total: int | None = None  # steps, where that is known
        self.title = f"saccade {command} · {name}"
        self.last, self.metrics = 0, dict[str, float | str]()  # of the last step
        self.done: tuple[int, int] | None = None  # (done, total) of the current phase
        self.idle = "starting"
        self.ends: deque[float] = deque(maxlen=24)  # when the last steps ended
        self._log = log
        self._file = file or sys.stdout
        self._messages = ExitStack()
        if live is None:
            live = self._file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        self._display = HOOKS["live_display"](self, self._file) if live else None

    def __enter__(self) -> Console:
        """From here on messages of the package appear above the display."""
        self.ends.append(time.monotonic())
        self._messages.enter_context(shown_by(self.note))
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.idle = "ended"
        self._messages.close()
        if self._display is not None:
            self._display.stop()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the body under `name` and show it."""
        self.done = None
        return self.clock.phase(name)

    def progress(self, done: int, total: int) -> None:
        """How far the current phase is."""
        self.done = (done, total)

    def step(self, step: int, metrics: Row) -> None:
        """Show a finished step."""
        self.last, self.metrics = step, dict(metrics)
        self.done, self.idle = None, "between phases"
        self.ends.append(time.monotonic())
        line = step_line(step, self.total, metrics)
        self.log(line)
        if self._display is None:
            print(line, file=self._file, flush=True)
        else:
            self._display.step(metrics)

    def note(self, text: str) -> None:
        """Print above the display, and write to the log file."""
        self.log(text)
        if self._display is None:
            print(text, file=self._file, flush=True)
        else:
            self._display.note(text)

    def log(self, text: str) -> None:
        """Write to the log file only."""
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
        except OSError as error:
            path, self._log = self._log, None
            self.note(f"{path} cannot be written and is left out from here: {error}")
