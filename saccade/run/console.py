"""Progress of a run: a live display on a terminal, one plain line per step in a pipe.

Also the run's phase timer, because the display names the phase that is timed. Knows metric names,
not what made them. Calls inside a step cost a microsecond: a thread of the display looks at the
state four times a second.

    with Console(350, "rl") as console:
        logging.getLogger("saccade").info("shown above the display, and in the log file")
        with console.phase("rollout"): ...
        console.step(1, {"reward/mean": 0.4} | console.lap())
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import IO

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from saccade.run.clock import Phase, PhaseClock
from saccade.run.messages import shown_by
from saccade.run.metrics import MEASURE

Row = Mapping[str, float | str]
Columns = tuple[tuple[str, str, Callable[[float], str]], ...]  # label, metric, how it is shown


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 10 else f"{value:.0f}s"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# What a step line leads with, in order; a column without its metric is left out.
LOST = (("abstain", "reward/abstain_rate"), ("error", "reward/error_rate"))  # only where there are
COLUMNS: Columns = (
    ("reward", "reward/mean", lambda v: f"{v:.3f}"),
    ("acc", "reward/accuracy", lambda v: f"{v:.3f}"),
    ("dead", "group/dead_frac", _percent),
    ("loss", "sft/loss", lambda v: f"{v:.4f}"),
    ("loss", "dpo/loss", lambda v: f"{v:.4f}"),
    ("right", "dpo/accuracy", _percent),
    ("margin", "dpo/margin", _short),
    ("loss", "rm/loss", lambda v: f"{v:.4f}"),
    ("right", "rm/accuracy", _percent),
    ("gap", "rm/gap", _short),
    ("len", "length/response_mean", lambda v: f"{v:.1f}"),
    ("grad", "policy/grad_norm", _short),
    ("time", "time/step", _seconds),
)
MORE_COLUMNS: Columns = (
    ("format", "reward/format", _percent),
    ("cut", "length/truncated_frac", _percent),
    ("kl", "policy/kl_ref", _short),
    ("entropy", "policy/entropy", _short),
    ("lr", "policy/lr", lambda v: f"{v:.2g}"),
    ("tok/s", "perf/rollout_tokens_per_s", _short),
)
TREND = "reward/accuracy"
PHASE_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_black")
NEARLY_ALL = 1 - 1e-9  # of a sum of shares
BLOCKS = "▁▂▃▄▅▆▇█"
REFRESH_PER_SECOND = 4


def step_line(step: int, total: int | None, metrics: Row) -> str:
    """`step 12/350  reward 0.412  acc 0.380  dead 25%  …  bottleneck rollout 61%`."""
    cells = [f"step {step}/{total}" if total else f"step {step}"]
    if sum(_number(metrics, name) or 0.0 for _, name in LOST) >= NEARLY_ALL:
        cells.append("nothing could be scored")
    shown = unscored(metrics, LOST) + _cells(COLUMNS, metrics)
    cells += [f"{label} {text}" for label, text in shown]
    cells += [f"{label} {text}" for label, text in _bottleneck(metrics)]
    cells += [f"{label} {text}" for label, text in _validation_cells(metrics)]
    return "  ".join(cells)


def unscored(metrics: Row, named: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """`abstain 32%`, `error 5%`: what has no score, where that is anything."""
    found = ((label, _number(metrics, name)) for label, name in named)
    return [(label, _percent(v) if v >= 0.01 else "<1%") for label, v in found if v]


def sparkline(values: list[float]) -> str:
    """Height between the smallest and the largest value; a flat line stays low."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


