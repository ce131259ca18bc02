"""Does reasoning that is learned in text carry over to pictures? Text-only RL, then RL with pictures, against either
alone and against both mixed, at equal rollouts. Does all: rows, arms, seeds, RESULTS.md and its pictures.

    python experiments/foundation/run.py                    # from the weights of experiments/smolvlm/run.py
    python experiments/foundation/run.py --model FOLDER     # from any vision-language model
    python experiments/foundation/run.py --dev              # the trials by which settings were chosen
    python experiments/foundation/run.py --page             # writes the page of the stored results
    python experiments/foundation/run.py --tiny             # a random model on a CPU, in seconds
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, command_line, options_of, run_and_write  # noqa: E402
from experiments.foundation.asked import write_sets  # noqa: E402
from experiments.foundation.page import HALF, write_page  # noqa: E402
from experiments.smolvlm import base  # noqa: E402

WHOLE = {"train": 6000, "taught_rows": 1000, "items": 200, "side": 224}
SMALL = {"train": 6, "taught_rows": 3, "items": 2, "side": 64, "workers": 1}
# Arm → command, training rows, steps, the arm whose model it starts from.
ARMS: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "base": ("eval", (), 0, ""),
    "cold": ("sft", ("cold",), 0, ""),
    "foundation": ("rl", ("train-text",), HALF, "cold"),
    "both": ("rl", ("train-pictures",), HALF, "foundation"),
    "text": ("rl", ("train-text",), 2 * HALF, "cold"),
    "pictures": ("rl", ("train-pictures",), 2 * HALF, "cold"),
    "mixed": ("rl", ("train-text", "train-pictures"), 2 * HALF, "cold"),
}
# Trials on other items, with another seed and, for RL, half of the steps: trial → the arm it tries, changed options.
TRIALS: dict[str, tuple[str, list[str]]] = {
    "cold": ("cold", []),
    **{f"cold_lr{lr}": ("cold", [f"train.lr={lr}"]) for lr in ("1e-5", "1e-4")},
    **{f"{arm}_lr{lr}": (arm, [f"train.lr={lr}"]) for arm in ("text", "pictures") for lr in ("3e-6", "1e-5", "3e-5")},
}
TRIAL_SEED = 100


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "foundation", at_once=6)
    base.ask_for_model(parser)
    args = parser.parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    rows, model, split = args.out.resolve() / "rows", base.start_model(args), "dev" if args.dev else "test"
    sets = write_sets(rows, split, **({"workers": os.cpu_count() or 1} | (SMALL if args.tiny else WHOLE)))

    def job(name: str, arm: str, seed: int, changes: Sequence[str] = ()) -> Job:
        command, learned, steps, after = ARMS[arm]
        files = ["common.yaml", *([f"{command}.yaml"] if learned else [])]
        given = {
            "model.path": "" if after else model,
            "data.train": [str(rows / f"{one}.jsonl") for one in learned],
            "data.val": sets,
            "run.max_steps": 0 if args.tiny else min(steps, HALF) if args.dev else steps,
        }
        options = options_of(HERE, args, files, given, *changes)
        return Job(arm=name, seed=seed, command=command, options=options, after=after)

    if args.dev:
        jobs = [job(name, arm, TRIAL_SEED, changes) for name, (arm, changes) in TRIALS.items()]
    else:
        jobs = [job(arm, arm, seed) for seed in args.seeds for arm in ARMS if arm != "base" or seed == args.seeds[0]]
    run_and_write(jobs, args, HERE, write_page)


if __name__ == "__main__":
    main()
