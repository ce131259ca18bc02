"""When is a learned reward hacked, and what prevents it? A reward model learns from pairs of right and wrong answers of
the quickstart's model; RL with it is compared to RL with the rule that it imitates. Does all: scenes, a cold start,
answers, pairs, settings by trials on other questions, all arms and seeds, RESULTS.md and its pictures.

    OMP_NUM_THREADS=1 python experiments/learned_reward/run.py          # on a CPU, a run on each of two cores
    OMP_NUM_THREADS=1 python experiments/learned_reward/run.py --dev    # the trials alone
    python experiments/learned_reward/run.py --page                     # writes the page of the stored results
    python experiments/learned_reward/run.py --tiny                     # two steps, in seconds
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
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
from experiments.row_files import read_rows, write_rows  # noqa: E402
from saccade.plugins.export.export import checkpoint_of  # noqa: E402
from saccade.plugins.families import tiny_kinds  # noqa: E402
from saccade.plugins.quickstart import counting, quickstart  # noqa: E402

STEPS = 200
SIZES = {"demonstrations": 400, "pairs": 3000, "train": 4000, "dev": 300, "test": 600}  # scenes
TINY = {"demonstrations": 64, "pairs": 10, "train": 4, "dev": 2, "test": 2}
RATES = {"rule": ("1e-4", "2e-4", "5e-4", "1e-3"), "rm": ("3e-4", "1e-3", "3e-3")}
TRIAL_SEED = 100
LEARNED = [
    {"verifier": "model", "name": "learned", "args": {"path": "{after}", "normalise": True}},
    {"verifier": "count", "weight": 0.0},  # the true accuracy, only reported
]


def draw_scenes(out: Path, tiny: bool) -> None:
    """Each set has scenes of its own; demonstrations have three of the six colours of the others."""
    for seed, (name, number) in enumerate((TINY if tiny else SIZES).items()):
        taught = name == "demonstrations"
        colours = counting.TEACHING_COLOURS if taught else counting.TRAINING_COLOURS
        drawn = counting.counting_split(number, seed=seed, colours=colours)
        counting.write_jsonl([*map(counting.demonstrated, drawn)] if taught else drawn, out, name=name)


def finished(job: Job, out: Path, tiny: bool) -> None:
    if start(job, out, None, 0 if tiny else 1).wait():
        sys.exit(f"{job.name} failed:\n{last_lines(out / f'{job.name}.log')}")


def write_pairs(out: Path, options: tuple[str, ...], asked: Path, tiny: bool) -> None:
    """From answers of the model to questions that RL does not ask; a tenth of these is held out for trials, and a tenth
    for the page.
    """
    if (out / "spoiled-train.jsonl").exists():  # the file that is written last
        return
    job = Job(arm="answers", seed=0, command="generate", options=options)
    finished(job, out, tiny)
    answered = read_rows(out / job.name / "generations.jsonl")
    tenth = len(answered) // 10 + 1
    splits = {"dev": answered[:tenth], "test": answered[tenth : 2 * tenth], "train": answered[2 * tenth :]}
    for split, rows in splits.items():
        pairs = pairs_of(read_rows(asked), rows)
        pairs = [{**row, "images": [str(asked.parent / image) for image in row["images"]]} for row in pairs]
        write_rows(out / f"plain-{split}.jsonl", pairs)
        write_rows(out / f"spoiled-{split}.jsonl", [*pairs, *spoiled_pairs(pairs, seed=0)])


def main(argv: Sequence[str] | None = None) -> None:
    args = command_line(__doc__ or "", "learned_reward", at_once=2).parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    out = args.out.resolve()
    rows = out / "rows"
    if not any((rows / "cold-0").glob("checkpoints/step-*")):
        draw_scenes(rows, args.tiny)
        built = tiny_kinds.build("qwen2_5_vl", out / "model", words=quickstart.WORDS, seed=0)
        given = {"model.path": built, "data.train": rows / "demonstrations.jsonl"}
        files = options_of(HERE, args, ["../systems/sft.yaml"], given)
        finished(Job(arm="cold", seed=0, command="sft", options=files), rows, args.tiny)
    model = checkpoint_of(rows / "cold-0")

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
