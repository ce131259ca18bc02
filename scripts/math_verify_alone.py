r"""Write into docs/rewards.md how math-verify alone scores the golden answers, which shows why our verifiers add code
around it: right answers that it misses and wrong ones that it accepts, by verifier and by class of answer.

    python scripts/math_verify_alone.py     # half a minute; then look at the diff of the page

It is run twice: on the whole response, as its documentation says, and on the answer that our verifier extracted from
it, boxed like the gold, so that only the comparison is tested.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from saccade.plugins.verifiers.numbers import split_unit
from saccade.plugins.verifiers.wording import STRUCK
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS as KNOWN

ROOT = Path(__file__).resolve().parent.parent
PAGE, GOLDEN = ROOT / "docs" / "rewards.md", ROOT / "tests" / "rewards" / "golden_answers.jsonl"
START, END = "<!-- math-verify alone -->\n", "<!-- end -->\n"
VERIFIERS = ("math", "number", "count", "gsm8k", "relaxed", "digit", "dapo_math")
Row = Mapping[str, Any]


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.search(pattern, text) is not None


# Classes of answers by the text of the answer or its gold; the first that matches counts.
CLASSES: Mapping[str, Callable[[str], bool]] = {
    "percent": matches("%"),
    "degrees": matches(r"\\circ|°|degree"),
    "doubted, denied, several": matches(rf"{STRUCK}|(?i:\b(not|or|wait|maybe|about|sorry|either|neither|unless|if)\b)"),
    "intervals, inequalities": matches(r"[<>≤≥]|\\(infty|cup|in|le|ge|lt|gt|leq|geq)\b|∞|[\[(][^\[\]()]*,[^\[\]()]*\]"),
    "sets, tuples, matrices": matches(r"\\[{}]|\{.*,|\(.*,.*\)|matrix|\d\s*(,|and)\s+\d|:"),
    "equations": matches("="),
    "thousands, bases, powers of ten": matches(r"\d[,.' ]\d{3}\b|\d[eE][-+]?\d|_\{?\d|million|thousand|\\times"),
    "units, money": lambda text: split_unit(text)[1] is not None or matches(r"[$€£¥]\s*\d")(text),
    "words, other scripts": matches(r"[^\x00-\x7f]|(?<![\\a-zA-Z])[a-zA-Z]{3,}"),
}
REST = "plain numbers and formulas"


def golden() -> list[Row]:
    rows = map(json.loads, GOLDEN.read_text("utf-8").splitlines())
    return [row for row in rows if row["verifier"] in VERIFIERS]


def alone(row: Row, response: str) -> bool:
    """Whether math-verify calls the response right."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    golds = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    answer = parse(response)
    return any(verify(parse(rf"\boxed{{{gold}}}"), answer) for gold in golds)


def found(row: Row) -> str:
    """The answer that our verifier extracts from the response, boxed; empty if there is none."""
    sample = RewardSample(id="a", response=row["response"], answer=row["gold"])
    extracted = KNOWN[row["verifier"]].function(sample, **row.get("args", {})).extracted
    return rf"\boxed{{{extracted}}}" if extracted else ""


def kind(row: Row) -> str:
    texts = [re.sub(r"</?\w+>|\\boxed|(?i:(the )?answer( is|:)?)", "", row["response"]), str(row["gold"])]
    return next((name for name, holds in CLASSES.items() if any(map(holds, texts))), REST)


def counts(rows: list[Row], *tries: list[Row]) -> str:
    """Cells: the number of pairs; for each try, right ones that it missed and wrong ones that it accepted."""
    cells = [f"{len(rows)}"]
    for failed in tries:
        for right in (True, False):
            of, off = (sum(row["right"] is right for row in some) for some in (rows, failed))
            cells.append(f"{off} of {of}")
    return " | ".join(cells)


def shown(row: Row | None) -> str:
    if row is None:
        return ""
    response, gold = (re.sub(r"\s+", " ", str(text)).replace("|", r"\|") for text in (row["response"], row["gold"]))
    return f"`{response}` for `{gold}`"


def table(rows: list[Row], whole: list[Row], given: list[Row]) -> str:
    """`whole`, `given`: rows that math-verify gets wrong from the whole response, and from the answer in it."""
    lines = [
        f"What math-verify {version('math-verify')} alone misses and accepts of the golden file, given whole "
        "responses, and given the answer that our verifier found in each (`python scripts/math_verify_alone.py`):",
        "",
        "| verifier | pairs | whole: right ones missed | wrong ones accepted | answer: right ones missed | "
        "wrong ones accepted |",
        "|---|---|---|---|---|---|",
    ]
    for name in VERIFIERS:
        own, *off = ([row for row in some if row["verifier"] == name] for some in (rows, whole, given))
        lines.append(f"| `{name}` | {counts(own, *off)} |")
    lines += [
        "",
        "| `math`, given the answer | pairs | right ones missed | wrong ones accepted | for example | for example |",
        "|---|---|---|---|---|---|",
    ]
    grouped: dict[str, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for place, some in enumerate((rows, given)):
        for row in some:
            if row["verifier"] == "math":
                grouped[kind(row)][place].append(row)
    for name in (*CLASSES, REST):
        own, failed = grouped[name]
        by = {row["right"]: row for row in sorted(failed, key=lambda row: -len(row["response"]))}  # the shortest
        lines.append(f"| {name} | {counts(own, failed)} | {shown(by.get(True))} | {shown(by.get(False))} |")
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def main() -> None:
    rows = golden()
    tries = [
        [row for row in rows if alone(row, made(row)) != row["right"]] for made in (lambda r: r["response"], found)
    ]
    written = table(rows, *tries)
    before, rest = PAGE.read_text("utf-8").split(START)
    PAGE.write_text(before + START + written + END + rest.split(END, 1)[1], "utf-8")
    print(written)


if __name__ == "__main__":
    main()
