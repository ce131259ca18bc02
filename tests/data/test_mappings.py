"""Mappings: the columns of public preference sets as comparisons, and what is refused."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.config import DataConfig, DataSource
from saccade.data.datasets import Dataset, load
from saccade.data.formats import FORMATS, read_row
from saccade.errors import ConfigError, DataError
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.plugins.check_data.canonical_rows import to_row
from saccade.plugins.preferences.mappings import MAPPINGS, load_mapping, mapped
from saccade.plugins.preferences.preference_rows import chosen_first, label_of
from saccade.types import Sample


def png(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (56, 56), (shade, 0, 0)).save(path)


def clip(path: Path, shade: int) -> None:
    """An animation stands for a film file: what matters here is where the mapping finds it."""
    frames = [Image.new("RGB", (56, 56), (shade + n, 0, 0)) for n in range(4)]
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, "WEBP", save_all=True, append_images=frames[1:], lossless=True)


def shades(sample: Sample) -> list[int]:
    return [int(decode(candidate[0].media[0]).flat[0]) for candidate in sample.candidates]


def better(sample: Sample) -> int:
    """The shade that is preferred."""
    return shades(sample)["AB".index(label_of(sample) or "")]


def read(path: Path, mapping: str, **options: Any) -> Dataset:
    return load([DataSource(path=str(path), mapping=mapping)], DataConfig(**options))


def write_json(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows))
    return path


def votes(**shares: tuple[float, float]) -> dict[str, float]:
    return {f"weighted_results{n + 1}_{head}": pair[n] for head, pair in shares.items() for n in (0, 1)}


COT = "<think>At first sight Image 2 is better.</think>"
RAPIDATA = {"prompt": "a horse runs", "file_name1": "x", "file_name2": "y", "prompt_asset": "asset.png"}
RAPIDATA |= votes(Preference=(0.8, 0.2), Coherence=(0.3, 0.7), Alignment=(0.5, 0.5))
RAPID_HEADS = {"preference": "x", "coherence": "y", "alignment": None}
OMNI = {"prompt": "rain", "criteria": "It should be loud."}
GENAI = {"Prompt": "two dogs", "HumanRatings": {"s": 0, "m": [5, 4], "n": None, "o": [], "p": 0.0}}
VIDEOGEN = {"path_A": "x", "path_B": "y", "prompt": "a bird", "VQ": "A", "MQ": "same", "TA": "B"}


@pytest.mark.parametrize(("name", "kind", "row", "preferred"), [
    ("hpdv3", "image", {"prompt": "a cat", "path1": "x", "path2": "y", "confidence": 0.99}, "x"),
    ("hpdv3", "image", {"prompt": "a cat", "path1": "x", "path2": "y", "confidence": 0.9}, "left out"),
    ("hpdv3", "image", {"prompt": "a cat", "path1": "x", "confidence": 1}, "has no b where mapping hpdv3 looks"),
    ("imagegen_cot", "image", f"{COT}<answer>Image 2 is better</answer>", "y"),
    ("imagegen_cot", "image", f"{COT}<answer>Both images are equally good</answer>", None),
    ("imagegen_cot", "image", f"{COT}I cannot say.", "has no label"),
    ("rapidata-t2v", "video", RAPIDATA, RAPID_HEADS),
    ("rapidata-i2v", "video", RAPIDATA, RAPID_HEADS),
    ("rapidata-i2v", "video", RAPIDATA | {"prompt_asset": None}, "no prompt_asset"),
    ("omnireward-t2a", "audio", OMNI | {"response1_path": "x", "response2_path": "y"}, "y"),
    ("videogen_rewardbench", "video", VIDEOGEN, "left out"),
    (
        "videogen_rewardbench",
        "video",
        VIDEOGEN | {"Overall": "B"},
        {"preference": "y", "visual_quality": "x", "motion_quality": None, "alignment": "y"},
    ),
    ("hpdv3-test", "image", {"prompt": "a cat", "path1": "x", "path2": "y"}, "x"),
    ("rewardbench", "text", {"prompt": "hello", "chosen": "x", "rejected": "y", "subset": "hep-go"}, "x"),
    ("vl_rewardbench", "text", {"query": "what?", "response": ["x", "y"], "human_ranking": [1, 0]}, "y"),
    ("audio_alpaca", "audio", {"prompt": "a bell", "chosen": "x", "rejected": "y"}, "x"),
])  # fmt: skip
def test_which_candidate_a_set_prefers(name, kind, row, preferred):
    critique = row if isinstance(row, str) else None
    if critique:
        row = {"conversations": [{"value": "<image>\n<image>\na cat"}, {"value": critique}], "images": ["x", "y"]}
    if name.startswith("omnireward"):
        row |= {"criteria_preference": "response2"}
        [(_, tie)] = mapped(name, [(1, row | {"criteria_preference": "tie"})])
        assert tie["extra"]["labels"] == {"preference": "C"}
        assert tie["messages"][0]["content"][-1]["text"] == "rain\nIt should be loud."
    [(_, found)] = mapped(name, [(1, row)])
    if preferred == "left out":
        assert found is None
    elif isinstance(found, Exception):
        assert preferred in str(found)
    else:
        sides = {"A": found["a"][0][kind], "B": found["b"][0][kind], "C": None}
        heads = preferred if isinstance(preferred, dict) else {"preference": preferred}
        assert {head: sides[label] for head, label in found["extra"]["labels"].items()} == heads
        assert set(sides.values()) == {"x", "y", None}
        shown = [item["type"] for item in found["messages"][0]["content"]]
        assert shown == (["image", "text"] if name == "rapidata-i2v" else ["text"])
        if critique:  # which names the sides as they were given
            assert (sides["A"], found["extra"]["critique"]) == ("x", critique)
            assert found["messages"][0]["content"][0]["text"] == "a cat"


def test_rated_candidates_make_pairs_unless_they_are_tied():
    models = {name: f"{name}.png" for name in "smnop"}
    pairs = [found for _, found in mapped("genai_bench", [(1, GENAI | models)])]
    assert sorted(sorted(pair["extra"]["models"]) for pair in pairs) == [["m", "p"], ["m", "s"]]  # nought is a rating
    row = {"id": "1", "prompt": "a wave", "models": {"Gen2": [2, 3, 2], "Pika": [4, 4, 5]}}
    [(_, film)] = mapped("genai_bench-video", [(1, row)])
    assert film["id"] == "1:Gen2-Pika"
    for pair, best, kind in (*((pair, "m.png", "image") for pair in pairs), (film, "Pika/1.mp4", "video")):
        side = pair["extra"]["labels"]["preference"].lower()
        assert pair[side][0] == {"type": kind, kind: best}
        assert pair["extra"]["models"]["ab".index(side)] in best
    ranked = [
        {"image_path": f"{prompt}{n}", "prompt_id": prompt, "prompt": "paint", "rank": rank}
        | {"image_text_alignment_rating": 3, "fidelity_rating": rank}
        for prompt, ranks in {"x": [1, 2, 2], "y": [3, 1]}.items()
        for n, rank in enumerate(ranks)
    ]
    found = [pair for _, pair in mapped("imagerewarddb", list(enumerate(ranked)))]
    best = []
    for pair in found:
        sides, labels = {"A": pair["a"][0]["image"], "B": pair["b"][0]["image"]}, pair["extra"]["labels"]
        best.append(sides[labels["preference"]])
        assert labels["alignment"] == "C" and labels["fidelity"] != labels["preference"]  # labels of their own
    assert best == ["x0", "x0", "y1"]  # of x the tied pair is missing


def test_sides_are_drawn_and_media_are_read(tmp_path):
    rows = []
    for n in range(40):
        png(tmp_path / f"images/{n}-good.png", 100 + n)
        png(tmp_path / f"images/{n}-bad.png", 10 + n)
        paths = {"path1": f"images/{n}-good.png", "path2": f"images/{n}-bad.png"}
        rows.append({"prompt": f"a cat {n}", **paths, "confidence": 0.9 if n < 5 else 0.99, "model1": "flux"})
    data = read(write_json(tmp_path / "train.json", rows), "hpdv3")
    assert len(data) == 35 and data.filtered == 5 and data.parts[0].rows == 40
    assert "5 rows left out by the mapping" in data.summary
    for sample in data.samples:
        assert better(sample) == max(shades(sample)) >= 100
        assert sample.messages[0].text.startswith("a cat") and sample.extra["model1"] == "flux"
    sides = Counter(label_of(sample) for sample in data.samples)
    assert 8 <= sides["A"] <= 27  # a fixed side would tell the label
    assert {sample.extra["sides"]["swapped"] for sample in data.samples} == {True, False}
    again = read(tmp_path / "train.json", "hpdv3")
    other = read(tmp_path / "train.json", "hpdv3", pair_order_seed=1)
    assert again.samples == data.samples and again.hash == data.hash
    assert [s.extra["sides"]["seed"] for s in other.samples] == [1] * 35
    assert [label_of(s) for s in other.samples] != [label_of(s) for s in data.samples]


def test_videodpo_looks_clips_up_in_the_table_beside_it(tmp_path):
    for n in range(4):
        clip(tmp_path / f"v/{n}.mp4", 20 * n)
    write_json(tmp_path / "metadata.json", [{"basic": {"clip_path": f"v/{n}.mp4"}} for n in range(4)])
    path = write_json(tmp_path / "pair.json", [{"video1": 2, "video2": 3, "label": 0, "frame_caption": "a lake"}])
    (sample,) = read(path, "videodpo").samples
    assert better(sample) == 40 and sorted(shades(sample)) == [40, 60]
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(DataError, match=r"metadata\.json does not exist; it holds clips"):
        read(path, "videodpo")


def test_a_comparison_is_written_and_read_back(tmp_path):
    png(tmp_path / "g.png", 1), png(tmp_path / "b.png", 2)
    rows = [{"prompt": "use <image>", "path1": "g.png", "path2": "b.png", "confidence": 1}]
    (sample,) = read(write_json(tmp_path / "x.json", rows), "hpdv3").samples
    row = json.loads(json.dumps(to_row(sample)))
    again = read_row(row, FORMATS["sides"], DataConfig(), open_image=open_media)
    assert replace(again, extra=sample.extra) == sample
    assert again.extra["labels"] == sample.extra["labels"]
    best = chosen_first(sample)
    assert shades(best)[0] == 1 and label_of(best) == "A"


OWN = """
from saccade.plugins.preferences.mappings import Pair, Rated

