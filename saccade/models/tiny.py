"""Tiny models with random weights, built in place from a family's own Hugging Face config: no
download.

They serve the quickstart, `--smoke` and the tests. The tokenizer is either a closed list of words
(every word one token) or byte-level (any text).

    build("qwen2_5_vl", "runs/tiny")            # an HF folder that stock transformers loads
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError
from saccade.models import tiny_squares

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
HEARD = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")  # more of them, where a model hears
PLAIN = {token: (token, "") for token in SPECIAL}
OMNI = {  # other names, and under which its processor looks for them
    "<|vision_start|>": ("<|vision_bos|>", "vision_bos_token"),
    "<|vision_end|>": ("<|vision_eos|>", "vision_eos_token"),
    "<|image_pad|>": ("<|IMAGE|>", "image_token"),
    "<|video_pad|>": ("<|VIDEO|>", "video_token"),
    "<|AUDIO|>": ("<|AUDIO|>", "audio_token"),
    "<|audio_bos|>": ("<|audio_bos|>", "audio_bos_token"),
    "<|audio_eos|>": ("<|audio_eos|>", "audio_eos_token"),
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
AUDIO = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "initializer_range": 0.1,
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
    from transformers import AutoConfig, GenerationConfig

    if family not in CONFIGS:
        raise ConfigError(f"tiny:{family} is not known; known are {', '.join(CONFIGS)}")
    if words is not None and family in ("qwen2", "qwen2_audio"):
        # transformers reads whatever tokenizer lies beside a qwen2 config as its own byte-level
        # one.
        raise ConfigError(f"tiny:{family} has no closed vocabulary; use qwen3, or no words")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = dict(PLAIN)
    if "audio" in family or "omni" in family:
        names |= {token: (token, "") for token in HEARD}
    if "omni" in family:
        names |= OMNI
    names |= tiny_squares.NAMES.get(family, {})
    tokenizer = make_tokenizer(
        words,
        phrases,
        names,
        template=tiny_squares.TEMPLATES.get(family, TEMPLATE),
        begin=tiny_squares.BEGINS.get(family),
    )
    ids = {token: tokenizer.convert_tokens_to_ids(name) for token, (name, _) in names.items()}
    vocabulary = (len(tokenizer) // 8 + 1) * 8
    settings = CONFIGS[family](
        ids, TEXT | {"vocab_size": vocabulary} | dict(text or {}), dict(vision or {})
    )
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _from_config(family, config)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in _processor(family, settings.get("thinker_config", settings)).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return str(folder)


def _processor(family: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Files that stock transformers makes the model's processor from, by name."""
    if family in tiny_squares.NAMES:
        return tiny_squares.processor_files(family, settings)
    made: dict[str, Any] = {}
    if "audio_config" in settings:
        made |= EXTRACTOR
    if "vision_config" in settings:
        made |= PROCESSOR | {"patch_size": settings["vision_config"]["patch_size"]}
    if family.startswith("qwen3_vl"):
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        made |= half | {"processor_class": "Qwen3VLProcessor"}
    if "omni" in family:
        made |= {"processor_class": "Qwen2_5OmniProcessor", "chunk_length": 300}
    return {"preprocessor_config.json": made} if made else {}


def make_tokenizer(
    words: Sequence[str] | None,
    phrases: Sequence[str] = (),
    names: Mapping[str, tuple[str, str]] = PLAIN,
    *,
    template: str = TEMPLATE,
    begin: str | None = None,
) -> Any:
    """Word-level for a closed vocabulary, else byte-level; both with the chat template inside.
    `begin` is a token that the tokenizer puts before every text.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )
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
        # Tags and punctuation are words of their own even without a blank before them.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.WhitespaceSplit(),
                pre_tokenizers.Split(Regex(r"</?\w+>|\w+|[^\w\s]"), behavior="isolated"),
            ]
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


def _from_config(family: str, config: Any) -> Any:
    import transformers

    if family in CLASSES:
        return getattr(transformers, CLASSES[family])(config)
    sees = hasattr(config, "vision_config")
    kind = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_config(config)


def _text_config(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    return text | {
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


def _mixture(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any], **sizes: int
) -> dict[str, Any]:
    return _experts(**sizes) | _text_config(ids, text, vision)


def _experts(**sizes: int) -> dict[str, int]:
    return {"num_experts_per_tok": 2, **sizes}


def _vl_config(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any], tower: Mapping[str, Any]
) -> dict[str, Any]:
    text = _text_config(ids, text, vision)
    text.pop("head_dim")
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {
        "text_config": text,
        "vision_config": {
            **tower,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _qwen2_5_vl(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    tower = _tower(text) | {"window_size": 112, "fullatt_block_indexes": [1]}
    return _vl_config(ids, text, vision, tower)


def _tower(text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "initializer_range": text["initializer_range"],
    }


def _qwen3_vl(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    tower = _tower(text) | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0]}
    settings = _vl_config(ids, text, {"patch_size": 16} | vision, tower)
    half = text["head_dim"] // 2
    settings["text_config"] |= {"head_dim": text["head_dim"]}
    settings["text_config"]["rope_parameters"] |= {
        "mrope_section": [half - 2 * (5 * half // 16), 5 * half // 16, 5 * half // 16],
        "mrope_interleaved": True,
    }
    return settings


def _qwen3_vl_moe(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    settings = _qwen3_vl(ids, text, {"depth": 1} | vision)
    settings["text_config"] |= _experts(num_experts=4, moe_intermediate_size=64)
    return settings


def _qwen2_vl(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    tower = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": text["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "initializer_range": text["initializer_range"],
    }
    return _vl_config(ids, text, vision, tower)


def _qwen2_audio(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    text = _text_config(ids, text, vision)
    text.pop("head_dim")
    # The head is a layer of its own.
    return {
        "text_config": {"model_type": "qwen2", **text, "tie_word_embeddings": False},
        "audio_config": {"model_type": "qwen2_audio_encoder", **AUDIO},
        "audio_token_index": ids["<|AUDIO|>"],
        "tie_word_embeddings": False,
    }


def _qwen2_5_omni_thinker(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    settings = _qwen2_5_vl(ids, text, vision)
    return {
        "text_config": settings["text_config"],
        "vision_config": settings["vision_config"],
        "audio_config": {**AUDIO, "output_dim": text["hidden_size"]},
        "image_token_index": ids["<|image_pad|>"],
        "video_token_index": ids["<|video_pad|>"],
        "audio_token_index": ids["<|AUDIO|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _qwen2_5_omni(
    ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    """A whole checkpoint, without the weights of what speaks."""
    return {
        "thinker_config": _qwen2_5_omni_thinker(ids, text, vision),
        "enable_audio_output": False,
    }


def _of_squares(
    ids: Mapping[str, int],
    text: dict[str, Any],
    vision: dict[str, Any],
    make: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    return make(ids, _text_config(ids, text, vision), vision)


CLASSES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
}
CONFIGS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "internvl": partial(_of_squares, make=tiny_squares.internvl),
    "llava": partial(_of_squares, make=tiny_squares.llava),
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen2_5_omni_thinker": _qwen2_5_omni_thinker,
    "qwen2": _text_config,
    "qwen3": _text_config,
    "llama": _text_config,
    "mixtral": partial(_mixture, num_local_experts=4),
    "qwen2_moe": partial(
        _mixture, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=96
    ),
    "qwen3_moe": partial(_mixture, num_experts=4, moe_intermediate_size=64),
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
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "resample": 3,
    "merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 1003520},
}
