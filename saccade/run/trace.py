"""One step under torch's profiler, as a file that ui.perfetto.dev and chrome://tracing show.

Phases of the step appear as ranges over the operators. The profiler is imported when it is used.

    with traced(folder / "trace-step-3.json.gz"): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Nothing is written when the body fails."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def named_range(name: str) -> AbstractContextManager[object]:
    from torch.profiler import record_function

    return record_function(name)
