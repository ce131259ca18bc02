"""The page says what math-verify alone makes of the golden answers: of these answers, and of this version."""

import importlib.util
from collections import Counter
from importlib.metadata import version
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "math_verify_alone.py"


def test_the_tables_are_those_of_this_version_and_of_these_answers():
    spec = importlib.util.spec_from_file_location("math_verify_alone", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = script.golden()
    told = script.PAGE.read_text("utf-8").split(script.START)[1].split(script.END)[0]
    assert f"What math-verify {version('math-verify')} alone" in told
    named = Counter(row["verifier"] for row in rows)
    kinds = Counter(script.kind(row) for row in rows if row["verifier"] == "math")
    for name, pairs in (*((f"`{name}`", n) for name, n in named.items()), *kinds.items()):
        assert f"\n| {name} | {pairs} |" in told
    examples = [row for row in rows if row["verifier"] == "math" and script.shown(row) in told]
    assert len(examples) == told.count("` for `") > 15
    assert all(script.alone(row, script.found(row)) != row["right"] for row in examples)
