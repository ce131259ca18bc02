"""The engine that a config asks for. Recipes call this and never name an engine themselves."""

from __future__ import annotations

from pathlib import Path

from saccade.config import ADAPTED, Config
from saccade.engines import Engine
from saccade.engines.build import Settings, build
from saccade.recipes.parts import Policy


def make_engine(config: Config, policy: Policy) -> Engine:
    """In this process, or replicas of it in their own."""
    return build(settings_of(config, policy), policy.family, policy.model)


def settings_of(config: Config, policy: Policy) -> Settings:
    rollout, template = config.rollout, config.prompt.chat_template
    dtype = next(policy.model.parameters()).dtype
    return Settings(
        engine=rollout.engine,
        folder=policy.family.path,
        dtype=str(dtype).removeprefix("torch."),
        device=str(policy.device),
        family=config.model.family,
        chat_template=Path(template).read_text(encoding="utf-8") if template else None,
        trust_remote_code=config.model.trust_remote_code,
        max_sequences=rollout.max_sequences,
        max_length=config.data.max_prompt_tokens + rollout.max_tokens,
        max_images=config.env.max_images,
        tensor_parallel=rollout.tensor_parallel,
        memory_share=rollout.memory_share,
        lora_rank=config.model.lora.rank if config.model.train in ADAPTED else 0,
        seed=config.run.seed,
        args=rollout.engine_args,
    )
