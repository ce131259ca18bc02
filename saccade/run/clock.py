"""Where the seconds of a step go.

A nested phase pauses the one around it, and what is in none is `other`, so the phases of a step add
up to the step. One thread only.

    >>> clock = PhaseClock()
    >>> with clock.phase("rollout"): pass
    >>> [name for name in sorted(clock.lap()) if "share" not in name]
    ['time/bottleneck', 'time/other', 'time/rollout', 'time/step']
"""

from __future__ import annotations

import time
from collections.abc import Callable


class PhaseClock:
    """Seconds per phase since the last lap."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._mark = self._lap_began = now()

    @property
    def current(self) -> str | None:
        return self._open[-1] if self._open else None

    def phase(self, name: str) -> Phase:
        """`with clock.phase("rollout"):` counts its body under that name."""
        return Phase(self, name)

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
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now

    def _enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def _leave(self, name: str) -> None:
        self._charge()
        left = self._open.pop()
        assert left == name, f"phase {name!r} ended inside {left!r}"


class Phase:
    """One use of `with`; a class because a generator would cost four times as much."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._clock._enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock._leave(self._name)
