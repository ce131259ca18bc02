"""RL against SFT on the same questions: counts and positions in pictures, with 50 to 5,000 training questions, tested
also with more objects, other colours, backgrounds and renderers. Does all: pictures, arms, seeds, RESULTS.md.

    python experiments/counting/run.py                      # from the weights of experiments/smolvlm/run.py
    python experiments/counting/run.py --model FOLDER       # from any vision-language model
    python experiments/counting/run.py --dev                # the trials by which settings were chosen
    python experiments/counting/run.py --page               # writes the page of the stored results
    python experiments/counting/run.py --tiny               # a random model on a CPU, in seconds
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments import scenes  # noqa: E402
from experiments.arms import Job, command_line, options_of, run_and_write  # noqa: E402
from experiments.counting.page import write_page  # noqa: E402
from experiments.row_files import questions, taught  # noqa: E402
from experiments.smolvlm import base  # noqa: E402

HOURS = 90 / 3600  # of each run, loading and validations included
SIZES = (50, 200, 1000, 5000)  # training questions
ITEMS = 200  # per test set
SIDE = 224  # pixels
# Arm → command, config files, training rows.
ARMS = {
    "rl": ("rl", ["common.yaml", "rl.yaml"], "questions"),
    "answers": ("sft", ["common.yaml", "sft.yaml"], "answers"),
    "worked": ("sft", ["common.yaml", "sft.yaml"], "worked"),
}
# Trials: each arm with these learning rates, this number of questions, and other questions and items than the runs.
RATES, TRIAL_SIZE, TRIAL_SEED = ("1e-5", "3e-5", "1e-4"), 1000, 100


def draw(rows: Path, split: str, seeds: Sequence[int], most: int, items: int, workers: int) -> list[dict[str, str]]:
    """Write training rows of each seed in three forms; returns the evaluation sets: `choice`, which chooses the step of
    a run, and one for each kind of picture.
    """

    def drawn(name: str, look: str, count: int, seed: int, workers: int = 1) -> Sequence[dict]:
        work = partial(scenes.draw_scene, split=look, kinds=(*scenes.KINDS,), side=SIDE)
        return questions(work, rows / f"{name}.jsonl", count, seed=seed, workers=workers)

    sets = {"choice": "same", **{look: look for look in scenes.SPLITS}}
    with ThreadPoolExecutor() as pool:
        found = {seed: pool.submit(drawn, f"questions-{seed}", "same", most, seed, workers) for seed in seeds}
        rest = [pool.submit(drawn, f"{split}-{name}", look, items, 0) for name, look in sets.items()]
    for seed, asked in found.items():
        for column, form in (("answer", "answers"), ("worked", "worked")):
            taught(rows / f"{form}-{seed}.jsonl", asked.result(), column)
    for each in rest:
        each.result()
    return [{"path": str(rows / f"{split}-{name}.jsonl"), "name": name} for name in sets]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "counting", at_once=8)
    base.ask_for_model(parser)
    args = parser.parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    rows, model = args.out.resolve() / "rows", base.start_model(args)
    seeds, sizes, split = ([TRIAL_SEED], (TRIAL_SIZE,), "dev") if args.dev else (args.seeds, SIZES, "test")
    sizes, items, workers = ((4,), 2, 1) if args.tiny else (sizes, ITEMS, max(1, (os.cpu_count() or 1) // len(seeds)))
    sets = draw(rows, split, seeds, max(sizes), items, workers)

    def job(name: str, arm: str, seed: int, size: int, *changes: str) -> Job:
        command, files, form = ARMS[arm]
        source = {"path": str(rows / f"{form}-{seed}.jsonl"), "max_samples": size}
        given = {"model.path": model, "data.train": [source], "data.val": sets, "run.max_hours": HOURS}
        return Job(arm=name, seed=seed, command=command, options=options_of(HERE, args, files, given, *changes))

    asked = options_of(HERE, args, ["common.yaml"], {"model.path": model, "data.val": sets})
    jobs = [Job(arm="base", seed=seeds[0], command="eval", options=asked)]
    if args.dev:
        jobs += [job(f"{arm}_lr{lr}", arm, TRIAL_SEED, TRIAL_SIZE, f"train.lr={lr}") for arm in ARMS for lr in RATES]
    else:
        jobs += [job(f"{arm}_{size}", arm, seed, size) for seed in seeds for size in sizes for arm in ARMS]
    run_and_write(jobs, args, HERE, write_page)


if __name__ == "__main__":
    main()
