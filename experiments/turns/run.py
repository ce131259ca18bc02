"""Mini-o3: does a policy that is trained to search in six turns continue for up to 32 at test time, if unfinished
searches are masked in training (over-turn masking), and only then? Does all: scenes, a model that can read, all arms
and seeds, RESULTS.md and its picture.

    python experiments/turns/run.py                              # one H200, 12 runs side by side
    python experiments/turns/run.py --at-once 2                  # two cores, two hours
    python experiments/turns/run.py --dev                        # the trials by which settings were chosen
    python experiments/turns/run.py --arms ahead1 ahead4         # masked, with rollouts that run ahead of training
    python experiments/turns/run.py --page                       # writes the page of the stored results
    python experiments/turns/run.py --tiny                       # three steps of everything on a CPU, in half a minute
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, command_line, options_of, run_and_write  # noqa: E402
from experiments.turns.page import write_page  # noqa: E402
from experiments.turns.search_rows import SIZES, TINY, build_model, draw_rows  # noqa: E402

# Training that all seeds share, in place of a pretrained model: arm → rows, options.
BASE = {
    "read": ("read", ("run.max_steps=320", "train.prompts_per_step=64", "train.lr=1.5e-3")),
    "chat": ("chat", ("run.max_steps=600", "train.prompts_per_step=16", "train.lr=1e-3")),
}
# Cold starts: arm → number of chats added to the 600 demonstrations, options. All see a demonstration equally often.
STARTS = {
    "cold": (0, ("run.max_steps=120", "train.prompts_per_step=32", "train.lr=2e-3")),
    "cold_chats": (200, ("run.max_steps=160", "train.prompts_per_step=32", "train.lr=2e-3")),
}
MASKED = ("algorithm.exclude_status=[overturn]", "algorithm.excluded_in_baseline=true")
ARMS = {  # arm → its cold start, options
    "masked": ("cold", MASKED),
    "unmasked": ("cold", ()),
    "masked_chats": ("cold_chats", MASKED),
    "unmasked_chats": ("cold_chats", ()),
}
AHEAD = {  # only where --arms names them
    "ahead1": ("cold", (*MASKED, "rollout.ahead=1")),
    "ahead1_unweighed": ("cold", (*MASKED, "rollout.ahead=1", "algorithm.correct=[]")),
    "ahead4": ("cold", (*MASKED, "rollout.ahead=4")),
    "ahead4_unweighed": ("cold", (*MASKED, "rollout.ahead=4", "algorithm.correct=[]")),
}
TRIED = {"cold_slow": (0, ("run.max_steps=120", "train.prompts_per_step=32", "train.lr=1e-3"))}  # cold starts
TRIAL_SEED = 100
TRIALS = {  # with this seed and other scenes
    "masked_slow": ("cold_slow", MASKED),
    "masked_lr": ("cold", (*MASKED, "train.lr=2.5e-4")),
    "unmasked_lr": ("cold", ("train.lr=2.5e-4",)),
    "masked_kl": ("cold", (*MASKED, "algorithm.kl={coef: 0.02}")),
}


def jobs_of(rows: Mapping[str, Path], model: str, args: argparse.Namespace) -> list[Job]:
    measured, seeds = rows["dev" if args.dev else "val"], [TRIAL_SEED] if args.dev else args.seeds

    def options(file: str, train: object, more: Sequence[str], **given: object) -> tuple[str, ...]:
        kept = [one for one in more if not (args.tiny and one.startswith(("run.max_steps", "train.prompts")))]
        sources = {"data.train": train, "data.val": measured} | {n.replace("_", "."): v for n, v in given.items()}
        return options_of(HERE, args, ["common.yaml", file], sources, *kept)

    jobs, before = list[Job](), ""
    for arm, (name, more) in BASE.items():
        asked = options("sft.yaml", rows[name], more, model_path="" if before else model, data_val="")
        jobs.append(Job(arm=arm, seed=0, command="sft", options=asked, after=before))
        before = arm
    starts, arms = (STARTS | TRIED, ARMS | TRIALS) if args.dev else (STARTS, ARMS | AHEAD)
    for seed in seeds:
        for arm, (chats, more) in starts.items():
            train = [{"path": str(rows["shown"])}] + [{"path": str(rows["chat"]), "max_samples": chats}] * (chats > 0)
            asked = options("sft.yaml", train, more)
            jobs.append(Job(arm=arm, seed=seed, command="sft", options=asked, after=before, of_seed=0))
        for arm, (start, more) in arms.items():
            asked = options("rl.yaml", rows["train"], more)
            jobs.append(Job(arm=arm, seed=seed, command="rl", options=asked, after=start))
    return jobs


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "turns", at_once=12)
    parser.set_defaults(seeds=[*range(8)])
    args = parser.parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    out, sizes = args.out.resolve(), TINY if args.tiny else SIZES
    rows = draw_rows(out / "rows", sizes, HERE / "common.yaml", 1 if args.tiny else os.cpu_count() or 1)
    model = build_model(out / "model", rows)
    if not args.arms:
        args.arms = [*STARTS, *ARMS, *(TRIALS if args.dev else ())]
    run_and_write(jobs_of(rows, model, args), args, HERE, write_page)


if __name__ == "__main__":
    main()
