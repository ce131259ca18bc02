"""`check-data`: every row and image, with the token lengths of the model and the self-test of the
rewards.

saccade check-data run.yaml --for dpo
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from saccade import checks
from saccade.config import Config, DataConfig, DataSource, defaults_for, load
from saccade.data import check
from saccade.data.datasets import Dataset
from saccade.errors import ConfigError
from saccade.types import Sample

COMMANDS = ("sft", "dpo", "reward-model")  # that refuse rows which others take


def run(
    config: Any, *, headers_only: bool = False, workers: int = 2, command: str | None = None
) -> check.Report:
    """Lengths are counted when the config names a model, rewards are tested when it names some.
    Training rows that `command` would refuse are bad, too.
    """
    config = load(config)
    checks.check(config, "check-data")
    return check.check_data(
        config,
        read=_reader(config, command) if command else None,
        length=_length(config) if config.model.path else None,
        self_test=_self_test(config),
        headers_only=headers_only,
        workers=workers,
    )


def _reader(config: Config, command: str) -> Callable[[Sequence[DataSource], DataConfig], Dataset]:
    """The training rows as the command reads them."""
    if command not in COMMANDS:
        raise ConfigError(f"--for {command}: it has no demands; known are {', '.join(COMMANDS)}")
    if not config.model.path:
        raise ConfigError(
            f"--for {command}: reads rows with the tokenizer of a model; "
            "give a Hugging Face model folder, or model.path=tiny:qwen2_5_vl"
        )
    from saccade.algorithms.comparison import from_config
    from saccade.recipes import models, pairs, questions, rated

    config = defaults_for(command, config)
    family = models.family_of(config, models.start_folder(config))

    def read(sources: Sequence[DataSource], data: DataConfig) -> Dataset:
        own = config.model_copy(update={"data": data})
        if command == "reward-model":
            return rated.task_of(own, family).load(sources)
        if command == "dpo":
            paired = from_config(own.dpo).paired
            return pairs.load_pairs(own, sources, family, paired=paired)
        reads = questions.load_documents if own.sft.mode == "pretrain" else questions.load_dialogues
        return reads(own, sources, family)

    return read


def _length(config: Config) -> Callable[[Sample], int]:
    from saccade.recipes import models, questions

    models.quiet_libraries()
    family = models.family_of(config, models.start_folder(config))
    ask = questions.asker(config)
    return lambda sample: len(family.render(ask(sample).messages))


def _self_test(config: Config) -> Callable[[Sequence[Sample]], Any] | None:
    from saccade.rewards.scorer import Scorer
    from saccade.rewards.self_test import self_test

    reward = config.reward
    if not reward.given:
        return None

    def test(samples: Sequence[Sample]) -> dict[str, Any]:
        style = config.prompt.format
        with Scorer(reward, prompt_format=style, max_tokens=config.rollout.max_tokens) as scorer:
            scorer.check_sources(sample.data_source for sample in samples)
            scorer.check_media(samples)
            if warning := scorer.unused(sample.data_source for sample in samples):
                print(warning)
            result = self_test(scorer, samples, format=style)
        return {
            "passed": result.passed,
            "rows": result.rows,
            "failures": [*filter(None, [result.ended.strip()]), *map(str, result.failures)],
            "skipped": list(result.skipped),
        }

    return test
