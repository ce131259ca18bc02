"""Small runs with fixed seeds, compared bit by bit: did a change of the code change a number?

Seven runs of five steps on a CPU (grpo, dapo, ppo with a critic, sft, dpo, a reward model, several
turns with crops), and the algorithm that every preset and every recipe resolves to. Run it in two
checkouts on one machine and compare what it wrote:

    OMP_NUM_THREADS=1 python scripts/fixed_runs.py before.json
    OMP_NUM_THREADS=1 python scripts/fixed_runs.py after.json
    python scripts/fixed_runs.py --compare before.json after.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Prefixes of metrics that depend on the clock or the machine, or that only some versions measure.
UNEQUAL = ("time", "mem/", "perf/", "host", "group/live_frac", "group/rollouts_per_live")
UNEQUAL += ("group/side_signal_frac",)
RUN = {"run.max_steps": 5, "run.device": "cpu", "run.seed": 7, "track.tensorboard": False}
COLOURS = {"red": "blue", "blue": "red"}
CROPS = ("[0, 0, 0.5, 0.5], 'source': 'original_image'", "[0, 0, 1, 0.5], 'source': 'observation_1'")


def rows_of(folder: Path) -> None:
    """Write scenes to count: with answers, with demonstrations, and as pairs."""
    from saccade.plugins.quickstart import counting

    scenes = counting.counting_split(24, seed=24, colours=tuple(COLOURS))
    counting.write_jsonl(scenes, folder, name="train")
    counting.write_jsonl([counting.demonstrated(s) for s in scenes], folder, name="shown")
    single = counting.counting_split(24, seed=5, colours=tuple(COLOURS), counts=(1, 1), radius=(16, 20))
    drawn = counting.write_jsonl(single, folder, name="single").read_text().splitlines()
    pairs = []
    for scene in map(json.loads, drawn):
        right = scene["colours"][0]
        row = {"id": scene["id"], "images": scene["images"], "prompt": "<image>how many objects ?"}
        pairs.append(row | {"chosen": right, "rejected": COLOURS[right]})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def runs_of(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → command and options."""
    from saccade.plugins.families import tiny
    from saccade.plugins.quickstart.quickstart import WORDS

    words = tiny.build("qwen2_5_vl", folder / "words", words=WORDS)
    calls = [f"<grounding>{{'bbox_2d': {crop}}}</grounding>" for crop in CROPS]
    calls += [f"<answer>{n}</answer>" for n in (1, 2, 3)] + ["hm"]
    caller = tiny.build("qwen2_5_vl", folder / "caller", words=calls)
    direct = {"model.path": words, "prompt.format": "direct", "prompt.instruction": ""}
    near = {"verifier": "count", "args": {"order": ["last_number"], "tolerance": 1}}
    rl = direct | {
        "data.train": str(folder / "train.jsonl"),
        "rollout.max_tokens": 6,
        "reward.terms": [near],
        "train.prompts_per_step": 4,
        "train.samples_per_prompt": 4,
        "train.lr": 5e-3,
    }
    taught = direct | {"train.prompts_per_step": 4, "train.lr": 2e-3}
    pairs = taught | {"data.train": str(folder / "pairs.jsonl")}
    crops = {
        "model.path": caller,
        "prompt.format": "think_answer",
        "env.name": "crop",
        "env.max_turns": 3,
        "env.min_pixels": 3136,
        "env.max_pixels": 12544,
        "reward.terms": [{"verifier": "count", "args": {"tolerance": 1}}],
        "train.samples_per_prompt": 8,
    }
    return {
        "grpo": ("rl", rl),
        "dapo": ("rl", rl | {"algorithm.preset": "dapo", "algorithm.overlong.buffer": 2}),
        "ppo": ("rl", rl | {"algorithm.preset": "ppo"}),
        "sft": ("sft", taught | {"data.train": str(folder / "shown.jsonl")}),
        "dpo": ("dpo", pairs | {"dpo.beta": 0.5}),
        "reward_model": ("reward-model", pairs),
        "crop": ("rl", rl | crops),
    }


