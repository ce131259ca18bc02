"""Groups whose answers were interrupted at several lengths: seconds until each has its next token.

    python benchmarks/interrupted.py                         # on a CPU: one group of 8, one image
    python benchmarks/interrupted.py --size 3b --work W1     # on a GPU

`together`: a group reads its prompt and image once, then each its own tokens; `alone`: each reads all of it. Written
tokens are log-normal with median --median. Prints one JSON object: seconds of both in the fastest of --rounds, their
ratio, and whether the tokens are equal. On a CPU these are seconds of its work, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from decode import REPEATS, requests
from model import SIZES, TEXT, VISION, build
from works import machine, parse

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.models.families import load_family
from saccade.models.load import load_model

SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
SMALL_VISION = {"depth": 8, "hidden_size": 320, "intermediate_size": 960, "num_heads": 8, "out_hidden_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=["small", *SIZES])
    parser.add_argument("--work", type=parse, default="W1,prompts=1")
    parser.add_argument("--median", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.size == "small":
        SIZES["small"] = {**TEXT, **SMALL, "vocab_size": 4096}
        VISION.update(SMALL_VISION, fullatt_block_indexes=[3, 7])
    with tempfile.TemporaryDirectory() as scratch:
        family = load_family(build(Path(scratch) / "model", args.size))
        there = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if there == "cuda" else torch.float32
        model = load_model(family, dtype=dtype, device=torch.device(there))
    rng, asked = np.random.default_rng(1), []
    for request in requests(family, dict(args.work), args.work["prompts"], 1):
        written = rng.integers(0, 200, max(1, int(args.median * rng.lognormal())))
        ids = np.concatenate([request.ids, written])
        asked.append(replace(request, ids=ids, first_index=len(written), opening=len(request.ids)))
    clock = time.perf_counter if there == "cuda" else time.process_time
    engine, seconds, tokens = EmbeddedEngine(model, family), {}, {}
    for _ in range(args.rounds):
        for name, opening in (("together", args.work["prompt"]), ("alone", None)):
            engine.sleep()
            began = clock()
            answers = generate(engine, [replace(request, opening=opening) for request in asked])
            took = clock() - began
            seconds[name] = min(took, seconds.get(name, took))
            tokens[name] = [answer.ids.tolist() for answer in answers]
    found = {
        "sequences": len(asked),
        "groups": len(asked) // REPEATS,
        "written": sum(len(request.ids) for request in asked) - len(asked) * args.work["prompt"],
        **{name: round(took, 3) for name, took in seconds.items()},
        "ratio": round(seconds["alone"] / seconds["together"], 2),
        "equal_tokens": tokens["together"] == tokens["alone"],
    }
    print(json.dumps(found | {"machine": machine()}))


if __name__ == "__main__":
    main()
