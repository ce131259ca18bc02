"""Conversations about drawn pictures, several questions each, from the builders of `saccade data`: solids, charts, and
words that are one token of the tokenizer, sometimes spelled out.

    python experiments/smolvlm/pictures.py MODEL out/train.jsonl --rows 20000 --workers 16
"""

import argparse
import json
import sys
import zlib
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the source tree is enough, no install needed

from PIL import Image  # noqa: E402

from saccade.plugins.drawn.chart_questions import CHART_KINDS, Chart, draw_chart_row  # noqa: E402
from saccade.plugins.drawn.drawn_sets import Drawing  # noqa: E402
from saccade.plugins.drawn.scene_questions import SCENE_KINDS, SCENE_SPLITS, draw_scene_row  # noqa: E402
from saccade.plugins.drawn.solids import Solid  # noqa: E402
from saccade.plugins.drawn.text_pages import ORDINALS, VOCABULARY, on_page  # noqa: E402

SIDE, COMMON = 224, 10_000
Turns = list[tuple[str, str]]
SOLID_KINDS = ("count", "attribute", "attribute", "relation", "relation", "exist", "count", "compare")
CHARTS_ASKED = ("value", "value", "which", "value", "compare", "difference", "count")


def unseen(word: str) -> bool:
    """Whether a word is held out of all training pictures."""
    return zlib.crc32(word.encode()) % 20 == 0


def words_of(model: str) -> list[str]:
    """Common words of three to eight letters: one token after a blank, with a small token id."""
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    marked = (token[1:] for token, number in vocabulary.items() if token[0] == "Ġ" and number < COMMON)
    found = (word for word in marked if word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 8)
    return sorted({*found, *VOCABULARY})


def scene(rng: Random, index: int) -> tuple[Image.Image, Turns]:
    drawn = draw_scene_row(rng, 0, split="same", kinds=("describe",), side=SIDE)
    names, solids = Solid._fields[:4], []
    for one in drawn.more["objects"]:
        left, top, right, bottom = (value / SIDE for value in one["box"])
        solids.append(Solid(*(one[name] for name in names), (left + right) / 2, (top + bottom) / 2))
    asked = (SCENE_KINDS[kind](rng, solids, SCENE_SPLITS["same"]) for kind in rng.sample(SOLID_KINDS, 6))
    return drawn.picture, [(drawn.question, drawn.answer), *filter(None, asked)]


def chart(rng: Random, index: int) -> tuple[Image.Image, Turns]:
    drawn = draw_chart_row(rng, 0, split="same", kinds=("describe",), side=SIDE)
    about = drawn.more
    shown = Chart(about["chart"], about["title"], about["names"], about["values"], 0, 0, False)
    asked = [CHART_KINDS[kind](rng, shown) for kind in rng.sample(CHARTS_ASKED, 5)]
    return drawn.picture, [(drawn.question, drawn.answer), *asked]


def words(rng: Random, index: int, *, known: Sequence[str]) -> tuple[Image.Image, Turns]:
    """A picture of one to five words, a number, or a sum, with its turns."""
    kind = rng.choice(("words", "words", "words", "number", "sum"))
    chosen = rng.sample(known, rng.randint(1, 5))
    if kind == "words":
        text = " ".join(chosen)
        places = rng.sample(range(len(chosen)), min(2, len(chosen)))
        turns = [("What does the picture say?", text)]
        turns += [(f"What is the {ORDINALS[n]} word in the picture?", chosen[n]) for n in places if len(chosen) > 1]
        turns += [(f"Spell the {ORDINALS[n]} word.", " ".join(chosen[n])) for n in places]
    elif kind == "number":
        text = str(rng.randrange(10 ** rng.randint(1, 6)))
        turns = [("Which number is in the picture?", text), ("What does the picture say?", text)]
    else:
        a, b = sorted((rng.randrange(100), rng.randrange(100)), reverse=rng.random() < 0.5)
        sign, result = ("-", a - b) if a >= b and rng.random() < 0.5 else ("+", a + b)
        text = f"{a} {sign} {b} = ?"
        turns = [("What does the picture say?", text), ("What is the result?", str(result))]
    return on_page(rng, text, SIDE)[0], turns


def unseen_row(rng: Random, index: int, *, kinds: Sequence[str], words: Sequence[str]) -> Drawing:
    text = " ".join(rng.sample(words, rng.randint(1, 2)))
    return Drawing(on_page(rng, text, SIDE)[0], "What does the picture say?", text, kinds[0], {})


def draw(index: int, *, folder: Path, seed: int, known: Sequence[str]) -> dict[str, Any]:
    rng = Random(f"smolvlm/{seed}/{index}")
    picture, turns = (scene, chart, partial(words, known=known))[index % 3](rng, index)
    place = folder / f"{index // 1000:03}" / f"{index:06}.png"
    place.parent.mkdir(parents=True, exist_ok=True)
    picture.save(place, compress_level=1)
    turns = rng.sample(turns, len(turns)) if index % 2 else [*rng.sample(turns[1:], len(turns) - 1), turns[0]]
    said = [{"role": r, "content": text} for turn in turns for r, text in zip(("user", "assistant"), turn, strict=True)]
    said[0]["content"] = f"<image>{said[0]['content']}"
    images = [f"{folder.name}/{place.parent.name}/{place.name}"]
    return {"id": f"smolvlm-{seed}-{index}", "images": images, "messages": said}


def write(model: str, file: Path, *, rows: int, seed: int = 0, workers: int = 1) -> Path:
    known = [word for word in words_of(model) if not unseen(word)]
    work = partial(draw, folder=file.with_suffix(""), seed=seed, known=known)
    file.parent.mkdir(parents=True, exist_ok=True)
    with get_context("fork").Pool(workers) as pool, file.with_suffix(".part").open("w") as out:
        for row in pool.imap(work, range(rows), chunksize=100):
            out.write(json.dumps(row) + "\n")
    return file.with_suffix(".part").rename(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    print(write(**vars(parser.parse_args())))
