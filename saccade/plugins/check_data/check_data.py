"""`saccade check-data`: every problem of the configured data sets, row by row, before a run meets them.

Loads as training would, then decodes every image once. Nothing stops it: bad rows are what it is
looking for. Token lengths and reward tests depend on model and rewards, so they come in as
functions.

    >>> report = run("run.yaml", command="dpo")
    >>> print(report.to_json()); write_fixed(report, Path("clean.jsonl"))
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade import checks
from saccade.config import Config, DataConfig, DataSource
from saccade.config import load as load_config
from saccade.data.datasets import BadRow, Dataset, keep, load
from saccade.data.records import plain
from saccade.errors import ConfigError, DataError
from saccade.media import kinds
from saccade.media.images import ImageError
from saccade.plugins.check_data.canonical_rows import convert
from saccade.registry import HOOKS
from saccade.types import Media, Sample

if TYPE_CHECKING:
    from saccade.models.families import Family

TRAINING = ("rl", "sft", "dpo", "reward-model")  # that read rows each in its own way
# (train or val, sources, options) → rows as they are in the file, rows that are used.
Read = Callable[[str, Sequence[DataSource], DataConfig], tuple[Dataset, Dataset]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found. `acceptable` is False when training would stop for too many bad rows."""

    rows: int
    good: int
    bad: tuple[BadRow, ...]
    overlong: tuple[BadRow, ...]
    left_out: tuple[BadRow, ...]  # good rows that the command leaves out, as ties are by dpo
    filtered: int  # rows that their mapping leaves out
    acceptable: bool
    formats: Mapping[str, str]
    duplicate_ids: tuple[str, ...]
    renamed: int  # rows that got a suffix, as an earlier one has their id
    repeated: int  # different rows of val that are in train, too
    media_kinds: Mapping[str, int]
    images: int  # different ones
    decoded: bool
    gold_rate: float  # share of the good rows that have an answer
    answerless: int  # good rows that need no answer: they have candidates or a `level` to play
    lengths: Mapping[str, float]  # min, mean, median, p95, max in tokens; empty where not counted
    histogram: tuple[tuple[int, int], ...]  # (tokens at most, rows)
    notes: tuple[str, ...] = ()  # what is likely a mistake, of rows that are good
    self_test: Any = None
    # Good rows of train and val.
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        named = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "samples"}
        for name in ("bad", "overlong", "left_out"):
            named[name] = [vars(row) for row in named[name]]
        return json.dumps(plain(named), indent=2, ensure_ascii=False)


def run(config: Any, *, headers_only: bool = False, workers: int = 2, command: str | None = None) -> Report:
    """Lengths are counted when the config names a model, rewards are tested when it names some.
    Rows that `command` would refuse are bad, too; what else it would leave out is listed.
    """
    config = load_config(config)
    checks.check(config, "check-data")
    if command is not None:
        config = _as_command(config, command)
    read: dict[str, Any] = _with_model(config, command) if config.model.path else {}
    return check_data(config, self_test=_self_test(config), headers_only=headers_only, workers=workers, **read)


def _as_command(config: Config, command: str) -> Config:
    if command not in TRAINING:
        raise ConfigError(f"--for {command}: is no command that trains; expected one of {', '.join(TRAINING)}")
    if not config.model.path:
        raise ConfigError(
            f"--for {command}: reads rows with the tokenizer of a model; "
            "give a Hugging Face model folder, or model.path=tiny:qwen2_5_vl"
        )
    return load_config(config, command=command)


def _with_model(config: Config, command: str | None) -> dict[str, Any]:
    """What a tokenizer and a family of models know about rows."""
    from saccade.plugins.check_data.row_warnings import unknown_words
    from saccade.recipes import model_setup, questions

    model_setup.quiet_libraries()
    family = model_setup.family_of(config, model_setup.start_folder(config))
    ask = questions.prompt_builder(config)
    return {
        "length": lambda sample: len(family.render(ask(sample).messages)),
        "marks": questions.marks_of(family),
        "unknown": lambda samples: "; ".join(unknown_words(family, [*map(ask, samples)]) or ()),
        "read": _reader(config, command, family) if command else None,
    }


def _reader(config: Config, command: str, family: Family) -> Read:
    """The sets as the command reads them, to train and to validate on."""
    from saccade.plugins.preferences import pairs
    from saccade.plugins.preferences.preference_losses import from_config
    from saccade.recipes import questions

    def used(split: str, sources: Sequence[DataSource], own: Config) -> Dataset:
        if command == "reward-model":
            return HOOKS["reward_model_rows"](own, family).load(sources)
        if command == "sft" and split == "train":
            return questions.load_dialogues(own, sources, family)
        asked = questions.load_prompts(own, sources, family)
        compares = split == "train" or any(sample.candidates for sample in asked.samples)
        if command == "dpo" and compares:
            paired = from_config(own.dpo).whole
            return pairs.load_pairs(own, sources, family, paired=paired)
        return asked

    def read(split: str, sources: Sequence[DataSource], data: DataConfig) -> tuple[Dataset, Dataset]:
        own = config.model_copy(update={"data": data})
        if command == "sft" and own.sft.mode == "pretrain" and split == "train":
            documents = questions.load_documents(own, sources, family)
            return documents, documents
        as_they_are = load(sources, data, marks=questions.marks_of(family))
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


# -- rows ------------------------------------------------------------------------------------------


