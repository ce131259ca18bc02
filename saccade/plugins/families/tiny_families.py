"""What tiny models differ in: for each family the overrides on its Hugging Face config, its tokens,
its chat template and its processor.

    >>> CONFIGS["qwen3"].text
    {}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
# Token → (its name, under which its processor looks for it).
Names = Mapping[str, tuple[str, str]]
PLAIN: Names = {token: (token, "") for token in SPECIAL}
HEARD: Names = {token: (token, "") for token in ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")}
OMNI: Names = {
    "<|vision_start|>": ("<|vision_bos|>", "vision_bos_token"),
    "<|vision_end|>": ("<|vision_eos|>", "vision_eos_token"),
    "<|image_pad|>": ("<|IMAGE|>", "image_token"),
    "<|video_pad|>": ("<|VIDEO|>", "video_token"),
    "<|AUDIO|>": ("<|AUDIO|>", "audio_token"),
    "<|audio_bos|>": ("<|audio_bos|>", "audio_bos_token"),
    "<|audio_eos|>": ("<|audio_eos|>", "audio_eos_token"),
}
INTERNVL: Names = {  # its processor writes the first two
    "<img>": ("<img>", "start_image_token"),
    "</img>": ("</img>", "end_image_token"),
    "<IMG_CONTEXT>": ("<IMG_CONTEXT>", "context_image_token"),
    "<video>": ("<video>", "video_token"),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<IMG_CONTEXT>\n{% elif c['type'] == 'video' %}<video>\n"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Pictures first, no end of a turn, and texts in lists alone.
LLAVA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}"
    "{% endif %}{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
    "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

# -- sizes -----------------------------------------------------------------------------------------

# Heads of 32 also run in vLLM; a vocabulary padded past the tokenizer's end keeps that case honest.
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 14}
PATCHES |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
WIDE = PATCHES | {"hidden_size": 64, "intermediate_size": 128}
WINDOWS = {**WIDE, "window_size": 112, "fullatt_block_indexes": [1]}
DEEP = {**WIDE, "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0]}
SQUARE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
AUDIO = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
BOUNDS = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
SEEN = BOUNDS | {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
SEEN_AND_HEARD = BOUNDS | {
    "image_token_index": "<|image_pad|>",
    "video_token_index": "<|video_pad|>",
    "audio_token_index": "<|AUDIO|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    **CLIP,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 1003520},
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
SPEAKING = {"processor_class": "Qwen2_5OmniProcessor", "chunk_length": 300}


NONE: Mapping[str, Any] = {}


class Tiny(NamedTuple):
    """Overrides of one family."""

    text: Mapping[str, Any] = NONE
    vision: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None
    tokens: Mapping[str, str] = NONE  # field of the config → the token whose id it holds
    width: str = ""  # field of the vision tower for the width of the text model
    head_dim: bool = True  # whether the config has this field
    mrope: tuple[int, int] | None = None  # share of half a head that height gets, and width
    merge: int | None = None  # patches along a side of a token; the config says tokens of a square
    model: str = ""  # class in transformers; empty: the auto class
    names: Names = NONE  # besides those of Qwen
    template: str = TEMPLATE
    begin: str | None = None  # the token that the tokenizer puts before every text
    processor: Mapping[str, Any] = NONE


QWEN2_VL = Tiny(tokens=SEEN, head_dim=False, mrope=(3, 8), width="out_hidden_size")
QWEN3_VL = Tiny(
    text={"rope_parameters": {"mrope_interleaved": True}},
    vision=DEEP,
    tokens=SEEN,
    width="out_hidden_size",
    mrope=(5, 16),
    processor=HALF,
)
OMNI_THINKER = QWEN2_VL._replace(
    vision=WINDOWS,
    audio={**AUDIO, "output_dim": 64},
    tokens=SEEN_AND_HEARD,
    model="Qwen2_5OmniThinkerForConditionalGeneration",
    names={**HEARD, **OMNI},
    processor=SPEAKING,
)
CONFIGS: Mapping[str, Tiny] = {
    "qwen2_vl": QWEN2_VL._replace(vision=PATCHES | {"embed_dim": 64, "mlp_ratio": 2}, width="hidden_size"),
    "qwen2_5_vl": QWEN2_VL._replace(vision=WINDOWS),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL._replace(text={**QWEN3_VL.text, **EXPERTS}, vision=DEEP | {"depth": 1}),
    "internvl": Tiny(
        text={"model_type": "qwen2"},
        vision=SQUARE | {"attention_bias": True, "layer_scale_init_value": 1.0},
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        merge=2,
        names=INTERNVL,
        template=INTERNVL_TEMPLATE,
    ),
    "llava": Tiny(  # features come from the layer before the last
        text={"model_type": "llama"},
        vision=SQUARE | {"model_type": "clip_vision_model", "projection_dim": 64, "num_hidden_layers": 3},
        tokens={"image_token_index": "<image>"},
        merge=1,
        names={"<image>": ("<image>", "image_token")},
        template=LLAVA_TEMPLATE,
        begin="<s>",
    ),
    "qwen2_audio": Tiny(
        # The head is a layer of its own.
        text={"model_type": "qwen2", "tie_word_embeddings": False},
        audio={"model_type": "qwen2_audio_encoder", **AUDIO},
        tokens={"audio_token_index": "<|AUDIO|>"},
        head_dim=False,
        model="Qwen2AudioForConditionalGeneration",
        names=HEARD,
    ),
    # A whole checkpoint, without the weights of what speaks.
    "qwen2_5_omni": OMNI_THINKER._replace(model="Qwen2_5OmniForConditionalGeneration"),
    "qwen2_5_omni_thinker": OMNI_THINKER,
    "qwen2": Tiny(),
    "qwen3": Tiny(),
    "llama": Tiny(),
    "mixtral": Tiny(text={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Tiny(text={**EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3_moe": Tiny(text=EXPERTS),
}


def settings_of(
    family: str, ids: Mapping[str, int], sizes: Mapping[str, Any], vision: Mapping[str, Any]
) -> dict[str, Any]:
    """What `AutoConfig.for_model` takes; `sizes` and `vision` win over the table."""
    row, end = CONFIGS[family], ids["<|endoftext|>"]
    text: dict[str, Any] = {**TEXT, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": end}
    text |= {**row.text, **sizes}
    rope = {"rope_type": "default", "rope_theta": 1e4, **row.text.get("rope_parameters", {})}
    if not row.head_dim:
        del text["head_dim"]
    if row.mrope is not None:
        wide = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        part = row.mrope[0] * (wide // 2) // row.mrope[1]
        rope["mrope_section"] = [wide // 2 - 2 * part, part, part]
    text["rope_parameters"] = rope
    if row.vision is None and row.audio is None:
        return text
    settings: dict[str, Any] = {name: ids[token] for name, token in row.tokens.items()}
    settings |= {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    if row.vision is not None:
        tower = {**row.vision, "initializer_range": text["initializer_range"]}
        tower |= {row.width: text["hidden_size"]} if row.width else {}
        settings["vision_config"] = tower = tower | dict(vision)
        if row.merge:
            side = tower["image_size"] // tower["patch_size"] // row.merge
            settings["image_seq_length"] = side**2
    if row.audio is not None:
        wide = {"output_dim": text["hidden_size"]} if "output_dim" in row.audio else {}
        settings["audio_config"] = {**row.audio, **wide}
    if family == "qwen2_5_omni":
        return {"thinker_config": settings, "enable_audio_output": False}
    return settings


def processor_files(family: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Files that stock transformers makes the model's processor from, by name."""
    settings = settings.get("thinker_config", settings)
    made: dict[str, Any] = {}
    vision, row = settings.get("vision_config", {}), CONFIGS[family]
    if row.merge:
        return _square_files(family, vision, settings["image_seq_length"])
    if row.audio is not None:
        made |= EXTRACTOR
    if row.vision is not None:
        made |= PROCESSOR | {"patch_size": vision["patch_size"]}
    made |= row.processor
    return {"preprocessor_config.json": made} if made else {}


def _square_files(family: str, vision: Mapping[str, Any], tokens: int) -> dict[str, dict[str, Any]]:
    side = vision["image_size"]
    square, more = {"height": side, "width": side}, dict[str, Any]()
    if family == "internvl":  # its processor cuts, whatever crop_to_patches says here
        kind, more = "InternVLProcessor", {"image_seq_length": tokens}
        images: dict[str, Any] = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "size": square,
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 6,
        }
    else:
        kind = "LlavaProcessor"
        images = {
            "image_processor_type": "CLIPImageProcessor",
            **CLIP,
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
    images |= {"resample": 3, "do_convert_rgb": True, "processor_class": kind}
    return {"preprocessor_config.json": images, "processor_config.json": more | {"processor_class": kind}}
