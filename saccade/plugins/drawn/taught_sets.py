"""Data sets that a teacher model makes from others: its correct answers for sft, or questions rewritten for rules.

Both ask through `saccade generate`, with any engine: an endpoint's answers are stored, an interrupted run is resumed,
and OUT/asked holds prompts and answers.

    distil(config, Path("scenes.jsonl"), Path("taught"), describe="description")
    rewrite(config, Path("vqa.jsonl"), Path("checked"))
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade import __version__
from saccade.config import Config, DataConfig, DataSource, load
from saccade.data import datasets
from saccade.data.chats import escape
from saccade.data.prompts import FINAL_PROMPT
from saccade.errors import DataError
from saccade.plugins.check_data.canonical_rows import convert, dialogue_row, to_row
from saccade.plugins.drawn.drawn_sets import chosen, count_lines, flags, write_card
from saccade.plugins.evaluation.results import read_lines, to_lines
from saccade.plugins.generate import generate
from saccade.run.folder import write_whole
from saccade.system.disk import require_new
from saccade.types import Media, Message, Sample

DESCRIPTION = "A picture is described as follows: {}\n"
# (pattern, replacement): turns a teacher's mentions of the description into mentions of the picture.
MENTIONS = (
    (
        re.compile(r"\b(the|this|that) (?:(?:given|provided|textual|scene|image|picture)\W)*description\b", re.I),
        r"\1 picture",
    ),
    (re.compile(r"\b(as )?(?:described|mentioned|listed|stated) in (the picture)\b", re.I), r"\1shown in \2"),
    (re.compile(r"\b(the picture) (?:says|states|mentions|lists)\b", re.I), r"\1 shows"),
)
TAGGED = re.compile(r"<question>(.*?)</question>\s*<answer>(.*?)</answer>", re.DOTALL)
MIN_SIDE = 28  # pixels; rows with a smaller picture are left out
MAX_WORDS = 5  # longest answer that counts as checkable by a rule
REWRITE_PROMPT = (
    "Question: {question}\nAnswer: {answer}\n\nWrite a question that asks for the same, but has exactly one right "
    "answer: a number, a word, a name, or yes or no. It must be answered from the picture alone and must not contain "
    "its answer. Write nothing but\n<question>the new question</question><answer>its answer</answer>"
)


def distil(config: Config, source: Path, out: Path, describe: str = "") -> dict[str, int]:
    """Write OUT/train.jsonl: conversations for sft with the teacher's answers that the config's rewards call correct;
    returns counts. With `describe` the teacher reads that column instead of the pictures; the rows have the pictures
    again, and mentions of a description become mentions of the picture.
    """
    samples = _read(config.data, source, out)
    asked = [_described(sample, describe) for sample in samples] if describe else samples
    result = _ask(config, asked, out, select="correct")
    by_id = {sample.id: sample for sample in samples}
    rows = read_lines(Path(result["selected"]))
    for row in rows:
        sample = by_id[row["id"].rpartition("/")[0]]
        row["images"] = dialogue_row(sample, out)["images"]
        for turn in row["conversations"] if describe else ():
            text = turn["value"]
            for mention, instead in MENTIONS if turn["from"] == "gpt" else ():
                text = mention.sub(instead, text)
            shown = escape(DESCRIPTION.format(sample.extra[describe]))
            pictures = "<image>" * len(sample.media) if turn["from"] == "human" else ""  # answers may quote it
            turn["value"] = text.replace(shown, pictures, 1)
    counts = {"questions": len(samples), "answers": len(samples) * config.generate.n, "right": len(rows)}
    _write(out, rows, config, ["distill", str(source), out.name, *flags({"describe": describe})], counts)
    return counts


def rewrite(config: Config, source: Path, out: Path) -> dict[str, int]:
    """Write OUT/train.jsonl: the rows with questions and answers that a rule can check; returns counts, also of rows
    that were left out, by reason.
    """
    config = load(config, ["generate.n=1"], "generate")  # only the first answer is used
    samples = {sample.id: sample for sample in _read(config.data, source, out)}
    counts, fit = Counter[str](), list[Sample]()
    for sample in samples.values():
        small = any(min(medium.width, medium.height) < MIN_SIDE for medium in sample.media)
        counts["small_picture"] += small
        fit += [] if small else [sample]
    result = _ask(config, [_to_rewrite(sample) for sample in fit], out, select="all")
    rows = []
    for made in read_lines(Path(result["path"])):
        sample, answered = samples[made["id"]], made["responses"][0]["text"] or ""
        question, answer, reason = rewritten(answered)
        counts[reason or "rewritten"] += 1
        if not reason:
            message = Message(role="user", parts=(*sample.media, question))
            before = {"question_before": _words(sample), "answer_before": sample.answer}
            new = replace(sample, messages=(message,), answer=answer, choices=(), extra={**sample.extra, **before})
            rows.append(to_row(new))
    _write(out, rows, config, ["rewrite", str(source), out.name], counts)
    return dict(counts)


def rewritten(text: str) -> tuple[str, str, str]:
    """Returns (question, answer, reason) of a reply; the reason why they cannot be used is "" if they can.

    >>> rewritten("<question>How many dogs?</question><answer>3</answer>")
    ('How many dogs?', '3', '')
    """
    found = TAGGED.search(text)
    question, answer = (part.strip() for part in found.groups()) if found else ("", "")
    said = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", question, re.IGNORECASE)
    reasons = {
        "no_tags": not found,
        "empty": not (question and answer),
        "long_answer": len(answer.split()) > MAX_WORDS,
        "answer_in_question": said and answer.casefold() not in ("yes", "no"),
    }
    reason = next((name for name, holds in reasons.items() if holds), "")
    return question, answer, reason


# -- asking -----------------------------------------------------------------------------------------


def _read(data: DataConfig, source: Path, out: Path) -> Sequence[Sample]:
    require_new(out, "OUT", inside="train.jsonl", other="folder")
    return datasets.load([DataSource(path=str(source))], data).samples


def _ask(config: Config, samples: Iterable[Sample], out: Path, *, select: str) -> Mapping[str, Any]:
    """Run `saccade generate` on the samples and return its result; an interrupted run is resumed."""
    convert([*samples], path := out / "asked" / "rows.jsonl")
    plain = [f"data.train={path}", "data.format=auto", "data.keys={}"]  # the converted rows, not the source's format
    folder = [f"run.out={out}", "run.name=asked", f"generate.select={select}"]
    return generate.run(load(config, [*plain, *folder], "generate"))


def _described(sample: Sample, column: str) -> Sample:
    """The sample with its description in place of its pictures."""
    if not isinstance(sample.extra.get(column), str):
        known = ", ".join(sorted(sample.extra)) or "no further columns"
        raise DataError(f"--describe {column}: row {sample.id} has no such text; it has {known}")
    if not sample.media:
        raise DataError(f"--describe {column}: row {sample.id} has no picture to stand for")
    shown = DESCRIPTION.format(sample.extra[column])
    first = next(index for index, message in enumerate(sample.messages) if message.media)
    messages = [
        replace(one, parts=((shown,) if index == first else ()) + tuple(p for p in one.parts if isinstance(p, str)))
        for index, one in enumerate(sample.messages)
    ]
    return replace(sample, messages=tuple(messages))


def _to_rewrite(sample: Sample) -> Sample:
    gold = " or ".join(sample.answer) if isinstance(sample.answer, tuple) else sample.answer or "unknown"
    parts: tuple[str | Media, ...] = (*sample.media, REWRITE_PROMPT.format(question=_words(sample), answer=gold))
    return replace(sample, messages=(Message(role="user", parts=parts),), extra={**sample.extra, FINAL_PROMPT: True})


def _words(sample: Sample) -> str:
    return "\n".join(message.text.strip() for message in sample.messages if message.role == "user")


def _write(
    out: Path, rows: Sequence[Mapping[str, Any]], config: Config, command: Sequence[str], counts: Mapping[str, int]
) -> None:
    source = command[1]
    if not rows:
        left = ", ".join(f"{name}: {number}" for name, number in counts.items())
        raise DataError(f"{source}: no row is left ({left}); read what was said in {out / 'asked'}")
    model = config.rollout.http.model if config.rollout.engine == "http" else config.model.path
    how = f"with temperature {config.rollout.temperature:g}, generate.n={config.generate.n}, run.seed={config.run.seed}"
    what = f"{len(rows):,} rows that saccade {__version__} made of {source}, asking {model} {how}"
    about = "What was asked and said is in asked/. Texts are a model's: its licence and its mistakes come with them."
    write_card(
        out / "train.jsonl", what, [*command, *chosen(config)], source=source, facts=[about, *count_lines(counts)]
    )
    write_whole(out / "train.jsonl", to_lines(rows))