def check_data(
    config: Config,
    *,
    length: Callable[[Sample], int] | None = None,
    headers_only: bool = False,
    workers: int = 2,
    self_test: Callable[[Sequence[Sample]], Any] | None = None,
    read: Read | None = None,
    marks: Collection[str] = (),
    unknown: Callable[[Sequence[Sample]], str | None] | None = None,
) -> Report:
    """Read train and validation sets; `self_test` gets the good samples and adds to the report.
    `read` is a command's own way to read a set: what it refuses is bad, too. `marks`: see `load`.
    `unknown` says which words a model does not know.
    """
    wanted = [("train", config.data.train), *(("val", [source]) for source in config.data.val)]
    sets = [(split, _load(split, listed, config.data, length, read, marks)) for split, listed in wanted if listed]
    if not sets:
        raise DataError("no data to check: set data.train or data.val")
    every = [data for _, data in sets]
    every_image = {media.key[:2]: media for data in every for s in data.samples for media in s.every_media}
    broken = {} if headers_only else _broken(every_image, workers)
    good: dict[str, tuple[Sample, ...]] = {}
    contents: dict[str, frozenset[str]] = {}
    bad: list[BadRow] = []
    for split, data in sets:
        sound = keep(data, lambda sample: _problem(sample, broken))
        good[split] = (*good.get(split, ()), *sound.samples)
        contents[split] = contents.get(split, frozenset()) | data.contents
        bad += [*data.quarantined, *sound.left_out[len(data.left_out) :]]
    rows = sum(data.rows for data in every)
    samples = [sample for part in good.values() for sample in part]
    tokens = [] if length is None else [length(sample) for sample in samples]
    return Report(
        rows=rows,
        good=len(samples),
        bad=tuple(bad),
        overlong=tuple(row for data in every for row in data.overlong),
        left_out=tuple(row for data in every for row in data.left_out),
        filtered=sum(data.filtered for data in every),
        acceptable=len(bad) <= config.data.max_bad_fraction * rows,
        formats={name: format for data in every for name, format in data.formats.items()},
        duplicate_ids=tuple(id for data in every for id in data.duplicate_ids),
        renamed=sum(data.renamed for data in every),
        repeated=len(frozenset.intersection(*contents.values())) if len(contents) > 1 else 0,
        media_kinds=dict(sum((Counter(data.media_kinds) for data in every), Counter())),
        images=len(every_image),
        decoded=not headers_only,
        gold_rate=sum(sample.answer not in (None, "", ()) for sample in samples) / max(1, len(samples)),
        answerless=sum(bool(s.candidates) or "level" in s.extra for s in samples),
        lengths=_statistics(tokens),
        histogram=_histogram(tokens),
        notes=tuple(filter(None, [_wordless(samples), unknown(samples) if unknown else None])),
        self_test=None if self_test is None else self_test(samples),
        samples=good,
    )


def _load(
    split: str,
    sources: Sequence[DataSource],
    config: DataConfig,
    length: Callable[[Sample], int] | None,
    read: Read | None,
    marks: Collection[str],
) -> Dataset:
    """As training does, but going on where training would stop. Samples are as in the file, though
    a command words them otherwise.
    """
    going_on: dict[str, Any] = {"on_bad_row": "quarantine", "max_bad_fraction": 1.0}
    if config.overlong == "error":
        going_on["overlong"] = "drop"
    config = config.model_copy(update=going_on)
    if read is None:
        return load(sources, config, length=length, marks=marks)
    data, taken = read(split, sources, config)
    used = set(_places(taken))
    place = {data.samples[n].id: at for n, at in enumerate(_places(data))}
    kept = keep(data, lambda sample: None if place[sample.id] in used else "the command drops it")
    lists = {name: getattr(taken, name) for name in ("quarantined", "overlong", "left_out")}
    return replace(kept, **lists)


def _places(data: Dataset) -> Iterator[tuple[int, int]]:
    """Of each sample: which source, and which row there."""
    for number, part in enumerate(data.parts):
        for index in range(part.start, part.stop):
            yield number, data.row_numbers[index]


def _wordless(samples: Sequence[Sample]) -> str | None:
    """Rows whose question is empty, or a picture alone."""
    found = [s for s in samples if not any(m.text.strip() for m in s.messages if m.role == "user")]
    if not found:
        return None
    rows = "1 good row asks" if len(found) == 1 else f"{len(found)} good rows ask"
    return f"{rows} nothing in words, first {found[0].id}: the question is empty or only <image>"


# -- images ----------------------------------------------------------------------------------------


def _broken(every_image: Mapping[Any, Media], workers: int) -> dict[Any, str]:
    """Reasons by image. Threads suffice, as Pillow decodes without holding the interpreter."""

    def reason(media: Media) -> str | None:
        try:
            kinds.decode(media)
        except ImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(workers) as pool:
        reasons = pool.map(reason, every_image.values())
        return {key: why for key, why in zip(every_image, reasons, strict=True) if why is not None}


def _problem(sample: Sample, broken: Mapping[Any, str]) -> str | None:
    keys = (media.key[:2] for media in sample.every_media)
    return next((broken[key] for key in keys if key in broken), None)


# -- lengths ---------------------------------------------------------------------------------------


def _statistics(tokens: Sequence[int]) -> dict[str, float]:
    if not tokens:
        return {}
    levels = {"min": 0, "median": 50, "p95": 95, "max": 100}
    at = {name: float(np.percentile(tokens, level)) for name, level in levels.items()}
    return at | {"mean": float(np.mean(tokens))}


def _histogram(tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rows by the power of two that holds them."""
    counts = Counter(1 << max(0, int(count) - 1).bit_length() for count in tokens)
    return tuple(sorted(counts.items()))


def write_fixed(report: Report, path: Path) -> list[Path]:
    """The good rows as canonical JSONL; train and val together give NAME.train.jsonl …."""
    paths = []
    for split, samples in report.samples.items():
        target = path if len(report.samples) == 1 else path.with_name(f"{path.stem}.{split}{path.suffix}")
        convert(samples, target)
        paths.append(target)
    return paths
