"""Writes RESULTS.md of this experiment, from its stored JSONs."""

from pathlib import Path
from typing import Any

from experiments.pages import cost, read, table

WHAT = {
    ("words", "read"): "all words of a picture", ("words", "number"): "a number of one to six digits",
    ("words", "word"): "the n-th word", ("words", "sum"): "the result of a written sum",
    ("unseen", "read"): "one or two words that no training picture shows",
    ("scenes", "count"): "how many", ("scenes", "exist"): "is there", ("scenes", "compare"): "more, fewer, as many",
    ("scenes", "attribute"): "size, colour, material or shape", ("scenes", "relation"): "left of, above, the lowest",
    ("charts", "value"): "a value", ("charts", "which"): "the highest, the lowest",
    ("charts", "difference"): "how much higher", ("charts", "compare"): "is it higher",
    ("charts", "count"): "how many marks",
}  # fmt: skip

TRIED = {
    "frozen": "tower and connector",
    "early": "these and the decoder's first four layers",
    "slow": "the same with 0.4 of the learning rate",
    "full": "all but the embedding; too large to travel",
}


def shown(numbers: Any) -> str:
    if not numbers:
        return "-"
    return f"{100 * numbers['accuracy']:.1f} [{100 * numbers['ci_low']:.1f}, {100 * numbers['ci_high']:.1f}]"


def write_page(results: Path, page: Path, images: Path) -> None:
    found = read(results)
    tables = found["answers"][0]["tables"] if "answers" in found else {}
    rows, right, blind = [], list[float](), list[float]()
    for (name, kind), what in WHAT.items():
        seeing, without = tables.get(name, {}).get(kind), tables.get(f"{name}-blind", {}).get(kind)
        right += [seeing["accuracy"]] if seeing else []
        blind += [without["accuracy"]] if without else []
        items = f"{seeing['items']:.0f}" if seeing else "-"
        rows.append([name, f"{kind}: {what}", items, shown(seeing), shown(without)])
    stages = [
        [
            arm,
            str(run["steps"]),
            f"{run['seconds']:.0f}",
            *(f"{run['curves']['sft/loss'][at][2]:.3f}" for at in (0, -1)),
        ]
        for arm, run in ((arm, found[arm][0]) for arm in ("first", "second") if arm in found)
    ]
    trials = [
        [arm, TRIED[arm], str(run["steps"]), f"{run['curves']['sft/loss'][-1][2]:.3f}"]
        for arm, (run, *_) in ((arm, [*runs.values()]) for arm, runs in read(results / "dev").items())
    ]
    chosen = table(["trial", "what learned", "steps", "loss of the last"], trials) if trials else "None were stored."
    mean = f"{100 * sum(right) / len(right):.0f} %" if right else "-"
    without = f", {100 * sum(blind) / len(blind):.0f} % without the picture" if blind else ""
    read_words = tables.get("words", {}).get("read")
    reads_none = " It reads no words." if read_words and read_words["accuracy"] < 0.02 else ""
    page.write_text(
        f"""# A small real model behind a new vision tower

SmolLM2-135M-Instruct behind a vision tower that began with random weights (15 M parameters) answers {mean} of the
questions about new pictures{without} (mean over {len(right)} kinds of questions; one model).{reads_none}

{table(["set", "asked", "items", "right, %", "without the picture, %"], rows)}

Greedy answers, compared word by word; 95 % intervals over items (Wilson). It is one model: nothing is said about other
seeds. Without the picture it does not answer in the form that it was taught, so that column is no guess: half of "is
there" and a third of "more, fewer, as many" are right by chance. Two of the 81 words of the set `words` are on no
training picture either.

## Training

{table(["stage", "steps", "seconds", "loss of the first step", "of the last"], stages)}

In the first stage the tower and the connector learn while the decoder is frozen, in the second also the decoder's first
four layers. Rows are conversations about drawn pictures (`pictures.py`): solids, charts and words, a third each.

Cost: {cost(found)}

Trials before it, on other pictures, side by side for the same seconds (`--dev`):

{chosen}

## What it does not show

The programs that drew the pictures of training drew these, too: nothing is known of photographs, scans or other fonts.
What the model has kept of SmolLM2's language was not measured.

    python experiments/smolvlm/run.py
""",
        encoding="utf-8",
    )
