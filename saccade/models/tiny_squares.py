"""What tiny models of InternVL and LLaVA are built from: tokens, templates, configs and processors
as published folders have them, for squares of 56 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIDE = 56
# Token → (its name, under which its processor looks for it).
NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "internvl": {  # its processor writes the first two
        "<img>": ("<img>", "start_image_token"),
        "</img>": ("</img>", "end_image_token"),
        "<IMG_CONTEXT>": ("<IMG_CONTEXT>", "context_image_token"),
        "<video>": ("<video>", "video_token"),
    },
    "llava": {"<image>": ("<image>", "image_token")},
}
TEMPLATES = {
    "internvl": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<IMG_CONTEXT>\n{% elif c['type'] == 'video' %}<video>\n"
        "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Pictures first, no end of a turn, and texts in lists alone.
    "llava": (
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}"
        "{% endif %}{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
        "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}
BEGINS = {"llava": "<s>"}  # what the tokenizer puts before every text, the template does not


def internvl(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    tower = _tower(text, 2) | {"attention_bias": True, "layer_scale_init_value": 1.0, **vision}
    return {
        "text_config": {"model_type": "qwen2", **text},
        "vision_config": tower,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": (tower["image_size"] // tower["patch_size"] // 2) ** 2,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def llava(ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Features come from the layer before the last."""
    tower = {"model_type": "clip_vision_model", "projection_dim": 64, **_tower(text, 3), **vision}
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": tower,
        "image_token_index": ids["<image>"],
        "image_seq_length": (tower["image_size"] // tower["patch_size"]) ** 2,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _tower(text: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 14,
        "initializer_range": text["initializer_range"],
    }


def processor_files(family: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    vision, shared = settings["vision_config"], {"resample": 3, "do_convert_rgb": True}
    side = vision["image_size"]
    square = {"height": side, "width": side}
    if family == "internvl":  # its processor cuts, whatever crop_to_patches says here
        kind = {"processor_class": "InternVLProcessor"}
        images = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "size": square,
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 6,
        }
        more = {"image_seq_length": settings["image_seq_length"]}
    else:
        kind = {"processor_class": "LlavaProcessor"}
        images = {
            "image_processor_type": "CLIPImageProcessor",
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "size": {"shortest_edge": side},
            "crop_size": square,
            "do_center_crop": True,
        }
        more = {
            "patch_size": vision["patch_size"],
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        }
    return {
        "preprocessor_config.json": images | shared | kind,
        "processor_config.json": more | kind,
    }
