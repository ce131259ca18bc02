"""`saccade check-data`: the report on the screen and in a file, and where training would stop.

run(config, headers_only=True, out=Path("report.json"))
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.errors import ConfigError, DataError, SelfTestError
from saccade.plugins.check_data import check_data
from saccade.plugins.check_data.check_data import Report, write_fixed
from saccade.system.disk import require_writable

LISTED = 20  # bad rows on the screen


def run(config: Config, *, fix: Path | None = None, out: Path | None = None, **options: Any) -> None:
    """`fix`: where the good rows go; `out`: the whole report as JSON; `options` of `check_data.run`."""
    if fix is not None and fix.exists():
        raise ConfigError(f"--fix {fix} exists; give a new file, nothing is overwritten")
    for option, path in (("--fix", fix), ("--out", out)):
        if path is not None:
            require_writable(path, option, file=True)
    report = check_data.run(config, **options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_json() + "\n", encoding="utf-8")
    fixed: list[Path] = []
    try:
        fixed = write_fixed(report, fix) if fix is not None else []
    finally:  # whether or not it can be written
        print_report(report)
    written = [*fixed, *filter(None, [out])]
    wrote = f"; wrote {', '.join(map(str, written))}" if written else ""
    print(f"{report.good} of {report.rows} rows can be used{wrote}")
    refuse_data(report, config, fix)


def print_report(report: Report) -> None:
    counts = {
        "bad": len(report.bad),
        "overlong": len(report.overlong),
        "left out": len(report.left_out),
        "filtered by the mapping": report.filtered,
    }
    others = "".join(f", {n} {what}" for what, n in counts.items() if n or what == "bad")
    looked_at = "decoded" if report.decoded else "with a readable header"
    lines = {
        "rows": f"{report.rows}, {report.good} good{others}",
        "format": ", ".join(f"{name}: {format}" for name, format in report.formats.items()),
        "media" if {"video", "audio", "series"} & set(report.media_kinds) else "images": (
            f"{report.images} different, {looked_at}"
        ),
        "answers": f"{report.gold_rate:.1%} of the good rows",
        "duplicate ids": "0",
    }
    if report.answerless == report.good and not report.gold_rate:
        del lines["answers"]
    if report.duplicate_ids:
        renamed = "1 row" if report.renamed == 1 else f"{report.renamed} rows"
        lines["duplicate ids"] = f"{len(report.duplicate_ids)}, and {renamed} got a suffix"
    if report.repeated:
        lines["val in train"] = f"{report.repeated} different rows of data.val are in data.train"
    if report.lengths:
        lines["prompt tokens"] = ", ".join(f"{k} {v:.0f}" for k, v in report.lengths.items())
    if report.self_test is not None:
        verdict = "passed" if report.self_test["passed"] else "FAILED"
        lines["reward test"] = f"{verdict} on {report.self_test['rows']} rows"
        if not report.self_test["rows"]:
            why = "; ".join(report.self_test["skipped"]) or "no good row"
            lines["reward test"] = f"tested nothing: {why}"
    for name, text in lines.items():
        print(f"{name:<14} {text}")
    for text in report.notes:
        print(f"{'note':<14} {text}")
    for failure in report.self_test["failures"][:LISTED] if report.self_test else ():
        print(f"  {failure}")
    listed = (*report.bad, *report.overlong)
    for row in listed[:LISTED]:
        print(f"  {row}")
    if len(listed) > LISTED:
        print(f"  and {len(listed) - LISTED} more; --out FILE lists all")
    reasons = Counter(row.reason for row in report.left_out)
    firsts = {row.reason: row for row in reversed(report.left_out)}
    for reason, count in reasons.items():  # good rows, so the first stands for all of them
        print(f"  {count} left out, first {firsts[reason]}")


def refuse_data(report: Report, config: Config, fixed: Path | None) -> None:
    """Where training would stop."""
    if not report.acceptable:
        limit = f"data.max_bad_fraction is {config.data.max_bad_fraction:g}"
        helps = f"the good ones are in {fixed}" if fixed else "fix them, or use --fix FILE"
        raise DataError(f"{len(report.bad)} of {report.rows} rows are bad, and {limit}; {helps}")
    if empty := [split for split, samples in report.samples.items() if not samples]:
        raise DataError(f"data.{empty[0]} has no usable row; see the reasons above")
    if report.self_test is not None and not report.self_test["passed"]:
        does = "fails on" if report.self_test["broken"] else "misjudges"
        raise SelfTestError(f"the reward {does} known answers; see the rows above")
