"""`saccade check-data`: every problem of the configured data sets, row by row, before training.

Loads as training would, then decodes every image once. Bad rows are collected, they do not stop it.

    >>> report = run("run.yaml", command="dpo")
    >>> print(report.to_json()); write_fixed(report, Path("clean.jsonl"))
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade import checks
from saccade.config import Config, DataConfig, DataSource
from saccade.config import load as load_config
from saccade.data.datasets import BadRow, Dataset, leave_out, load
from saccade.data.records import content_hash, json_data
from saccade.errors import ConfigError, DataError, SelfTestError
from saccade.media import kinds
from saccade.media.images import ImageError
from saccade.models.families import Family
from saccade.plugins.check_data.canonical_rows import convert
from saccade.plugins.check_data.row_warnings import unknown_words, unused_prompts, warnings_of
from saccade.plugins.check_data.self_test import known_answers_by_format
from saccade.recipes import questions
from saccade.registry import HOOKS
from saccade.rewards.scorer import Scorer
from saccade.system.disk import require_new, require_writable
from saccade.types import Media, Sample

TRAINING = ("rl", "sft", "dpo", "reward-model")  # commands for --for
LISTED = 20  # most bad rows that are printed
LENGTHS = ("min", "median", "p95", "max", "mean")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check. `acceptable` is False if training would stop because of too many bad rows."""

    rows: int
    good: int
    bad: tuple[BadRow, ...]
    overlong: tuple[BadRow, ...]
    left_out: tuple[BadRow, ...]  # good rows that the command leaves out, such as ties in dpo
    filtered: int  # rows that the data.mapping leaves out
    acceptable: bool
    formats: Mapping[str, str]
    duplicate_ids: tuple[str, ...]
    renamed: int  # rows whose id got a suffix, as an earlier row has the same id
    repeated: int  # distinct rows of val that are also in train
    media_kinds: Mapping[str, int]
    images: int  # distinct images and other media
    decoded: bool  # False: only headers were read
    gold_rate: float  # share of the good rows that have an answer
    answerless: int  # good rows that need no answer: they have candidates or a `level` to play
    lengths: Mapping[str, float]  # min, median, p95, max, mean in tokens; empty if not counted
    histogram: tuple[tuple[int, int], ...]  # (upper bound in tokens, a power of two; number of rows)
    notes: tuple[str, ...] = ()  # likely mistakes in good rows
    self_test: Any = None
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict, repr=False)  # good rows by split

    def to_json(self) -> str:
        named = asdict(replace(self, samples={}))
        del named["samples"]
        return json.dumps(json_data(named), indent=2, ensure_ascii=False)


def run(config: Any, *, headers_only: bool = False, workers: int = 2, command: str | None = None) -> Report:
    """Check the data sets of a config. Lengths are counted if it names a model, rewards are tested if it has some.
    With `command`, rows that this command refuses count as bad, and rows that it leaves out are listed.
    """
    config = load_config(config)
    checks.check(config, "check-data")
    if command is not None:
        if command not in TRAINING:
            raise ConfigError(f"--for {command}: is no command that trains; expected one of {', '.join(TRAINING)}")
        if not config.model.path:
            raise ConfigError(f"--for {command}: needs a tokenizer; give a model folder, or model.path=tiny:qwen2_5_vl")
        config = load_config(config, command=command)
    family = None
    if config.model.path:
        from saccade.recipes import model_setup

        model_setup.quiet_libraries()
        family = model_setup.family_of(config, model_setup.start_folder(config))
    return check_data(config, family=family, command=command, headers_only=headers_only, workers=workers)


def _test_rewards(config: Config, samples: Sequence[Sample]) -> dict[str, Any]:
    """Test whether the rewards of a config tell right from wrong answers to the samples."""
    with Scorer(config.reward, prompt_format=config.prompt.format, max_tokens=config.rollout.max_tokens) as scorer:
        scorer.check_sources(sample.data_source for sample in samples)
        scorer.check_media(samples)
        for warning in (*warnings_of(scorer, samples), *unused_prompts(config.prompt, samples)):
            print(f"WARNING: {warning}")
        results = [*known_answers_by_format(scorer, samples, config.prompt)]
    failures = [failure for result in results for failure in result.failures]
    return {
        "passed": not failures,
        "broken": any(failure.broken for failure in failures),
        "rows": sum(result.rows for result in results),
        "failures": [*filter(None, (one.ended.strip() for one in results)), *(failure.text for failure in failures)],
        "skipped": [text for result in results for text in result.skipped],
    }


# -- rows ------------------------------------------------------------------------------------------


