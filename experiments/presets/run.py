"""Which algorithm should I use? GRPO and ten other presets teach the quickstart's model to count, with equal rollouts.
Does all: scenes, a cold start for each seed, the learning rate of each preset by trials on other scenes with another
seed, all presets and seeds, RESULTS.md and its picture.

    OMP_NUM_THREADS=1 python experiments/presets/run.py            # on a CPU, a run on each of two cores
    OMP_NUM_THREADS=1 python experiments/presets/run.py --dev      # the trials alone
    python experiments/presets/run.py --page                       # writes the page of the stored results
    python experiments/presets/run.py --tiny                       # two steps, in seconds
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, carry_out, command_line, name_failed, options_of, out_of, run_and_write  # noqa: E402
from experiments.pages import best_rates, read  # noqa: E402
from experiments.presets.page import PRESETS, rates_of, write_page  # noqa: E402
from saccade.algorithms.build import resolve  # noqa: E402
from saccade.config import AlgorithmConfig  # noqa: E402
from saccade.plugins.families import tiny_kinds  # noqa: E402
from saccade.plugins.quickstart import quickstart  # noqa: E402

SIZE = {
    "steps": 60,
    "rollouts": 240,  # per step: a multiple of every preset's samples per prompt
    "rates": ("1e-4", "2e-4", "5e-4", "1e-3"),
    "rounds": 10,  # at most, of dynamic sampling
    "rows": {"demonstrations": 400, "prompts": 6000, "evaluation": 600},
}
TINY = {
    "steps": 1,
    "rollouts": 16,
    "rates": ("5e-4",),
    "rounds": 1,
    "rows": {"demonstrations": 64, "prompts": 16, "evaluation": 6},
}
TRIAL_SEED = 100
CRITIC = 9  # learning rate of the critic over that of the policy, as in the defaults


def settings_of(preset: str, rate: str, size: Mapping[str, Any]) -> list[str]:
    """The rollouts of a step are divided among prompts by the samples of the preset."""
    row = resolve(AlgorithmConfig(preset=preset), max_tokens=12)
    prompts = size["rollouts"] // (row.samples_per_prompt + row.estimator.greedy)
    options = [f"algorithm.preset={preset}", f"train.lr={rate}", f"train.prompts_per_step={prompts}"]
    if row.needs_critic:
        options.append(f"algorithm.critic.lr={CRITIC * float(rate):g}")
    # Dynamic sampling uses at least twice the rollouts per step and exceeds the budget, so it is validated often.
    dynamic = [f"algorithm.filter.max_rounds={size['rounds']}", "val.every=2"] if row.filter.dynamic else []
    steps = max(1, size["steps"] // 2) if dynamic else size["steps"]
    return [*options, *dynamic, f"run.max_steps={steps}"]


def main(argv: Sequence[str] | None = None) -> None:
    args = command_line(__doc__ or "", "presets", at_once=2).parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    if unknown := {*(args.arms or ())} - PRESETS.keys():
        sys.exit(f"--arms {' '.join(sorted(unknown))}: expected some of {', '.join(PRESETS)}")
    out, size = args.out.resolve(), TINY if args.tiny else SIZE
    presets = [preset for preset in PRESETS if preset in (args.arms or PRESETS)]
    tried = size["rates"][: 1 if args.rehearse else None]

    def run(split: str, arms: Mapping[str, tuple[str, str]], seeds: Sequence[int]) -> list[str]:
        """Arm → preset and learning rate. Every seed has its own weights and cold start. Returns the names of runs that
        failed.
        """
        data, jobs = quickstart.draw_data(out / split / "data", size["rows"], seeds[0]), list[Job]()
        for seed in seeds:
            model = tiny_kinds.build("qwen2_5_vl", out / f"model-{seed}", words=quickstart.WORDS, seed=seed)
            given = {"model.path": model, "data.train": data["demonstrations"]}
            cold = options_of(HERE, args, ["../systems/sft.yaml"], given, f"run.max_steps={1 if args.tiny else 100}")
            jobs.append(Job(arm="cold", seed=seed, command="sft", options=cold))
            common = options_of(HERE, args, ["rl.yaml"], {"data.train": data["train"], "data.val": data["val"]})
            for arm, (preset, rate) in arms.items():
                options = (*common, *settings_of(preset, rate, size))
                jobs.append(Job(arm=arm, seed=seed, command="rl", options=options, after="cold"))
        changed = vars(args) | {"arms": None, "dev": split == "dev"}
        return carry_out(jobs, argparse.Namespace(**changed), HERE, write_page)

    failed = run("dev", {f"{preset}@{rate}": (preset, rate) for preset in presets for rate in tried}, [TRIAL_SEED])
    cut_off = failed and time.time() > args.until  # then rates are not those of all trials
    if not (args.dev or cut_off):
        rates = best_rates(rates_of(read(out_of(args) / "dev" / "results")))
        failed += run("test", {preset: (preset, rates[preset]) for preset in presets if preset in rates}, args.seeds)
    name_failed(failed)


if __name__ == "__main__":
    main()
