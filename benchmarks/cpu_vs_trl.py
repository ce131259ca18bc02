"""The same GRPO steps of a tiny vision-language model on a CPU, with saccade and with TRL.

    python benchmarks/cpu_vs_trl.py                    # needs trl and datasets; about four minutes
    python benchmarks/cpu_vs_trl.py --work T1 --rounds 1

Both sample 8 prompts x 8 rollouts of 64 tokens with one image each, score them with the same
function and train on all of them, in float32 with two threads. They alternate, so a machine that
becomes busy slows both; the first step of each run only warms up. Prints medians and their ratio;
absolute times say little about other machines.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from compare import SYSTEMS, differences
from parts import Bench, Help, ensure_model, run
from works import parse, sequences

WORK = "T1,prompts=8,samples=8,side=112,prompt=64,new=64"
PHASES = ("whole", "rollout", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--folder", type=Path, default=Path("runs/cpu_vs_trl"), help="for results")
    parser.add_argument("--work", default=WORK, help="NAME[,key=number…] of benchmarks/works.py")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each, at least 1")
    parser.add_argument("--steps", type=int, default=6, help="of a turn, at least 2")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error("--rounds 1 and --steps 2 are the least")
    missing = [module for module in SYSTEMS["trl"].needs if find_spec(module) is None]
    if missing:
        raise SystemExit(f"no module {', '.join(missing)}; pip install -c constraints.txt -e '.[trl,data]'")
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder=folder, model=ensure_model(folder / "model", "tiny"))
    # Everything in one forward and backward, as saccade does with so few tokens.
    more = {"saccade": (), "trl": ("--micro", sequences(parse(args.work)))}
    parts = {}
    for turn in range(args.rounds):
        for system in ("saccade", "trl"):
            name, program = f"{system}-{turn + 1}", SYSTEMS[system].program
            found = run(bench, name, program, args.work, steps=args.steps, more=more[system])
            if found["status"] != "ok":
                raise SystemExit(f"{name} failed: {found['reason']}")
            parts[name] = {"system": system} | found
    medians = {
        system: {
            phase: median(
                step[phase] for part in parts.values() if part["system"] == system for step in part["steps"][1:]
            )
            for phase in PHASES
        }
        for system in ("saccade", "trl")
    }
    ratio = {phase: medians["trl"][phase] / medians["saccade"][phase] for phase in PHASES}
    result = {"medians": medians, "ratio": ratio, "parts": parts}
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.work}, {args.threads} threads, seconds of a step")
    print(f"{'':10}" + "".join(f"{phase:>10}" for phase in PHASES))
    for title, row in (*medians.items(), ("ratio", ratio)):
        print(f"{title:10}" + "".join(f"{row[phase]:10.3f}" for phase in PHASES))
    for number in range(args.rounds):
        pair = [parts[f"{system}-{number + 1}"]["steps"][1:] for system in ("saccade", "trl")]
        ours, theirs = (median(step["whole"] for step in steps) for steps in pair)
        print(f"round {number + 1}: {ours:.3f} s and {theirs:.3f} s, ratio {theirs / ours:.2f}")
    found = differences(parts)
    print("\n".join(found) if found else "Both did the same work.")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
