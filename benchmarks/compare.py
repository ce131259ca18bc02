"""saccade and its peers on the same work, on the same GPU: whole GRPO steps and rollouts alone.

    python benchmarks/compare.py                                  # all parts without a result
    python benchmarks/compare.py --part saccade-w1 trl-vllm-w1    # these, even if they have results
    python benchmarks/compare.py --part --merge elsewhere.json    # only merge results
    python benchmarks/compare.py --tiny --folder runs/dry         # all of it on a CPU in minutes

Each part is a process with a time limit; its result is written to one JSON file at once, so parts
may be run in several calls. The model (Qwen2.5-VL-3B shape, random weights) is built once;
prompts, images, group size, response length (end tokens ignored), reward and learning rate are the
same for all, no KL term. Peers: transformers `generate`, TRL with it, TRL with vLLM in the same
process, vLLM alone. One that is not installed is listed as absent. The work of each is counted and
compared: if any differs or a part fails, the exit code is 1.

TRL trains bf16 weights (its default is float32); saccade also has fp32 master weights. TRL keeps
activations and takes --trl-micro sequences at a time, which is faster than its defaults. With vLLM
it also computes log-probs of the samples, to correct for the mismatch of the two engines.

Of a part with several steps the first only warms up; the numbers are medians of the others. A part
with a single step says so. `peak` is the most memory that torch allocated in the process, `GPU`
the most that was in use on the whole GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parts import LIMIT, Bench, Help, ensure_model, read, run, shown, warm, write
from works import sequences


@dataclass(frozen=True, kw_only=True)
class System:
    title: str
    program: tuple[str, ...]  # arguments of python, run in this folder
    steps: int
    needs: tuple[str, ...] = ()  # modules that must be installed


SYSTEMS: Mapping[str, System] = {
    "saccade": System(title="saccade", program=("rl_step.py",), steps=3),
    "trl": System(title="TRL", program=("-m", "peers.trl_step"), steps=2, needs=("trl", "datasets", "accelerate")),
    "trl-vllm": System(
        title="TRL + vLLM",
        program=("-m", "peers.trl_step", "--engine", "vllm"),
        steps=2,
        needs=("trl", "datasets", "accelerate", "vllm"),
    ),
    "trl-vllm-defaults": System(
        title="TRL + vLLM, as it comes",
        program=("-m", "peers.trl_step", "--engine", "vllm", "--micro", "16", "--recompute"),
        steps=2,
        needs=("trl", "datasets", "accelerate", "vllm"),
    ),
    "generate": System(title="transformers generate", program=("-m", "peers.generate"), steps=2),
    "vllm": System(title="vLLM", program=("-m", "peers.vllm_generate"), steps=3, needs=("vllm",)),
    "saccade-rollout": System(title="saccade", program=("rollout.py",), steps=3),
}
WORKS = {"w1": "W1", "w2": "W2", "w1x4": "W1,prompts=64", "w2x4": "W2,prompts=64"}
TINY = {"w1": "T1", "w2": "T2", "w1x4": "T1,prompts=4", "w2x4": "T2,prompts=4"}
PARTS: Mapping[str, tuple[str, str]] = {
    f"{system}-{work}": (system, work)
    for work, systems in {
        "w1": ("saccade", "trl-vllm", "trl-vllm-defaults", "trl", "vllm", "generate"),
        "w2": ("saccade", "trl-vllm", "trl", "vllm", "generate"),
        "w1x4": ("saccade-rollout", "vllm"),
        "w2x4": ("saccade-rollout", "vllm"),
    }.items()
    for system in systems
}


# -- running ---------------------------------------------------------------------------------------


def run_part(name: str, args: Any, bench: Bench) -> dict[str, Any]:
    key, work = PARTS[name]
    system, text = SYSTEMS[key], (TINY if args.tiny else WORKS)[work]
    missing = [module for module in system.needs if find_spec(module) is None]
    if missing:
        return {"system": key, "status": "absent", "reason": f"no module {', '.join(missing)}"}
    more = {"saccade": args.set, "trl": ["--micro", args.trl_micro]}.get(name.split("-")[0], [])
    steps = args.steps or system.steps
    return {"system": key} | run(bench, name, system.program, text, steps=steps, more=more)


# -- comparing -------------------------------------------------------------------------------------


def differences(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lists where a system did other work than was asked for, or than the other systems did."""
    found, prompts, devices = [], {}, {}
    for name, part in parts.items():
        if part["status"] != "ok":
            continue
        asked = part["asked"]
        count = sequences(asked)
        wanted = {"sequences": count, "images": asked["prompts"], "generated": count * asked["new"]}
        for step in part["steps"][1:] or part["steps"]:
            wanted_here = wanted | ({"trained": wanted["generated"]} if "trained" in step else {})
            found += [
                f"{name}: {step[what]} {what}, not {number}"
                for what, number in wanted_here.items()
                if step[what] != number
            ]
        prompts.setdefault(part["work"], {})[name] = warm(part, "prompt_tokens")
        devices[name] = part["machine"]["device"]
    for work, lengths in prompts.items():
        if len(set(lengths.values())) > 1:
            found.append(f"{work}: prompts differ in length: {lengths}")
    if len(set(devices.values())) > 1:
        found.append(f"parts ran on different devices: {devices}")
    return found


