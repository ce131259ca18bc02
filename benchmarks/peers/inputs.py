"""The rows of a workload as inputs for transformers and vLLM.

prompts, images = step_inputs(Path("data/train.jsonl"), work, step=0)
batch = processor("runs/3b")(text=prompts, images=images, return_tensors="pt")
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers import Qwen2_5_VLProcessor as QwenProcessor
from works import Work, parse, read_rows


class PictureProcessor(QwenProcessor):
    """The processor of transformers without its video part, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor(folder: str) -> Any:
    if find_spec("torchvision"):
        made = AutoProcessor.from_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        made = PictureProcessor(AutoImageProcessor.from_pretrained(folder), tokenizer, tokenizer.chat_template)
    made.tokenizer.padding_side = "left"
    return made


def placeholder_ids(folder: str) -> list[int]:
    """Ids of media placeholders, which must not be sampled: a trainer that matches placeholders with
    pictures would fail.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    return sorted(config[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end"))


def conversation(text: str, image: Any = None) -> list[dict[str, Any]]:
    picture = {"type": "image"} if image is None else {"type": "image", "image": image}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def step_inputs(data: Path, work: Work, step: int, made: Any) -> tuple[list[str], list[Any]]:
    """Rendered prompts with one placeholder each, and their images."""
    rows = read_rows(data, work, step)
    prompts = [
        made.apply_chat_template(conversation(text), add_generation_prompt=True, tokenize=False) for text, _ in rows
    ]
    return prompts, [Image.open(path).convert("RGB") for _, path in rows]


def arguments(about: str | None, more: Sequence[tuple[str, dict[str, Any]]] = ()) -> Any:
    """Parse the command line options of all peers, and `more`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=parse, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--result", type=Path, required=True)
    for name, settings in more:
        parser.add_argument(name, **settings)
    return parser.parse_args()
