"""Warnings about rows and rewards as a whole: likely mistakes that do not stop a run."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from saccade.config import Config, PromptConfig
from saccade.data.datasets import Dataset, Stream
from saccade.models.families import Family
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import VERIFIERS, has_gold, split_name
from saccade.types import Sample

log = logging.getLogger(__name__)

READ = 256  # rows whose words are looked up in the tokenizer
MATERIAL = 0.01  # share of unknown tokens from which on a warning is given


def warn_of_rewards(scorer: Scorer | None, sets: Iterable[Dataset], *, shared: bool = True) -> None:
    samples = [sample for data in sets for sample in data.samples]
    for warning in warnings_of(scorer, samples, shared=shared) if scorer is not None else ():
        log.warning(warning)


def unused_rewards(scorer: Scorer, there: set[str], *, shared: bool = True) -> list[str]:
    """Warnings about rewards of sources that no row of `there` has. `shared`: also about reward.terms or reward.preset
    if every source has its own rewards; evaluation turns this off, as its sets may differ.
    """
    named = scorer.config.by_source.keys() - {"default"}
    idle, sources = ", ".join(sorted(named - there)), ", ".join(sorted(there))
    found = [f"reward.by_source: no row has the data_source {idle}; there is {sources}"] if idle else []
    others = next((name for name in ("terms", "preset") if getattr(scorer.config, name)), None)
    if shared and others and there and there <= named:
        all_named = f"as reward.by_source names the data_source of all ({sources})"
        found.append(f"reward.{others}: scores no row, {all_named}; remove it, or those")
    return found


def warnings_of(scorer: Scorer, samples: Sequence[Sample], *, shared: bool = True) -> list[str]:
    """Warnings about rewards that score no row (a source's name may be misspelt), and about rows without a gold
    answer whose outcome term is a built-in that compares with one.
    """
    unused = unused_rewards(scorer, {sample.data_source for sample in samples}, shared=shared)
    terms: Counter[str] = Counter()
    for sample in samples:
        recipe = scorer.recipe(sample.data_source)
        term = recipe.terms[recipe.outcome]
        compares = term.needs_answer and not split_name(term.verifier)
        row = RewardSample(id=sample.id, response="", answer=sample.answer)
        terms[term.name] += compares and not has_gold(VERIFIERS[term.verifier], row, term.args)
    unanswered = [
        f"{count} of {len(samples)} rows have no answer, and {name} abstains where it has "
        "none to compare with; data.keys.answer names the column, or leave such rows out"
        for name, count in terms.items()
        if count
    ]
    return [*unused, *unanswered]


def unused_prompts(prompt: PromptConfig, samples: Iterable[Sample]) -> list[str]:
    """Warnings about prompts of sources that no row has."""
    there = {sample.data_source for sample in samples}
    idle = {name: value.keys() - there - {"default"} for name, value in prompt if isinstance(value, dict)}
    there_is = f"there is {', '.join(sorted(there))}"
    return [f"prompt.{n}: no row has the data_source {', '.join(sorted(s))}; {there_is}" for n, s in idle.items() if s]


def warn_of_rows(config: Config, family: Family, stream: Stream, held: Collection[Dataset]) -> None:
    rows, wanted = stream.rows_per_epoch, config.train.prompts_per_step
    if wanted > rows:
        log.warning(
            f"train.prompts_per_step={wanted} and an epoch has {rows} rows: a step takes "
            f"each {wanted / rows:.3g} times; try train.prompts_per_step={rows}"
        )
    for warning in unused_prompts(config.prompt, (s for data in (stream.dataset, *held) for s in data.samples)):
        log.warning(warning)
    if unknown := unknown_words(family, stream.dataset.samples):
        log.warning("; ".join(unknown))
    for data in held:
        if same := len(data.contents & stream.dataset.contents):
            log.warning(
                f"{same} of {len(data.contents)} different rows of {data.parts[0].path} "
                "(data.val) are in data.train, too: there it measures what was memorised"
            )


def unknown_words(family: Family, samples: Sequence[Sample]) -> tuple[str, str] | None:
    """Returns (problem, fix) if the tokenizer maps more than MATERIAL of the tokens to its unknown token; about READ
    rows are looked at.
    """
    unknown, found, total, example = family.chat.unknown, 0, 0, ""
    if unknown is None:
        return None
    for sample in samples[:: max(1, len(samples) // READ)]:
        for text in (message.text for message in sample.messages):
            ids = family.chat.encode(text)
            found, total = found + int((ids == unknown).sum()), total + len(ids)
            words = text.split() if unknown in ids and not example else ()
            example = next((word for word in words if unknown in family.chat.encode(word)), example)
    if found < MATERIAL * max(1, total):
        return None
    return (
        f"the tokenizer of {family.path} does not know {found / total:.0%} of the words of these "
        f"rows, such as {example!r}: all of them are one and the same token to the model",
        "take a model whose tokenizer covers the data",
    )
