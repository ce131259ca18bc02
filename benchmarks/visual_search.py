"""Does reinforcement learning teach a model to look again, and does it go on looking when it may?

One command builds a small vision-language model with random weights, draws scenes, teaches the call
syntax by a cold start of at most six turns, trains every arm, and evaluates each with up to 32
turns. Seeds run side by side as processes of their own, on one GPU or on the cores of a CPU.

    python benchmarks/visual_search.py --out runs/search            # one H200
    python benchmarks/visual_search.py --tiny --out runs/search     # two cores

The policy is never told how many turns it has, and its sampling noise depends on the tokens so far
alone: under a smaller limit the same episode ends earlier. So one evaluation with 32 turns gives
the accuracy under every smaller limit, exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from search_curves import LIMITS, picture, summary, table


@dataclass(frozen=True, kw_only=True)
class Size:
    """Everything that can be made larger or smaller; each field is an option of the command."""

    kind: str = "digit"
    level: str = "medium"
    grid: int = 4
    view: int = 112
    width: int = 256  # of the language model; heads of 32
    depth: int = 6
    vision_width: int = 192
    vision_depth: int = 4
    # One picture, one answer; then chats about many pictures; then the cold start; then RL.
    read_steps: int = 300
    read_rows: int = 128
    read_lr: float = 1e-3
    chat_steps: int = 100
    chat_rows: int = 32
    chat_lr: float = 5e-4
    demonstrations: int = 2000
    scenes: int = 3200
    items: int = 256  # of the evaluation
    k: int = 8  # samples of each item
    turns: int = 6  # in the cold start and in RL
    sft_steps: int = 300
    sft_rows: int = 128
    sft_lr: float = 1e-3
    rl_steps: int = 100
    rl_prompts: int = 32
    rl_samples: int = 8
    rl_lr: float = 2e-4
    mistakes: float = 0.03
    baseline: bool = True  # excluded members stay in the group's baseline, as in Mini-o3


TINY = Size(
    view=56,
    width=64,
    depth=3,
    vision_width=64,
    vision_depth=2,
    read_steps=130,
    read_rows=64,
    read_lr=2e-3,
    chat_steps=40,
    chat_rows=8,
    chat_lr=1e-3,
    demonstrations=600,
    scenes=1500,
    items=64,
    k=4,
    sft_steps=60,
    sft_rows=32,
    sft_lr=2e-3,
    rl_steps=40,
    rl_prompts=16,
    rl_samples=8,
    rl_lr=5e-4,
)


# -- one seed --------------------------------------------------------------------------------------


def run_seed(out: Path, size: Size, seed: int, memory: float | None) -> dict[str, Any]:
    """Every stage of one seed; returns what it measured."""
    from saccade.recipes import parts, rl, sft

    parts.quiet_libraries()
    began = time.monotonic()
    data = draw_data(out / "data", size, seed)
    model = build_model(out / "model", data, size, seed)
    common = _common(out, size, seed, memory)
    seconds: dict[str, float] = {"data": time.monotonic() - began}

    def timed(name: str, recipe: Any, config: dict[str, Any]) -> str:
        start = time.monotonic()
        recipe.run(config)
        seconds[name] = time.monotonic() - start
        return _last_checkpoint(out / name)

    base = timed("read", sft, sft_config(common, "read", model, data["read"], size))
    base = timed("chat", sft, sft_config(common, "chat", base, data["chat"], size))
    models = {"sft": timed("sft", sft, sft_config(common, "sft", base, data["cold"], size))}
    start = timed("sft_direct", sft, sft_config(common, "sft_direct", base, data["plain"], size))
    for arm in ("masked", "unmasked"):
        models[arm] = timed(arm, rl, rl_config(common, arm, models["sft"], data, size))
    models["direct"] = timed("direct", rl, rl_config(common, "direct", start, data, size))
    evaluations = {}
    for arm, path in models.items():
        start_time = time.monotonic()
        evaluations[arm] = evaluate(out, arm, path, data, common, size)
        seconds[f"eval_{arm}"] = time.monotonic() - start_time
    return {
        "seed": seed,
        "parameters": _parameters(Path(model)),
        "seconds": seconds,
        "evaluations": evaluations,
    }


def draw_data(folder: Path, size: Size, seed: int) -> dict[str, str]:
    """Scenes to search, scenes with a searcher's turns, the same scenes with bare answers, scenes
    to evaluate; no scene is in two of the first and the last.
    """
    from saccade.config import load
    from saccade.data.visual_search import search_split, write_search
    from saccade.recipes import coldstart

    def scenes(n: int, name: str, offset: int) -> Path:
        rows = search_split(
            n,
            seed=1000 * seed + offset,
            level=size.level,
            kind=size.kind,
            grid=size.grid,
            view=size.view,
        )
        return write_search(rows, folder, name=name)

    read = draw_reading(folder, size, "read", 1000 * seed + 4, most=1)
    chat = draw_reading(folder, size, "chat", 1000 * seed + 5, most=max(LIMITS))
    shown = scenes(size.demonstrations, "shown", 1)
    config = load({"env": _crop(size), "run": {"seed": seed}})
    coldstart.run(
        config, shown, folder / "cold", turns=size.turns, mistakes=size.mistakes, verifier="exact"
    )
    plain = folder / "plain.jsonl"
    with plain.open("w") as file:
        for line in shown.read_text().splitlines():
            row = json.loads(line)
            answer = row["answer"]
            turn = f"<think>It reads {answer}.</think><answer>{answer}</answer>"
            row["conversations"] = [
                {"from": "human", "value": row.pop("problem")},
                {"from": "gpt", "value": turn},
            ]
            file.write(json.dumps(row) + "\n")
    return {
        "read": str(read),
        "chat": str(chat),
        "cold": str(folder / "cold" / "train.jsonl"),
        "plain": str(plain),
        "train": str(scenes(size.scenes, "train", 2)),
        "val": str(scenes(size.items, "val", 3)),
    }


def draw_reading(folder: Path, size: Size, name: str, seed: int, *, most: int) -> Path:
    """Chats about one place after the other: what a pretrained model would bring along. Nobody
    searches in them, nobody calls a tool.
    """
    from saccade.data.dialogues import dialogue_row
    from saccade.data.visual_search import search_split
    from saccade.images import crop
    from saccade.types import Message

    rng = np.random.default_rng(seed)
    rows = getattr(size, f"{name}_steps") * getattr(size, f"{name}_rows")
    pool = search_split(
        min(rows, 1000),
        seed=seed,
        level=size.level,
        kind=size.kind,
        grid=size.grid,
        view=size.view,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for index in range(min(rows, 4 * len(pool))):
            messages = []
            for number in range(1, int(most ** rng.random()) + 1):
                scene = pool[int(rng.integers(len(pool)))]
                side = scene.media[0].width // size.grid
                x, y = (v // side * side for v in scene.extra["box"][:2])
                said = f"It reads {scene.answer}."
                if rng.random() < 0.5:
                    x, said = (x + side) % (size.grid * side), "Not here."
                picture = crop(scene.media[0], (x, y, x + side, y + side))
                asked = scene.messages[0].text if number == 1 else f"Picture {number}:\n"
                messages += [
                    Message(role="user", parts=(asked, picture)),
                    Message(role="assistant", parts=(f"<think>{said}</think>",)),
                ]
            sample = replace(scene, id=f"{name}-{index}", messages=tuple(messages), extra={})
            file.write(json.dumps(dialogue_row(sample, folder)) + "\n")
    return path


def build_model(folder: Path, data: Mapping[str, str], size: Size, seed: int) -> str:
    from saccade.models import tiny

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
        seed=seed,
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


def _common(out: Path, size: Size, seed: int, memory: float | None) -> dict[str, Any]:
    pixels = size.view**2
    return {
        "run": {"out": str(out), "seed": seed, "memory": memory},
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


def sft_config(
    common: Mapping[str, Any], name: str, model: str, rows: str, size: Size
) -> dict[str, Any]:
    stage = name.partition("_")[0]
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
    common: Mapping[str, Any], arm: str, model: str, data: Mapping[str, str], size: Size
) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"preset": "grpo", "drop_constant": True, "kl": {"coef": 0.0}}
    if arm == "masked":
        algorithm |= {"exclude_status": ["overturn"], "excluded_in_baseline": size.baseline}
    return _with(
        common,
        arm,
        run={"name": arm, "max_steps": size.rl_steps},
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
    out: Path,
    arm: str,
    model: str,
    data: Mapping[str, str],
    common: Mapping[str, Any],
    size: Size,
) -> dict[str, Any]:
    """avg@k under every limit of turns, and how the episodes ended."""
    from saccade.recipes import evaluate as recipe

    config = _with(
        common,
        f"eval_{arm}",
        model={"path": model},
        data={"val": data["val"]},
        rollout={"max_tokens": 16},
        reward={"terms": ["exact"]},
        val={"n": size.k, "temperature": 1.0},
    ) | {"env": {"name": "single_turn"} if arm == "direct" else _crop(size)}
    folder = out / f"eval_{arm}"
    recipe.run(config, out=folder)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {"accuracy": by_limit(rows), "ends": _ends(rows), "turns": _mean(rows, "turns")}


def by_limit(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """An episode counts under a limit when it answered rightly within it."""
    return {
        str(limit): float(np.mean([row["score"] == 1 and row["turns"] <= limit for row in rows]))
        for limit in LIMITS
    }


def _ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    reasons = [row["end_reason"] for row in rows]
    return {reason: reasons.count(reason) / len(reasons) for reason in sorted(set(reasons))}


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _parameters(folder: Path) -> int:
    from saccade.checkpoint import tensor_shapes

    return int(sum(np.prod(shape) for shape in tensor_shapes(folder)))


def _last_checkpoint(run: Path) -> str:
    from saccade.checkpoint import complete_steps

    return str(run / "checkpoints" / f"step-{complete_steps(run / 'checkpoints')[-1]}")


# -- all seeds -------------------------------------------------------------------------------------


def run_all(out: Path, size: Size, seeds: Sequence[int], jobs: int, memory: float | None) -> None:
    """Each seed as a process; a seed that is done already is not run again."""
    out.mkdir(parents=True, exist_ok=True)
    waiting, running = list(seeds), dict[int, subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            seed = waiting.pop(0)
            if not (out / f"seed-{seed}" / "result.json").is_file():
                running[seed] = _start(out, size, seed, jobs, memory)
        for seed, process in list(running.items()):
            if process.poll() is not None:
                del running[seed]
                log = out / f"seed-{seed}.log"
                assert process.returncode == 0, f"seed {seed} failed; see {log}"
                print(f"seed {seed} is done", flush=True)
        time.sleep(0.5)
    results = [json.loads((out / f"seed-{seed}" / "result.json").read_text()) for seed in seeds]
    found = summary(results, asdict(size))
    (out / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "visual_search.svg").write_text(picture(found))
    print(table(found))


def _start(
    out: Path, size: Size, seed: int, jobs: int, memory: float | None
) -> subprocess.Popen[bytes]:
    options = [f"--{name}={value}" for name, value in asdict(size).items()]
    options += [f"--memory={memory}"] if memory else []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with (out / f"seed-{seed}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, f"--out={out}", f"--one={seed}", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/visual_search"))
    parser.add_argument("--tiny", action="store_true", help="small enough for two cores")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3, help="seeds that run at once")
    parser.add_argument("--memory", type=float, help="GiB of the GPU for each process")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    for field in fields(Size):
        kind = type(field.default)
        reader = (lambda text: text == "True") if kind is bool else kind
        parser.add_argument(f"--{field.name}", type=reader)
    given = vars(parser.parse_args())
    changes = {f.name: given[f.name] for f in fields(Size) if given[f.name] is not None}
    size = replace(TINY if given["tiny"] else Size(), **changes)
    if given["one"] is not None:
        folder = given["out"] / f"seed-{given['one']}"
        result = run_seed(folder, size, given["one"], given["memory"])
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    else:
        run_all(given["out"], size, range(given["seeds"]), given["jobs"], given["memory"])


if __name__ == "__main__":
    main()
