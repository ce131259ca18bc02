"""Does what RL teaches in words carry over to pictures? The quickstart's model counts objects that are listed or drawn:
RL in text and then with pictures, against either alone and both mixed, at equal rollouts. Does all: rows, a cold start
for each seed, learning rates by trials on other rows with another seed, all arms and seeds, RESULTS.md.

    OMP_NUM_THREADS=1 python experiments/text_first/run.py          # on a CPU, a run on each of two cores
    OMP_NUM_THREADS=1 python experiments/text_first/run.py --dev    # the trials alone
    python experiments/text_first/run.py --page                     # writes the page of the stored results
    python experiments/text_first/run.py --tiny                     # one step, in seconds
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, carry_out, command_line, name_failed, options_of, out_of, run_and_write  # noqa: E402
from experiments.pages import read  # noqa: E402
from experiments.text_first.page import HALF, chosen_rates, write_page  # noqa: E402
from experiments.text_first.rows import FORMS, GROUPS, WORDS, rows_of  # noqa: E402
from saccade.plugins.families import tiny_kinds  # noqa: E402
from saccade.plugins.quickstart import counting  # noqa: E402
from saccade.types import Sample  # noqa: E402

# Arm → forms of its training rows, steps, the arm whose model it starts from.
ARMS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "foundation": (("text",), HALF, "cold"),
    "both": (("pictures",), HALF, "foundation"),
    "text": (("text",), 2 * HALF, "cold"),
    "pictures": (("pictures",), 2 * HALF, "cold"),
    "mixed": (("text", "pictures"), 2 * HALF, "cold"),
}
RATES = ("2e-4", "5e-4", "1e-3")
TRIAL_SEED = 100
SIZE = {"taught": 100, "train": 3000, "items": 300}  # demonstrations of each kind and form; rows of each file
TINY = {"taught": 2, "train": 8, "items": 2}


def write(rows: Sequence[Sample], folder: Path, name: str) -> str:
    """Rows with a picture as the quickstart writes them, others without one."""
    if rows[0].media:
        return str(counting.write_jsonl(rows, folder, name=name))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"id": row.id, "problem": row.messages[0].text, "answer": row.answer} for row in rows]
    for line, row in zip(lines, rows, strict=True):
        if row.messages[-1].role == "assistant":
            said = {"from": "gpt", "value": row.messages[-1].text}
            line |= {"conversations": [{"from": "human", "value": line.pop("problem")}, said]}
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / f"{name}.jsonl")


def jobs_of(args: argparse.Namespace, seed: int, split: str, arms: Mapping[str, tuple[str, str]]) -> Iterator[Job]:
    """Of one seed: the cold start, and arm → the arm of ARMS and its learning rate."""
    folder, size = args.out.resolve() / f"rows-{seed}", TINY if args.tiny else SIZE
    sets = [
        {
            "path": write(rows_of(group, form, size["items"], {"dev": 40, "test": 50}[split] + n), folder, name),
            "name": name,
        }
        for n, group in enumerate(GROUPS)
        for form in FORMS
        for name in [f"{group}_{form}"]
    ]
    draw = partial(rows_of, count=size["taught"], colours=counting.TEACHING_COLOURS)
    taught = [
        write(
            [*map(counting.demonstrated, draw(group, form, seed=2000 + 10 * seed + n))],
            folder,
            f"taught-{group}-{form}",
        )
        for n, group in enumerate(("seen", "held"))
        for form in FORMS
    ]
    train = {form: write(rows_of("seen", form, size["train"], 1000 + seed), folder, f"train-{form}") for form in FORMS}
    model = tiny_kinds.build("qwen2_5_vl", folder / "model", words=WORDS, seed=seed)
    make = partial(options_of, HERE, args)
    given = {"model.path": model, "data.train": taught, "data.val": sets}
    yield Job(arm="cold", seed=seed, command="sft", options=make(["common.yaml", "sft.yaml"], given))
    for name, (arm, rate) in arms.items():
        forms, steps, after = ARMS[arm]
        given = {"data.train": [train[form] for form in forms], "data.val": sets}
        options = make(["common.yaml", "rl.yaml"], given, f"train.lr={rate}")
        steps = 1 if args.tiny else min(steps, HALF) if split == "dev" else steps
        yield Job(arm=name, seed=seed, command="rl", options=(*options, f"run.max_steps={steps}"), after=after)


def main(argv: Sequence[str] | None = None) -> None:
    args = command_line(__doc__ or "", "text_first", at_once=2).parse_args(argv)
    if args.page:
        return run_and_write([], args, HERE, write_page)

    def run(split: str, arms: Mapping[str, tuple[str, str]], seeds: Sequence[int]) -> list[str]:
        jobs = [job for seed in seeds for job in jobs_of(args, seed, split, arms)]
        return carry_out(jobs, argparse.Namespace(**vars(args) | {"dev": split == "dev"}), HERE, write_page)

    rates = RATES[: 1 if args.tiny or args.rehearse else None]
    trials = {f"{form}@{rate}": (form, rate) for form in FORMS for rate in rates}
    failed = run("dev", trials, [TRIAL_SEED])
    if not (args.dev or (failed and time.time() > args.until)):
        best = chosen_rates(read(out_of(args) / "dev" / "results"))
        # What learns in text alone has the rate of text, whatever sees pictures that of pictures.
        arms = {arm: (arm, best["text" if forms == ("text",) else "pictures"]) for arm, (forms, *_) in ARMS.items()}
        failed += run("test", arms, args.seeds)
    name_failed(failed)


if __name__ == "__main__":
    main()
