"""Trains a tiny vision-language model to count, offline, on a laptop's CPU, with every part of saccade.

SFT on few demonstrations gives a weak policy; RL improves on it with only correct counts as reward.
The control continues SFT on the same demonstrations for the same time. The configs are written
next to the results, so that each stage can be changed and run again.

    saccade quickstart --out runs/first
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import yaml

from saccade.errors import Interrupted
from saccade.plugins.evaluation import evaluate
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.export.export import checkpoint_of, export
from saccade.plugins.families import tiny_kinds
from saccade.plugins.quickstart import counting
from saccade.plugins.ranks.layouts import numbers_in
from saccade.plugins.reports.comparison import paired_difference
from saccade.plugins.reports.episodes import stored_episodes
from saccade.plugins.reports.report import charts_of, phase_seconds
from saccade.plugins.reports.report_page import Estimate, Report, Table, write_report
from saccade.recipes import model_setup, rl, sft
from saccade.run.loggers import read_metrics
from saccade.run.statistics import mean_interval
from saccade.system.disk import require_writable

CHAT = "<think> </think> <answer> </answer> user assistant system how many objects ?"
WORDS = (*CHAT.split(), *counting.COLOURS, *"123456789")
SIZES = {  # numbers of demonstrations, prompts and rows of each evaluation set; SFT and RL steps
    "full": {"demonstrations": 400, "prompts": 6000, "evaluation": 600, "sft": 100, "rl": 160},
    "quick": {"demonstrations": 32, "prompts": 64, "evaluation": 16, "sft": 3, "rl": 2},
}
Size = Mapping[str, int]
Scores = Mapping[str, Mapping[str, np.ndarray]]  # stage → set → whether each item is right
STAGES = {"sft": "after SFT", "rl": "after GRPO", "sft_only": "SFT continued"}


def run(out: Path, seed: int = 0, quick: bool = False, kind: str = "qwen2_5_vl") -> dict[str, Any]:
    """Run data, model, SFT, GRPO, the control, evaluation, export, report. Returns the summary."""
    began = time.monotonic()
    model_setup.quiet_libraries()
    out, size = Path(out).resolve(), SIZES["quick" if quick else "full"]
    require_writable(out, "--out")
    _make_room(out)
    _say(1, f"drawing {size['prompts']:,} scenes, building a model with random weights")
    data = draw_data(out / "data", size, seed)
    model = tiny_kinds.build(kind, out / "model", words=WORDS, seed=seed)
    _say(2, f"cold start: SFT on {size['demonstrations']} demonstrations in three colours")
    _train(sft, out, sft_config(out, data, model, size, seed))
    start = str(checkpoint_of(out / "sft"))

    _say(3, f"GRPO on {size['prompts']:,} questions in six colours; the reward is the count")
    seconds = time.monotonic()
    _train(rl, out, rl_config(out, data, start, size, seed))
    seconds = time.monotonic() - seconds

    _say(4, f"control: SFT goes on with the same demonstrations for the same {seconds:.0f} s")
    _train(sft, out, control_config(out, data, start, size, seed, seconds))

    _say(5, "evaluating all three on held-out scenes, and with new colours and more objects")
    scores = {name: _evaluate(out, name, data, seed) for name in STAGES}
    export(out / "rl", out / "exported")

    accuracies = {name: {split: float(v.mean()) for split, v in splits.items()} for name, splits in scores.items()}
    seconds_of_all = round(time.monotonic() - began, 1)
    summary = {"seconds": seconds_of_all, "model_parameters": numbers_in(Path(model)), **accuracies}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _say(6, "writing the report")
    _report(out, summary, scores, seconds, size)
    _conclude(out, summary, scores)
    if quick:
        print("  --quick only shows that everything runs; leave it out to see a model learn")
    return summary


def draw_data(folder: Path, size: Size, seed: int) -> dict[str, str]:
    """Write demonstrations, prompts and two evaluation sets; no image is in two of them. The last set, "ood", has
    colours that no other set has, and up to eight objects instead of six.
    """
    base, draw = 1000 * seed, counting.counting_split
    taught = draw(size["demonstrations"], seed=base + 1, colours=counting.TEACHING_COLOURS)
    rows = {
        "demonstrations": list(map(counting.demonstrated, taught)),
        "train": draw(size["prompts"], seed=base + 2, colours=counting.TRAINING_COLOURS),
        "val": draw(size["evaluation"], seed=base + 3, colours=counting.TRAINING_COLOURS),
        "ood": draw(
            size["evaluation"], seed=base + 4, colours=counting.UNSEEN_COLOURS, counts=(1, 8), name="counting-unseen"
        ),
    }
    return {name: str(counting.write_jsonl(samples, folder, name=name)) for name, samples in rows.items()}


# -- configs: what a user would write --------------------------------------------------------------


def _common(out: Path, name: str, model: str, seed: int) -> dict[str, Any]:
    return {
        "run": {"name": name, "out": str(out), "seed": seed},
        "model": {"path": model, "dtype": "float32", "checkpointing": "off"},
        "prompt": {"format": "think_answer", "instruction": ""},
        "save": {"every": 0},
        "track": {"tensorboard": True},
    }


def sft_config(out: Path, data: Mapping[str, str], model: str, size: Size, seed: int) -> dict[str, Any]:
    config = _common(out, "sft", model, seed)
    config["run"]["max_steps"] = size["sft"]
    config["data"] = {"train": data["demonstrations"]}
    config["train"] = {"prompts_per_step": min(64, size["demonstrations"]), "lr": 2e-3, "schedule": "constant"}
    config["train"] |= {"warmup": min(5, size["sft"] - 1), "weight_decay": 0.0}
    return config


def control_config(
    out: Path, data: Mapping[str, str], start: str, size: Size, seed: int, seconds: float
) -> dict[str, Any]:
    """SFT continued from the cold start for about as long as RL took; the learning rate falls linearly as in RL."""
    config = sft_config(out, data, start, size, seed + 1)
    times = [row["time/step"] for row in read_metrics(out / "sft") if row.get("time/step")]
    steps = max(2, round(seconds / float(np.median(times))))
    config["run"] |= {"name": "sft_only", "max_steps": steps}
    config["train"] |= {"schedule": "linear", "min_lr": 0.05, "warmup": 0}
    return config


def rl_config(out: Path, data: Mapping[str, str], start: str, size: Size, seed: int) -> dict[str, Any]:
    config = _common(out, "rl", start, seed)
    config["run"]["max_steps"] = size["rl"]
    config["data"] = {"train": data["train"], "val": data["val"]}
    config["rollout"] = {"max_tokens": 12}
    config["reward"] = REWARD
    config["algorithm"] = {"preset": "grpo", "drop_constant": True, "kl": {"coef": 0.0}}
    config["train"] = {"prompts_per_step": min(64, size["prompts"] // 2), "samples_per_prompt": 8, "lr": 5e-4}
    config["train"] |= {"schedule": "linear", "warmup": min(10, size["rl"] - 1), "min_lr": 0.05, "weight_decay": 0.0}
    config["val"] = {"every": max(1, size["rl"] // 7)}
    return config


BETTER = (
    "What this shows: RL gets past the demonstrations. It sees only whether a count is right, on more and more varied "
    "scenes than were demonstrated; imitating the same demonstrations for longer does not get there."
)
REWARD = {
    "terms": [{"verifier": "count"}, {"verifier": "format:think_answer", "name": "format", "weight": 0.2}],
    "combine": "gate(format)",  # a correct number in the wrong format earns nothing
}


# -- results ---------------------------------------------------------------------------------------


def _evaluate(out: Path, name: str, data: Mapping[str, str], seed: int) -> dict[str, np.ndarray]:
    """Greedy accuracy of a stage on both sets, one score per item."""
    config = _common(out, name, str(checkpoint_of(out / name)), seed)
    del config["save"], config["track"]  # an evaluation does not use them
    config["data"] = {"val": [data["val"], data["ood"]]}
    config["rollout"] = {"max_tokens": 16}  # up to eight objects are listed
    config["reward"] = REWARD
    folder = out / "evaluation" / name
    evaluate.run(config, out=folder)
    rows = read_lines(folder / "samples.jsonl")
    return {split: np.array([row["score"] for row in rows if row["set"] == split]) for split in ("val", "ood")}


def _report(out: Path, summary: Mapping[str, Any], scores: Scores, seconds: float, size: Size) -> None:
    rows = read_metrics(out / "rl")
    report = Report(
        title="saccade quickstart",
        subtitle="A tiny vision-language model learns to count: supervised start, then GRPO.",
        facts={
            "Total time": f"{summary['seconds']:.0f} s",
            "GRPO": f"{seconds:.0f} s, {size['rl']} steps",
            "Parameters": f"{summary['model_parameters']:,}",
            "Held-out accuracy": f"{summary['sft']['val']:.0%} → {summary['rl']['val']:.0%}",
        },
        notes=_notes(scores, size),
        tables=[_table(scores)],
        charts=charts_of(rows),
        phases=phase_seconds(rows),
        episodes=stored_episodes(out / "rl"),
        texts={f"{name}.yaml": (out / f"{name}.yaml").read_text() for name in STAGES},
    )
    write_report(out / "report.html", report)


def _notes(scores: Scores, size: Size) -> list[str]:
    """Notes of the report; they claim only what the numbers of this run support."""
    if size != SIZES["full"]:
        return ["A quick run shows that every part works; it is too short to learn anything."]
    gain = paired_difference(scores["sft_only"]["val"], scores["rl"]["val"])
    return [
        BETTER if gain[1] > 0 else "In this run RL did not get past the demonstrations; try another --seed.",
        "What it does not show: that RL beats SFT on the answers of all its questions. With those "
        "answers as targets SFT would do at least as well here.",
        "The reward looks at the count alone, so the listed colours need not be right.",
    ]


def _table(scores: Scores) -> Table:
    rows: list[tuple[Any, ...]] = []
    for split, label in {"val": "Held-out scenes", "ood": "New colours, up to eight objects"}.items():
        reached = {stage: scores[stage][split] for stage in STAGES}
        means = [(float(v.mean()), *mean_interval([np.array([one]) for one in v])) for v in reached.values()]
        gains = [paired_difference(reached["sft"], reached[stage]) for stage in ("rl", "sft_only")]
        cells = [Estimate(value=value, low=low, high=high) for value, low, high in means]
        cells += [Estimate(value=value, low=low, high=high, change=True) for value, low, high in gains]
        rows.append((label, *cells))
    return Table(
        title="Accuracy, greedy, with 95 % intervals",
        columns=("", *STAGES.values(), "gain of GRPO", "gain of SFT continued"),
        rows=tuple(rows),
        note="Gains are paired over the same scenes. SFT continued had as many seconds as GRPO.",
    )


def _conclude(out: Path, summary: Mapping[str, Any], scores: Scores) -> None:
    gain, low, high = (f"{100 * x:+.1f}" for x in paired_difference(scores["sft"]["val"], scores["rl"]["val"]))
    print()
    for split, label in (("val", "held-out scenes"), ("ood", "new colours, more")):
        cells = (f"{text} {summary[stage][split]:6.1%}" for stage, text in STAGES.items())
        print(f"  {label:<22} {'   '.join(cells)}")
    print(f"\n  GRPO gained {gain} points on held-out scenes [{low}, {high}]")
    print(f"  report    {out / 'report.html'}")
    print(f"  model     {out / 'exported'}  (a Hugging Face folder)")
    config = out / "rl.yaml"
    print(f"  next      edit {config}, give it another run.name, then: saccade rl {quote(str(config))}")


# -- folders ---------------------------------------------------------------------------------------


def _make_room(out: Path) -> None:
    """Move an earlier quickstart aside instead of overwriting it."""
    if out.exists() and any(out.iterdir()):
        number = next(n for n in range(1, 10_000) if not out.with_name(f"{out.name}.{n}").exists())
        aside = out.with_name(f"{out.name}.{number}")
        out.rename(aside)
        print(f"{out} exists: moved to {aside}")
    out.mkdir(parents=True, exist_ok=True)


def _write(out: Path, config: Mapping[str, Any]) -> Path:
    path = out / f"{config['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    return path


def _train(recipe: Any, out: Path, config: Mapping[str, Any]) -> None:
    try:
        recipe.run(_write(out, config))
    except Interrupted:
        raise Interrupted(f"stopped; `saccade quickstart` begins again, and renames {out} first") from None


def _say(number: int, text: str) -> None:
    print(f"\n[{number}/6] {text}", flush=True)
