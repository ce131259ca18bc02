"""Exports a checkpoint as a stand-alone Hugging Face folder, optionally in another dtype, and verifies
it by loading it.

export(Path("runs/geo/checkpoints/step-100"), Path("my-model"), dtype="bfloat16", verify=True)
"""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import load_family
from saccade.models.files import model_json, require_intact
from saccade.models.load import DTYPES, load_model
from saccade.plugins.export.sharded_weights import sharded_folder, sharded_weights, write_dcp
from saccade.plugins.export.zero_weights import write_zero, zero_folder, zero_weights
from saccade.system.disk import require_writable

log = logging.getLogger(__name__)
ADAPTER = "adapter"  # folder that `models/lora.py` writes inside a checkpoint


def export(
    checkpoint: str | Path,
    out: str | Path,
    dtype: str | None = None,
    verify: bool = True,
    adapter_only: bool = False,
    like: str | Path | None = None,
) -> Path:
    """`checkpoint`: a step folder, a run folder (its latest checkpoint), or a checkpoint of DeepSpeed ZeRO or FSDP;
    `like`: a folder with the model's config, for those that have none. `verify`: compare the log-probs of both folders.
    LoRA adapters are copied too; `adapter_only`: copy nothing else.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    _require_known(dtype)
    for find, read in ((zero_folder, zero_weights), (sharded_folder, sharded_weights)):
        if found := find(checkpoint):
            return _from_parts(found, read(found), _described_by(like, checkpoint, found), out, dtype, verify)
    source = checkpoint_of(checkpoint)
    log.info(f"from {source}")
    adapter = source / ADAPTER
    if adapter_only and not adapter.is_dir():
        raise ConfigError(f"{source} has no adapter; it was not trained with model.train=lora")
    _require_empty(out)
    require_intact(source)
    if adapter_only:
        shutil.copytree(adapter, out, dirs_exist_ok=True)
        return out
    out.mkdir(parents=True, exist_ok=True)
    if adapter.is_dir():
        shutil.copytree(adapter, out / ADAPTER)
    if dtype is None:
        for path in source.iterdir():
            if path.is_file():
                shutil.copy2(path, out / path.name)
    else:
        _convert(source, out, dtype)
    if verify:
        _compare(source, out, exact=dtype is None)
    return out


def _require_known(dtype: str | None) -> None:
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not known; use {' or '.join(DTYPES)}")


def _require_empty(out: Path) -> None:
    require_writable(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; give another folder")


def _described_by(like: str | Path | None, *places: Path) -> Path:
    """The folder with the model's config; verl writes it as huggingface/ next to the shards."""
    for folder in [Path(like)] if like else [place / name for place in places for name in (".", "huggingface")]:
        if (folder / "config.json").is_file():
            return folder
    named = like or places[0]
    raise ConfigError(f"{named} has no config.json; give --like MODEL, the folder that the training began with")


def _from_parts(
    parts: Path, weights: dict[str, Tensor], like: Path, out: Path, dtype: str | None, verify: bool
) -> Path:
    """Write joined shards. Verification only loads the result: there are no logits to compare with."""
    from huggingface_hub import save_torch_state_dict

    _require_empty(out)
    kind = DTYPES[dtype] if dtype else None
    if adapters := [name for name in weights if ".lora_" in name]:
        raise ConfigError(f"{parts}: it holds adapters ({adapters[0]}); merge those saved beside it with peft")
    if model_json(like, "config.json").get("tie_word_embeddings") and "lm_head.weight" in weights:
        del weights["lm_head.weight"]  # a copy of the embedding
    cast = {name: each.to(kind) if each.is_floating_point() else each for name, each in weights.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(cast, out, metadata={"format": "pt"})
    _copy_description(like, out)
    if verify:
        load_model(load_family(str(out)), dtype=torch.float32, device=torch.device("cpu"))
    return out


def _copy_description(model: Path, out: Path) -> None:
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model", ".py") and not path.name.endswith(".index.json"):
            shutil.copy2(path, out)


def export_for(checkpoint: str | Path, out: str | Path, *, zero: bool, dtype: str | None = None) -> Path:
    """Write a model folder or checkpoint for DeepSpeed (`zero`), or as a torch distributed checkpoint (DCP), for
    trainers that use FSDP. Read it back and compare.
    """
    source, out = checkpoint_of(Path(checkpoint)), Path(out)
    _require_known(dtype)
    _require_empty(out)
    require_intact(source)
    stored = dtype or str(model_json(source).get("dtype") or model_json(source).get("torch_dtype") or "float32")
    model = load_model(load_family(str(source)), dtype=DTYPES.get(stored, torch.float32), device=torch.device("cpu"))
    weights, step = model.state_dict(), source.name.partition("step-")[2]
    number = int(step) if step.isdigit() else 0
    again = zero_weights(write_zero(weights, out, number)) if zero else sharded_weights(write_dcp(weights, out))
    _copy_description(source, out)
    if again.keys() != weights.keys() or any(not torch.equal(again[name], weights[name]) for name in weights):
        raise EnvironmentProblem(f"{out}: what was written differs from the model's weights")
    return out


def checkpoint_of(path: Path) -> Path:
    """The latest checkpoint of a run folder or of its checkpoints/; a model folder is returned as it is."""
    from saccade.run.checkpoint import complete_steps

    for folder in (path / "checkpoints", path):
        if folder.is_dir() and (steps := complete_steps(folder)):
            return folder / f"step-{steps[-1]}"
    if (path / "config.json").is_file():
        return path
    raise ConfigError(f"{path} holds no checkpoint; give a run folder or checkpoints/step-N")


def _convert(source: Path, out: Path, dtype: str) -> None:
    from saccade.models.files import SERIES_FILE
    from saccade.plugins.reward_models.reward_card import REWARD_FILE
    from saccade.run.checkpoint import copy_processor

    family = load_family(str(source))
    model = load_model(family, dtype=DTYPES[dtype], device=torch.device("cpu"))
    model.save_pretrained(out)  # type: ignore[operator]
    copy_processor(family, out)
    for beside in (REWARD_FILE, SERIES_FILE):
        if (source / beside).is_file():
            shutil.copy2(source / beside, out)


def _compare(source: Path, out: Path, *, exact: bool) -> None:
    """Raise if the log-probs of two questions differ between the folders, at all if `exact`, else by over 0.5."""
    import numpy as np

    from saccade.forest.packing import pack
    from saccade.plugins.doctor.agreement import questions
    from saccade.recipes.to_trajectory import dialogue
    from saccade.trainer import Scoring
    from saccade.trainer.local import LocalTrainer
    from saccade.types import Message

    answer, results = Message(role="assistant", parts=("1 2 3 4 5 6 7 8 9",)), []
    for folder in (source, out):
        family = load_family(str(folder))
        model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
        asked = [replace(sample, messages=(*sample.messages, answer)) for sample in questions(family)]
        groups = [dialogue(sample, family, loss_on="all") for sample in asked]
        scored = LocalTrainer(model, family).logprobs(pack(groups, micro_tokens=1 << 30), Scoring(ban=False))
        results.append(np.concatenate([logprobs for logprobs, _ in scored]))
    gap = float(np.abs(results[0] - results[1]).max())
    if not gap <= (0.0 if exact else 0.5):
        raise EnvironmentProblem(f"{out}: log-probs differ from the checkpoint's by {gap:.3g}")
