"""Rows of the visual search: single cells to read, chats about many cells, scenes with an expert's turns, scenes for
training and evaluation; and a model with random weights whose tokens are phrases of these. All seeds share them.

    rows = draw_rows(Path("runs/turns/rows"), SIZES, HERE / "common.yaml", workers=16)
    build_model(Path("runs/turns/model"), rows)
"""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from saccade.config import DataConfig, DataSource, load
from saccade.data import datasets
from saccade.media.images import crop
from saccade.plugins.check_data.canonical_rows import dialogue_row
from saccade.plugins.families import tiny
from saccade.plugins.quickstart.counting import write_jsonl
from saccade.plugins.visual_search import coldstart
from saccade.plugins.visual_search.search_expert import call, place_boxes
from saccade.plugins.visual_search.search_scenes import search_split
from saccade.types import Message

SIZES = {"read": 8000, "chat": 8000, "shown": 600, "train": 3200, "val": 256, "dev": 256}
TINY = {"read": 4, "chat": 4, "shown": 8, "train": 4, "val": 2, "dev": 2}
GRID, VIEW = 4, 56  # cells per side; pixels per side as the model sees a cell
PICTURES = {"read": 1, "chat": 32}  # pictures in the longest chat
MISTAKES = 0.4  # share of wrong calls in demonstrations, each followed by its correction
SHARDS = 16  # fixed, as a scene depends on its shard and its index there
MODEL = {
    "text": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "initializer_range": 0.1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "vision": {
        **{"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "fullatt_block_indexes": [1]}
    },
}


def draw_rows(folder: Path, sizes: Mapping[str, int], config: Path, workers: int) -> dict[str, Path]:
    """Write the files; returns them by name. No scene is in two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.jsonl" for name in sizes} | {"shown": folder / "shown" / "train.jsonl"}
    if files["shown"].exists():  # the file that is written last
        return files
    for name in sizes.keys() - PICTURES.keys() - {"shown"}:
        write_scenes(files[name], sizes[name], workers)
    for name, most in PICTURES.items():
        scenes = write_scenes(folder / f"{name}-scenes.jsonl", min(1000, sizes[name]), workers)
        write_chats(files[name], scenes, sizes[name], most)
    scenes = write_scenes(folder / "shown-scenes.jsonl", sizes["shown"], workers)
    turns = load(config).env.max_turns
    coldstart.run(load(config), scenes, folder / "shown", turns=turns, mistakes=MISTAKES, verifier="exact")
    return files


def write_scenes(file: Path, count: int, workers: int) -> Path:
    shares = [len(shard) for shard in np.array_split(np.arange(count), SHARDS)]
    with ProcessPoolExecutor(workers) as pool:
        mapped = map if workers == 1 else pool.map
        written = mapped(partial(write_shard, file), range(SHARDS), shares)
        file.write_text("".join(path.read_text() for path in written))
    return file


def write_shard(file: Path, shard: int, count: int) -> Path:
    seed = int.from_bytes(f"{shard}{file.stem}".encode(), "little")
    rows = search_split(count, seed=seed, level="medium", kind="orientation", grid=GRID, view=VIEW)
    return write_jsonl(rows, file.parent, name=f"{file.stem}-{shard}", budgets=True)


def write_chats(file: Path, scenes: Path, count: int, most: int) -> None:
    """Write chats about one cell after another, which teach what a pretrained model would know. In long chats the
    assistant also lists the boxes of the grid in order. They contain no search: pictures do not depend on what the
    assistant says, and it calls no tool.
    """
    pool = datasets.load([DataSource(path=str(scenes))], DataConfig()).samples
    rng = np.random.default_rng(most)
    boxes = [re.findall(r"\[.*?\]", call(box, ""))[0] for box in place_boxes(GRID)]
    with file.open("w") as out:
        for index in range(count):
            messages, place = [], int(rng.integers(len(boxes)))
            for number in range(1, int(most ** rng.random()) + 1):
                scene = pool[int(rng.integers(len(pool)))]
                side = scene.media[0].width // GRID
                x, y = (v // side * side for v in scene.extra["box"][:2])
                said = f"It reads {scene.answer}."
                if rng.random() < 0.5:
                    x, said = (x + side) % (GRID * side), "Not here."
                picture = crop(scene.media[0], (x, y, x + side, y + side))
                asked = scene.messages[0].text if number == 1 else f"Picture {number}:\n"
                counted = boxes[(place + number) % len(boxes)] if most > 1 else ""
                messages.append(Message(role="user", parts=(asked, picture)))
                messages.append(Message(role="assistant", parts=(f"<think>{said}</think>{counted}",)))
            sample = replace(scene, id=f"{file.stem}-{index}", messages=tuple(messages), extra={})
            out.write(json.dumps(dialogue_row(sample, file.parent)) + "\n")


def build_model(folder: Path, rows: Mapping[str, Path]) -> str:
    lines = (line for name in ("shown", "chat") for line in rows[name].read_text().splitlines())
    texts = [turn["value"] for line in lines for turn in json.loads(line)["conversations"]]
    return tiny.build("qwen2_5_vl", folder, phrases=phrases(texts), **MODEL)


def phrases(texts: Sequence[str]) -> list[str]:
    """The phrases that become tokens: tags, boxes, and the texts between these and digits."""
    marks = r"(</?\w+>|\{\"bbox_2d\": |\[[\d., ]+\]|observation_|[\d\[])"
    pieces = {piece for text in texts for piece in re.split(marks, text) if len(piece) > 1}
    return sorted(pieces - {"<image>"} | {"user\n", "assistant\n"})
