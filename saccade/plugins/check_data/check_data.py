"""`check-data`: every row and image, with the token lengths of the model and the self-test of the
rewards.

saccade check-data run.yaml --for dpo
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from saccade import checks
from saccade.config import Config, DataConfig, DataSource, load
from saccade.data import datasets
from saccade.data.datasets import Dataset
from saccade.errors import ConfigError
from saccade.plugins.check_data import check_rows
from saccade.types import Sample

if TYPE_CHECKING:
    from saccade.models.families import Family

TRAINING = ("rl", "sft", "dpo", "reward-model")  # that read rows each in its own way


def run(config: Any, *, headers_only: bool = False, workers: int = 2, command: str | None = None) -> check_rows.Report:
    """Lengths are counted when the config names a model, rewards are tested when it names some.
    Rows that `command` would refuse are bad, too; what else it would leave out is listed.
    """
    config = load(config)
    checks.check(config, "check-data")
    if command is not None:
        config = _as_command(config, command)
    read: dict[str, Any] = _with_model(config, command) if config.model.path else {}
    return check_rows.check_data(
        config, self_test=_self_test(config), headers_only=headers_only, workers=workers, **read
    )


def _as_command(config: Config, command: str) -> Config:
    if command not in TRAINING:
        raise ConfigError(f"--for {command}: is no command that trains; known are {', '.join(TRAINING)}")
    if not config.model.path:
        raise ConfigError(
            f"--for {command}: reads rows with the tokenizer of a model; "
            "give a Hugging Face model folder, or model.path=tiny:qwen2_5_vl"
        )
    return load(config, command=command)


def _with_model(config: Config, command: str | None) -> dict[str, Any]:
    """What a tokenizer and a family of models know about rows."""
    from saccade.recipes import model_setup, questions

    model_setup.quiet_libraries()
    family = model_setup.family_of(config, model_setup.start_folder(config))
    ask = questions.prompt_builder(config)
    return {
        "length": lambda sample: len(family.render(ask(sample).messages)),
        "marks": questions.marks_of(family),
        "unknown": lambda samples: questions.warning_of_words(family, [*map(ask, samples)]),
        "read": _reader(config, command, family) if command else None,
    }


def _reader(config: Config, command: str, family: Family) -> check_rows.Read:
    """The sets as the command reads them, to train and to validate on."""
    from saccade.plugins.preferences import pairs
    from saccade.plugins.preferences.comparison import from_config
    from saccade.recipes import model_setup, questions

    def used(split: str, sources: Sequence[DataSource], own: Config) -> Dataset:
        if command == "reward-model":
            return model_setup.REWARD_MODELS["rows"](own, family).load(sources)
        if command == "sft" and split == "train":
            return questions.load_dialogues(own, sources, family)
        asked = questions.load_prompts(own, sources, family)
        compares = split == "train" or any(sample.candidates for sample in asked.samples)
        if command == "dpo" and compares:
            paired = from_config(own.dpo).paired
            return pairs.load_pairs(own, sources, family, paired=paired)
        return asked

    def read(split: str, sources: Sequence[DataSource], data: DataConfig) -> tuple[Dataset, Dataset]:
        own = config.model_copy(update={"data": data})
        if command == "sft" and own.sft.mode == "pretrain" and split == "train":
            documents = questions.load_documents(own, sources, family)
            return documents, documents
        as_they_are = datasets.load(sources, data, marks=questions.marks_of(family))
        return as_they_are, used(split, sources, own)

    return read


def _self_test(config: Config) -> Callable[[Sequence[Sample]], Any] | None:
    from saccade.plugins.check_data.row_warnings import warnings_of
    from saccade.plugins.check_data.self_test import self_test
    from saccade.rewards.scorer import Scorer

    reward = config.reward
    if not reward.given:
        return None

    def test(samples: Sequence[Sample]) -> dict[str, Any]:
        style = config.prompt.format
        with Scorer(reward, prompt_format=style, max_tokens=config.rollout.max_tokens) as scorer:
            scorer.check_sources(sample.data_source for sample in samples)
            scorer.check_media(samples)
            for warning in warnings_of(scorer, samples):
                print(f"WARNING: {warning}")
            result = self_test(scorer, samples, format=style)
        return {
            "passed": result.passed,
            "broken": any(failure.broken for failure in result.failures),
            "rows": result.rows,
            "failures": [*filter(None, [result.ended.strip()]), *map(str, result.failures)],
            "skipped": list(result.skipped),
        }

    return test
