"""The live display of a run on a terminal: progress, the last step, where the time goes.

It is drawn by a thread of rich four times a second, from the state of the run's console.

    display = LiveDisplay(console, sys.stdout)
    display.start()
"""

import time
from collections import deque
from datetime import timedelta
from itertools import cycle
from typing import IO

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from saccade.run.console import Console, Row, column_cells, leading_cells, number, percent, short, validation_cells

MORE_COLUMNS = (
    ("format", "reward/format", percent),
    ("cut", "length/truncated_frac", percent),
    ("kl", "policy/kl_ref", short),
    ("entropy", "policy/entropy", short),
    ("lr", "policy/lr", lambda v: f"{v:.2g}"),
    ("tok/s", "perf/rollout_tokens_per_s", short),
)
TREND = "reward/accuracy"
PHASE_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_black")
BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Height between the smallest and the largest value; a flat line stays low."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


class LiveDisplay:
    def __init__(self, console: Console, file: IO[str]) -> None:
        self.console = console
        self._validation: dict[str, str] = {}  # latest result of each validation set
        self._trend: deque[float] = deque(maxlen=48)
        self._spinner = Spinner("dots")
        terminal = Terminal(file=file, force_terminal=True, emoji=False)
        self.live = Live(console=terminal, get_renderable=self._render, refresh_per_second=4, vertical_overflow="crop")

    def start(self) -> None:
        self.live.start(refresh=True)

    def stop(self) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.live.console.print(Text(text), soft_wrap=True)

    def step(self, metrics: Row) -> None:
        self._validation |= dict(validation_cells(metrics))
        if (value := number(metrics, TREND)) is not None:
            self._trend.append(value)

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = [self._head()]
        if self.console.metrics:
            rows += [self._table(self.console.metrics), *_time_split(self.console.metrics), *self._trend_line()]
        return Group(*rows)

    def _head(self) -> Table:
        run = self.console
        head = Table.grid(padding=(0, 2))
        name = next(reversed(run.clock.open), run.idle)
        self._spinner.text = Text(f"{name}  {run.done[0]}/{run.done[1]}" if run.done else name, style="bold")
        total = run.total or max(run.last, 1)
        bar = ProgressBar(total=total, completed=min(run.last, total), width=24)
        count = f"{run.last}/{run.total}" if run.total else f"{run.last}"
        head.add_row(Text(run.title, style="bold cyan"), bar, Text(f"step {count}"), self._time_left())
        head.add_row(self._spinner)
        return head

    def _time_left(self) -> Text:
        run = self.console
        if not run.total or len(run.ends) < 2 or run.last >= run.total:
            return Text("")
        per_step = (run.ends[-1] - run.ends[0]) / (len(run.ends) - 1)
        left = max(0.0, (run.total - run.last) * per_step - (time.monotonic() - run.ends[-1]))
        return Text(f"{timedelta(seconds=int(left))} left", style="dim")

    def _table(self, metrics: Row) -> Table:
        cells = leading_cells(metrics) + column_cells(MORE_COLUMNS, metrics) + list(self._validation.items())
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for label, _ in cells:
            table.add_column(label, style="bold", header_style="dim", no_wrap=True)
        table.add_row(*[text for _, text in cells])
        return table

    def _trend_line(self) -> list[Text]:
        if len(self._trend) < 2:
            return []
        line = Text("accuracy ", style="dim").append(sparkline(list(self._trend)), style="green")
        return [line.append(f" {min(self._trend):.2f} … {max(self._trend):.2f}")]


def _time_split(metrics: Row) -> list[Text]:
    shares = {name[11:]: number(metrics, name) or 0.0 for name in metrics if name.startswith("time/share/")}
    bar, legend, width = Text(), Text(), 48
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    for (name, share), style in zip(ordered, cycle(PHASE_STYLES), strict=False):
        bar.append("█" * round(share * width), style=style)
        if share >= 0.01:
            legend.append("■ ", style=style).append(f"{name} {percent(share)}  ", style="dim")
    return [bar, legend] if shares else []
