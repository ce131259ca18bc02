"""Mappings: the columns of public preference sets as comparisons, and what is refused."""

from __future__ import annotations

import io
import json
import re
import wave
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from saccade.config import DataConfig, DataSource
from saccade.data.datasets import Dataset, load
from saccade.data.formats import FORMATS, read_row
from saccade.data.records import to_row
from saccade.errors import ConfigError, DataError
from saccade.media.images import open_media
from saccade.plugins.preferences.mappings import MAPPINGS, apply, load_mapping, number_of
from saccade.plugins.preferences.preference_rows import chosen_first, label_of
from saccade.types import Media, Sample

# -- media of known brightness ---------------------------------------------------------------------


def png(path: Path | None, shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 56), (shade, 0, 0)).save(file, "PNG")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
    return file.getvalue()


def clip(path: Path, shade: int) -> str:
    """An animation stands for a film file: what matters here is where the mapping finds it."""
    frames = [Image.new("RGB", (56, 56), (shade + n, 0, 0)) for n in range(4)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    return path.name


def wav(shade: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(np.full(1600, shade * 100, "<i2").tobytes())
    return file.getvalue()


def shade(media: Media) -> int:
    from saccade.media.kinds import decode

    pixels = decode(media)
    return round(float(pixels[0]) * 327.68) if media.kind == "audio" else int(pixels.flat[0])


def shades(sample: Sample) -> list[int]:
    return [shade(candidate[0].media[0]) for candidate in sample.candidates]


def better(sample: Sample, head: str = "preference") -> int | None:
    """The shade that a head prefers; None: a tie."""
    label = label_of(sample, head)
    return None if label == "C" else shades(sample)["AB".index(label or "")]


def read(path: Path, mapping: str, **options: Any) -> Dataset:
    return load([DataSource(path=str(path), mapping=mapping)], DataConfig(**options))


def write_json(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# -- the families ----------------------------------------------------------------------------------


def test_hpdv3_prefers_the_first_path_and_leaves_doubtful_rows_out(tmp_path: Path) -> None:
    rows = []
    for n in range(40):
        png(tmp_path / f"images/{n}-good.png", 100 + n)
        png(tmp_path / f"images/{n}-bad.png", 10 + n)
        rows.append(
            {
                "prompt": f"a cat {n}",
                "path1": f"images/{n}-good.png",
                "path2": f"images/{n}-bad.png",
                "confidence": 0.9 if n < 4 else None if n == 4 else 0.99,
                "choice_dist": [11, 1],
                "model1": "flux",
                "model2": "sd2",
            }
        )
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


def test_imagerewarddb_pairs_what_belongs_to_one_prompt_and_is_not_tied(tmp_path: Path) -> None:
    rows = []
    for prompt, ranks in {"x": [1, 2, 2], "y": [3, 1]}.items():
        for n, rank in enumerate(ranks):
            png(tmp_path / f"images/train/{prompt}{n}.png", 200 - 10 * rank + n)
            rows.append(
                {
                    "image_path": f"images/train/{prompt}{n}.png",
                    "prompt_id": prompt,
                    "prompt": f"paint {prompt}",
                    "classification": "People",
                    "rank": rank,
                    "overall_rating": 8 - rank,
                    "image_text_alignment_rating": 3,
                    "fidelity_rating": rank,
                }
            )
    data = read(write_parquet(tmp_path / "metadata-train.parquet", rows), "imagerewarddb")
    assert len(data) == 3  # of x the tied pair is missing
    for sample in data.samples:
        assert better(sample) == max(shades(sample))
        assert label_of(sample, "alignment") == "C"
        assert better(sample, "fidelity") == min(shades(sample))  # labels of their own


def test_imagegen_cot_keeps_the_sides_that_its_critique_speaks_of(tmp_path: Path) -> None:
    png(tmp_path / "a.png", 10), png(tmp_path / "b.png", 20)
    said = "<think>Image 2 is sharper.</think><answer>Image 2 is better</answer>"
    row = {
        "conversations": [
            {"from": "human", "value": "<image>\n<image>\nCompare for: a red cat"},
            {"from": "gpt", "value": said},
        ],
        "images": ["a.png", "b.png"],
        "source": "hpd",
    }
    data = read(write_json(tmp_path / "data.json", [row]), "imagegen_cot")
    (sample,) = data.samples
    assert shades(sample) == [10, 20] and better(sample) == 20
    assert sample.extra["critique"] == said and sample.messages[0].text == "Compare for: a red cat"


def test_imagegen_cot_is_labelled_by_its_answer_alone(tmp_path: Path) -> None:
    png(tmp_path / "a.png", 10), png(tmp_path / "b.png", 20)
    thought = "<think>At first sight Image 2 is better.</think>"
    said = [
        f"{thought}<answer>Image 1 is better</answer>",
        f"{thought}<answer>Both images are equally good</answer>",
        f"{thought}I cannot say.",
    ]
    rows = [
        {"conversations": [{"value": f"Compare for: {n}"}, {"value": text}], "images": ["a.png", "b.png"]}
        for n, text in enumerate(said)
    ]
    path = write_json(tmp_path / "data.json", rows)
    data = read(path, "imagegen_cot", max_bad_fraction=1.0)
    assert [label_of(sample) for sample in data.samples] == ["A", "C"]
    assert [(bad.row, "no label" in bad.reason) for bad in data.quarantined] == [(3, True)]


@pytest.mark.parametrize("name", ["rapidata-t2v", "rapidata-i2v"])
def test_rapidata_labels_three_heads_by_their_votes(tmp_path: Path, name: str) -> None:
    votes = {"Preference": (0.8, 0.2), "Coherence": (0.3, 0.7), "Alignment": (0.5, 0.5)}
    row: dict[str, Any] = {
        "prompt": "a horse runs",
        "file_name1": clip(tmp_path / "one.webp", 10),
        "file_name2": clip(tmp_path / "two.webp", 90),
        "source": "pika",
        "prompt_asset": {"bytes": png(None, 5), "path": None},
    }
    for head, pair in votes.items():
        row |= {f"weighted_results{n + 1}_{head}": value for n, value in enumerate(pair)}
    (sample,) = read(write_parquet(tmp_path / "d.parquet", [row]), name).samples
    assert better(sample) == 10 and better(sample, "coherence") == 90
    assert better(sample, "alignment") is None
    assert {m.kind for c in sample.candidates for m in c[0].media} == {"video"}
    assert len(sample.media) == (1 if name == "rapidata-i2v" else 0)


@pytest.mark.parametrize(("kind", "column"), [("t2i", "_path"), ("t2v", ""), ("t2a", "_path")])
def test_omnireward_reads_three_kinds_of_media(tmp_path: Path, kind: str, column: str) -> None:
    rows = []
    for n, said in enumerate(["response1", "response2", "tie"]):
        names = []
        for side, value in enumerate((10, 90)):
            path = tmp_path / "media_data" / f"{n}-{side}"
            path.parent.mkdir(exist_ok=True)
            if kind == "t2a":
                path.write_bytes(wav(value))
            elif kind == "t2v":
                clip(path, value)
            else:
                png(path, value)
            names.append(path.name)
        rows.append(
            {
                "id": f"{kind}-{n}",
                "prompt": "rain",
                "criteria": "It should be loud.",
                "criteria_preference": said,
                f"response1{column}": names[0],
                f"response2{column}": names[1],
                "model1": "m",
                "model2": "n",
                "source": "s",
            }
        )
    path = write_parquet(tmp_path / "x.parquet", rows)
    source = DataSource(path=str(path), image_dir=str(tmp_path / "media_data"))
    data = load([source], DataConfig(mapping=f"omnireward-{kind}"))
    assert [better(sample) for sample in data.samples] == [10, 90, None]
    assert data.samples[0].id == f"{kind}-0"
    assert data.samples[0].messages[0].text == "rain\nIt should be loud."


def test_genai_bench_pairs_the_models_that_a_row_rates(tmp_path: Path) -> None:
    rated = {"DALLE_3": [5, 4, 5], "SD_2": [1, 2, 1], "Flux": [4, 5, 5]}
    row = {"Index": 7, "Prompt": "two dogs", "HumanRatings": rated}
    row |= {name: {"bytes": png(None, n), "path": None} for n, name in enumerate(rated, start=1)}
    data = read(write_parquet(tmp_path / "g.parquet", [row]), "genai_bench")
    assert sorted(better(sample) or 0 for sample in data.samples) == [1, 3]  # 1 and 3 are tied
    for sample in data.samples:
        assert [list(rated).index(name) + 1 for name in sample.extra["models"]] == shades(sample)
        assert "DALLE_3" not in sample.extra  # media are kept once


def test_a_rating_of_nought_is_a_rating(tmp_path: Path) -> None:
    row = {"Prompt": "two dogs", "HumanRatings": {"a": 0, "b": 3, "c": None, "d": [], "e": 0.0}}
    for name in "abcde":
        png(tmp_path / f"{name}.png", ord(name))
        row[name] = f"{name}.png"
    data = read(write_json(tmp_path / "g.json", [row]), "genai_bench")
    pairs = sorted(sorted(sample.extra["models"]) for sample in data.samples)
    assert pairs == [["a", "b"], ["b", "e"]]


def test_genai_bench_video_names_files_by_model_and_id(tmp_path: Path) -> None:
    for model, value in {"Gen2": 40, "Pika": 80}.items():
        clip(tmp_path / model / "0001.mp4", value)
    rows = {"0001": {"prompt": "a wave", "models": {"Gen2": [2, 3, 2], "Pika": [4, 4, 5]}}}
    (sample,) = read(write_json(tmp_path / "genai_video.json", rows), "genai_bench-video").samples
    assert better(sample) == 80 and sample.id == "0001:Gen2-Pika"


def test_videodpo_looks_clips_up_in_the_table_beside_it(tmp_path: Path) -> None:
    clips = [{"basic": {"clip_path": f"v/{n}.mp4"}} for n in range(4)]
    for n in range(4):
        clip(tmp_path / f"v/{n}.mp4", 20 * n)
    write_json(tmp_path / "metadata.json", clips)
    rows = [{"video1": 2, "video2": 3, "label": 0, "frame_caption": "a lake"}]
    path = write_json(tmp_path / "pair.json", rows)
    (sample,) = read(path, "videodpo").samples
    assert better(sample) == 40 and sorted(shades(sample)) == [40, 60]
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(DataError, match=r"metadata\.json does not exist; it holds clips"):
        read(path, "videodpo")


def test_videogen_rewardbench_names_the_side_for_each_head(tmp_path: Path) -> None:
    clip(tmp_path / "videos/a.mp4", 10), clip(tmp_path / "videos/b.mp4", 90)
    path = tmp_path / "v.csv"
    path.write_text(
        "path_A,path_B,prompt,VQ,MQ,TA,Overall,fps_A\n"
        "videos/a.mp4,videos/b.mp4,a bird,A,same,B,B,8\n"
        "videos/a.mp4,videos/b.mp4,a bird,A,same,B,,8\n"
    )
    data = read(path, "videogen_rewardbench")
    (sample,) = data.samples
    heads = {head: better(sample, head) for head in sample.extra["labels"]}
    assert heads == {"preference": 90, "visual_quality": 10, "motion_quality": None, "alignment": 90}
    assert data.filtered == 1


def test_audio_alpaca_holds_its_sounds(tmp_path: Path) -> None:
    sounds = {"chosen": {"bytes": wav(50), "path": "x"}, "rejected": {"bytes": wav(7), "path": "y"}}
    row = {"prompt": "a bell", **sounds, "strategy": "sampling"}
    (sample,) = read(write_parquet(tmp_path / "a.parquet", [row]), "audio_alpaca").samples
    assert better(sample) == 50 and sample.extra["strategy"] == "sampling"
    assert {c[0].media[0].kind for c in sample.candidates} == {"audio"}


def test_every_included_mapping_can_be_loaded() -> None:
    assert len(MAPPINGS) == 13 and all(callable(load_mapping(name).function) for name in MAPPINGS)


# -- records ---------------------------------------------------------------------------------------


def test_a_comparison_is_written_and_read_back(tmp_path: Path) -> None:
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

def smell(row):
    return Pair(kind="smell", prompt="p", a="x", b="y", labels={"preference": "A"})

def headless(row):
    return Pair(kind="text", prompt="p", a="x", b="y", labels={"quality": "A"})

def first(row):
    return Pair(kind="text", prompt="p", a="x", b="y", labels={"preference": "first"})

def text(row):
    return row["q"]
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, str]:
    """Four rows of texts, and the file of the user's mappings."""
    (tmp_path / "own.py").write_text(OWN)
    rows = [{"q": "2+2?", "left": "4", "right": "5", "winner": w} for w in ("L", "r", "none", "?")]
    return write_json(tmp_path / "r.json", rows), f"{tmp_path}/own.py"


def test_a_mapping_of_the_user_may_compare_texts(own: tuple[Path, str]) -> None:
    data = read(own[0], f"{own[1]}:judge", max_bad_fraction=0.5)
    labels = [label_of(sample) or "" for sample in data.samples]
    texts = [
        None if label == "C" else s.candidates["AB".index(label)][0].text
        for s, label in zip(data.samples, labels, strict=True)
    ]
    assert texts == ["4", "5", None]
    assert data.quarantined[0].row == 4 and "no label" in data.quarantined[0].reason
    assert data.samples[0].messages[0].text == "Judge 2+2? {by} it."


def test_a_mapping_of_the_user_may_rate_candidates(own: tuple[Path, str]) -> None:
    data = read(own[0], f"{own[1]}:rate")
    assert data.filtered == 1 and len(data) == 9  # of the three rows, each left with each right
    for sample in data.samples:
        assert sample.extra["models"]["AB".index(label_of(sample) or "")] == "right"


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smell", "kind='smell'; expected one of image, "),
        ("headless", "row 1: labels={'quality': 'A'} lack the head preference"),
        ("first", "expected A, B, C or None for each head"),
        ("text", "row 1: returned str; expected Pair"),
        ("nowhere", "expected file.py:function; the file has judge, rate"),
    ],
)
def test_a_wrong_function_is_refused(own: tuple[Path, str], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(own[0], f"{own[1]}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hpd", "expected one of hpdv3, imagerewarddb, .*, or file.py:function"),
        ("nowhere.py:f", "the file does not exist"),
        ("own.yaml", "a mapping is a Python function; write file.py with"),
        ("own.yaml:mine", "a mapping is a Python function"),
    ],
)
def test_unknown_names_are_refused_with_those_that_work(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_mapping(name)


def test_a_file_or_function_that_raises_is_named_with_its_line(own: tuple[Path, str]) -> None:
    path = Path(own[1])
    path.write_text("\n\ndef f(row):\n    return row['nothing']\n")
    reason = re.escape(f"row-1 (row 1 of r): mapping {path}:f raised KeyError: 'nothing' (own.py:4)")
    with pytest.raises(DataError, match=reason):
        read(own[0], f"{path}:f")
    for text, message in {"1 / 0": "ZeroDivisionError: division by zero", "(": "SyntaxError"}.items():
        path.write_text(f"\n{text}\n")
        with pytest.raises(ConfigError, match=rf"the file raised {message}.* \(own.py:2\)"):
            load_mapping(f"{path}:f")


def test_rows_that_lack_something_are_named() -> None:
    row = {"prompt": "p", "path1": "x", "confidence": 1}
    (problem,) = [found for _, found in apply(load_mapping("hpdv3"), [(1, row)])]
    assert str(problem) == "the row has no b where mapping hpdv3 looks for it"


@pytest.mark.parametrize(
    ("value", "number"),
    [(" -2.5 ", -2.5), ("1e-3", 0.001), ([4, "5"], 4.5), ("x", None), ([], None), ([1, None], None)],
)
def test_texts_and_lists_count_as_numbers(value: Any, number: float | None) -> None:
    assert number_of(value) == number
