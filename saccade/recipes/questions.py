"""Data as a config asks for it: questions in the words that the model is asked them with,
conversations and documents to learn from, sets to validate on.

    load_prompts(config, config.data.train, family).samples
"""

import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

from saccade.config import Config, DataSource, PromptConfig
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
Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # of a row as it is read


def wording(config: Config, *, choices_seed: int = 0) -> Callable[[Sample], Sample]:
    """Adds how to answer and which tools there are, by data source."""
    tools = env_setup.explanation(config.env)

    @cache
    def asked(source: str) -> tuple[PromptConfig, str]:
        prompt = config.prompt.of(source)
        own = prompts.instruction_for(str(prompt.format)) if prompt.instruction is None else str(prompt.instruction)
        return prompt, " ".join(filter(None, [own, tools]))

    def word(sample: Sample) -> Sample:
        prompt, instruction = asked(sample.data_source)
        return prompts.apply(sample, prompt, instruction=instruction, choices_seed=choices_seed)

    return word


def prompt_builder(config: Config) -> Callable[[Sample], Sample]:
    """A row as the model is asked it. A demonstration at its end is no part of the question: of an
    episode all turns, of a chat the last reply.
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
    """Asks the environment and the verifiers of a row whether they can use it."""
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
    """Media whose placeholder is never plain text, beside images: who plugs in an encoder of
    series has rows with series.
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
    """Rows as `word` makes them, of as many tokens as the option `limit` says or as the model has
    positions for; longer ones follow `data.overlong`. `read` makes the tokens, under a name;
    `measure` says what of a row is counted.
    """
    longest = attrgetter(limit)(config)
    room = family.max_positions - (limit == PROMPT_LIMIT)  # beside a prompt there is an answer
    limits = config.data.model_copy(update={"max_prompt_tokens": min(room, longest)})
    name = POSITIONS if room < longest else limit
    with HOOKS["cached_lengths"](config, family, read[0], word, read[1]) as length:
        counted = measure(length)
        data = datasets.load(sources, limits, length=counted, change=change, limit=name, marks=marks_of(family))
    return map_samples(data, word)


def load_prompts(
    config: Config, sources: Sequence[DataSource], family: Family, change: Change | None = None
) -> datasets.Dataset:
    """Questions, ready to be rendered."""
    ask, read = prompt_builder(config), ("prompt", family.render)
    return load_worded(config, sources, family, ask, limit=PROMPT_LIMIT, read=read, change=change)


def load_dialogues(config: Config, sources: Sequence[DataSource], family: Family) -> datasets.Dataset:
    """Conversations to learn from, the question worded as in RL; of candidates the best one."""
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


def load_documents(config: Config, sources: Sequence[DataSource], family: Family) -> datasets.Dataset:
    """Plain texts to learn from, as they are; their length counts characters."""

    def length(sample: Sample) -> int:
        if sample.media:
            raise RowError("a document with an image; conversations show images (sft.mode=chat)")
        return sum(len(message.text) for message in sample.messages)

    data = config.data
    changes = {"keys": {"prompt": "text", **data.keys}, "max_prompt_tokens": sys.maxsize}
    changes["format"] = "messages" if data.format == "auto" else data.format
    limits = data.model_copy(update=changes)
    return datasets.load(sources, limits, length=length, limit="sft.max_tokens")


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
