"""Builds models from a config: the policy, its reference, a critic, a teacher, reward models.

family = family_of(config, start_folder(config))
model = load_policy(config, family)
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import ADAPTED, Config, RunConfig
from saccade.errors import ConfigError
from saccade.models import lora
from saccade.models.families import FAMILIES, Family, load_family
from saccade.models.files import model_json, require_whole
from saccade.models.heads import attach_score
from saccade.models.load import describe_trained, freeze, load_model, pick_device, pick_dtype
from saccade.registry import HOOKS
from saccade.run.training_run import Run
from saccade.system.devices import limit_memory
from saccade.trainer import Trainer
from saccade.trainer.local import LocalTrainer
from saccade.trainer.optimizer import Optimizer
from saccade.trainer.reference import AdapterReference, Reference

log = logging.getLogger(__name__)

SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")  # of a decoder; they tell models of one type apart


def quiet_libraries() -> None:
    """Silence progress bars and warnings of libraries, which would break the display."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.captureWarnings(True)


def start_folder(config: Config) -> str:
    """The model folder that the config names."""
    return model_folder(config.run, config.model.path)


def model_folder(run: RunConfig, path: str) -> str:
    """The folder of a model; a tiny model (`tiny:KIND`) is built first, in a folder next to the runs."""
    if not path.startswith("tiny:"):
        return path
    kind = path.removeprefix("tiny:")
    folder = Path(run.out) / ".tiny" / f"{kind}-{run.seed}"
    if not (folder / "model.safetensors").is_file():
        quiet_libraries()
        HOOKS["tiny_model"](kind, folder, seed=run.seed)
    return str(folder)


def family_of(config: Config, folder: str) -> Family:
    require_whole(Path(folder))
    template, families = config.prompt.chat_template, (*FAMILIES, "generic")
    if config.model.family not in (None, *families):
        raise ConfigError(f"model.family: there is no family {config.model.family}; use one of {', '.join(families)}")
    family = load_family(
        folder,
        name=config.model.family,
        chat_template=Path(template).read_text(encoding="utf-8") if template else None,
        trust_remote_code=config.model.trust_remote_code,
    )
    data = config.data
    family = replace(family, shown=family.budget(data.min_pixels, data.max_pixels))
    return HOOKS["plug_series"](family, config.model.series)


def device_of(run: RunConfig) -> torch.device:
    """The device of this process; the memory that it may take there is limited first."""
    device = pick_device(run.device)
    if run.gpu_memory_gib and device.type == "cuda":
        limit_memory(device, run.gpu_memory_gib)
    return device


def load_policy(
    config: Config, family: Family, *, folder: str | None = None, train: str | None = None, divided: bool = False
) -> Any:
    """Load weights from `folder` (a checkpoint) or from the family's own folder; `train` replaces `model.train`.
    Adapters are always added to the family's own weights, as a checkpoint has them merged in. `divided`: for
    `backend_of`; if processes hold a shard each, this one loads its own, unless weights have 4 bits.
    """
    if strange := sorted(set(config.train.lr_scale) - set(family.spec.towers)):
        raise ConfigError(f"train.lr_scale: no tower {strange[0]!r}; expected one of {', '.join(family.spec.towers)}")
    train = train or config.model.train
    adapted = train in ADAPTED
    device = device_of(config.run)
    dtype = pick_dtype(config.model.dtype, device)
    a_shard = divided and config.run.gpus > 1 and train != "qlora"
    model = load_model(
        replace(family, path=folder) if folder and not adapted else family,
        dtype=dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        options=lora.four_bit_options(family, dtype, device) if train == "qlora" else None,
        seed=config.run.seed,
        by_rows=HOOKS["by_rows"](config.train, device) if a_shard else None,
    )
    vars(model.config).pop("reward_model", None)  # training a reward model writes its own
    if adapted:
        stored = Path(folder) / lora.FOLDER if folder else None
        lora.add(model, family, config.model.lora, seed=config.run.seed, stored=stored)
        torch.manual_seed(config.run.seed)  # for dropout; a resumed run restores its own state later
    else:
        freeze(model, family, train)
    return model


