"""Counting questions about a picture of the quickstart, or about the same objects in words.

rows_of("seen", "text", 100, seed=0)     # "red blue red how many objects?" → 3
"""

from collections.abc import Sequence

from saccade.plugins.quickstart import counting, quickstart
from saccade.types import Message, Sample, replace

WORDS = quickstart.WORDS  # of the tokenizer; both questions have no other
GROUPS = {"seen": "how many objects", "held": "how many of one colour", "far": "how many objects, of 7 to 9"}
FORMS = ("text", "pictures")


def rows_of(
    group: str, form: str, count: int, seed: int, colours: Sequence[str] = counting.TRAINING_COLOURS
) -> list[Sample]:
    """The same seed gives the same objects in both forms."""
    counts = (7, 9) if group == "far" else (1, 6)
    scenes = counting.counting_split(count, seed=seed, colours=colours, counts=counts, name=group)
    return [_asked(row, number, group, form) for number, row in enumerate(scenes)]


def _asked(row: Sample, number: int, group: str, form: str) -> Sample:
    there = row.extra["colours"]
    meant = [there[number % len(there)]] if group == "held" else []
    counted = [colour for colour in there if colour in meant] if meant else there
    question = f"how many {' '.join([*meant, 'objects'])}?"
    shown = row.messages[0].parts[0] if form == "pictures" else f"{' '.join(there)} "
    said = f"<think> {' '.join(counted)} </think><answer> {len(counted)} </answer>"
    extra = {"colours": there, "demonstration": said}
    asked = Message(role="user", parts=(shown, question))
    return replace(row, id=f"{row.id}-{form}", messages=(asked,), answer=str(len(counted)), extra=extra)
