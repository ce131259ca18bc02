"""Tiny random models of kinds that have no family of their own, each a folder that stock transformers loads: model,
tokenizer, processor and chat template, from tiny_kinds.yaml. `build` also knows the families of tiny.py.

    build("gemma3", "runs/tiny")
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.config.notation import parse
from saccade.config.schema.presets import unknown
from saccade.plugins.families import tiny

KINDS: Mapping[str, Any] = parse(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))["kinds"]
ALL = (*tiny.CONFIGS, *KINDS)
PLAIN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = {
    **{name: value for name, value in tiny.TEXT.items() if name != "tie_word_embeddings"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}MARKERS{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(kind: str, folder: str | Path, *, seed: int = 0, words: Sequence[str] | None = None, **changes: Any) -> str:
    """Write a model folder, return its path. `changes` replace fields of the text part."""
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    if kind not in ALL:
        raise unknown("tiny model", kind, ALL)
    if kind in tiny.CONFIGS:
        return tiny.build(kind, folder, seed=seed, words=words, text=changes)
    row = KINDS[kind]
    shown = {"image": row["marker"], **row.get("shows", {})}
    markers = "".join(f"{{% elif c['type'] == '{medium}' %}}{marker}" for medium, marker in shown.items())
    template = TEMPLATE.replace("MARKERS", markers)
    names: tiny.Names = {token: (token, key) for token, key in {**dict.fromkeys(PLAIN, ""), **row["tokens"]}.items()}
    kept = tiny.Tiny(names=names, template=template, begin=row.get("begin"))
    tokenizer = tiny.make_tokenizer(words, row.get("phrases", ()), kept)
    values = {token: tokenizer.convert_tokens_to_ids(token) for token in (*tiny.PLAIN, *names)}
    tied = row.get("tie", False)
    text = {name: value for name, value in TEXT.items() if name not in row.get("without", ())}
    text |= {"vocab_size": "vocab", "bos_token_id": None, "eos_token_id": PLAIN[2], "pad_token_id": PLAIN[0]}
    text |= {"tie_word_embeddings": tied, **row.get("text", {}), **changes}
    settings = text if row.get("flat") else {"text_config": text, **row["config"]}
    settings = _filled(settings, values, (len(tokenizer) // 8 + 1) * 8)
    config = transformers.AutoConfig.for_model(row.get("type", kind), **settings)
    config.tie_word_embeddings = tied
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        own = getattr(transformers, row["cls"]) if "cls" in row else None
        model: Any = own(config) if own else transformers.AutoModelForImageTextToText.from_config(config)
        _stir(model)
    ends = [values[PLAIN[2]], values[PLAIN[0]]]
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    # Named as in published folders.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False) or None
    model.save_pretrained(folder)
    _processor(row["processor"], tokenizer=tokenizer, chat_template=template).save_pretrained(folder)
    return str(folder)


def _filled(part: Any, values: Mapping[str, int], vocabulary: int) -> Any:
    """Settings with ids for tokens and numbers for `vocab` and `vocab+4`."""
    if isinstance(part, Mapping):
        return {name: _filled(value, values, vocabulary) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, values, vocabulary) for value in part]
    if isinstance(part, str) and part.startswith("vocab"):
        return vocabulary + int(part.removeprefix("vocab") or 0)
    return values.get(part, part) if isinstance(part, str) else part


def _processor(part: Mapping[str, Any], **more: Any) -> Any:
    """A processor, or a part of one."""
    import transformers

    options = {n: _processor(v) if isinstance(v, dict) and "class" in v else v for n, v in part.items() if n != "class"}
    kind = getattr(transformers, part["class"])
    if "image_seq_length" in options and part["class"] == "SiglipImageProcessor":  # set by PaliGemma folders
        length = options.pop("image_seq_length")
        one = kind(**options)
        one.image_seq_length = length
        return one
    parameters = inspect.signature(kind.__init__).parameters
    return kind(**options, **{name: value for name, value in more.items() if name in parameters})


def _stir(model: Any) -> None:
    """Norms of ones and tables of zeros would hide mistakes."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and "norm" in name.lower() and float(p.std() if p.numel() > 1 else 0) == 0:
                p.add_(torch.randn_like(p) * 0.1)
            if not torch.isfinite(p).all() or (p.numel() > 1 and float(p.abs().max()) == 0):
                p.copy_(torch.randn_like(p) * 0.1)
