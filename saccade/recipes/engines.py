"""Builds the engine that the config names. Other recipes call this and never name an engine themselves."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from saccade.checks.steps import val_by_set
from saccade.config import Config, DataConfig, RolloutConfig
from saccade.engines import Engine, Settings
from saccade.engines.builders import ENGINES, build
from saccade.engines.embedded.kv_cache import cache_shape, why_no_kernels
from saccade.errors import ConfigError
from saccade.models import experts
from saccade.models.families import Family
from saccade.models.load import pick_dtype
from saccade.recipes import model_setup, run_parts
from saccade.rollout.episode import Limits
from saccade.trainer import Trainer
from saccade.types import Sample

log = logging.getLogger(__name__)


def make_engine(config: Config, policy: Trainer, *, first_tokens: bool = False, logs: Path | None = None) -> Engine:
    """Make the engine in this process, or replicas in processes of their own, which log into the folder `logs`.
    `first_tokens`: some first tokens are sampled with other parameters.
    """
    name = config.rollout.engine
    if policy.engine is not None and not config.rollout.replicas:
        return policy.engine
    if name == "sglang" and experts.count(policy.model):
        raise ConfigError("rollout.engine=sglang: experts cannot be handed over; use rollout.engine=embedded or vllm")
    if name == "embedded" and policy.device.type == "cuda" and policy.engine is None:  # the model is in this process
        if slow := why_no_kernels(cache_shape(policy.model, policy.family)):
            log.info(f"generation waits for the GPU after every token, because {slow}")
        elif not experts.capturable(policy.model):
            log.info("generation runs without CUDA graphs: on this GPU experts ask the host for sizes")
    settings = replace(settings_of(config, policy.family), first_tokens=first_tokens)
    return start_engine(config.rollout, settings, policy.family, policy, logs=logs)


def start_engine(
    rollout: RolloutConfig, settings: Settings, family: Family, policy: Trainer | None = None, logs: Path | None = None
) -> Engine:
    if rollout.replicas:
        return ENGINES["replicas"](settings, rollout.replicas, logs=logs, team=policy and policy.engine)
    return build(settings, family, policy and policy.model)


def settings_of(config: Config, family: Family) -> Settings:
    rollout, template = config.rollout, config.prompt.chat_template
    device = model_setup.device_of(config.run)
    return Settings(
        engine=rollout.engine,
        folder=family.path,
        dtype=str(pick_dtype(config.model.dtype, device)).removeprefix("torch."),
        device=str(device),
        family=config.model.family,
        chat_template=Path(template).read_text(encoding="utf-8") if template else None,
        trust_remote_code=config.model.trust_remote_code,
        max_sequences=rollout.max_sequences,
        max_length=longest_sequence(config),
        max_images=max(config.data.max_images, *(limits.max_images for limits in _limits(config))),
        # Images that environments create have the default limit.
        max_pixels=max(config.data.max_pixels, config.env.max_pixels, DataConfig().max_pixels),
        tensor_parallel=1 if rollout.engine == "embedded" else rollout.tensor_parallel,
        memory_share=rollout.memory_share,
        seed=config.run.seed,
        args=rollout.engine_args,
    )


def longest_sequence(config: Config) -> int:
    """Most tokens of an episode, prompt included, in training or validation."""
    limits = _limits(config)
    turns, total = (max(getattr(one, n) for one in limits) for n in ("max_turns", "max_total_tokens"))
    answers = [config.rollout.max_tokens, *(val.max_tokens for val in (config.val, *val_by_set(config).values()))]
    return total if turns > 1 else min(total, config.data.max_prompt_tokens + max(answers))


def _limits(config: Config) -> list[Limits]:
    return [run_parts.limits_of(config, evaluation=evaluation) for evaluation in (False, True)]


def require_capabilities(rollout: RolloutConfig, engine: Engine) -> None:
    """Refuse what the engine cannot do. Truncated sampling: it must return the kept ids, which training reads.
    `rollout.at_update`: sequences that outlast the rollout phase need memory that the trainer does not take, and to
    keep their keys a KV cache that is usable after an update.
    """
    can = engine.capabilities()
    if (rollout.top_p < 1 or rollout.top_k > 0) and not can.support:
        raise ConfigError(f"rollout.truncated_sampling: not with {rollout.engine}; use rollout.engine=embedded")
    again, shared = not can.live_updates and rollout.at_update == "keep_keys", not can.separate_memory
    if rollout.at_update != "interrupt" and (again or shared):
        why = f"{rollout.engine} computes them again" if again else "replicas share a GPU with the trainer"
        raise ConfigError(f"rollout.at_update={rollout.at_update}: {why}; use rollout.at_update=interrupt")


def check_parity(
    config: Config, engine: Engine, policy: Trainer, samples: Sequence[Sample], *, version: int
) -> dict[str, float]:
    """Compare log-probs of trainer and engine, unless they share weights; returns metrics, raises on a large gap."""
    if engine.capabilities().shares_weights:
        return {}
    found = ENGINES["parity"](config, engine, policy, samples, version=version)
    log.info(str(found))
    return found.metrics()