def check_data(
    config: Config,
    *,
    family: Family | None = None,
    command: str | None = None,
    length: Callable[[Sample], int] | None = None,
    headers_only: bool = False,
    workers: int = 2,
) -> Report:
    """Read train and validation sets as `command` does (rows that it refuses are bad), counting tokens with `family`,
    or else with `length`, if given.
    """
    marks: Collection[str] = ()
    if family is not None:
        ask, marks = questions.prompt_builder(config), questions.marks_of(family)
        length = partial(_tokens, family, ask)
    changes: dict[str, Any] = {"on_bad_row": "quarantine", "max_bad_fraction": 1.0}  # never stop at a bad row
    if config.data.overlong == "error":
        changes["overlong"] = "drop"
    lenient = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    sets: list[tuple[str, Dataset]] = []
    for split, sources in (("train", config.data.train), *(("val", [source]) for source in config.data.val)):
        if sources and command is not None and family is not None:
            sets.append((split, _read(command, split, sources, lenient, family)))
        elif sources:
            sets.append((split, load(sources, lenient.data, length=length, marks=marks)))
    if not sets:
        raise DataError("no data to check: set data.train or data.val")
    every = [data for _, data in sets]
    every_image = {media.key[:2]: media for data in every for s in data.samples for media in s.every_media}
    broken = {} if headers_only else _broken(every_image, workers)
    good: dict[str, tuple[Sample, ...]] = {}
    contents: dict[str, frozenset[str]] = {}
    bad: list[BadRow] = []
    for split, data in sets:
        sound = leave_out(data, lambda sample: _problem(sample, broken))
        good[split] = (*good.get(split, ()), *sound.samples)
        contents[split] = contents.get(split, frozenset()) | data.contents
        bad += [*data.quarantined, *sound.left_out[len(data.left_out) :]]
    rows = sum(data.rows for data in every)
    samples = [sample for part in good.values() for sample in part]
    tokens = [] if length is None else [length(sample) for sample in samples]
    measured = (*np.percentile(tokens, (0, 50, 95, 100)), np.mean(tokens)) if tokens else ()
    copies = sum(len(part) - len({content_hash(sample) for sample in part}) for part in good.values())
    repeats = f"rows that repeat an earlier one exactly: {copies}" if copies else None
    unknown = "; ".join(unknown_words(family, [*map(ask, samples)]) or ()) if family else None
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
        lengths=dict(zip(LENGTHS, map(float, measured), strict=False)),
        histogram=tuple(sorted(Counter(1 << max(0, count - 1).bit_length() for count in tokens).items())),
        notes=tuple(filter(None, [repeats, _wordless(samples), unknown])),
        self_test=_test_rewards(config, samples) if config.reward.given else None,
        samples=good,
    )


def _tokens(family: Family, ask: Callable[[Sample], Sample], sample: Sample) -> int:
    return len(family.render(ask(sample).messages))


def _read(command: str, split: str, sources: Sequence[DataSource], config: Config, family: Family) -> Dataset:
    """The rows that the command would use to train or validate. Samples are as in the file, not as the command would
    word them.
    """
    from saccade.plugins.preferences import pairs
    from saccade.plugins.preferences.preference_losses import from_config

    if command == "sft" and split == "train":
        if config.sft.mode == "pretrain":
            return questions.load_documents(config.data, sources)
        used = questions.load_dialogues(config, sources, family)
    elif command == "reward-model":
        used = HOOKS["reward_model_rows"](config, family).load(sources)
    else:
        used = questions.load_prompts(config, sources, family)
        if command == "dpo" and (split == "train" or any(sample.candidates for sample in used.samples)):
            used = pairs.load_pairs(config, sources, family, paired=from_config(config.dpo).whole)
    data = load(sources, config.data, marks=questions.marks_of(family))
    taken, place = set(_places(used)), {data.samples[n].id: at for n, at in enumerate(_places(data))}
    kept = leave_out(data, lambda sample: None if place[sample.id] in taken else "the command drops it")
    return replace(kept, quarantined=used.quarantined, overlong=used.overlong, left_out=used.left_out)


def _places(data: Dataset) -> Iterator[tuple[int, int]]:
    """Per sample (index of its source, number of its row there)."""
    for number, part in enumerate(data.parts):
        for index in range(part.start, part.stop):
            yield number, data.row_numbers[index]


def _wordless(samples: Sequence[Sample]) -> str | None:
    """A note on rows whose question is empty or only an image; None if there are none."""
    found = [s for s in samples if not any(m.text.strip() for m in s.messages if m.role == "user")]
    if not found:
        return None
    rows = "1 good row asks" if len(found) == 1 else f"{len(found)} good rows ask"
    return f"{rows} nothing in words, first {found[0].id}: the question is empty or only <image>"


