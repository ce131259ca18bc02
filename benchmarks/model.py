"""A Qwen2.5-VL-3B-shaped model with random weights: they do not change the speed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from saccade.models import tiny

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151_936,
    "initializer_range": 0.02,
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def build_3b(folder: Path) -> str:
    """A tiny folder first, for its tokenizer and processor; then the large weights in its place,
    made on the GPU.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    tiny.build("qwen2_5_vl", folder)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"] |= TEXT
    described["text_config"]["rope_parameters"] |= {
        "mrope_section": [16, 24, 24],
        "rope_theta": 1e6,
    }
    described["text_config"]["layer_types"] = ["full_attention"] * TEXT["num_hidden_layers"]
    described["vision_config"] |= VISION
    described["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(described, indent=2))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return str(folder)
