"""Tiny random models of kinds that have no family of their own, each a folder that stock transformers loads: model,
tokenizer, processor and chat template, from tiny_kinds.yaml. The tests and scripts/model_table.py build them.

    python scripts/tiny_kinds.py smolvlm gemma3 --out /tmp/kinds
"""

import argparse
import inspect
from pathlib import Path

import yaml

import saccade.models  # noqa: F401  first: without it a torchvision for CUDA fails on a CPU
from saccade.plugins.families import tiny

KINDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))["kinds"]
PLAIN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = {
    **{name: value for name, value in tiny.TEXT.items() if name != "tie_word_embeddings"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}MARKER{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(kind, folder, *, seed=0, **changes):
    """Write a model folder, return its path. `changes` replace fields of the text part."""
    import torch
    import transformers

    row = KINDS[kind]
    template = TEMPLATE.replace("MARKER", row["marker"])
    names = {token: (token, key) for token, key in {**dict.fromkeys(PLAIN, ""), **row["tokens"]}.items()}
    tokenizer = tiny.make_tokenizer(None, (), tiny.Tiny(names=names, template=template, begin=row.get("begin")))
    values = {token: tokenizer.convert_tokens_to_ids(token) for token in (*tiny.PLAIN, *names)}
    tied = row.get("tie", False)
    text = {name: value for name, value in TEXT.items() if name not in row.get("without", ())}
    text |= {"vocab_size": "vocab", "bos_token_id": None, "eos_token_id": PLAIN[2], "pad_token_id": PLAIN[0]}
    text |= {"tie_word_embeddings": tied, **row.get("text", {}), **changes}
    settings = text if row.get("flat") else {"text_config": text, **row["config"]}
    settings = filled(settings, values, (len(tokenizer) // 8 + 1) * 8)
    config = transformers.AutoConfig.for_model(row.get("type", kind), **settings)
    config.tie_word_embeddings = tied
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        own = getattr(transformers, row["cls"]) if "cls" in row else None
        model = own(config) if own else transformers.AutoModelForImageTextToText.from_config(config)
        stir(model)
    ends = [values[PLAIN[2]], values[PLAIN[0]]]
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    model.save_pretrained(folder)
    made(row["processor"], tokenizer=tokenizer, chat_template=template).save_pretrained(folder)
    return str(folder)


def filled(part, values, vocabulary):
    """Settings with ids for tokens and numbers for `vocab` and `vocab+4`."""
    if isinstance(part, dict):
        return {name: filled(value, values, vocabulary) for name, value in part.items()}
    if isinstance(part, list):
        return [filled(value, values, vocabulary) for value in part]
    if isinstance(part, str) and part.startswith("vocab"):
        return vocabulary + int(part.removeprefix("vocab") or 0)
    return values.get(part, part) if isinstance(part, str) else part


def made(part, **more):
    """A processor, or a part of one."""
    import transformers

    options = {n: made(v) if isinstance(v, dict) and "class" in v else v for n, v in part.items() if n != "class"}
    kind = getattr(transformers, part["class"])
    if "image_seq_length" in options and part["class"] == "SiglipImageProcessor":  # set by PaliGemma folders
        length = options.pop("image_seq_length")
        one = kind(**options)
        one.image_seq_length = length
        return one
    known = inspect.signature(kind.__init__).parameters
    return kind(**options, **{name: value for name, value in more.items() if name in known})


def stir(model):
    """Norms of ones and tables of zeros would hide mistakes."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and "norm" in name.lower() and float(p.std() if p.numel() > 1 else 0) == 0:
                p.add_(torch.randn_like(p) * 0.1)
            if not torch.isfinite(p).all() or (p.numel() > 1 and float(p.abs().max()) == 0):
                p.copy_(torch.randn_like(p) * 0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all of them without a name")
    parser.add_argument("--out", default="runs/kinds")
    arguments = parser.parse_args()
    for kind in arguments.kinds or KINDS:
        print(build(kind, f"{arguments.out}/{kind}"), flush=True)
