"""Which algorithm should I use? GRPO and ten other presets train a small vision-language model on questions about drawn
scenes and charts, with equal rollouts. Does all: questions, the learning rate of each preset by trials on other
questions, all presets and seeds, RESULTS.md and its picture.

    python experiments/presets/run.py                  # from the weights of experiments/smolvlm; or --model FOLDER
    python experiments/presets/run.py --dev            # the trials alone
    python experiments/presets/run.py --page           # writes the page of the stored results
    python experiments/presets/run.py --tiny           # a random model on a CPU, in seconds
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, carry_out, command_line, name_failed, options_of, out_of, run_and_write  # noqa: E402
from experiments.pages import best_rates, read  # noqa: E402
from experiments.presets.page import PRESETS, rates_of, write_page  # noqa: E402
from experiments.row_files import questions  # noqa: E402
from experiments.smolvlm import base  # noqa: E402
from saccade.algorithms.build import resolve  # noqa: E402
from saccade.config import AlgorithmConfig  # noqa: E402
from saccade.plugins.drawn.chart_questions import CHART_KINDS, draw_chart_row  # noqa: E402
from saccade.plugins.drawn.scene_questions import SCENE_KINDS, draw_scene_row  # noqa: E402

SIZE = {
    "steps": 50,
    "rollouts": 240,  # per step: a multiple of every preset's samples per prompt
    "rates": ("3e-6", "1e-5", "3e-5"),
    "rounds": 10,  # at most, of dynamic sampling
    "rows": {"train": 6000, "dev": 400, "test": 500},  # rows about scenes, and as many about charts
}
TINY = {"steps": 1, "rollouts": 16, "rates": ("1e-5",), "rounds": 1, "rows": {"train": 8, "dev": 2, "test": 2}}
TRIAL_SEED = 100
CRITIC = 9  # learning rate of the critic over that of the policy, as in the defaults
DRAWN = {"scenes": (draw_scene_row, SCENE_KINDS), "charts": (draw_chart_row, CHART_KINDS)}


def draw_rows(out: Path, rows: Mapping[str, int], workers: int) -> dict[str, list[dict[str, str]]]:
    """The sets of each split."""
    sets: dict[str, list[dict[str, str]]] = {split: [] for split in rows}
    for seed, (split, count) in enumerate(rows.items()):
        for name, (draw, known) in DRAWN.items():
            kinds = [kind for kind in known if kind != "describe"]
            file = out / f"{name}-{split}.jsonl"
            questions(partial(draw, split="same", kinds=kinds, side=base.SIDE), file, count, seed=seed, workers=workers)
            sets[split].append({"path": str(file), "name": name})
    return sets


def settings_of(preset: str, rate: str, size: Mapping[str, Any]) -> list[str]:
    """The rollouts of a step are divided among prompts by the samples of the preset."""
    row = resolve(AlgorithmConfig(preset=preset), max_tokens=16)
    prompts = size["rollouts"] // (row.samples_per_prompt + row.estimator.greedy)
    options = [f"algorithm.preset={preset}", f"train.lr={rate}", f"train.prompts_per_step={prompts}"]
    if row.needs_critic:
        options.append(f"algorithm.critic.lr={CRITIC * float(rate):g}")
    # Dynamic sampling uses at least twice the rollouts per step and exceeds the budget, so it is validated often.
    dynamic = [f"algorithm.filter.max_rounds={size['rounds']}", "val.every=2"] if row.filter.dynamic else []
    steps = max(1, size["steps"] // 2) if dynamic else size["steps"]
    return [*options, *dynamic, f"run.max_steps={steps}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__ or "", "presets", at_once=8)
    base.ask_for_model(parser)
    args = parser.parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    if unknown := {*(args.arms or ())} - PRESETS.keys():
        parser.error(f"--arms {' '.join(sorted(unknown))}: expected some of {', '.join(PRESETS)}")
    out = args.out.resolve()
    presets = [preset for preset in PRESETS if preset in (args.arms or PRESETS)]
    size, cores = (TINY, 1) if args.tiny else (SIZE, os.cpu_count() or 1)
    model, sets = base.start_model(args), draw_rows(out / "rows", size["rows"], cores)
    tried = size["rates"][: 1 if args.rehearse else None]

    def run(split: str, arms: Mapping[str, tuple[str, str]], seeds: Sequence[int]) -> list[str]:
        """Arm → preset and learning rate; in test also the model as it is. Returns the runs that failed."""
        given = {"model.path": model, "data.val": sets[split]}
        common = options_of(HERE, args, ["rl.yaml"], given)
        jobs = [Job(arm="base", seed=seeds[0], command="eval", options=common)] if split == "test" else []
        for arm, (preset, rate) in arms.items():
            options = (*common, f"data.train={json.dumps(sets['train'])}", *settings_of(preset, rate, size))
            jobs += [Job(arm=arm, seed=seed, command="rl", options=options) for seed in seeds]
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
