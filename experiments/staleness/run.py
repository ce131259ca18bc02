"""How old may tokens be? One GRPO run of the quickstart's task in which every token is exactly k steps old when it is
trained, with and without importance weights. Does all: scenes, models, all arms and seeds, RESULTS.md and its picture.

    OMP_NUM_THREADS=1 python experiments/staleness/run.py       # on two cores: trainer and replica
    python experiments/staleness/run.py --page                  # writes the page of the stored results
    python experiments/staleness/run.py --tiny                  # two steps, in seconds
"""

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import command_line, run_and_write  # noqa: E402
from experiments.staleness.page import AGES, FIRST, PLAIN, write_page  # noqa: E402
from experiments.systems.run import jobs_of  # noqa: E402

AGED = {f"age_{k}": (f"rollout.ahead={k}", "rollout.replicas=1", "rollout.at_update=drain") for k in AGES}
# Options that an arm changes in rl.yaml of experiments/systems.
ARMS: dict[str, tuple[str, ...]] = {
    FIRST: (),
    **AGED,
    **{f"{arm}{PLAIN}": (*options, "algorithm.correct=[]") for arm, options in AGED.items()},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = command_line(__doc__ or "", "staleness").parse_args(argv)
    run_and_write([] if args.page else jobs_of(args, ARMS), args, HERE, write_page)


if __name__ == "__main__":
    main()
