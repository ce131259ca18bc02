"""When is a learned reward hacked, and what prevents it? A reward model learns from pairs of right and wrong answers of
the model itself; RL with it is compared to RL with the rule that it imitates. Does all: questions, answers, pairs,
settings by trials on other questions, all arms and seeds, RESULTS.md and its pictures.

    python experiments/learned_reward/run.py           # from the weights of experiments/smolvlm; or --model FOLDER
    python experiments/learned_reward/run.py --dev     # the trials alone
    python experiments/learned_reward/run.py --page    # writes the page of the stored results
    python experiments/learned_reward/run.py --tiny    # a random model on a CPU, in seconds
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import (  # noqa: E402
    Job,
    carry_out,
    command_line,
    last_lines,
    name_failed,
    options_of,
    out_of,
    run_and_write,
    start,
)
from experiments.learned_reward.page import ARMS, rates_of, write_page  # noqa: E402
from experiments.learned_reward.pairs import pairs_of, spoiled_pairs  # noqa: E402
from experiments.pages import best_rates, read  # noqa: E402
from experiments.row_files import questions, read_rows, write_rows  # noqa: E402
from experiments.smolvlm import base  # noqa: E402
from saccade.plugins.drawn.scene_questions import SCENE_KINDS, draw_scene_row  # noqa: E402

STEPS = 200
SIZES = {"pairs": 3000, "train": 4000, "dev": 400, "test": 600}  # questions
TINY = {"pairs": 10, "train": 4, "dev": 2, "test": 2}
RATES = {"rule": ("3e-6", "1e-5", "3e-5"), "rm": ("1e-5", "3e-5", "1e-4")}
TRIAL_SEED = 100
KINDS = [kind for kind in SCENE_KINDS if kind != "describe"]
LEARNED = [
    {"verifier": "model", "name": "learned", "args": {"path": "{after}", "normalise": True}},
    {"verifier": "exact", "weight": 0.0},  # the true accuracy, only reported
]


def write_pairs(out: Path, options: tuple[str, ...], asked: Path, tiny: bool) -> None:
    """From answers of the model to questions that RL does not ask; a tenth of these is held out for trials, and a tenth
    for the page.
    """
    if (out / "spoiled-train.jsonl").exists():  # the file that is written last
        return
    job = Job(arm="answers", seed=0, command="generate", options=options)
    if start(job, out, None, 0 if tiny else 1).wait():
        sys.exit(f"no answers to make pairs of:\n{last_lines(out / 'answers-0.log')}")
    answered = read_rows(out / job.name / "generations.jsonl")
    tenth = len(answered) // 10 + 1
    splits = {"dev": answered[:tenth], "test": answered[tenth : 2 * tenth], "train": answered[2 * tenth :]}
    for split, rows in splits.items():
        pairs = pairs_of(read_rows(asked), rows)
        pairs = [{**row, "images": [str(asked.parent / image) for image in row["images"]]} for row in pairs]
        write_rows(out / f"plain-{split}.jsonl", pairs)
        write_rows(out / f"spoiled-{split}.jsonl", [*pairs, *spoiled_pairs(pairs, seed=0)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__ or "", "learned_reward", at_once=8)
    base.ask_for_model(parser)
    args = parser.parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    out = args.out.resolve()
    sizes, cores = (TINY, 1) if args.tiny else (SIZES, os.cpu_count() or 1)
    model, rows = base.start_model(args), out / "rows"
    draw = partial(draw_scene_row, split="same", kinds=KINDS, side=base.SIDE)
    for seed, (split, count) in enumerate(sizes.items()):
        questions(draw, rows / f"{split}.jsonl", count, seed=seed, workers=cores)

    def options(file: str, train: Path | None = None, val: Path | None = None, *changes: str) -> tuple[str, ...]:
        sets = [{"path": str(val), "name": "pairs" if "rm" in file else "test"}] if val else None
        return options_of(HERE, args, [file], {"model.path": model, "data.train": train, "data.val": sets}, *changes)

    write_pairs(rows, options("generate.yaml", rows / "pairs.jsonl"), rows / "pairs.jsonl", args.tiny)

    def judge(arm: str, pairs: str, rate: str, seed: int, split: str) -> Job:
        held = (rows / f"{pairs}-{part}.jsonl" for part in ("train", split))
        return Job(arm=arm, seed=seed, command="reward-model", options=options("rm.yaml", *held, f"train.lr={rate}"))

    def learner(arm: str, after: str, kl: float, rate: str, seed: int, split: str) -> Job:
        """With the reward model `after`; without one, with the rule."""
        changes = [f"train.lr={rate}", *([] if args.tiny else [f"run.max_steps={STEPS}"])]
        changes += [f"reward.terms={json.dumps(LEARNED)}"] if after else []
        changes += [f"algorithm.kl.coef={kl}"] if kl else []
        asked = options("rl.yaml", rows / "train.jsonl", rows / f"{split}.jsonl", *changes)
        return Job(arm=arm, seed=seed, command="rl", options=asked, after=after)

    def run(split: str, jobs: list[Job]) -> list[str]:
        given = {"dev": split == "dev", "arms": None if split == "dev" else args.arms}
        return carry_out(jobs, argparse.Namespace(**vars(args) | given), HERE, write_page)

    rates = {arm: tried[:1] if args.tiny or args.rehearse else tried for arm, tried in RATES.items()}
    trials = [learner(f"rule@{rate}", "", 0, rate, TRIAL_SEED, "dev") for rate in rates["rule"]]
    failed = run("dev", [*trials, *(judge(f"rm@{rate}", "plain", rate, TRIAL_SEED, "dev") for rate in rates["rm"])])
    best = best_rates(rates_of(read(out_of(args) / "dev" / "results")))
    cut_off = failed and time.time() > args.until  # then rates are not those of all trials
    if not (args.dev or cut_off) and best.keys() == RATES.keys():
        rule, rm = best["rule"], best["rm"]
        as_it_is = options("rl.yaml", None, rows / "test.jsonl")
        jobs = [Job(arm="base", seed=args.seeds[0], command="eval", options=as_it_is)]
        for seed in args.seeds:
            jobs += [judge(arm, pairs, rm, seed, "test") for arm, pairs in (("rm", "plain"), ("rm_spoiled", "spoiled"))]
            jobs += [learner(arm, one.judge, one.kl, rule, seed, "test") for arm, one in ARMS.items()]
        failed += run("test", jobs)
    name_failed(failed)


if __name__ == "__main__":
    main()
