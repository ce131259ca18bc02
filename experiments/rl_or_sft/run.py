"""RL against SFT on the same questions: the quickstart's model counts objects, with 50 to 5,000 training questions, and
is tested also on pictures that differ from those of training. Does all: pictures, a cold start for each seed, learning
rates by trials on other pictures with another seed, all arms and seeds, RESULTS.md and its pictures.

    OMP_NUM_THREADS=1 python experiments/rl_or_sft/run.py           # on a CPU, a run on each of two cores
    OMP_NUM_THREADS=1 python experiments/rl_or_sft/run.py --dev     # the trials alone
    python experiments/rl_or_sft/run.py --page                      # writes the page of the stored results
    python experiments/rl_or_sft/run.py --tiny                      # one step, in seconds
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, carry_out, command_line, name_failed, options_of, out_of, run_and_write  # noqa: E402
from experiments.pages import read  # noqa: E402
from experiments.rl_or_sft.page import ARMS, chosen_rates, write_page  # noqa: E402
from experiments.rl_or_sft.pictures import LOOKS, rows_of  # noqa: E402
from saccade.plugins.families import tiny_kinds  # noqa: E402
from saccade.plugins.quickstart import counting, quickstart  # noqa: E402
from saccade.types import Message, Sample, replace  # noqa: E402

SIZES = (50, 500, 5000)  # training questions
ITEMS, TAUGHT = 300, 400  # of each test set; demonstrations of the cold start
# 15,360 sequences for each arm. Arm → command, steps, steps between validations, learning rates that are tried.
STEPS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "rl": ("rl", 60, 20, ("2e-4", "5e-4", "1e-3")),
    "answers": ("sft", 240, 80, ("2e-4", "5e-4", "1e-3", "2e-3")),
    "worked": ("sft", 240, 80, ("2e-4", "5e-4", "1e-3", "2e-3")),
}
TRIAL_SIZE, TRIAL_SEED = 500, 100


def answered(row: Sample) -> Sample:
    turn = Message(role="assistant", parts=(f"<answer> {row.answer} </answer>",))
    return replace(row, messages=(*row.messages, turn))


def draw(folder: Path, split: str, seed: int, most: int, items: int) -> list[dict[str, str]]:
    """Write the training rows of a seed in three forms, which share their pictures; returns the evaluation sets:
    `choice`, which chooses the step of a run, and one for each kind of picture.
    """
    write = partial(counting.write_jsonl, folder=folder)
    asked = rows_of("same", most, seed=1000 + seed)
    forms = {"rl": asked, "answers": [*map(answered, asked)], "worked": [*map(counting.demonstrated, asked)]}
    for name, rows in forms.items():
        write(rows, name=f"{name}-{seed}")
    offset = {"dev": 10, "test": 30}[split]
    sets = {"choice": "same", **{look: look for look in LOOKS}}
    for number, (name, look) in enumerate(sets.items()):
        write(rows_of(look, items, seed=offset + number), name=f"{split}-{name}")
    return [{"path": str(folder / f"{split}-{name}.jsonl"), "name": name} for name in sets]


def jobs_of(args: argparse.Namespace, seed: int, split: str, arms: Mapping[str, tuple[str, str, int]]) -> Iterator[Job]:
    """Of one seed: the cold start, its evaluation, and arm → the arm of STEPS, its learning rate, its questions."""
    rows, tiny = args.out.resolve() / f"rows-{seed}", args.tiny
    sets = draw(rows, split, seed, max(of for *_, of in arms.values()), 2 if tiny else ITEMS)
    taught = counting.counting_split(4 if tiny else TAUGHT, seed=2000 + seed, colours=counting.TEACHING_COLOURS)
    shown = counting.write_jsonl([*map(counting.demonstrated, taught)], rows, name="taught")
    model = tiny_kinds.build("qwen2_5_vl", rows / "model", words=quickstart.WORDS, seed=seed)

    def job(name: str, command: str, given: Mapping[str, Any], *changes: str, after: str = "cold") -> Job:
        files = ["common.yaml", *([] if command == "eval" else [f"{command}.yaml"])]
        options = options_of(HERE, args, files, given, *changes)
        return Job(arm=name, seed=seed, command=command, options=options, after=after)

    steps = [] if tiny else ["run.max_steps=100"]
    yield job("cold", "sft", {"model.path": model, "data.train": shown}, "train.lr=2e-3", *steps, after="")
    yield job("base", "eval", {"data.val": sets})
    for name, (arm, rate, of) in arms.items():
        command, count, every, _ = STEPS[arm]
        given = {"data.train": [{"path": str(rows / f"{arm}-{seed}.jsonl"), "max_samples": of}], "data.val": sets}
        steps = [] if tiny else [f"run.max_steps={count}", f"val.every={every}"]
        yield job(name, command, given, f"train.lr={rate}", *steps)


def main(argv: Sequence[str] | None = None) -> None:
    args = command_line(__doc__ or "", "rl_or_sft", at_once=2).parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)

    def run(split: str, arms: Mapping[str, tuple[str, str, int]], seeds: Sequence[int]) -> list[str]:
        jobs = [job for seed in seeds for job in jobs_of(args, seed, split, arms)]
        return carry_out(jobs, argparse.Namespace(**vars(args) | {"dev": split == "dev"}), HERE, write_page)

    size, sizes = (4, (4,)) if args.tiny else (TRIAL_SIZE, SIZES)
    tried = {arm: row[-1][: 1 if args.tiny or args.rehearse else None] for arm, row in STEPS.items()}
    trials = {f"{arm}@{rate}": (arm, rate, size) for arm, rates in tried.items() for rate in rates}
    failed = run("dev", trials, [TRIAL_SEED])
    if not (args.dev or (failed and time.time() > args.until)):
        rates = chosen_rates(read(out_of(args) / "dev" / "results"))
        arms = {f"{arm}_{of}": (arm, rates[arm], of) for of in sizes for arm in ARMS if arm in rates}
        failed += run("test", arms, args.seeds)
    name_failed(failed)


if __name__ == "__main__":
    main()
