"""Memory needs of the recipes in configs/, by `saccade estimate`, for the comments at their top.

    python benchmarks/recipes.py              # prints a line for each
    python benchmarks/recipes.py --write      # also writes it below the first comments of the file
    python benchmarks/recipes.py --only 8gpu  # those with this in their names

Models have the published shapes and no weights; prompts are as long as the recipe allows. Recipes whose models are not
in the table below have hand-written lines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model
from model import SIZES, enlarge

from saccade.config import load
from saccade.errors import SaccadeError
from saccade.plugins.estimate import Estimate, estimate
from saccade.plugins.estimate.memory_items import OFFLOADED
from saccade.plugins.families import tiny, tiny_kinds
from saccade.system import devices

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
CARDS = {24: "RTX 4090", 48: "L40S", 80: "H100", 141: "H200"}
MARK = "(`saccade estimate`)."


def _text(hidden: int, inner: int, layers: int, heads: int, keys: int, words: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words} | more


EARS = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
TIED = {"tie_word_embeddings": True}
VL_3B, VL_7B = ("qwen2_5_vl", SIZES["3b"]), ("qwen2_5_vl", SIZES["7b"])
HALF_B = ("qwen2", _text(896, 4864, 24, 14, 2, 151_936, **TIED))
LLAMA_8B = ("llama", _text(4096, 14336, 32, 32, 8, 128_256))
SHAPES = {
    "Qwen2.5-VL-3B-Instruct": VL_3B,
    "Qwen2.5-VL-7B-Instruct": VL_7B,
    "Qwen2.5-VL-32B-Instruct": ("qwen2_5_vl", SIZES["32b"]),
    "Qwen2.5-VL-72B-Instruct": ("qwen2_5_vl", SIZES["72b"]),
    "Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_30b_a3b",  # of shapes.yaml
    "gemma-3-27b-it": "gemma3_27b",
    "Mini-o3-7B-v1": VL_7B,
    "Qwen2-VL-2B-Instruct": ("qwen2_5_vl", SIZES["3b"] | _text(1536, 8960, 28, 12, 2, 151_936, **TIED)),
    "Qwen2.5-7B-Instruct": ("qwen2", _text(3584, 18944, 28, 28, 4, 152_064)),
    "Qwen2.5-0.5B-Instruct": HALF_B,
    "Qwen2.5-0.5B": HALF_B,
    "Qwen3-4B": ("qwen3", _text(2560, 9728, 36, 32, 8, 151_936, head_dim=128, **TIED)),
    "Qwen3-14B-Base": ("qwen3", _text(5120, 17408, 40, 40, 8, 151_936, head_dim=128)),
    "Qwen2-Audio-7B-Instruct": (
        "qwen2_audio",
        {"text_config": _text(4096, 11008, 32, 32, 32, 156_032), "audio_config": EARS},
    ),
    "Llama-3-8b-sft": LLAMA_8B,
    "Llama-3-8b-rm": LLAMA_8B,
}
LEARNED = {  # recipes that start from a model that another recipe has trained → the base model
    "lmmr1_mgt_geo": "Qwen2.5-VL-3B-Instruct",
    "lmmr1_mgt_percereas": "Qwen2.5-VL-3B-Instruct",
    "minio3_rl": "Qwen2.5-VL-7B-Instruct",
}


def needs(file: Path, scratch: Path) -> str:
    """The text for a recipe; empty if the shape of its model is not known here."""
    lines = file.read_text(encoding="utf-8").splitlines()
    command = lines[0].split()[2]
    config = load(file, command=command)
    name = LEARNED.get(file.stem) or Path(config.model.path).name
    if name not in SHAPES or command == "eval":
        return ""
    folder, shape = scratch / name, SHAPES[name]
    if not folder.exists() and isinstance(shape, str):
        tiny_kinds.build(model.SHAPES[shape]["kind"], folder)
        model.reshape(folder, model.SHAPES[shape])
    elif not folder.exists():
        kind, sizes = shape
        tiny.build(kind, folder)
        (enlarge if kind == "qwen2_5_vl" else widen)(folder, sizes)
    config = load(file, [f"model.path={folder}"], command)
    if config.run.gpus > 1:  # its second line names them
        card = next(CARDS[size] for size in CARDS if f"GPUs of {size} GB" in lines[1])
        return f"{of_several(estimate(config, devices.lookup(card), command=command))} {MARK}"
    found = {size: estimate(config, devices.lookup(card), command=command) for size, card in CARDS.items()}
    least = next((size for size, one in found.items() if one.memory.fits), None)
    text = f"Fits one GPU of {least} GB" if least else f"Does not fit one GPU of {max(CARDS)} GB as it is"
    if least is None or least > 80:
        ways = [way for way in found[80].advice if not way.startswith(("data.", "rollout.max_tokens", "run."))]
        text += f"; with {ways[0]} one of 80 GB is enough" if ways else "; use run.gpus=8"
    return f"{text} {MARK}"


def of_several(found: Estimate) -> str:
    if not found.memory.fits:
        return f"Does not fit {found.gpus} {found.device.name}"
    rollout, update = (found.memory.peaks[phase] for phase in ("rollout", "update"))
    state = sum(item.gib for item in found.host if item.name == OFFLOADED)
    held = f"{rollout:.0f} GiB in the rollout, {update:.0f} in the update" + f", {state:.0f} of main memory" * (
        state > 0
    )
    return f"Each of {found.gpus} {found.device.name}, {found.layout}: {held}"


def widen(folder: Path, sizes: dict[str, Any]) -> None:
    """Change the config of a tiny model folder to large sizes, per sub-config if it has any; delete its weights."""
    described = json.loads((folder / "config.json").read_text())
    parts = sizes if "text_config" in sizes else {"text_config": sizes}
    for name, of_part in parts.items():
        described.get(name, described).update(of_part)
    text = described.get("text_config", described)
    text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    described["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "model.safetensors").unlink()


def recipes(only: str) -> Iterator[tuple[Path, str]]:
    with tempfile.TemporaryDirectory() as scratch:
        for file in sorted(file for file in CONFIGS.glob("*.yaml") if only in file.stem):
            try:
                yield file, needs(file, Path(scratch))
            except SaccadeError as error:
                yield file, f"? {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    for file, text in recipes(args.only):
        print(f"{file.name}: {text or '-'}", flush=True)
        if args.write and text and not text.startswith("?"):
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.endswith(MARK)]
            lines.insert(next(n for n, line in enumerate(lines) if not line.startswith("#")), f"# {text}")
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
