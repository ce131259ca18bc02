"""`saccade annotate FOLDER`: exports the answers of an evaluation for a person to judge, and reads the verdicts back.

The table has one answer per row and an empty column `human`. Reading it back computes how often person and verifier
agree, with Cohen's kappa, and writes the evaluation with the person's verdicts in place of the verifier's.

    >>> round(kappa([(True, True), (True, True), (False, False), (True, False)]), 3)
    0.5
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import ConfigError
from saccade.plugins.evaluation.compare import evaluated, item_of
from saccade.plugins.evaluation.eval_folder import numbered
from saccade.plugins.evaluation.results import add_rows, read_lines, to_lines, write_numbers
from saccade.plugins.reports.report_page import Cell, Estimate, Table
from saccade.plugins.reports.trajectories import IMAGES
from saccade.recipes.accuracy import accuracy
from saccade.run.folder import TRAJECTORIES
from saccade.run.metrics import RIGHT
from saccade.run.statistics import wilson
from saccade.system.disk import require_new
from saccade.types import ALWAYS_EXCLUDED

Row = dict[str, Any]
Verdicts = Sequence[tuple[bool, bool]]  # (verifier, person): whether each judged the answer right
KEY = ("set", "id", "repeat")
SHOWN = (*KEY, "question", "media", "gold", "response", "extracted", "verifier", "human", "note")
HUMAN = {"right": True, "1": True, "yes": True, "true": True, "wrong": False, "0": False, "no": False, "false": False}
RESAMPLES = 2000
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes text that begins so for a formula
LONGEST = 1 << 30  # limit on the characters of a CSV field; that of the csv module is 131,072


def write_annotations(folder: Path, out: Path, rows: int = 0, hide: bool = False, seed: int = 0) -> int:
    """Write the scored answers, or `rows` of them drawn at random, as CSV or JSON lines; returns how many. `hide` omits
    the verifier's verdicts, which would bias the person.
    """
    if out.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"--out {out}: ends in neither .csv nor .jsonl; try --out answers.csv")
    if not (scored := _scored(folder)):
        raise ConfigError(f"{folder}: no answer has a score, as those of pairs have none; name one that scored answers")
    require_new(out, "--out")
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(scored))[: rows or None])
    made = [_shown(row, folder, hide) for row in (scored[index] for index in chosen)]
    if out.suffix == ".jsonl":
        out.write_text(to_lines(made), encoding="utf-8")
        return len(made)
    with out.open("w", encoding="utf-8-sig", newline="") as file:  # with a BOM, as spreadsheets expect
        writer = csv.DictWriter(file, SHOWN)
        writer.writeheader()
        writer.writerows({name: _harmless(value) for name, value in row.items()} for row in made)
    return len(made)


def _scored(folder: Path) -> list[Row]:
    evaluated(folder)  # raises if the folder is no evaluation
    rows = read_lines(folder / "samples.jsonl")
    return [row for row in rows if row.get("score") is not None and row.get("status") not in ALWAYS_EXCLUDED]


def _shown(row: Row, folder: Path, hide: bool) -> Row:
    gold, files = row.get("gold"), [_file(medium, folder) for medium in row.get("media") or ()]
    return {
        **{"set": row["set"], "id": row["id"], "repeat": row.get("repeat", 0), "question": row.get("prompt") or ""},
        "media": " ".join(files),
        "gold": " or ".join(gold) if isinstance(gold, list) else str(gold or ""),
        **{"response": row.get("response") or "", "extracted": row.get("extracted") or ""},
        "verifier": "" if hide else "right" if row["score"] >= RIGHT else "wrong",
        **{"human": "", "note": ""},
    }


def _file(medium: Mapping[str, Any], folder: Path) -> str:
    """A picture's own file, else the evaluation's copy (of one inside another file), else its hash."""
    stored = (folder / TRAJECTORIES / IMAGES).glob(f"{medium['hash']}.*")
    return str(medium.get("path") or next(stored, medium["hash"]))


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula, marked as text; a negative number stays one."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


# -- read back --------------------------------------------------------------------------------------


def read_annotations(folder: Path, file: Path, out: Path | None = None) -> tuple[list[Table], Path]:
    """Returns tables of the agreement of person and verifier, and a new evaluation folder with the verdicts."""
    said = _verdicts(file)
    rows = read_lines(folder / "samples.jsonl")
    by_key = {_key(row): row for row in _scored(folder)}
    if strange := " ".join(next((key for key in said if key not in by_key), ())):
        raise ConfigError(f"{file}: {strange} is no scored answer of {folder}; name the folder it came from")
    pairs = {key: (by_key[key]["score"] >= RIGHT, verdict) for key, verdict in said.items()}
    sets: dict[str, list[tuple[bool, bool]]] = {}
    items: dict[str, list[str]] = {}  # set -> the question of each pair
    for key, pair in pairs.items():
        sets.setdefault(key[0], []).append(pair)
        items.setdefault(key[0], []).append(item_of(by_key[key]))
    table = Table(
        title=f"Verifier and person, {len(pairs)} answers",
        columns=("set", "judged", "agree", "kappa", "verifier right", "person right", "too kind", "too strict"),
        rows=tuple((name, *_agreement(own, items[name])) for name, own in sets.items()),
        note="Brackets hold 95 % intervals over questions. "
        "Too kind: right for the verifier alone; too strict: for the person alone.",
    )
    differ = [key for key, (rule, person) in pairs.items() if rule != person]
    listed = tuple((*key, *("right" if side else "wrong" for side in pairs[key])) for key in differ)
    tables = [table]
    if differ:
        tables.append(Table(title="Where they differ", columns=(*KEY, "verifier", "person"), rows=listed))
    whole = folder.resolve()
    free = (path for path in numbered(whole.with_name(f"{whole.name}-human")) if not path.exists())
    return tables, _rescored(rows, said, out or next(free))


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(row["set"]), str(row["id"]).removeprefix("'"), str(row.get("repeat") or 0)


def _verdicts(file: Path) -> dict[tuple[str, str, str], bool]:
    """The person's verdicts: (set, id, repeat) -> right or wrong."""
    if not file.is_file():
        raise ConfigError(f"--read {file}: no such file; `saccade annotate FOLDER --out FILE` writes one")
    if file.suffix == ".jsonl":
        rows: list[Row] = read_lines(file)
    else:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--read {file}: is no UTF-8 ({error}); save it as 'CSV UTF-8'") from None
        separator = ";" if ";" in text.partition("\n")[0].partition(",")[0] else ","  # some spreadsheets save `;`
        csv.field_size_limit(LONGEST)
        rows = [*csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)]
    found = dict[tuple[str, str, str], bool]()
    for number, row in enumerate(rows, 1):
        if missing := {*KEY, "human"} - row.keys():
            lacks = f"has no column {', '.join(sorted(missing))}"
            raise ConfigError(f"{file} row {number}: {lacks}; keep those of the file, between commas or semicolons")
        text = json.dumps(row["human"]) if isinstance(row["human"], bool | int) else str(row["human"] or "")
        if text.strip():
            if text.strip().casefold() not in HUMAN:
                raise ConfigError(f"{file} row {number}: human is {text!r}; expected right or wrong, or nothing")
            verdict = HUMAN[text.strip().casefold()]
            if found.setdefault(_key(row), verdict) != verdict:
                raise ConfigError(f"{file} row {number}: two verdicts on {' '.join(_key(row))}; keep one")
    if not found:
        raise ConfigError(f"{file}: no row has a verdict in the column human; write right or wrong there")
    return found


