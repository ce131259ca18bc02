"""Batch inference: writes a model's responses to a file, one JSON line per row; rows that the file has
with the same content are skipped. With rewards, the best responses can become training rows.

`generate.select=correct` also writes the correct episodes, with all turns and images, as
conversations for SFT.

    saccade generate run.yaml generate.n=4
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade import checks
from saccade.config import Config, load, on_one_gpu
from saccade.data.prompts import FINAL_PROMPT
from saccade.data.records import content_hash
from saccade.errors import ConfigError
from saccade.models.files import stamp
from saccade.plugins.check_data.canonical_rows import dialogue_row
from saccade.plugins.evaluation.answering import answering_family, evaluator_of
from saccade.plugins.evaluation.results import read_lines, to_lines
from saccade.plugins.generate.selection import SELECT, write_selected
from saccade.plugins.reports.rollout_record import rollout_row, same
from saccade.recipes import model_setup, questions, run_parts
from saccade.recipes.accuracy import measured, measures, score_terms
from saccade.rewards.scorer import Scorer
from saccade.run.folder import differences, leaves, write_whole
from saccade.system import devices
from saccade.system.disk import require_writable
from saccade.types import Group

log = logging.getLogger(__name__)

BLOCK = 512  # prompts per write
FILES = "files"  # key in `_made_of`: digests of the files that a response depends on
MADE_OF = ("run.seed", "rollout.", "prompt.", "env.", "reward.", "generate.n")
# Options of MADE_OF that affect speed, cost or failures, but no answer or score.
PACE = re.compile(
    r"rollout\.(http\.(?!api).*|replicas|tensor_parallel|memory_share|parity_max|max_sequences)"
    r"|reward\.(serve\..*|((judge|remote)\.)?(concurrency|retries|timeout|deadline|max_error_rate|self_test|workers"
    r"|batch|key|token|per_minute|cache|price|offload))"
)
ANSWERED = {**same("id", "data_source", "prompt"), "answer": "gold"}  # columns of a row; RESPONSES: of each response
RESPONSES = {"text": "response", "tokens": "response_tokens", "score": "outcome"}
RESPONSES |= same("end_reason", "reward", "extracted")

NONE_SELECTED = (
    "no prompt has responses that are complete, reach generate.threshold and, as best and worst, differ in reward"
)


def run(config: Any) -> dict[str, Any]:
    """Answer the rows of `data.train`, or of `data.val` if it is empty; with rewards, score each response."""
    config = load(config)
    checks.check(config, "generate")
    idle = checks.idle_gpus(config, "generate", devices.count(config.run.device))
    config = on_one_gpu(config)
    model_setup.quiet_libraries()
    path = Path(config.run.out) / config.run.name / config.generate.output
    require_writable(config.run.out, "run.out")
    path.parent.mkdir(parents=True, exist_ok=True)
    family = answering_family(config)
    data = questions.load_prompts(config, config.data.train or config.data.val, family)
    taught = path.parent / "coldstart" / "train.jsonl"
    made_of = _made_of(config, family.path)
    made_by = {"model": made_of["model.path"], "settings": _digest(json.dumps(made_of, sort_keys=True).encode())}
    contents = {s.id: content_hash(s, everything=True)[:16] for s in data.samples}
    done, again = _done(path, made_of, made_by, contents)
    todo, skipped = [sample for sample in data.samples if sample.id not in done], len(done)
    opened = evaluator_of(
        config, family, path.parent, answers=path.parent / "answers", command="generate", name=config.run.name
    )
    with opened as (evaluator, console), path.open("a", encoding="utf-8") as file:
        quarantine = evaluator.quarantine
        for line in filter(None, (checks.ignored_options(config, "generate"), idle)):
            log.info(line)
        log.info(f"{len(todo)} of {len(data.samples)} rows to do, {len(done)} are in {path}")
        if again:
            log.info(f"of these {len(again)} are answered again, such as {again[0]}: they changed since")
        quarantine.record(data.excluded_rows)
        for start in range(0, len(todo), BLOCK):
            samples = quarantine.sound(todo[start : start + BLOCK], data, family)
            with console.phase("generate"):
                sampling = run_parts.rollout_sampling(config)
                groups = evaluator.answer(samples, config.generate.n, sampling, "generate")
            if config.generate.select == "correct":
                _teach(taught, groups, done)
            rows = [
                rollout_row(ANSWERED, group)
                | {"responses": [rollout_row(RESPONSES, group, each, family) for each in group.trajectories]}
                | {"row": contents[group.sample.id]}
                | made_by
                for group in groups
            ]
            file.write(to_lines(rows))
            file.flush()
            done |= {group.sample.id for group in groups}
        if left_out := quarantine.left_out(data):
            log.info(f"{data.summary}\n{left_out} left out in all, listed in {quarantine.file}")
    made = len(todo) - len(quarantine.found(data))
    result: dict[str, Any] = {"path": str(path), "rows": made, "skipped": skipped}
    chosen, lines = config.generate, [_made(path, evaluator.scorer)]
    if chosen.select == "correct":
        count = len(read_lines(taught))
        lines += [f"{count} of {len(done) * chosen.n} episodes were right, to train on in {taught}"]
    elif chosen.select in SELECT:
        taught, count = write_selected(chosen.select, path, data.samples, chosen.threshold)
        lines += [f"{count} rows to train on in {taught}{'' if count else f': {NONE_SELECTED}'}"]
    if chosen.select != "all":
        result |= {"selected": str(taught), "selected_rows": count}
    print(*lines, sep="\n")
    return result


def _made(path: Path, scorer: Scorer | None) -> str:
    """Summary of the file in one line: rows, responses, mean reward and scores."""
    rows = read_lines(path)
    answers = [(row["data_source"], [a for a in row["responses"] if a["reward"] is not None]) for row in rows]
    rewards = [answer["reward"] for _, scored in answers for answer in scored]
    items = [(source, np.array([a["score"] for a in each if a["score"] is not None])) for source, each in answers]
    scores = [f"reward {np.mean(rewards):.3f}"] if rewards else []
    scores += measures(measured(items, score_terms(scorer, items)))
    responses = sum(len(row["responses"]) for row in rows)
    return "  ".join([f"{len(rows)} rows with {responses} responses are in {path}", *scores])


def _teach(path: Path, groups: Sequence[Group], done: Set[str]) -> None:
    """Add correct episodes as rows for SFT. Drops those of rows not in `done`: an interrupted run left them."""
    rows = [row for row in read_lines(path) if row["id"].rpartition("/")[0] in done]
    for sample, t in ((group.sample, t) for group in groups for t in group.trajectories):
        if t.status == "ok" and t.outcome is not None and t.outcome >= 1:
            extra = {**sample.extra, FINAL_PROMPT: True}
            taught = replace(sample, id=f"{sample.id}/{t.repeat}", messages=t.messages, extra=extra)
            rows.append(dialogue_row(taught, path.parent))
    write_whole(path, to_lines(rows))


def _made_of(config: Config, folder: str) -> dict[str, Any]:
    """Everything besides the row that a response and its score depend on. It is compared, so that answers
    of two models or scores of two rewards never mix in one file.
    """
    http, options = config.rollout.http, leaves(config.model_dump(mode="json"))
    made: dict[str, Any] = {
        "model.path": f"{http.model} at {http.url}" if config.rollout.engine == "http" else config.model.path,
        # other selections only read the finished file
        "select=correct": config.generate.select == "correct",
        **{name: value for name, value in options if name.startswith(MADE_OF) and not PACE.fullmatch(name)},
    }
    named = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(made, ensure_ascii=False))
    return made | {FILES: {text: digest for text in (folder, *named) if (digest := _stamped(text))}}


def _stamped(text: str) -> str | None:
    """Digest of a model folder, or of a file such as rewards or a template; None if `text` is no path."""
    if text and os.path.isfile(os.path.join(text, "config.json")):
        return _digest(repr(stamp(Path(text))).encode())
    path = text.partition(":")[0]
    return _digest(Path(path).read_bytes()) if os.path.isfile(path) else None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _done(
    path: Path, made_of: Mapping[str, Any], made_by: Mapping[str, str], contents: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Returns the ids of complete lines, and the ids of rows whose content changed after they were
    answered. Removes the lines of changed rows and a truncated last line, so that they are made again.
    The settings of all lines are in NAME.settings.json next to the file.
    """
    beside = path.with_name(f"{path.name}.settings.json")
    data = path.read_bytes() if path.is_file() else b""  # bytes: the last line may end inside a character
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    rows = read_lines(path)
    if any(row.get(name) != value for row in rows for name, value in made_by.items()):
        before = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else made_of
        changes = "; ".join(_described(*change) for change in differences(before, made_of).items())
        holds = f"{path} holds responses of {rows[0].get('model')} with other settings, rewards or weights"
        raise ConfigError(f"{holds} ({changes or 'not recorded'}); give another run.name or generate.output")
    if not rows:
        write_whole(beside, json.dumps(made_of, ensure_ascii=False))
    again = [row["id"] for row in rows if row.get("row") != contents.get(row["id"], row.get("row"))]
    kept = [row for row in rows if row["id"] not in set(again)]
    if again:
        write_whole(path, to_lines(kept))
    return {row["id"] for row in kept}, again


def _described(name: str, values: tuple[Any, Any]) -> str:
    file = name.removeprefix(f"{FILES}.")
    return f"{name}: {values[0]!r} there, {values[1]!r} now" if file == name else f"{file} changed"