def judge(row):
    label = {"l": "A", "L": "A", "r": "B", "none": "C"}.get(row["winner"])
    prompt = f"Judge {row['q']} {{by}} it."
    return Pair(kind="text", prompt=prompt, a=row["left"], b=row["right"],
                labels={"preference": label})

def rate(row):
    if row["winner"] == "?":
        return None
    return [Rated(kind="text", prompt=row["q"], media=row[side], group=row["q"], name=side,
                  ratings={"preference": n}) for n, side in enumerate(("left", "right"))]

def first(row):
    return Pair(kind="text", prompt="p", a="x", b="y", labels={"preference": "first"})

def headless(row):
    return Rated(kind="text", prompt="p", media="x", group="g", ratings={"quality": 4})
"""


@pytest.fixture
def own(tmp_path):
    """Four rows of texts, and the file of the user's mappings."""
    (tmp_path / "own.py").write_text(OWN)
    rows = [{"q": "2+2?", "left": "4", "right": "5", "winner": w} for w in ("L", "r", "none", "?")]
    return write_json(tmp_path / "r.json", rows), f"{tmp_path}/own.py"


def test_a_mapping_of_the_user_may_compare_texts_or_rate_them(own):
    data = read(own[0], f"{own[1]}:judge", max_bad_fraction=0.5)
    labels = [label_of(sample) or "" for sample in data.samples]
    better = [s.candidates["ABC".index(label)][0].text for s, label in zip(data.samples[:2], labels, strict=False)]
    assert better == ["4", "5"] and labels[2] == "C"
    assert data.quarantined[0].row == 4 and "no label" in data.quarantined[0].reason
    assert data.samples[0].messages[0].text == "Judge 2+2? {by} it."
    data = read(own[0], f"{own[1]}:rate")
    assert data.filtered == 1 and len(data) == 9  # of the three rows, each left with each right
    for sample in data.samples:
        assert sample.extra["models"]["AB".index(label_of(sample) or "")] == "right"