def _agreement(pairs: Verdicts, items: Sequence[str]) -> list[Cell]:
    both = np.array(pairs)
    agree, asked = float((both[:, 0] == both[:, 1]).mean()), len({*items})
    low, high = wilson(agree * asked, asked)  # n: questions, as answers to one are not independent
    value, (low_kappa, high_kappa) = kappa(pairs), kappa_interval(pairs, items)
    beyond: Cell = None if value is None else Estimate(value=value, low=low_kappa, high=high_kappa, percent=False)
    shares = [Estimate(value=float(side.mean())) for side in both.T]
    kind, strict = (int((both[:, one] & ~both[:, 1 - one]).sum()) for one in (0, 1))
    counted = [Estimate(value=count, percent=False) for count in (kind, strict)]
    return [
        Estimate(value=len(pairs), percent=False), Estimate(value=agree, low=low, high=high), beyond, *shares, *counted
    ]  # fmt: skip


def kappa(pairs: Verdicts, weights: Sequence[int] | np.ndarray | None = None) -> float | None:
    """Cohen's kappa (1960), agreement beyond chance; None if person and verifier gave all answers the same verdict."""
    sides = np.array(pairs).T
    first, second, same = (np.average(one, weights=weights) for one in (*sides, sides[0] == sides[1]))
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else float((same - chance) / (1 - chance))


def kappa_interval(pairs: Verdicts, items: Sequence[str]) -> tuple[float, float] | tuple[None, None]:
    """95 % percentile bootstrap over questions, each with all its answers; resamples in which kappa is not defined are
    skipped. (None, None) if person or verifier gave all answers the same verdict: no resample has a kappa but 0 then.
    """
    if any(len({*side}) == 1 for side in zip(*pairs, strict=True)):
        return None, None
    names, item = np.unique(items, return_inverse=True)
    drawn = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES)
    found = [value for times in drawn[:, item] if (value := kappa(pairs, times)) is not None]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _rescored(rows: Sequence[Row], said: Mapping[tuple[str, str, str], bool], out: Path) -> Path:
    """Write the evaluation with the person's verdicts, where given, as a folder that `saccade compare` reads."""
    require_new(out, "--out", file=False)
    new = [row | ({"score": float(said[_key(row)]), "reason": "human"} if _key(row) in said else {}) for row in rows]
    out.mkdir(parents=True)
    add_rows(out, new)
    write_numbers(out, {})
    outcomes: dict[str, list[np.ndarray]] = {}
    for (name, _), (answers, _) in evaluated(out).items():
        outcomes.setdefault(name, []).append(np.array([a["score"] for a in answers if a.get("score") is not None]))
    write_numbers(out, {name: accuracy(values) for name, values in outcomes.items()})
    return out
