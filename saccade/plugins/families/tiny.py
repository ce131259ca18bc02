"""Tiny models with random weights: a table of overrides on each family's Hugging Face config, and
the tokenizer and processor files that go with them. Nothing is downloaded.

They serve the quickstart, `--smoke` and the tests. The tokenizer is either a closed list of words
(every word one token) or byte-level (any text).

    build("qwen2_5_vl", "runs/tiny")            # an HF folder that stock transformers loads
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from saccade.errors import ConfigError
from saccade.models.families.qwen_vl import CLIP_MEAN, CLIP_STD

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
INTERNVL_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>\n"
)
# Pictures first, no end of a turn, and texts in lists alone.
LLAVA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

# -- sizes -----------------------------------------------------------------------------------------

WIDE = {"hidden_size": 64, "intermediate_size": 128}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
# Heads of 32 also run in vLLM.
TEXT: dict[str, Any] = {**WIDE, **HEADS, "num_key_value_heads": 1, "head_dim": 32}
TEXT |= {"max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.1}
PATCHES: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WINDOWS = {**PATCHES, **WIDE, "window_size": 112, "fullatt_block_indexes": [1]}
DEEP = {**PATCHES, **WIDE, "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0]}
SQUARE = {**WIDE, **HEADS, "image_size": 56, "patch_size": 14}
AUDIO: dict[str, Any] = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
AUDIO |= {"initializer_range": 0.1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
BOUNDS = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
SEEN = BOUNDS | {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
SEEN_AND_HEARD = BOUNDS | {"image_token_index": "<|image_pad|>", "video_token_index": "<|video_pad|>"}
SEEN_AND_HEARD |= {"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"}
SEEN_AND_HEARD |= {"audio_token_index": "<|AUDIO|>"}
# As real folders have them: vLLM reads other defaults where a step is not named.
PICTURES: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
}
EXTRACTOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
}
EXTRACTOR |= {"feature_size": 128, "return_attention_mask": True}
PROCESSOR = PICTURES | {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
PROCESSOR |= {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "merge_size": 2, "temporal_patch_size": 2}
PROCESSOR |= {"rescale_factor": 1 / 255, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}
GOT: dict[str, Any] = PICTURES | {"image_processor_type": "GotOcr2ImageProcessor", "min_patches": 1, "max_patches": 6}
GOT |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
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


QWEN2_VL = Tiny(tokens=SEEN, head_dim=False, mrope=(3, 8), width="out_hidden_size", processor=PROCESSOR)
QWEN3_VL = Tiny(
    text={"rope_parameters": {"mrope_interleaved": True}},
    vision=DEEP,
    tokens=SEEN,
    width="out_hidden_size",
    mrope=(5, 16),
    processor=PROCESSOR
    | {"processor_class": "Qwen3VLProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16},
)
OMNI_THINKER = QWEN2_VL._replace(
    vision=WINDOWS,
    audio={**AUDIO, "output_dim": 64},
    tokens=SEEN_AND_HEARD,
    model="Qwen2_5OmniThinkerForConditionalGeneration",
    names={**HEARD, **OMNI},
    processor=EXTRACTOR | PROCESSOR | {"processor_class": "Qwen2_5OmniProcessor", "chunk_length": 300},
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
        processor=GOT,
    ),
    "llava": Tiny(  # features come from the layer before the last
        text={"model_type": "llama"},
        vision=SQUARE | {"model_type": "clip_vision_model", "projection_dim": 64, "num_hidden_layers": 3},
        tokens={"image_token_index": "<image>"},
        merge=1,
        names={"<image>": ("<image>", "image_token")},
        template=LLAVA_TEMPLATE,
        begin="<s>",
        processor=PICTURES
        | {"image_processor_type": "CLIPImageProcessor", "image_mean": CLIP_MEAN, "image_std": CLIP_STD},
    ),
    "qwen2_audio": Tiny(
        # The head is a layer of its own.
        text={"model_type": "qwen2", "tie_word_embeddings": False},
        audio={"model_type": "qwen2_audio_encoder", **AUDIO},
        tokens={"audio_token_index": "<|AUDIO|>"},
        head_dim=False,
        model="Qwen2AudioForConditionalGeneration",
        names=HEARD,
        processor=EXTRACTOR,
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


def build(
    family: str,
    folder: str | Path,
    *,
    words: Sequence[str] | None = None,
    phrases: Sequence[str] = (),
    seed: int = 0,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> str:
    """Write a model folder, return its path. `text` and `vision` override sizes of the config;
    `phrases` are single tokens of the byte-level tokenizer.
    """
    import torch
    import transformers

    if family not in CONFIGS:
        raise ConfigError(f"tiny:{family}: expected one of {', '.join(CONFIGS)}")
    if words is not None and family in ("qwen2", "qwen2_audio"):  # transformers reads any tokenizer as byte-level
        raise ConfigError(f"tiny:{family} has no closed vocabulary; use qwen3, or no words")
    folder, row = Path(folder), CONFIGS[family]
    folder.mkdir(parents=True, exist_ok=True)
    names = {**PLAIN, **row.names}
    tokenizer = make_tokenizer(words, phrases, names, template=row.template, begin=row.begin)
    ids = {token: tokenizer.convert_tokens_to_ids(name) for token, (name, _) in names.items()}
    # Padded past the tokenizer's end, as vocabularies of large models are.
    sizes = {"vocab_size": (len(tokenizer) // 8 + 1) * 8, **(text or {})}
    settings = settings_of(row, ids, sizes, vision or {})
    whole = {"thinker_config": settings, "enable_audio_output": False} if family == "qwen2_5_omni" else settings
    config = transformers.AutoConfig.for_model(family, **whole)
    auto = "AutoModelForCausalLM" if row.vision is None else "AutoModelForImageTextToText"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = getattr(transformers, row.model or auto)
        model = kind(config) if row.model else kind.from_config(config)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in processor_files(family, settings).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return str(folder)


def make_tokenizer(
    words: Sequence[str] | None,
    phrases: Sequence[str] = (),
    names: Names = PLAIN,
    *,
    template: str = TEMPLATE,
    begin: str | None = None,
) -> Any:
    """Word-level for a closed vocabulary, else byte-level; both with the chat template inside.
    `begin` is a token that the tokenizer puts before every text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if words is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    else:
        vocabulary = {word: index for index, word in enumerate(dict.fromkeys((*words, "[unk]")))}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
        # Tags and punctuation are words even without a blank before them.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"</?\w+>|\w+|[^\w\s]"), behavior="isolated")]
        )
    for token, (name, _) in names.items():
        template = template.replace(token, name)
    sought = {key or name: name for name, key in names.values()}
    if begin is not None:
        backend.add_special_tokens([begin])
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        extra_special_tokens=sought if any(key for _, key in names.values()) else list(sought),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=TEXT["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def settings_of(
    row: Tiny, ids: Mapping[str, int], sizes: Mapping[str, Any], vision: Mapping[str, Any]
) -> dict[str, Any]:
    """What `AutoConfig.for_model` takes; `sizes` and `vision` win over the table."""
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    text: dict[str, Any] = {**TEXT, **ends, **row.text, **sizes}
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
        width = {row.width: text["hidden_size"]} if row.width else {}
        tower = {**row.vision, "initializer_range": text["initializer_range"], **width, **vision}
        settings["vision_config"] = tower
        if row.merge:
            settings["image_seq_length"] = (tower["image_size"] // tower["patch_size"] // row.merge) ** 2
    if row.audio is not None:
        wide = {"output_dim": text["hidden_size"]} if "output_dim" in row.audio else {}
        settings["audio_config"] = {**row.audio, **wide}
    return settings


def processor_files(family: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Files that stock transformers makes the model's processor from, by name."""
    made, whole = dict(CONFIGS[family].processor), dict[str, Any]()
    vision = settings.get("vision_config", {})
    side = vision.get("image_size")
    square = {"height": side, "width": side}
    if family == "internvl":
        made |= {"size": square}
        whole = {"processor_class": "InternVLProcessor", "image_seq_length": settings["image_seq_length"]}
    elif family == "llava":
        made |= {"size": {"shortest_edge": side}, "crop_size": square}
        whole = {"processor_class": "LlavaProcessor", "patch_size": vision["patch_size"]}
        whole |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    elif vision:
        made["patch_size"] = vision["patch_size"]
    files = {"preprocessor_config.json": made, "processor_config.json": whole}
    return {name: content for name, content in files.items() if content}
