"""A checkpoint → a stand-alone Hugging Face folder, in another type if wanted, verified by opening
it again.

export(Path("runs/geo/checkpoints/step-100"), Path("my-model"), dtype="bfloat16", verify=True)
"""

import shutil
from pathlib import Path

import torch

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import load_family
from saccade.models.files import described, require_intact
from saccade.models.load import DTYPES, load_model
from saccade.plugins.export.zero_weights import zero_folder, zero_weights
from saccade.system.disk import require_writable

ADAPTER = "adapter"  # folder of `models/lora.py`, inside a checkpoint


def export(
    checkpoint: str | Path,
    out: str | Path,
    dtype: str | None = None,
    verify: bool = True,
    adapter_only: bool = False,
    like: str | Path | None = None,
) -> Path:
    """`checkpoint` is a step folder or a run folder (its latest checkpoint). Logits of both are
    compared. Adapters come along as they were trained, or are all that is written. Or it is one of
    DeepSpeed's ZeRO, and `like` a folder with the config of its model, if it has none itself.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not known; use {' or '.join(DTYPES)}")
    if zero := zero_folder(checkpoint):
        return _from_zero(zero, Path(like or checkpoint), out, dtype, verify)
    source = checkpoint_of(checkpoint)
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


def _require_empty(out: Path) -> None:
    require_writable(out, "--out")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; give another folder")


def _from_zero(zero: Path, like: Path, out: Path, dtype: str | None, verify: bool) -> Path:
    """Names are checked by opening what was written: there are no logits to compare."""
    from huggingface_hub import save_torch_state_dict

    if not (like / "config.json").is_file():
        raise ConfigError(f"{like} has no config.json; give --like MODEL, the folder that the training began with")
    _require_empty(out)
    kind, weights = DTYPES[dtype] if dtype else None, zero_weights(zero)
    if adapters := [name for name in weights if ".lora_" in name]:
        raise ConfigError(f"{zero}: it holds adapters ({adapters[0]}); merge those that were saved beside it with peft")
    cast = {name: each.to(kind) if each.is_floating_point() else each for name, each in weights.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(cast, out, metadata={"format": "pt"})
    for path in like.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model", ".py") and not path.name.endswith(".index.json"):
            shutil.copy2(path, out)
    if verify:
        load_model(load_family(str(out)), dtype=torch.float32, device=torch.device("cpu"))
    return out


def pictures(folder: Path) -> str:
    """How large whoever serves the folder shows images, as a part of a sentence."""
    settings = described(folder, file := "preprocessor_config.json")
    limits = [f"{name} {settings[name]}" for name in ("max_pixels", "max_patches") if name in settings]
    return f"; {file} shows images with {limits[0]}" if limits else ""


def checkpoint_of(path: Path) -> Path:
    """A step folder itself, or the latest one of a run folder."""
    from saccade.run.checkpoint import complete_steps

    for folder in (path / "checkpoints", path):
        steps = complete_steps(folder) if folder.is_dir() else []
        if steps:
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
    """The same few tokens through both folders."""
    import numpy as np

    from saccade.forest.packing import pack
    from saccade.recipes.to_trajectory import document
    from saccade.trainer import Scoring
    from saccade.trainer.local import LocalBackend
    from saccade.types import Message, Sample

    results = []
    for folder in (source, out):
        family = load_family(str(folder))
        model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
        sample = Sample(id="probe", messages=(Message(role="user", parts=("1 2 3 4 5 6 7 8 9",)),))
        group = document(sample, family, max_tokens=64)
        batches = pack([group], micro_tokens=64)
        results.append(LocalBackend(model, family).logprobs(batches, Scoring(ban=False))[0][0])
    gap = float(np.abs(results[0] - results[1]).max())
    if not gap <= (0.0 if exact else 0.5):
        raise EnvironmentProblem(f"{out}: log-probs differ from the checkpoint's by {gap:.3g}")