@pytest.mark.parametrize(("name", "message"), [
    ("first", "labels must say A, B or C for each head, not {'preference': 'first'}"),
    ("headless", "row 1: {'quality': 4} lacks the head preference"),
    ("nowhere", "no function 'nowhere' in "),
])  # fmt: skip
def test_a_wrong_function_is_refused(own, name, message):
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        read(own[0], f"{own[1]}:{name}")


def test_unknown_names_are_refused_with_those_that_work():
    for name, message in {
        "hpd": "expected one of .*hpdv3.*, or file.py:function; write .def NAME",
        "own.yaml:mine": "or file.py:function; write .def NAME",
        "nowhere.py:f": "nowhere.py does not exist or is no .py file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_mapping(name)
    assert len(MAPPINGS) == 16 and all(callable(load_mapping(name)) for name in MAPPINGS)


def test_a_file_or_function_that_raises_is_named_with_its_line(own):
    path = Path(own[1])
    path.write_text("\n\ndef f(row):\n    return row['nothing']\n")
    reason = re.escape(f"row-1 (row 1 of r): mapping {path}:f raised KeyError: 'nothing' (own.py:4)")
    with pytest.raises(DataError, match=reason):
        read(own[0], f"{path}:f")
    for text, message in {"1 / 0": "ZeroDivisionError: division by zero", "(": "SyntaxError"}.items():
        path.write_text(f"\n{text}\n")
        with pytest.raises(ConfigError, match=rf"own.py raised {message}.* \(own.py:2\)"):
            load_mapping(f"{path}:f")
