"""`check-data`: every row and image, with the token lengths of the model and the self-test of the
rewards.

saccade check-data run.yaml
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from saccade import checks
from saccade.config import Config, load
from saccade.data import check
from saccade.types import Sample


def run(config: Any, *, headers_only: bool = False, workers: int = 2) -> check.Report:
    """Lengths are counted when the config names a model, rewards are tested when it names some."""
    config = load(config)
    checks.check(config, "check-data")
    return check.check_data(
        config,
        length=_length(config) if config.model.path else None,
        self_test=_self_test(config),
        headers_only=headers_only,
        workers=workers,
    )


def _length(config: Config) -> Callable[[Sample], int]:
    from saccade.recipes import parts

    parts.quiet_libraries()
    family = parts.family_of(config, parts.start_folder(config))
    ask = parts.asker(config)
    return lambda sample: len(family.render(ask(sample).messages))


def _self_test(config: Config) -> Callable[[Sequence[Sample]], Any] | None:
    from saccade.rewards.scorer import Scorer
    from saccade.rewards.self_test import self_test

    reward = config.reward
    if not (reward.terms or reward.preset or reward.by_source):
        return None

    def test(samples: Sequence[Sample]) -> dict[str, Any]:
        style = config.prompt.format
        with Scorer(reward, prompt_format=style, max_tokens=config.rollout.max_tokens) as scorer:
            scorer.check_sources(sample.data_source for sample in samples)
            scorer.check_media(samples)
            result = self_test(scorer, samples, format=style)
        return {
            "passed": result.passed,
            "rows": result.rows,
            "failures": [str(failure) for failure in result.failures],
            "skipped": list(result.skipped),
        }

    return test
