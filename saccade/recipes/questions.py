"""Loads data as the config says: prompts as the model reads them, conversations and documents to train on, validation
sets.

    load_prompts(config, config.data.train, family).samples
"""

import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

from saccade.config import Config, DataConfig, DataSource, PromptConfig
from saccade.data import datasets, prompts
from saccade.data.chats import RowError
from saccade.data.dataset import POSITIONS, PROMPT_LIMIT
from saccade.data.sources import set_names
from saccade.environments import KINDS
from saccade.errors import DataError
from saccade.models.families import Family
from saccade.registry import HOOKS
from saccade.rewards.resolve import verifiers_for
from saccade.rewards.verifiers import VERIFIERS
from saccade.rollout import env_setup
from saccade.types import Message, Sample

Length = Callable[[Sample], int]
Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # turns a raw row into one of a supported format


def wording(config: Config, *, choices_seed: int = 0) -> Callable[[Sample], Sample]:
    """Returns a function that adds the instruction and the description of tools for the sample's data source."""
    tools = env_setup.explanation(config.env)

    @cache
    def asked(source: str) -> tuple[PromptConfig, str]:
        prompt = config.prompt.of(source)
        own = prompts.instruction_for(str(prompt.format)) if prompt.instruction is None else str(prompt.instruction)
        return prompt, " ".join(filter(None, [own, tools]))

    for source in config.prompt.format if isinstance(config.prompt.format, dict) else ("default",):
        asked(source)  # refuses an unknown format before any row is read

    def word(sample: Sample) -> Sample:
        prompt, instruction = asked(sample.data_source)
        return prompts.apply(sample, prompt, instruction=instruction, choices_seed=choices_seed)

    return word


def prompt_builder(config: Config) -> Callable[[Sample], Sample]:
    """Returns a function that turns a row into a prompt. It removes a demonstration at the end of the row: all turns of
    an episode, the last reply of a chat.
    """
    word, episodes = wording(config, choices_seed=config.run.seed), config.env.name != "single_turn"

    def ask(sample: Sample) -> Sample:
        _check_row(sample, config)
        messages, roles = sample.messages, [message.role for message in sample.messages]
        if roles[-1] == "assistant" and (episodes or "tool" in roles):
            messages = messages[: roles.index("assistant") or 1]
        while len(messages) > 1 and messages[-1].role == "assistant":
            messages = messages[:-1]
        return word(replace(sample, messages=messages))

    return ask


def _check_row(sample: Sample, config: Config) -> None:
    """Raise a RowError if the environment or a verifier cannot use the row."""
    names = verifiers_for(config.reward, sample.data_source)
    asked = [VERIFIERS[name].check_row for name in names if name in VERIFIERS]
    if config.env.name in KINDS:
        asked.append(KINDS[config.env.name].check_row)
    for check in filter(None, asked):
        try:
            check(sample)
        except ValueError as error:
            raise RowError(str(error)) from None


def marks_of(family: Family) -> tuple[str, ...]:
    """Media kinds besides images whose placeholder is never plain text: with an encoder of series plugged in, rows
    contain series.
    """
    return ("series",) if family.series is not None else ()


def load_worded(
    config: Config,
    sources: Sequence[DataSource],
    family: Family,
    word: Callable[[Sample], Sample],
    *,
    limit: str,
    read: tuple[str, Callable[[Sequence[Message]], Sized]],
    measure: Callable[[Length], Length] = lambda length: length,
    change: Change | None = None,
) -> datasets.Dataset:
    """Load rows and apply `word` to each. Rows with more tokens than the option `limit` or the model's positions allow
    follow `data.overlong`. `read`: the function that makes tokens, after its name in the length cache; `measure`
    changes what of a row is counted.
    """
    longest = attrgetter(limit)(config)
    room = family.max_positions - (limit == PROMPT_LIMIT)  # a prompt leaves room for one answer token
    limits = config.data.model_copy(update={"max_prompt_tokens": min(room, longest)})
    name = POSITIONS if room < longest else limit
    with HOOKS["cached_lengths"](config.run, family, read[0], word, read[1]) as length:
        data = datasets.load(sources, limits, length=measure(length), change=change, limit=name, marks=marks_of(family))
    return map_samples(data, word)


def load_prompts(
    config: Config, sources: Sequence[DataSource], family: Family, change: Change | None = None
) -> datasets.Dataset:
    """Load prompts, ready to be rendered."""
    ask, read = prompt_builder(config), ("prompt", family.render)
    return load_worded(config, sources, family, ask, limit=PROMPT_LIMIT, read=read, change=change)


def load_dialogues(config: Config, sources: Sequence[DataSource], family: Family) -> datasets.Dataset:
    """Load conversations to train on, the question worded as in RL; of several candidates, the chosen one."""
    ask, tag = wording(config), config.sft.reward_tag

    def word(sample: Sample) -> Sample:
        if sample.desirable is False and tag is None:
            raise RowError("labelled as bad; sft learns from such rows with sft.reward_tag")
        sample = HOOKS["chosen"](sample)
        roles = [message.role for message in sample.messages]
        if "assistant" not in roles or roles[0] == "assistant":
            raise RowError("no assistant turn that answers something; sft reads conversations")
        sample = ask(sample)
        return sample if tag is None else HOOKS["reward_tagged"](sample, tag)

    read = ("dialogue", family.render_dialogue)
    return load_worded(config, sources, family, word, limit="sft.max_tokens", read=read)


def load_documents(data: DataConfig, sources: Sequence[DataSource]) -> datasets.Dataset:
    """Load plain texts to train on, unchanged; their length is in characters."""

    def length(sample: Sample) -> int:
        if sample.media:
            raise RowError("a document with an image; conversations show images (sft.mode=chat)")
        return sum(len(message.text) for message in sample.messages)

    changes = {"keys": {"prompt": "text", **data.keys}, "max_prompt_tokens": sys.maxsize}
    changes["format"] = "messages" if data.format == "auto" else data.format
    return datasets.load(sources, data.model_copy(update=changes), length=length, limit="sft.max_tokens")


def map_samples(dataset: datasets.Dataset, change: Callable[[Sample], Sample]) -> datasets.Dataset:
    return replace(dataset, samples=tuple(change(sample) for sample in dataset.samples))


def validation_sets(config: Config, family: Family) -> dict[str, datasets.Dataset]:
    val = config.data.val
    return {
        name: require_rows(load_prompts(config, [source], family), f"data.val: {source.path}")
        for name, source in zip(set_names(val), val, strict=True)
    }


def require_rows(dataset: datasets.Dataset, where: str) -> datasets.Dataset:
    if not dataset.samples:
        raise DataError(f"{where} has no usable row:\n{dataset.summary}")
    return dataset
