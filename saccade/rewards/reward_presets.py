"""Named lists of reward terms, after the recipes that they come from.

>>> [term["verifier"] for term in PRESETS["r1v"]]
['math', 'format:think_answer']
"""

from __future__ import annotations

from typing import Any


def _math_and(shape: str, accuracy: float, form: float, **args: Any) -> tuple[dict[str, Any], ...]:
    return ({"verifier": "math", "weight": accuracy}, {"verifier": f"format:{shape}", "weight": form, "args": args})


PRESETS: dict[str, tuple[dict[str, Any], ...]] = {
    "lmmr1_math": _math_and("think_answer", 1.0, 0.5, gap="none"),
    "r1v": _math_and("think_answer", 1.0, 1.0),
    "easyr1_r1v": _math_and("think_answer", 0.5, 0.5),
    "easyr1_math": _math_and("think_boxed", 0.9, 0.1),
    "lightrft": _math_and("think_boxed", 0.9, 0.1),
    "geo3k": ({"verifier": "geo3k"},),
    "gsm8k": ({"verifier": "gsm8k"},),
    "lmmr1_sokoban": ({"verifier": "sokoban", "args": {"mode": "lmmr1"}},),
    "medical_safe": ({"verifier": "medical", "args": {"weights": {"length": 0.0}}},),
    "hybrid_mc": ({"verifier": "hybrid"},),
    "minio3": ({"verifier": "hybrid"},),  # accuracy alone: format and tool use weigh nothing
}