# -- images ----------------------------------------------------------------------------------------


def _broken(every_image: Mapping[Any, Media], workers: int) -> dict[Any, str]:
    """Decode every image; returns the reasons of those that fail. Threads suffice, as Pillow releases the GIL."""

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


# -- good rows -------------------------------------------------------------------------------------


def write_fixed(report: Report, path: Path) -> list[Path]:
    """Write the good rows as canonical JSONL; returns the paths: `path`, or NAME.train.jsonl and NAME.val.jsonl."""
    paths = []
    for split, samples in report.samples.items():
        target = path if len(report.samples) == 1 else path.with_name(f"{path.stem}.{split}{path.suffix}")
        convert(samples, target)
        paths.append(target)
    return paths


# -- the command ------------------------------------------------------------------------------------


def show(config: Config, *, fix: Path | None = None, out: Path | None = None, **options: Any) -> None:
    """The command. `fix`: file for the good rows; `out`: file for the report as JSON; `options`: those of `run`."""
    if fix is not None:
        require_new(fix, "--fix")
    if out is not None:
        require_writable(out, "--out", file=True)
    report = run(config, **options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_json() + "\n", encoding="utf-8")
    fixed: list[Path] = []
    try:
        fixed = write_fixed(report, fix) if fix is not None else []
    finally:  # print the report even if writing fails
        print_report(report)
    written = [*fixed, *filter(None, [out])]
    wrote = f"; wrote {', '.join(map(str, written))}" if written else ""
    print(f"{report.good} of {report.rows} rows can be used{wrote}")
    refuse_data(report, config.data, fix)


def print_report(report: Report) -> None:
    counts = {
        "bad": len(report.bad),
        "overlong": len(report.overlong),
        "left out": len(report.left_out),
        "filtered by the mapping": report.filtered,
    }
    others = "".join(f", {n} {what}" for what, n in counts.items() if n or what == "bad")
    shown = "media" if {"video", "audio", "series"} & set(report.media_kinds) else "images"
    renamed = "1 row" if report.renamed == 1 else f"{report.renamed} rows"
    tested, verdict = report.self_test or {"failures": ()}, ""
    if tested.get("rows"):
        verdict = f"{'passed' if tested['passed'] else 'FAILED'} on {tested['rows']} rows"
    elif report.self_test is not None:
        verdict = f"tested nothing: {'; '.join(tested['skipped']) or 'no good row'}"
    needed = report.gold_rate or report.answerless < report.good
    lines = {
        "rows": f"{report.rows}, {report.good} good{others}",
        "format": ", ".join(f"{name}: {format}" for name, format in report.formats.items()),
        shown: f"{report.images} different, {'decoded' if report.decoded else 'with a readable header'}",
        "answers": f"{report.gold_rate:.1%} of the good rows" if needed else "",
        "duplicate ids": f"{len(report.duplicate_ids)}, and {renamed} got a suffix" if report.duplicate_ids else "0",
        "val in train": f"{report.repeated} different rows of data.val are in data.train" if report.repeated else "",
        "prompt tokens": ", ".join(f"{k} {v:.0f}" for k, v in report.lengths.items()),
        "reward test": verdict,
    }
    for name, text in (*lines.items(), *(("note", text) for text in report.notes)):
        if text:
            print(f"{name:<14} {text}")
    listed = (*report.bad, *report.overlong)
    for row in (*tested["failures"][:LISTED], *listed[:LISTED]):
        print(f"  {row}")
    if len(listed) > LISTED:
        print(f"  and {len(listed) - LISTED} more; --out FILE lists all")
    firsts = {row.reason: row for row in reversed(report.left_out)}
    for reason, count in Counter(row.reason for row in report.left_out).items():
        print(f"  {count} left out, first {firsts[reason]}")  # these rows are good, so one example suffices


def refuse_data(report: Report, data: DataConfig, fixed: Path | None) -> None:
    """Raise an error if training would stop because of the data."""
    if not report.acceptable:
        limit = f"data.max_bad_fraction is {data.max_bad_fraction:g}"
        helps = f"the good ones are in {fixed}" if fixed else "fix them, or use --fix FILE"
        raise DataError(f"{len(report.bad)} of {report.rows} rows are bad, and {limit}; {helps}")
    if empty := [split for split, samples in report.samples.items() if not samples]:
        raise DataError(f"data.{empty[0]} has no usable row; see the reasons above")
    if report.self_test is not None and not report.self_test["passed"]:
        does = "fails on" if report.self_test["broken"] else "misjudges"
        raise SelfTestError(f"the reward {does} known answers; see the rows above")
