"""Tiny models with random weights, built in place from a family's own Hugging Face config: no
download.

They serve the quickstart, `--smoke` and the tests. The tokenizer is either a closed list of words
(every word one token) or byte-level (any text).

    build("qwen2_5_vl", "runs/tiny")            # an HF folder that stock transformers loads
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError
from saccade.plugins.families.tiny_families import (
    CONFIGS,
    PLAIN,
    SPECIAL,
    TEMPLATE,
    TEXT,
    Names,
    processor_files,
    settings_of,
)

__all__ = ["CONFIGS", "SPECIAL", "TEMPLATE", "TEXT", "build", "make_tokenizer"]


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
    if words is not None and family in ("qwen2", "qwen2_audio"):
        # transformers reads whatever tokenizer lies beside a qwen2 config as its own byte-level
        # one.
        raise ConfigError(f"tiny:{family} has no closed vocabulary; use qwen3, or no words")
    folder, row = Path(folder), CONFIGS[family]
    folder.mkdir(parents=True, exist_ok=True)
    names = {**PLAIN, **row.names}
    tokenizer = make_tokenizer(words, phrases, names, template=row.template, begin=row.begin)
    ids = {token: tokenizer.convert_tokens_to_ids(name) for token, (name, _) in names.items()}
    vocabulary = (len(tokenizer) // 8 + 1) * 8
    settings = settings_of(family, ids, {"vocab_size": vocabulary, **(text or {})}, vision or {})
    config = transformers.AutoConfig.for_model(family, **settings)
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
        # Tags and punctuation are words of their own even without a blank before them.
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
