"""What the recipes in configs/ need, by `saccade estimate`: written into their first lines.

    python benchmarks/recipes.py              # prints a line for each
    python benchmarks/recipes.py --write      # and writes it behind the comments of the file

Models have the published shapes and no weights; prompts are as long as the recipe allows. Recipes whose models have
another shape than those below, or that are for several GPUs, say it in words of their own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from model import SIZES, enlarge

from saccade.config import load
from saccade.errors import SaccadeError
from saccade.plugins.estimate import estimate
from saccade.plugins.families import tiny
from saccade.system import devices

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
CARDS = {80: "H100", 141: "H200"}


def _text(hidden: int, inner: int, layers: int, heads: int, keys: int, words: int, **more: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return SIZES["7b"] | sizes | {"num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words} | more


LLAMA_8B = _text(4096, 14336, 32, 32, 8, 128_256)
QWEN_7B = SIZES["7b"]
SHAPES = {
    "Qwen2.5-VL-3B-Instruct": SIZES["3b"],
    "Qwen2.5-VL-7B-Instruct": QWEN_7B,
    "Mini-o3-7B-v1": QWEN_7B,
    "Qwen2.5-7B-Instruct": QWEN_7B,
    "Qwen2-VL-2B-Instruct": _text(1536, 8960, 28, 12, 2, 151_936),
    "Qwen2.5-1.5B-Instruct": _text(1536, 8960, 28, 12, 2, 151_936),
    "Qwen2.5-0.5B-Instruct": SIZES["0.5b"],
    "Qwen2.5-0.5B": SIZES["0.5b"],
    "Qwen3-4B": _text(2560, 9728, 36, 32, 8, 151_936),
    "Qwen3-14B-Base": SIZES["14b"],
    "Llama-3-8b-sft": LLAMA_8B,
    "Llama-3-8b-rm": LLAMA_8B,
}

LEARNED = {  # recipes that go on with what another has trained
    "lmmr1_mgt_geo": "Qwen2.5-VL-3B-Instruct",
    "lmmr1_mgt_percereas": "Qwen2.5-VL-3B-Instruct",
    "minio3_rl": "Qwen2.5-VL-7B-Instruct",
}


def needs(file: Path, scratch: Path) -> str:
    """What to write into a recipe; nothing where its model is not known here."""
    lines = file.read_text(encoding="utf-8").splitlines()
    command = lines[0].split()[2]
    config = load(file, command=command)
    name = LEARNED.get(file.stem) or Path(config.model.path).name
    if name not in SHAPES or command in ("eval", "reward-model") or config.run.gpus > 1:
        return ""
    folder = scratch / name
    if not folder.exists():
        tiny.build("qwen2_5_vl", folder)
        enlarge(folder, SHAPES[name])
    config = load(file, [f"model.path={folder}"], command)
    found = {}
    for size, card in CARDS.items():
        device = devices.named(card)
        assert device is not None
        found[size] = estimate(config, device, command=command)
    least = next((size for size, one in found.items() if one.memory.fits), None)
    peak = f" ({max(found[least].memory.peaks.values()):.0f} GiB)" if least else ""
    text = f"Needs one GPU of {least} GB{peak}" if least else "Needs more memory than one GPU has"
    for size, one in found.items():
        mildest = next((way for way in one.advice if not way.startswith(("data.", "rollout.max_tokens"))), "")
        if mildest and mildest not in text:
            text += f"; with {mildest} one of {size} GB is enough"
    return f"{text} (`saccade estimate`)."


def recipes() -> Iterator[tuple[Path, str]]:
    with tempfile.TemporaryDirectory() as scratch:
        for file in sorted(CONFIGS.glob("*.yaml")):
            try:
                yield file, needs(file, Path(scratch))
            except SaccadeError as error:
                yield file, f"? {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for file, text in recipes():
        print(f"{file.name}: {text or '-'}", flush=True)
        if args.write and text and not text.startswith("?"):
            lines = file.read_text(encoding="utf-8").splitlines()
            end = next(n for n, line in enumerate(lines) if not line.startswith("#"))
            start = next((n for n, line in enumerate(lines[:end]) if line.startswith("# Needs ")), end)
            lines[start:end] = [f"# {line}" for line in wrap(text, 116)]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