class Console:
    """The display and the phase timer of one run."""

    def __init__(
        self,
        total_steps: int | None,
        command: str,
        *,
        name: str = "",
        log: Path | None = None,
        file: IO[str] | None = None,
        live: bool | None = None,
    ) -> None:
        """`log`: notes and step lines are appended to it. `live`: empty asks whether `file` is a
        terminal.
        """
        self.clock = PhaseClock()
        self._total = total_steps
        self._title = f"saccade {command}" + (f" · {name}" if name else "")
        self._log = log
        self._file = file or sys.stdout
        self._step, self._metrics = 0, dict[str, float | str]()
        self._validation: dict[str, str] = {}  # the last of each set
        self._done: tuple[int, int | None] | None = None
        self._idle = "starting"
        self._messages = ExitStack()
        self._trend: deque[float] = deque(maxlen=48)
        self._ends: deque[float] = deque(maxlen=24)  # when the last steps ended
        terminal = Terminal(file=self._file, force_terminal=live, emoji=False)
        if live is None:
            live = self._file.isatty() and not terminal.is_dumb_terminal
        self._spinner = Spinner("dots")
        self._live = (
            Live(
                console=terminal,
                get_renderable=self._render,
                refresh_per_second=REFRESH_PER_SECOND,
                vertical_overflow="crop",
            )
            if live
            else None
        )

    def __enter__(self) -> Console:
        """From here on messages of the package appear above the display."""
        self._ends.append(time.monotonic())
        self._messages.enter_context(shown_by(self.note))
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._idle = "ended"
        self._messages.close()
        if self._live is not None:
            self._live.stop()

    def expect(self, total_steps: int) -> None:
        """How many steps there will be, once that is known."""
        self._total = total_steps

    def phase(self, name: str) -> Phase:
        """Time the body under `name` and show it."""
        self._done = None
        return self.clock.phase(name)

    def progress(self, done: int, total: int | None = None) -> None:
        """How far the current phase is."""
        self._done = (done, total)

    def lap(self) -> dict[str, float | str]:
        """`time/…` metrics of the step that ends here."""
        return self.clock.lap()

    def step(self, step: int, metrics: Row) -> None:
        """Show a finished step."""
        self._step, self._metrics = step, dict(metrics)
        self._done, self._idle = None, "between phases"
        self._validation |= dict(_validation_cells(metrics))
        self._ends.append(time.monotonic())
        if (value := _number(metrics, TREND)) is not None:
            self._trend.append(value)
        line = step_line(step, self._total, metrics)
        self.log(line)
        if self._live is None:
            print(line, file=self._file, flush=True)

    def note(self, text: str) -> None:
        """Print above the display, and write to the log file."""
        self.log(text)
        if self._live is None:
            print(text, file=self._file, flush=True)
        else:
            self._live.console.print(Text(text), soft_wrap=True)

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

    # -- the live display --

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = [self._head()]
        if self._metrics:
            rows += [self._table(), *self._time_split(), *self._trend_line()]
        return Group(*rows)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 2))
        self._spinner.text = Text(self._phase_text(), style="bold")
        total = self._total or max(self._step, 1)
        bar = ProgressBar(total=total, completed=min(self._step, total), width=24)
        count = f"{self._step}/{self._total}" if self._total else f"{self._step}"
        head.add_row(Text(self._title, style="bold cyan"), bar, Text(f"step {count}"), self._eta())
        head.add_row(self._spinner)
        return head

    def _phase_text(self) -> str:
        name = self.clock.current or self._idle
        if self._done is None:
            return name
        done, total = self._done
        return f"{name}  {done}/{total}" if total else f"{name}  {done}"

    def _eta(self) -> Text:
        if not self._total or len(self._ends) < 2 or self._step >= self._total:
            return Text("")
        per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left = max(0.0, (self._total - self._step) * per_step - (time.monotonic() - self._ends[-1]))
        hours, minutes, seconds = int(left // 3600), int(left % 3600 // 60), int(left % 60)
        return Text(f"{hours}:{minutes:02d}:{seconds:02d} left", style="dim")

    def _table(self) -> Table:
        cells = unscored(self._metrics, LOST) + _cells(COLUMNS, self._metrics)
        cells += _bottleneck(self._metrics)
        cells += _cells(MORE_COLUMNS, self._metrics) + list(self._validation.items())
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for label, _ in cells:
            table.add_column(label, style="bold", header_style="dim", no_wrap=True)
        table.add_row(*[text for _, text in cells])
        return table

    def _time_split(self) -> list[Text]:
        shares = {
            name.removeprefix("time/share/"): value
            for name in self._metrics
            if name.startswith("time/share/")
            if (value := _number(self._metrics, name)) is not None
        }
        if not shares:
            return []
        bar, legend, width = Text(), Text(), 48
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        for (name, share), style in zip(ordered, cycle(PHASE_STYLES), strict=False):
            bar.append("█" * round(share * width), style=style)
            if share >= 0.01:
                legend.append("■ ", style=style).append(f"{name} {_percent(share)}  ", style="dim")
        return [bar, legend]

    def _trend_line(self) -> list[Text]:
        if len(self._trend) < 2:
            return []
        line = Text("accuracy ", style="dim").append(sparkline(list(self._trend)), style="green")
        return [line.append(f" {min(self._trend):.2f} … {max(self._trend):.2f}")]


def _cells(columns: Columns, metrics: Row) -> list[tuple[str, str]]:
    return [(label, show(value)) for label, name, show in columns if (value := _number(metrics, name)) is not None]


def _bottleneck(metrics: Row) -> list[tuple[str, str]]:
    name = metrics.get("time/bottleneck")
    share = _number(metrics, f"time/share/{name}")
    if name is None:
        return []
    return [("bottleneck", str(name) if share is None else f"{name} {_percent(share)}")]


def _validation_cells(metrics: Row) -> list[tuple[str, str]]:
    return [
        (name.removesuffix("/accuracy"), f"{value:.3f}")
        for name in metrics
        if MEASURE.fullmatch(name) and (value := _number(metrics, name)) is not None
    ]


def _number(metrics: Row, name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or isinstance(value, str) else float(value)