def numbers_of(folder: Path) -> dict[str, Any]:
    """Every metric of every step, and a hash of the last weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {
            name: value.hex() if isinstance(value, float) else value
            for name, value in row.items()
            if not name.startswith(UNEQUAL)
        }
        for row in lines
    ]
    [*_, last] = sorted((folder / "checkpoints").glob("step-*"))
    weights = b"".join(file.read_bytes() for file in sorted(last.glob("*.safetensors")))
    return {"steps": steps, "weights": hashlib.sha256(weights).hexdigest()}


def algorithms() -> dict[str, Any]:
    """The resolved algorithm of every preset, and of every recipe for `rl`."""
    from saccade.checks.steps import algorithm_of
    from saccade.config import load
    from saccade.config.schema.presets import PRESETS

    sources: dict[str, Any] = {name: {"algorithm.preset": name} for name in PRESETS}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.read_text(encoding="utf-8").startswith("# saccade rl "):
            sources[f"configs/{path.name}"] = path
    return {name: cells_of(algorithm_of(load(source, command="rl"))) for name, source in sources.items()}


def cells_of(row: Any) -> dict[str, Any]:
    """The fields of an algorithm, with functions as names and options."""
    entries = {"advantage": row.estimator, "loss": row.loss, "aggregation": row.aggregate, "kl": row.divergence}
    found = row.model_dump(mode="json", exclude={"estimator", "loss", "aggregate", "divergence", "corrections"})
    found |= {f"{name}_options": entry.options for name, entry in entries.items()}
    found["warnings"] = [*row.warnings]
    return found | {"corrections": [{"name": c.name, "options": c.options} for c in row.corrections]}


def record() -> dict[str, Any]:
    from importlib import import_module

    from saccade.cli_run import MODULES

    found: dict[str, Any] = {"algorithms": algorithms()}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        rows_of(folder)
        for name, (command, options) in runs_of(folder).items():
            recipe = import_module(f"saccade.{MODULES[command]}")
            recipe.run(RUN | options | {"run.out": str(folder / "runs"), "run.name": name})
            found[name] = numbers_of(folder / "runs" / name)
    return found


# Fields of an algorithm that are compared → their names in older records.
CELLS = {
    **{name: name for name in ("about", "paper", "samples_per_prompt", "updates_per_step")},
    **{name: name for name in ("sequences", "adv_clip", "reward_clip", "reward_normalise", "denominator", "old")},
    **{name: name for name in ("advantage", "policy_loss", "aggregation", "corrections")},
    **{f"{name}_options": f"{name}_options" for name in ("advantage", "loss", "aggregation")},
    **{name: name for name in ("self_normalise", "drop_constant", "exclude_status", "warnings")},
    **{name: name for name in ("excluded_in_baseline", "filter", "critic")},
    **{f"entropy_{n}": f"entropy.{n}" for n in ("coef", "target", "step", "range", "top", "scope")},
    **{f"kl.{n}": f"kl.{n}" for n in ("coef", "kind", "place", "ratio_correct", "controller")},
    **{f"kl.{n}": f"kl.{n}" for n in ("target", "horizon", "update", "update_every", "ema")},
    **{name: name for name in ("overlong.buffer", "overlong.factor")},
    "kl_options": "kl.options",
    "max_tokens": "overlong.max_tokens",
    "hot_first_token": "fire",
}
# Options of some estimators and their defaults; older records have them as fields of the algorithm.
OF_ESTIMATORS = {"whiten": False, "whiten_std": True, "reward_range": [0.0, 1.0]}


def cell(algorithm: Any, name: str) -> Any:
    for part in name.split("."):
        algorithm = algorithm.get(part) if isinstance(algorithm, dict) else None
    return algorithm


def by_value(found: Any) -> Any:
    """Rename the fields of older records to today's names, so that only values are compared."""
    for name, algorithm in found.get("algorithms", {}).items():
        older = "entropy" in algorithm
        cells = {new: cell(algorithm, old if older else new) for new, old in CELLS.items()}
        of_estimator, clamp = cells["advantage_options"], cells["kl_options"].pop("clamp", None)
        for option, usual in OF_ESTIMATORS.items():
            cells[option] = algorithm[option] if option in algorithm else of_estimator.pop(option, usual)
        cells["kl_options"] |= {"kl_clamp": clamp} if clamp else {}
        options = cells["loss_options"]
        if options.pop("weight_bound", None) == "cap":
            options |= {"weight_floor": 0.0}
            del options["clip_low"], options["clip_high"]
        found["algorithms"][name] = cells
    return found


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted(one.keys() | other.keys())
        return [d for n in names for d in differences(one.get(n), other.get(n), f"{where}/{n}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for n, pair in pairs for d in differences(*pair, f"{where}[{n}]")]
    return [] if one == other else [f"{where}: {one!r} → {other!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--compare", action="store_true", help="two files that were written before")
    parser.add_argument("--algorithms", action="store_true", help="resolve, but run nothing")
    asked = parser.parse_args()
    if asked.compare:
        found = differences(*(by_value(json.loads(file.read_text())) for file in asked.files))
        print("\n".join(found) or "equal to the bit")
        sys.exit(bool(found))
    [out] = asked.files
    found = {"algorithms": algorithms()} if asked.algorithms else record()
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
