from __future__ import annotations

from typing import Any

import pytest

from saccade.plugins.verifiers.grounding import json_quality, medical
from saccade.plugins.verifiers.text_match import labels_f1, labels_recall, token_f1, token_recall
from saccade.rewards.reward_sample import RewardSample


def value(verifier: Any, answer: str, gold: Any, **args: Any) -> float:
    sample = RewardSample(id="a", response=f"<answer>{answer}</answer>", answer=gold)
    return verifier(sample, **args).value


BOTH = "cardiomegaly, edema"


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "recall"),
    [
        ("Edema, Cardiomegaly", BOTH, 1, 1),
        ("edema", BOTH, 2 / 3, 0.5),
        ("edema and effusion", "edema", 2 / 3, 1),
        ("", BOTH, 0, 0),
        ("fracture", BOTH, 0, 0),
        ("edema; Cardiomegaly.", BOTH, 1, 1),
        ("edema / cardiomegaly", BOTH, 1, 1),
        ("edema & cardiomegaly", BOTH, 1, 1),
        ("edema\ncardiomegaly", BOTH, 1, 1),
        ('["edema", "cardiomegaly"]', BOTH, 1, 1),
        ("edema, edema, cardiomegaly", BOTH, 1, 1),
        ("edema, cardiomegaly", ("Edema", "Cardiomegaly"), 1, 1),
        ("\u6c34\u80bf\u3001\u79ef\u6db2", "\u79ef\u6db2\uff0c\u6c34\u80bf", 1, 1),
        ("", "", 1, 1),
        ("edema", "", 0, 0),
        ("candy", "c, y", 0, 0),  # " and " only between words
    ],
)
def test_labels(answer: str, gold: Any, f1: float, recall: float) -> None:
    assert value(labels_f1, answer, gold) == pytest.approx(f1)
    assert value(labels_recall, answer, gold) == pytest.approx(recall)


def test_synonyms() -> None:
    words = {"Enlarged heart": "cardiomegaly"}
    assert value(labels_f1, "enlarged heart, edema", BOTH, synonyms=words) == 1


def test_no_answer_and_no_gold() -> None:
    assert labels_f1(RewardSample(id="a", response="edema", answer="")).reason == "no_answer"
    assert labels_f1(RewardSample(id="a", response="edema")).kind == "abstain"
    assert token_f1(RewardSample(id="a", response="edema", answer="the")).kind == "abstain"


@pytest.mark.parametrize(
    ("answer", "gold", "recall", "f1"),
    [
        ("the left lobe", "left lower lobe", 2 / 3, 0.8),
        ("Left lower lobe.", "the left lower lobe", 1, 1),
        ("left left lobe", "left lower lobe", 2 / 3, 2 / 3),
        ("right", "left lower lobe", 0, 0),
        ("\u5de6\u4e0b\u80ba", "\u5de6\u80ba", 1, 0.8),
        ("no idea", ("left", "no"), 1, 2 / 3),
        ("", "left", 0, 0),
    ],
)
def test_tokens(answer: str, gold: Any, recall: float, f1: float) -> None:
    assert value(token_recall, answer, gold) == pytest.approx(recall)
    assert value(token_f1, answer, gold) == pytest.approx(f1)


# -- the composite ---------------------------------------------------------------------------------

BOXES = '```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "edema"}]\n```\n'
LONG = "<think>" + "x" * 600 + "</think> "


def composite(response: str, extra: Any = None, **args: Any) -> Any:
    return medical(RewardSample(id="a", response=response, answer="edema", extra=extra or {}), **args)


@pytest.mark.parametrize(
    ("response", "quality"),
    [
        (BOXES, 1.0),
        ('```\n[{"bbox_2d": [0, 0, 10, 10], "label": "a"}]\n```', 0.9),
        ('[{"bbox_2d": [0, 0, 10, 10], "label": "a"}]', 0.7),
        ('```json\n{"bbox_2d": [0, 0, 10, 10], "label": "a"}\n```', 0.5),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10]}, {"bbox": [0, 0, 1, 1], "label": "a"}]\n```', 0.8),
        ("```json\n[oops\n```", 0.3),
        ("nothing", 0.0),
    ],
)
def test_json_quality(response: str, quality: float) -> None:
    assert json_quality(response) == pytest.approx(quality)


def test_medical_weighs_what_the_row_can_have() -> None:
    row = {"bbox": [0, 0, 10, 10]}
    assert composite(BOXES + LONG + r"\boxed{edema}", row).value == pytest.approx(1)
    half = composite(BOXES.replace("10, 10", "10, 5") + LONG + r"\boxed{edema}", row)
    assert half.value == pytest.approx(0.7 + 0.3 * 0.5)
    mask = [[1] * 10 for _ in range(10)]
    masked = composite(BOXES + LONG + r"\boxed{edema}", {"segmentation_path": mask})
    assert masked.value == pytest.approx(1)
    short = composite(BOXES + r"\boxed{edema}")  # no box in the row
    length = len(BOXES + r"\boxed{edema}") / 600
    assert short.value == pytest.approx((0.5 + 0.1 + 0.1 * length) / 0.7)
    assert (short.parts["accuracy"], short.extracted) == (1, "edema")


def test_the_safe_weights_do_not_pay_for_length() -> None:
    short, long = (composite(thought + BOXES + r"\boxed{edema}", weights={"length": 0}).value for thought in ("", LONG))
    assert short == long == pytest.approx(1)
    with pytest.raises(ValueError, match="weights are those of labels, boxes, json, length"):
        composite(BOXES, weights={"lenght": 0})


def test_medical_without_what_it_compares() -> None:
    assert composite(BOXES, {"bbox": "on the left"}).kind == "abstain"
    assert medical(RewardSample(id="a", response=BOXES)).kind == "abstain"
    assert composite(BOXES, {"bbox": [0, 0, 1, 1]}, box_frame="unit").kind == "error"
