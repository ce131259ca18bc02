"""Write the tables of docs/algorithms.md and docs/evaluation.md from the code, or check that they are current.

python scripts/algorithm_reference.py [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the source tree is enough, no install needed

from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs  # noqa: E402
from saccade.algorithms.aggregation import AGGREGATIONS  # noqa: E402
from saccade.algorithms.build import resolve  # noqa: E402
from saccade.algorithms.corrections import CORRECTIONS, Correction, Mismatch  # noqa: E402
from saccade.algorithms.describe import extras, numbers  # noqa: E402
from saccade.algorithms.policy_losses import KINDS, LOSSES, LossInputs  # noqa: E402
from saccade.algorithms.resolved_algorithm import Algorithm  # noqa: E402
from saccade.algorithms.table import Entry  # noqa: E402
from saccade.config import AlgorithmConfig  # noqa: E402
from saccade.config.schema.presets import ADD_ONS, PRESETS  # noqa: E402
from saccade.errors import ConfigError  # noqa: E402
from saccade.plugins.more_algorithms.explain import ahead_of  # noqa: E402
from saccade.plugins.suites.suites import SUITES  # noqa: E402

PAGES = [ROOT / "docs" / name for name in ("algorithms.md", "evaluation.md")]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
LONGEST_RESPONSE = 20_480  # as in the DAPO paper, so that its preset shows the paper's numbers


def main() -> None:
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = MARKED.sub(lambda m: m[1] + "\n".join(TABLES[m[2]]()) + "\n" + m[3], old)
        if "--check" not in sys.argv[1:]:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
        elif new != old:
            sys.exit(f"{page.relative_to(ROOT)} is out of date; run: make docs")


def presets() -> Iterator[str]:
    yield "| preset | what it is, when to use it | formula | samples | ahead | also | arXiv |"
    yield "|---|---|---|---|---|---|---|"
    for name in PRESETS:
        row = resolve(AlgorithmConfig(preset=name), max_tokens=LONGEST_RESPONSE)
        samples = f"{row.samples_per_prompt}" + (" + greedy" if row.estimator.greedy else "")
        also = [f"{row.updates_per_step} updates per step."] if row.updates_per_step > 1 else []
        also += [in_words(option, *found) for option, found in extras(row).items() if option != "old"]
        yield cells(f"`{name}`", row.about, formula(row), samples, ahead(name, row), " ".join(also), links(row.paper))


def ahead(name: str, row: Algorithm) -> str:
    """Whether a preset is sound on tokens of older weights, and by what."""
    if (default := ahead_of(name)) == "refused":
        return "no: strictly on-policy, refused"
    if default == "old=rollout":
        return f"yes: `old=rollout`, {row.loss.older}"
    try:
        other = resolve(AlgorithmConfig(preset=name, old="rollout"), max_tokens=LONGEST_RESPONSE, ahead=1)
    except ConfigError:  # something needs the trainer's old log-probs
        return f"yes: `{default}`"
    return f"yes: `{default}`" + (" or `old=rollout`" if other.allows_older else "")


def in_words(option: str, value: str, text: str) -> str:
    """What the option does (the part of its text before other values are described), and how to write it."""
    return f"{re.split('[;:]', text)[0].rstrip('.')} (`{option}={value}`)."


def formula(row: Algorithm) -> str:
    parts = [
        f"A: `{row.advantage}`{in_brackets(row.estimator)}",
        f"loss: `{row.policy_loss}`{in_brackets(row.loss)}",
        f"`{row.aggregation}`",
    ]
    if row.needs_reference:
        parts.append(f"{row.kl.coef:g} `{row.kl.kind}` in the {row.kl.place}")
    return ", ".join(parts)


USUAL = {"std_eps": 1e-6, "whiten": True, "whiten_std": True, "reward_range": (0.0, 1.0)}


def in_brackets(entry: Entry) -> str:
    shown = numbers({k: v for k, v in entry.options.items() if k not in USUAL or v != USUAL[k]})
    return f" ({shown})" if shown else ""


def links(papers: str) -> str:
    return ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in papers.split(", ") if p)


def add_ons() -> Iterator[str]:
    yield "| add-on | what it does | arXiv |"
    yield "|---|---|---|"
    for name, row in ADD_ONS.items():
        yield cells(f"`{name}`", row["about"], links(row["paper"]))


def entries(table: Mapping[str, Entry], heading: str) -> Iterator[str]:
    yield f"| name | {heading} | options and their defaults |"
    yield "|---|---|---|"
    for name, entry in table.items():
        options = ", ".join(
            f"`{option}`" + ("" if value is None else f" {shown(value)}") for option, value in entry.options.items()
        )
        yield cells(f"`{name}`", entry.formula, options)


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", r"\|") for text in texts) + " |"


def fields(*records: type) -> Iterator[str]:
    """A row for each field, with the comment behind it; T: policy tokens, S: members, K: reward terms."""
    yield "| record | field | |"
    yield "|---|---|---|"
    for record in records:
        for line in inspect.getsource(record).splitlines():
            if found := re.fullmatch(r"    (\w+): ([^#=]+?)(?: = \w+)?(?:  # (.*))?", line):
                name, kind, comment = found.groups()
                yield cells(f"`{record.__name__}`", f"`{name}: {kind}`", comment or "")


def suites() -> Iterator[str]:
    yield "| suite | public set | files in its folder | rows | scored by | reported as | official rule |"
    yield "|---|---|---|---|---|---|---|"
    for name, suite in SUITES.items():
        term = suite.verifier if isinstance(suite.verifier, dict) else {"verifier": suite.verifier}
        args = ", ".join(f"{option}: {value}" for option, value in term.get("args", {}).items())
        scored = f"`{term['verifier']}`" + (f" ({args})" if args else "") + (", or a judge" if suite.judged else "")
        reported = ", ".join(filter(None, [suite.protocol, suite.metric if suite.metric != "accuracy" else ""]))
        files = f"`{suite.file}`" + (f"; not seen: {suite.unsure}" if suite.unsure else "")
        yield cells(f"`{name}`", suite.hub, files, str(suite.rows or ""), scored, reported, suite.rules)


TABLES = {
    "records": lambda: fields(AdvantageInputs, LossInputs, Mismatch, Correction),
    "presets": presets,
    "suites": suites,
    "add_ons": add_ons,
    "advantages": lambda: entries(ADVANTAGES, "advantage"),
    "losses": lambda: entries(LOSSES, "loss of a token"),
    "aggregations": lambda: entries(AGGREGATIONS, "loss"),
    "kl": lambda: entries(KINDS, "value"),
    "corrections": lambda: entries(CORRECTIONS, "what it keeps, what it weighs"),
}

if __name__ == "__main__":
    main()
