"""Peak memory per GPU for several model sizes and numbers of GPUs, by `saccade estimate`.

    python benchmarks/capacity.py
    python benchmarks/capacity.py train.offload=true --gpus 1 8

Every GPU has 16 prompts x 8 rollouts of 512 tokens, prompts of 368 tokens with an image; activations are recomputed,
so a cell is the minimum. Cells in brackets do not fit; `s`: sharded, `h`: hybrid. No weights are built or loaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from model import SIZES, enlarge

from saccade.config import load
from saccade.plugins.estimate import estimate
from saccade.plugins.families import tiny
from saccade.system import devices

CARDS = {"80 GB": "H100", "141 GB": "H200"}


def cells(size: str, gpus: int, folder: Path, overrides: list[str]) -> list[str]:
    """One cell per card: GiB on each GPU."""
    options = {"model.path": str(folder), "algorithm.kl.coef": 0.0, "rollout.max_tokens": 512, "run.gpus": gpus}
    options |= {"train.prompts_per_step": 16 * gpus, "train.samples_per_prompt": 8, "model.checkpointing": "on"}
    found = []
    for card in CARDS.values():
        device = devices.lookup(card)
        assert device is not None
        one = estimate(load(options, overrides, "rl"), device, prompt_tokens=368, image=(448, 448))
        peak = f"{max(one.memory.peaks.values()):.0f}" + {"sharded": " s", "hybrid": " h"}.get(one.layout, "")
        found.append(peak if one.memory.fits else f"({peak})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="options of the config")
    parser.add_argument("--sizes", nargs="*", default=["3b", "7b", "14b", "32b"])
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 8, 16])
    args = parser.parse_args()
    print("| GiB of each GPU | " + " | ".join(f"{n} x {card}" for n in args.gpus for card in CARDS) + " |")
    print("|---|" + "---|" * (len(args.gpus) * len(CARDS)))
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            tiny.build("qwen2_5_vl", folder)
            enlarge(folder, SIZES[size])
            row = [cell for n in args.gpus for cell in cells(size, n, folder, args.overrides)]
        print(f"| {size.upper()} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
