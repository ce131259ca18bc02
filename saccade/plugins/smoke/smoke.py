"""Shrinks a config to two steps of a tiny model, to test that all parts of the run fit together.

The tiny model has the family of the config's model. Algorithm, rewards, prompts and data stay the
same; sizes shrink. Data that are not on this disk are replaced by example rows next to the config.
Works on options only: loads no model and reads no data.

    >>> smoke(load({"model.path": "some/folder", "model.family": "qwen2_vl"}), "rl").model.path
    'tiny:qwen2_vl'
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from math import gcd
from operator import attrgetter
from pathlib import Path
from typing import Any

from saccade.checks import why_ignored
from saccade.config import Config, DataConfig, load
from saccade.data.sources import parse_address
from saccade.models.families import FAMILIES, generic_spec
from saccade.models.files import model_json, names_experts
from saccade.plugins.families import tiny_kinds
from saccade.plugins.suites.suites import problems

DEFAULT_FAMILY = "qwen2_5_vl"
BY_HAND = {  # pattern of a model's path → tiny model; the first match counts
    "internvl": "internvl",
    r"llava-(1\.5|interleave)": "llava",
    r"llava-(v1\.6|next)": "llava_next",
    r"gemma-3-(4|12|27)b": "gemma3",
    "gemma-4-12b": "gemma4_unified",
    "smolvlm2": "smolvlm",
    "smolvlm": "idefics3",
    r"(mistral-small|ministral)-3": "mistral3",
    r"glm-4\.(1v|6v-flash)": "glm4v",
    r"glm-4\.[56]v": "glm4v_moe",
    r"\baria\b": "aria",
    "qwen2-vl": "qwen2_vl",
    r"qwen3-vl.*-a\d": "qwen3_vl_moe",
    "qwen3-vl": "qwen3_vl",
    r"qwen3\.5.*-a\d": "qwen3_5_moe",
    r"qwen3\.5": "qwen3_5",
    "qwen3-next": "qwen3_next",
    "qwen3-omni": "qwen3_omni_moe_thinker",
    r"minicpm-v-4[._]6": "minicpmv4_6",
}
WRITTEN = {  # model types as paths spell them, with marks between letters and digits: Llama-4, Kimi-K2.5
    r"\b" + re.sub(r"_|(?<=[a-z])(?=\d)|(?<=\d)(?=\w)", r"[-_.]?", kind) + r"(?!\d)" * kind[-1].isdigit(): kind
    for kind in tiny_kinds.KINDS
    if kind not in BY_HAND.values()
}
NAMES = {  # the first match counts, else DEFAULT_FAMILY
    **BY_HAND,
    **WRITTEN,
    "vl|vision": DEFAULT_FAMILY,
    "omni": "qwen2_5_omni",
    "audio": "qwen2_audio",
    r"mixtral|\dx\d+b": "mixtral",
    r"moe|-a\d[\d.]*b": "qwen3_moe",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    r"llama|gemma|mistral|smollm|phi-\d": "llama",
}
TOKENS = 16
ROWS = 8
TINY_HIDDEN = 64
# Folder next to a config with example rows in the config's data format; public/ inside it is for suites.
EXAMPLES = "rows"
AT_MOST = {  # options that are lowered to these values
    1: ("val.every",),
    2: ("train.prompts_per_step", "train.samples_per_prompt", "val.n", "generate.n"),
    4: ("data.max_frames", "data.min_frames"),
    TOKENS: ("rollout.max_tokens",),
    4000: ("data.max_prompt_tokens",),  # tiny models have 4096 positions
    112 * 112: ("data.max_pixels", "data.min_pixels", "data.max_frame_pixels", "env.max_pixels", "env.min_pixels"),
}
DROPPED = {  # options of other engines, and of several GPUs
    "rollout": ("tensor_parallel", "memory_share", "engine_args", "parity_max"),
    "run": ("gpus", "launcher", "restarts", "min_gpus"),
    "train": ("layout", "sequence_parallel"),
}


def shrunk(config: Config, command: str, files: Sequence[str], given: Sequence[str]) -> Config:
    """Returns the config for `--smoke`; prints what is replaced by what."""
    for file in files:
        config, replaced = with_examples(config, Path(file), given)
        for line in replaced:
            print(line)
    small, path = smoke(config, command), config.model.path
    if path and path != small.model.path:
        certain = config.model.family not in (None, "generic") or (Path(path) / "config.json").is_file()
        guess = "" if certain else ", guessed by name as the folder is not here; model.family says it"
        if (kind := str(model_json(Path(path)).get("model_type", ""))) and small.model.path == f"tiny:{DEFAULT_FAMILY}":
            guess = f", for there is no tiny model of type {kind}" * (kind != DEFAULT_FAMILY)
        print(f"{small.model.path} stands in for model.path: {path}{guess}")
    return small


def smoke(config: Config, command: str) -> Config:
    """The same config at the smallest size that still does everything once."""
    data, train = config.data, config.train
    changes: dict[str, Any] = {
        # Separate from real runs; the next smoke run overwrites it.
        "run.out": str(Path(config.run.out) / "smoke" / command),
        "run.device": "auto",
        "run.resume": "none",
        "run.max_steps": 2,
        "model.path": f"tiny:{model_type(config)}",
        "model.family": "generic" if config.model.family == "generic" else None,
        "data.max_samples": min(data.max_samples or ROWS, ROWS),
        "data.val": [{**source.model_dump(exclude_unset=True), "max_samples": 2} for source in data.val],
        "rollout.engine": "embedded",
        "rollout.replicas": 0,
        "train.warmup": 0,
        "algorithm.filter.dynamic": False,  # a random model is never right: it would sample without end
        "val.max_tokens": TOKENS,
        "save.every": 0,
        "track.loggers": [],
    }
    for most, names in AT_MOST.items():
        changes |= {name: min(attrgetter(name)(config), most) for name in names}
    reward = config.reward.model_dump(exclude_unset=True)
    for name in ("terms", "by_source"):
        if name in reward:
            changes[f"reward.{name}"] = _with_tiny_models(reward[name], changes["model.path"])
    if config.sft.teacher:
        changes["sft.teacher"] = changes["model.path"]
    if command == "reward-model" and config.reward_model.kind == "scalar":
        own = config.reward_model
        changes["reward_model.probe_layer"] = max(-2, min(own.probe_layer, 1))  # tiny models have two blocks
        if own.pooling == "attention":
            changes["reward_model.pooling_heads"] = gcd(own.pooling_heads, TINY_HIDDEN)
    if "updates_per_step" in train.model_fields_set:
        changes["train.updates_per_step"] = min(train.updates_per_step, 2)
    if config.algorithm.overlong.buffer and config.algorithm.overlong.model_fields_set:
        changes["algorithm.overlong.buffer"] = TOKENS // 2
    tree = config.model_dump(exclude_unset=True)
    for section, names in DROPPED.items():
        tree[section] = {name: value for name, value in tree.get(section, {}).items() if name not in names}
    if own := tree.get("algorithm", {}).get("filter", {}).get("function"):
        tree["algorithm"]["filter"] = {"function": own}
    else:
        tree.get("algorithm", {}).pop("filter", None)
    read = {name: value for name, value in changes.items() if not why_ignored(name, command)}
    return load(tree, _options(read), command)


def with_examples(config: Config, file: Path, given: Collection[str] = ()) -> tuple[Config, list[str]]:
    """Replace data that are not on this disk by example rows; returns the config and a line for each
    replacement. `given` options were set on the command line and stay.
    """
    rows, public = _rows(file, config.data), file.parent / EXAMPLES / "public"
    changes, replaced = dict[str, Any](), list[str]()
    for name in ("train", "val", "demonstrations") if rows != file else ():
        sources = getattr(config.data, name)
        missing = [s.path for s in sources if not Path(parse_address(s.path).path).exists()]
        if missing and f"data.{name}" not in given:
            changes[f"data.{name}"] = [
                source.model_dump(exclude_unset=True)
                | ({"path": str(rows), "split": None, "offset": 0} if source.path in missing else {})
                for source in sources
            ]
            replaced.append(f"{rows} stands in for data.{name}: {', '.join(missing)}")
    lacking = "eval.folder" not in given and any(problems(config.eval))
    if config.eval.suites and lacking and public.is_dir():
        changes["eval.folder"] = str(public)
        replaced.append(f"{public} stands in for eval.folder: {config.eval.folder}")
    return load(config, _options(changes)), replaced


def _rows(file: Path, data: DataConfig) -> Path:
    """Example rows of config A_B_C: A_B_C.jsonl, A_B.jsonl, A.jsonl or FOLDER.jsonl of its data; `file` if none."""
    parts = file.stem.split("_")
    names = ["_".join(parts[:n]) for n in range(len(parts), 0, -1)]
    names += [Path(parse_address(source.path).path).parent.name for source in data.train]
    found = (file.parent / EXAMPLES / f"{name}.jsonl" for name in names)
    return next((rows for rows in found if rows.is_file()), file)


def _options(changes: Mapping[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in changes.items()]


def _with_tiny_models(value: Any, path: str) -> Any:
    """The same reward terms, with reward models replaced by an untrained tiny one."""
    if isinstance(value, list | tuple):
        return [_with_tiny_models(item, path) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("verifier") == "model":
        return value | {"args": value["args"] | {"path": path, "normalise": False}}
    return {name: _with_tiny_models(item, path) for name, item in value.items()}


def model_type(config: Config) -> str:
    """Family of the config's model; guessed from its path if the model is not on this disk."""
    path = config.model.path
    if path.startswith("tiny:"):
        return path.removeprefix("tiny:")
    if config.model.family and config.model.family != "generic":
        return config.model.family
    found = model_json(Path(path)) if path else {}
    if not found:
        guesses = (kind for name, kind in NAMES.items() if re.search(name, path.lower()))
        guess = next(guesses, DEFAULT_FAMILY)
        return "qwen3_moe" if config.train.aux_coef and guess != "mixtral" else guess
    kind = found.get("model_type", DEFAULT_FAMILY)
    for tiny in (kind, f"{kind}_thinker"):
        if tiny in tiny_kinds.ALL:
            return tiny
    if config.model.family is None and kind not in FAMILIES:
        generic_spec(kind, found, path)  # raises if the run would refuse the model
    if any(name.startswith(("vision", "audio", "vq", "thinker")) for name in found):
        return DEFAULT_FAMILY
    return "qwen3_moe" if names_experts(found) else "llama"  # text models of the generic family
