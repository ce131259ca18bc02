"""Builds models of published shapes with random weights, which do not change the speed. Sizes are those of
Qwen2.5-VL; shapes.yaml has other kinds.

    build("runs/3b")              # 3.75 B parameters: Qwen2.5-VL-3B
    build("runs/7b", "7b")
    build("runs/gemma", "gemma3_4b")

The vocabulary is as large as the real one and every id is a word of the tokenizer, so all systems
sample from the same ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from works import FILLER, QUESTION

from saccade.plugins.families import tiny, tiny_kinds

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151_936,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
WIDE = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
# Text models; their vision towers differ only in the output width.
SIZES: dict[str, Mapping[str, Any]] = {
    "0.5b": TEXT
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "3b": TEXT,
    "7b": TEXT
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
SIZES |= {  # text models of Qwen2.5; 14B is not published with a vision tower
    "14b": {**SIZES["7b"], **WIDE, "intermediate_size": 13824, "num_hidden_layers": 48},
    "32b": {**SIZES["7b"], **WIDE, "intermediate_size": 27648, "num_hidden_layers": 64},
    "72b": {
        **SIZES["7b"],
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
SHAPES: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text(encoding="utf-8"))
SPOKEN = ("system", "user", "assistant", *QUESTION.split(), FILLER.strip())


def words(size: int) -> list[str]:
    """The words of the benchmarks' prompts, then made-up words up to the size of the vocabulary."""
    named = [*SPOKEN, *(f"w{index}" for index in range(size))]
    return named[: size - len(tiny.PLAIN) - 1]  # one id is for unknown words


def build(folder: str | Path, size: str = "3b") -> str:
    """Build a tiny model folder for its tokenizer and processor, then replace its weights by large
    ones, made on the GPU. The size "tiny" keeps the tiny weights.
    """
    final, folder = Path(folder), Path(f"{folder}.new")
    if folder.exists():  # left by an interrupted build
        shutil.rmtree(folder)
    if size == "tiny":
        tiny.build("qwen2_5_vl", folder, words=words(2_000))
    elif size in SHAPES:
        shape = SHAPES[size]
        spoken = None if shape["kind"] in tiny.BYTE_LEVEL else words(shape["vocabulary"] - 256)
        tiny_kinds.build(shape["kind"], folder, words=spoken)
        reshape(folder, shape)
        _write_weights(folder, shape.get("scaled", {}))
    else:
        tiny.build("qwen2_5_vl", folder, words=words(SIZES[size]["vocab_size"] - 256))
        enlarge(folder, SIZES[size])
        _write_weights(folder)
    folder.rename(final)
    return str(final)


def _write_weights(folder: Path, scaled: Mapping[str, float] = MappingProxyType({})) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, factor in scaled.items():
                if part in name:
                    parameter.mul_(factor)
    model.save_pretrained(folder)


def reshape(folder: Path, shape: Mapping[str, Any]) -> None:
    """Change the config files of a tiny folder to this shape, and delete its weights."""
    for name, changes in shape["files"].items():
        described = _merged(json.loads((folder / name).read_text()), changes)
        if name == "config.json":
            described["dtype"] = "bfloat16"
            described["text_config"]["vocab_size"] = shape["vocabulary"]
        (folder / name).write_text(json.dumps(described, indent=2))
    (folder / "model.safetensors").unlink()


def _merged(part: Any, changes: Any) -> Any:
    """Merge nested mappings; null removes a field."""
    if not (isinstance(part, dict) and isinstance(changes, Mapping)):
        return changes
    whole = part | {name: _merged(part.get(name), value) for name, value in changes.items()}
    return {name: value for name, value in whole.items() if name not in changes or value is not None}


def enlarge(folder: Path, text: Mapping[str, Any]) -> None:
    """Change the config of a tiny folder to this text model, and delete its weights."""
    described = json.loads((folder / "config.json").read_text())
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    described["text_config"] |= text
    described["text_config"]["rope_parameters"] |= {
        "mrope_section": [half // 4, 3 * half // 8, 3 * half // 8],
        "rope_theta": 1e6,
    }
    described["text_config"]["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    described["vision_config"] |= VISION | {"out_hidden_size": text["hidden_size"]}
    described["tie_word_embeddings"] = text["tie_word_embeddings"]
    described["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(described, indent=2))
    (folder / "model.safetensors").unlink()