def table(parts: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "| work | system | whole step | rollout | update | rest | rollout tok/s | peak GiB "
        "| GPU GiB | whole / saccade's | rollout / saccade's |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in [name for name in PARTS if parts.get(name, {}).get("status") == "ok"]:
        part = parts[name]
        whole, rollout, update = (warm(part, key) for key in ("whole", "rollout", "update"))
        rest = whole - rollout - update if whole is not None else None
        same = (part["work"], part["machine"].get("card"))  # cards of one type differ by some percent
        ours = next((p for p in parts.values() if is_ours(p) and (p["work"], p["machine"].get("card")) == same), None)
        ratios = [
            warm(part, key) / warm(ours, key)
            if ours is not None and ours is not part and warm(part, key) and warm(ours, key)
            else None
            for key in ("whole", "rollout")
        ]
        first = " (first step)" if len(part["steps"]) == 1 else ""
        cells = [part["work"], SYSTEMS[part["system"]].title + first]
        cells += [shown(value, "{:.2f} s") for value in (whole, rollout, update, rest)]
        cells.append(shown(warm(part, "generated") / rollout, "{:,.0f}"))
        cells += [shown(v, "{:.1f}") for v in (warm(part, "peak_gib"), part["gpu_gib"])]
        cells += [shown(ratio, "{:.2f}") for ratio in ratios]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"{name}: {part['status']}, {part['reason']}" for name, part in parts.items() if part["status"] != "ok"]
    cards = {p["machine"].get("card", "unknown") for p in parts.values() if p["status"] == "ok"}
    if len(cards) > 1:
        lines.append(f"These parts ran on {len(cards)} cards; ratios are inside of one.")
    return "\n".join(lines)


def is_ours(part: Mapping[str, Any]) -> bool:
    return part["status"] == "ok" and part["system"].startswith("saccade")


# -- the command -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="for all files")
    parser.add_argument("--out", type=Path, help="the JSON file; FOLDER/results.json unless given")
    parser.add_argument("--model", type=Path, help="model folder; FOLDER/model, built, unless given")
    parser.add_argument(
        "--part", nargs="*", choices=list(PARTS), metavar="PART", help="run these; those without a result unless given"
    )
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="results of other calls")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little work")
    parser.add_argument("--steps", type=int, help="of each part, the first warms up; 2 or 3 unless given")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of one part")
    parser.add_argument("--trl-micro", type=int, default=8, help="sequences of a forward of TRL")
    parser.add_argument("--set", nargs="*", default=[], help="options of saccade: key=value")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    out = args.out or args.folder / "results.json"
    parts = read([out, *args.merge])
    chosen = args.part
    if chosen is None:
        chosen = [name for name in PARTS if parts.get(name, {}).get("status") != "ok"]
    model = (args.model or args.folder / "model").resolve()
    if chosen:
        ensure_model(model, "tiny" if args.tiny else "3b")
    bench = Bench(folder=args.folder, model=model, limit=args.limit)
    for name in chosen:
        parts[name] = run_part(name, args, bench)
        write(out, parts)
        seconds = f" in {parts[name]['took']:.0f} s" if "took" in parts[name] else ""
        print(f"{name}: {parts[name]['status']}{seconds}", flush=True)
    write(out, parts)
    print(table(parts))
    found = differences(parts)
    print("\n".join(found) if found else "No part did other work than it was asked for.")
    if found or any(part["status"] == "failed" for part in parts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
