"""Tiny models with random weights, made from a table of overrides on each family's Hugging Face config
(tiny_models.yaml): weights, tokenizer and the files of a processor. Nothing is downloaded.

They serve the quickstart, `--smoke` and the tests. The tokenizer is either a closed list of words
(every word one token) or byte-level (any text).

    build("qwen2_5_vl", "runs/tiny")            # an HF folder that stock transformers loads
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import saccade.models  # noqa: F401  first: without it a torchvision for CUDA fails on a CPU
from saccade.config.notation import parse
from saccade.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_INTERNVL = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<video>\n"
)
# Images first, no end of a turn, and texts in lists alone.
_LLAVA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TEMPLATES = {"internvl": _INTERNVL, "llava": _LLAVA}
TABLE: Mapping[str, Any] = parse(Path(__file__).with_name("tiny_models.yaml").read_text(encoding="utf-8"))
TEXT: Mapping[str, Any] = TABLE["text"]
Names = dict[str, Sequence[str]]  # token → its name, and the attribute under which its processor looks for it
PLAIN: Names = {token: (token, "") for token in TABLE["special"]}
NONE: dict[str, Any] = {}
BYTE_LEVEL = ("qwen2", "qwen2_audio", "qwen3_5", "qwen3_5_moe")  # as which transformers reads any tokenizer of these


class Tiny(NamedTuple):
    """A row of the table, which says what its fields mean."""

    text: Mapping[str, Any] = NONE
    vision: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None
    tokens: Mapping[str, str] = NONE
    width: str = ""
    head_dim: bool = True
    mrope: Sequence[int] | None = None
    merge: int | None = None
    model: str = ""
    names: Names = NONE
    begin: str | None = None
    processor: Mapping[str, Any] = NONE
    films: Mapping[str, Any] = NONE
    template: str = TEMPLATE


PLAIN_ROW = Tiny()
CONFIGS = {name: Tiny(template=TEMPLATES.get(name, TEMPLATE), **row) for name, row in TABLE["families"].items()}


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
    from transformers.conversion_mapping import get_model_conversion_mapping

    if words is not None and family in BYTE_LEVEL:
        raise ConfigError(f"tiny:{family} has no closed vocabulary; use qwen3, or no words")
    folder, row = Path(folder), CONFIGS[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(words, phrases, row)
    ids = {token: tokenizer.convert_tokens_to_ids(name) for token, (name, _) in (PLAIN | row.names).items()}
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
    # Named as in published folders.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False) or None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in processor_files(family, settings).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return str(folder)


def make_tokenizer(words: Sequence[str] | None, phrases: Sequence[str] = (), row: Tiny = PLAIN_ROW) -> Any:
    """Word-level for a closed vocabulary, else byte-level; both with the chat template inside."""
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
    names, template, begin = PLAIN | row.names, row.template, row.begin
    for token, (name, _) in names.items():
        template = template.replace(token, name)
    sought = {key or name: name for name, key in names.values()}
    if begin is not None:
        backend.add_special_tokens([begin])
        known = [(begin, backend.token_to_id(begin))]
        backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=known)
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
    films = dict(CONFIGS[family].films)
    files = {"preprocessor_config.json": made, "processor_config.json": whole, "video_preprocessor_config.json": films}
    return {name: content for name, content in files.items() if content}
