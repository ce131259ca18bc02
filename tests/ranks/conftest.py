"""How several processes are tested without paying for several imports of torch (5 s of a core each):

- What ranks compute, without a run: a function `main(rank, folder, ...)` of your test file that returns what it
  found, and `on_ranks(main, folder, ...)` of `processes.py`, which returns what each of them found. A training that
  one process does too is a row of CASES in `test_divided.py` or `test_sharded.py`: one pair serves all of a file.
- A run with `run.gpus=2`: ask for the fixture `forked_ranks`, and compare with a run of one process that the file
  makes once. Two to four steps of the tiny model are enough. How real ranks are started `test_ranks.py` shows.
"""

import pytest

from saccade.plugins.engines.replicas.replica import Replica
from tests.estimate.conftest import built_once, large, models, shaped  # noqa: F401
from tests.ranks.processes import Forked


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a run that this machine starts do so at once: ranks, and replicas beside them."""
    monkeypatch.setattr(Replica, "start", lambda replica: replica.place(replica) if replica.place else Forked(replica))
