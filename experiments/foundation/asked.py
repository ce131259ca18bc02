"""Questions about solids, charts and diagrams that can be answered from the picture or from the facts as text.

drawn = draw_asked(Random(0), 0, group="seen", side=224)
drawn.question, drawn.more["facts"], drawn.more["worked"]
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

from experiments.row_files import in_words, questions, taught
from experiments.scenes import draw_scene, worked
from saccade.plugins.drawn.chart_questions import draw_chart_row
from saccade.plugins.drawn.diagram_questions import draw_diagram_row
from saccade.plugins.drawn.drawn_sets import Drawing

GROUPS: Mapping[str, Sequence[tuple[str, str]]] = {  # group → (kind of picture, kind of question)
    "seen": (
        ("solids", "all"),
        ("solids", "count"),
        ("solids", "side"),
        ("charts", "difference"),
        ("charts", "compare"),
    ),
    "held": (("solids", "compare"), ("solids", "most"), ("charts", "which"), ("charts", "value")),
    "far": (("diagrams", "next"), ("diagrams", "exist"), ("diagrams", "count")),
}
FORMS = ("text", "pictures")


def draw_asked(rng: Random, index: int, *, group: str, side: int) -> Drawing:
    about, kind = GROUPS[group][index % len(GROUPS[group])]
    drawn = DRAWN[about](rng, 0, kinds=(kind,), side=side)
    return drawn._replace(category=f"{about} {kind}")


def draw_chart(rng: Random, index: int, *, kinds: Sequence[str], side: int) -> Drawing:
    drawn = draw_chart_row(rng, index, split="same", kinds=kinds, side=side)
    values = dict(zip(drawn.more["names"], drawn.more["values"], strict=True))
    asked = [name for name in re.findall(r"\w+", drawn.question) if name in values]
    steps = _listed({name: values[name] for name in asked or values})
    if drawn.category == "difference":
        steps += f", {values[asked[0]]} - {values[asked[1]]} = {drawn.answer}"
    facts = f"{drawn.more['title']}: {_listed(values)}."
    return drawn._replace(more={"facts": facts, "worked": worked(steps, drawn.answer)})


def _listed(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def draw_diagram(rng: Random, index: int, *, kinds: Sequence[str], side: int) -> Drawing:
    drawn = draw_diagram_row(rng, index, split="same", kinds=kinds, side=side)
    boxes = ", ".join(f"{name} is a {outline}" for name, outline in drawn.more["boxes"].items())
    arrows = ", ".join(f"from {a} to {b}" for a, b in drawn.more["arrows"])
    return drawn._replace(more={"facts": f"Boxes: {boxes}. Arrows: {arrows}."})


DRAWN = {"solids": partial(draw_scene, split="solids"), "charts": draw_chart, "diagrams": draw_diagram}


def write_sets(
    rows: Path, split: str, *, train: int, taught_rows: int, items: int, side: int, workers: int
) -> list[dict[str, str]]:
    """Write training questions in both forms and conversations for the cold start; returns the evaluation sets."""
    learned = questions(
        partial(draw_asked, group="seen", side=side), rows / "train-pictures.jsonl", train, workers=workers
    )
    in_words(rows / "train-text.jsonl", learned)
    shown = questions(partial(draw_asked, group="seen", side=side), rows / "shown.jsonl", taught_rows)
    taught(rows / "cold.jsonl", [*shown, *in_words(rows / "shown-text.jsonl", shown)], "worked")
    sets = []
    for group in GROUPS:
        found = questions(partial(draw_asked, group=group, side=side), rows / f"{split}-{group}-pictures.jsonl", items)
        in_words(rows / f"{split}-{group}-text.jsonl", found)
        sets += [{"path": str(rows / f"{split}-{group}-{form}.jsonl"), "name": f"{group}_{form}"} for form in FORMS]
    return sets