def learner(config: Config, model: Any, family: Family) -> LocalTrainer:
    """The trainer that trains the model, with the checkpointing and optimizer that the config names."""
    wanted = config.model.checkpointing
    checkpointing: bool | Literal["auto"] = "auto" if wanted == "auto" else wanted == "on"
    optimizer = HOOKS["divided_optimizer"] if config.run.gpus > 1 else Optimizer
    return backend_of(config)(model, family, config.train, checkpointing=checkpointing, optimizer=optimizer)


def backend_of(config: Config) -> Callable[..., LocalTrainer]:
    """The class that holds a model, or the shard of it in this process."""
    return HOOKS["divided_trainer"](config.train) if config.run.gpus > 1 else LocalTrainer


def start_policy(run: Run, family: Family, *, attach: Callable[[Any], None] = lambda model: None) -> Trainer:
    """Load the policy and its optimizer, from the start or the checkpoint of the run: in this process, or in one
    process per GPU. `attach` adds heads.
    """
    config, folder = run.config, str(run.start) if run.start else None
    if folder is not None:
        _refuse_another_model(folder, family)
    if config.run.gpus > 1:
        policy = HOOKS["start_several"](config, run.command, family, folder, logs=run.folder.path)
        attach(policy.model)  # has shapes but no weights; FLOPs are counted from it
    else:
        model = load_policy(config, family, folder=folder)
        attach(model)
        policy = learner(config, model, family)
    run.close_at_end(policy)
    log.info(describe_trained(policy.model, family))
    return policy


def _refuse_another_model(folder: str, family: Family) -> None:
    """Refuse a checkpoint of another model: its weights would run as if they were those of model.path."""
    whole = model_json(Path(folder)), model_json(Path(family.path))
    kinds = [config.get("model_type", "").removesuffix("_thinker") for config in whole]
    inner = [config.get(family.spec.section, config) for config in whole]
    there, here = (config.get("text_config", config) for config in inner)
    sizes = [name for name in SIZES if there.get(name) != here.get(name) and name in there and name in here]
    if kinds[0] != kinds[1] or sizes:
        models = (
            f"{kind or 'unknown'}{''.join(f', {name} {text[name]}' for name in sizes)}"
            for kind, text in zip(kinds, (there, here), strict=True)
        )
        what = f"holds another model ({next(models)}) than model.path={family.path} ({next(models)})"
        other = f"to start from its weights, use run.resume=none model.path={folder}"
        raise ConfigError(f"run.resume={folder}: {what}; name the model that the checkpoint began with, or, {other}")


def load_beside(part: str, config: Config, family: Family, algorithm: Algorithm | None, policy: Any) -> Any:
    """Load the reference, critic or teacher in the process, or the processes, of the policy."""
    return policy.beside(part) if policy.engine is not None else BESIDE[part](config, family, algorithm, policy)


def load_reference(config: Config, family: Family, algorithm: Algorithm | None, policy: LocalTrainer) -> Reference:
    """The model that the policy started from: another copy, or the policy without its adapters."""
    follows = algorithm is not None and algorithm.kl.update == "ema"
    if config.model.train not in ADAPTED:
        backend = backend_of(config)
        if config.train.offload and backend is LocalTrainer and not follows:
            backend = HOOKS["host_trainer"]
        return backend(load_policy(config, family, divided=True), family)
    if follows:
        raise ConfigError("algorithm.kl.update=ema: a blend of weights is no adapter; use algorithm.kl.update=copy")
    return AdapterReference(policy)


def load_critic(config: Config, family: Family, algorithm: Algorithm, policy: LocalTrainer) -> LocalTrainer:
    """A model of the policy's family with a head for values and its own optimizer. It has no adapters: if the policy
    has them, all of the critic is trained.
    """
    train = "full" if config.model.train in ADAPTED else None
    path = algorithm.critic.path
    model = load_policy(config, family, folder=path, train=train, divided=True)
    attach_score(model, seed=config.run.seed)
    if path is not None and not HOOKS["start_critic"](model, Path(path)):
        log.info(f"algorithm.critic.path={path}: its score is not linear; the critic draws a head of its own")
    return learner(config, model, family)


def load_teacher(config: Config, family: Family, algorithm: Algorithm | None, policy: LocalTrainer) -> LocalTrainer:
    return HOOKS["teacher"](config, family)


BESIDE: Mapping[str, Callable[..., Any]] = {"reference": load_reference, "critic": load_critic, "teacher": load_teacher}
