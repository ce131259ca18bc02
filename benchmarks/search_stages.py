"""What visual_search.py is made of: its sizes, scenes, model, and the config of each stage.

draw_data(Path("runs/search/data"), TINY)       # rows for every stage, by name
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from search_curves import LIMITS


@dataclass(frozen=True, kw_only=True)
class Size:
    """Everything that can be made larger or smaller; each field is an option of the command."""

    kind: str = "orientation"  # four answers: a guess pays a quarter
    level: str = "medium"
    grid: int = 4
    view: int = 56
    width: int = 64  # of the language model; heads of 32
    depth: int = 3
    vision_width: int = 64
    vision_depth: int = 2
    # One picture, one answer; then chats about many pictures; then the cold start; then RL.
    read_steps: int = 320
    read_rows: int = 64
    read_lr: float = 1.5e-3
    chat_steps: int = 600
    chat_rows: int = 16
    chat_lr: float = 1e-3
    demonstrations: int = 600
    scenes: int = 3200
    items: int = 256  # of the evaluation
    k: int = 4  # samples of each item
    turns: int = 6  # in the cold start and in RL
    sft_steps: int = 120
    sft_rows: int = 32
    sft_lr: float = 2e-3
    rl_steps: int = 80
    rl_prompts: int = 16
    rl_samples: int = 8
    rl_lr: float = 5e-4
    mistakes: float = 0.4  # wrong calls among those that are shown, each with its correction
    baseline: bool = True  # excluded members stay in the group's baseline, as in Mini-o3


TINY = Size(chat_steps=200, scenes=1500, items=64, sft_steps=110, rl_steps=50)


# -- data ------------------------------------------------------------------------------------------


def draw_data(folder: Path, size: Size) -> dict[str, str]:
    """Scenes to search, scenes with a searcher's turns, the same scenes with bare answers, scenes
    to evaluate; no scene is in two of the first and the last. All seeds share them.
    """
    from saccade.config import load
    from saccade.plugins.visual_search import coldstart

    def scenes(n: int, name: str) -> Path:
        jobs = os.cpu_count() or 1
        sizes = [len(shard) for shard in np.array_split(np.arange(n), jobs)]
        with ProcessPoolExecutor(jobs) as pool:
            files = list(pool.map(partial(write_scenes, folder, size, name), range(jobs), sizes))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(file.read_text() for file in files))
        return path

    folder.mkdir(parents=True, exist_ok=True)
    reading = {
        name: draw_reading(folder, size, name, scenes(min(1000, size.scenes), f"{name}_scenes"))
        for name in ("read", "chat")
    }
    shown = scenes(size.demonstrations, "shown")
    config = load({"env": _crop(size)})
    coldstart.run(config, shown, folder / "cold", turns=size.turns, mistakes=size.mistakes, verifier="exact")
    plain = folder / "plain.jsonl"
    with plain.open("w") as file:
        for line in shown.read_text().splitlines():
            row = json.loads(line)
            answer = row["answer"]
            turn = f"<think>It reads {answer}.</think><answer>{answer}</answer>"
            row["conversations"] = [{"from": "human", "value": row.pop("problem")}, {"from": "gpt", "value": turn}]
            file.write(json.dumps(row) + "\n")
    paths = reading | {
        "cold": folder / "cold" / "train.jsonl",
        "plain": plain,
        "train": scenes(size.scenes, "train"),
        "val": scenes(size.items, "val"),
    }
    return {name: str(path) for name, path in paths.items()}


def write_scenes(folder: Path, size: Size, name: str, shard: int, n: int) -> Path:
    from saccade.plugins.quickstart.counting import write_jsonl
    from saccade.plugins.visual_search.search_scenes import search_split

    rows = search_split(
        n,
        seed=int.from_bytes(f"{shard}{name}".encode(), "little"),
        level=size.level,
        kind=size.kind,
        grid=size.grid,
        view=size.view,
    )
    return write_jsonl(rows, folder, name=f"{name}-{shard}", budgets=True)


def draw_reading(folder: Path, size: Size, name: str, scenes: Path) -> Path:
    """Chats about one place after the other: what a pretrained model would bring along. In long
    ones the assistant counts on through the boxes of a grid. Nobody searches in them: what is shown
    does not follow from what is said; nobody calls a tool.
    """
    from saccade.config import DataConfig, DataSource
    from saccade.data.datasets import load
    from saccade.media.images import crop
    from saccade.plugins.check_data.canonical_rows import dialogue_row
    from saccade.plugins.visual_search.search_expert import call, place_boxes
    from saccade.types import Message

    most = 1 if name == "read" else max(LIMITS)
    pool = load([DataSource(path=str(scenes))], DataConfig()).samples
    rng = np.random.default_rng(most)
    boxes = [re.findall(r"\[.*?\]", call(box, ""))[0] for box in place_boxes(size.grid)]
    rows = getattr(size, f"{name}_steps") * getattr(size, f"{name}_rows")
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for index in range(min(rows, 8 * len(pool))):
            messages, place = [], int(rng.integers(len(boxes)))
            for number in range(1, int(most ** rng.random()) + 1):
                scene = pool[int(rng.integers(len(pool)))]
                side = scene.media[0].width // size.grid
                x, y = (v // side * side for v in scene.extra["box"][:2])
                said = f"It reads {scene.answer}."
                if rng.random() < 0.5:
                    x, said = (x + side) % (size.grid * side), "Not here."
                picture = crop(scene.media[0], (x, y, x + side, y + side))
                asked = scene.messages[0].text if number == 1 else f"Picture {number}:\n"
                counted = boxes[(place + number) % len(boxes)] if most > 1 else ""
                messages += [
                    Message(role="user", parts=(asked, picture)),
                    Message(role="assistant", parts=(f"<think>{said}</think>{counted}",)),
                ]
            sample = replace(scene, id=f"{name}-{index}", messages=tuple(messages), extra={})
            file.write(json.dumps(dialogue_row(sample, folder)) + "\n")
    return path


def build_model(folder: Path, data: Mapping[str, str], size: Size) -> str:
    from saccade.plugins.families import tiny

    texts = [
        turn["value"]
        for name in ("cold", "chat")
        for line in Path(data[name]).read_text().splitlines()
        for turn in json.loads(line)["conversations"]
    ]
    return tiny.build(
        "qwen2_5_vl",
        folder,
        phrases=phrases(texts),
        text={
            "hidden_size": size.width,
            "intermediate_size": 2 * size.width,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.width // 32,
            "num_key_value_heads": max(1, size.width // 64),
            "initializer_range": 0.1 if size.width < 128 else 0.05,
        },
        vision={
            "hidden_size": size.vision_width,
            "intermediate_size": 2 * size.vision_width,
            "depth": size.vision_depth,
            "num_heads": size.vision_width // 32,
            "fullatt_block_indexes": [size.vision_depth - 1],
        },
    )


def phrases(texts: Sequence[str]) -> list[str]:
    """What becomes a token: tags, boxes, and what stands between them and digits."""
    marks = r"(</?\w+>|\{\"bbox_2d\": |\[[\d., ]+\]|observation_|[\d\[])"
    pieces = {piece for text in texts for piece in re.split(marks, text) if len(piece) > 1}
    return sorted(pieces - {"<image>"} | {"user\n", "assistant\n"})


# -- configs ---------------------------------------------------------------------------------------


def common_config(out: Path, size: Size, seed: int, memory: float | None) -> dict[str, Any]:
    pixels = size.view**2
    return {
        "run": {"out": str(out), "seed": seed, "gpu_memory_gib": memory},
        "model": {"dtype": "auto", "checkpointing": "off"},
        "prompt": {"format": "think_answer", "instruction": ""},
        "data": {"min_pixels": pixels, "max_pixels": pixels},
        "save": {"every": 0},
        "track": {"tensorboard": False, "trajectories_every": 0},
    }


def _crop(size: Size) -> dict[str, Any]:
    pixels = size.view**2
    return {
        "name": "crop",
        "instruction": "",
        "min_pixels": pixels,
        "max_pixels": pixels,
        "max_turns": size.turns,
        "eval": {"max_turns": max(LIMITS), "max_images": 2 * max(LIMITS)},
    }


def _with(common: Mapping[str, Any], name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    sections = {"run": {"name": name}} | sections
    return {**common, **{key: {**common.get(key, {}), **value} for key, value in sections.items()}}


def sft_config(common: Mapping[str, Any], name: str, model: str, rows: str, size: Size) -> dict[str, Any]:
    stage = name.partition("_")[0].partition("-")[0]
    steps = getattr(size, f"{stage}_steps")
    return _with(
        common,
        name,
        run={"name": name, "max_steps": steps},
        model={"path": model},
        data={"train": rows},
        sft={"max_tokens": 4096},
        train={
            "prompts_per_step": getattr(size, f"{stage}_rows"),
            "lr": getattr(size, f"{stage}_lr"),
            "warmup": min(20, steps - 1),
            "schedule": "linear",
            "min_lr": 0.3,
            "weight_decay": 0.0,
        },
        val={"every": 0},
    ) | {"env": {"instruction": ""}}


def rl_config(
    common: Mapping[str, Any], name: str, arm: str, model: str, data: Mapping[str, str], size: Size
) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"preset": "grpo", "drop_constant": True, "kl": {"coef": 0.0}}
    if arm == "masked":
        algorithm |= {"exclude_status": ["overturn"], "excluded_in_baseline": size.baseline}
    return _with(
        common,
        name,
        run={"name": name, "max_steps": size.rl_steps},
        model={"path": model},
        data={"train": data["train"]},
        rollout={"max_tokens": 16},
        reward={"terms": ["exact"]},
        train={
            "prompts_per_step": size.rl_prompts,
            "samples_per_prompt": size.rl_samples,
            "lr": size.rl_lr,
            "warmup": min(5, size.rl_steps - 1),
            "schedule": "linear",
            "min_lr": 0.1,
            "weight_decay": 0.0,
        },
        val={"every": 0},
    ) | {"algorithm": algorithm, "env": {"name": "single_turn"} if arm == "direct" else _crop(size)}


def evaluate(
    out: Path, name: str, arm: str, model: str, data: Mapping[str, str], common: Mapping[str, Any], size: Size
) -> dict[str, Any]:
    """avg@k under every limit of turns, and how the episodes ended."""
    from saccade.plugins.evaluation import evaluate as recipe

    config = _with(
        common,
        f"eval_{name}",
        model={"path": model},
        data={"val": data["val"]},
        rollout={"max_tokens": 16},
        reward={"terms": ["exact"]},
        val={"n": size.k, "temperature": 1.0, "turns": [] if arm == "direct" else LIMITS},
    ) | {"env": {"name": "single_turn"} if arm == "direct" else _crop(size)}
    folder = out / f"eval_{name}"
    found = recipe.run(config, out=folder)["val"]
    limits = found.get("by_limit", {})  # who has one turn answers alike under every limit
    accuracy = {str(n): limits.get(str(n), found)["accuracy"] for n in LIMITS}
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {"accuracy": accuracy, "ends": _ends(rows), "turns": _mean(rows, "turns")}


def _ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    reasons = [row["end_reason"] for row in rows]
    return {reason: reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))}


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))
