"""Time series: sources, what is refused, and their places in rows."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from saccade.config import DataConfig, DataSource
from saccade.data.chats import RowError
from saccade.data.datasets import POLICIES, load
from saccade.data.formats import FORMATS, read_row
from saccade.media.images import ImageError
from saccade.media.kinds import decode
from saccade.plugins.check_data.canonical_rows import to_row
from saccade.plugins.series.series_files import is_one, open_series
from saccade.types import Media

VALUES = np.arange(12, dtype=np.float32).reshape(2, 6)


def npy(values: np.ndarray, **options: bool) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def row(*, text: str = "<series>which?", **columns: object) -> tuple[str | Media, ...]:
    def opened(source: object, **more: object) -> Media:
        assert more.pop("kind") == "series"
        return open_series(source)

    qa = {"question": text, "answer": "1", **columns}
    return read_row(qa, FORMATS["qa"], DataConfig(), open_image=opened).messages[0].parts


def test_every_source_is_the_same_series(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES.astype(np.int16))
    np.save(tmp_path / "f.npy", np.asfortranarray(VALUES.astype(">f8")))
    lines = [",".join(map(str, sample)) for sample in VALUES.T.tolist()]
    (tmp_path / "a.csv").write_text("\n".join(["I,II", *lines]))
    sources = [VALUES.tolist(), VALUES, npy(VALUES), {"bytes": npy(VALUES), "path": "gone.npy"}]
    sources += ["a.npy", "f.npy", "a.csv", "\n".join(lines).encode(), {"array": VALUES}]
    for source in sources:
        media = open_series(source, base=tmp_path)
        assert (media.kind, media.height, media.width) == ("series", 2, 6)
        assert decode(media).dtype == np.float32
        assert decode(media).tolist() == VALUES.tolist()
    assert open_series([1, 2, 3]).height == 1
    media = open_series("a.npy", base=tmp_path)
    assert media == open_series("a.npy", base=tmp_path)
    np.save(tmp_path / "a.npy", VALUES + 1)
    with pytest.raises(ImageError, match="changed after it was read"):
        decode(media)


@pytest.mark.parametrize(("source", "why"), [
    ([[1.0, float("nan")]], "lead 0 is nan at sample 1"),
    ([[1e300]], "lead 0 is inf"),
    ([[1, 2], [3]], "leads of different lengths"),
    ([[]], "empty"),
    (b"I,II\n", "empty"),
    (b"1,2\n3\n", "number of columns changed from 2 to 1 at row 2"),
    (b"1,2\n3,x\n", "could not convert string 'x' to float64 at row 1, column 2"),
    ([["1", "2"], ["3", "4"]], "series: text instead of numbers"),
    (5, "a time series cannot be made from int"),
    (b"\xff\xfe", "neither NPY nor CSV, which is text"),
    (npy(np.zeros((1, 2, 3))), r"an array \[1, 2, 3\]"),
    (npy(np.array([{"a": 1}]), allow_pickle=True), "Object arrays cannot be loaded"),
    (npy(VALUES)[:-4], "EOF|Failed to read all data"),
    ("../other.npy", "leaves the folder"),
    ("gone.npy", "does not exist"),
])  # fmt: skip
def test_what_is_no_series_is_refused(source: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=why):
        open_series(source, base=tmp_path)


def test_long_series_are_refused_or_cut_where_they_are_opened_alone() -> None:
    with pytest.raises(ImageError, match=r"6 samples, data\.max_series is 4; data\.long_series=tr"):
        open_series(VALUES, limits=DataConfig(max_series=4))
    cut = open_series(VALUES, limits=DataConfig(max_series=4, long_series="truncate"))
    assert decode(cut).tolist() == VALUES[:, :4].tolist()
    assert cut.key != open_series(VALUES[:, :4]).key and cut.width == 4
    long = {"question": "<series>" + "a" * 50, "answer": "1", "series": VALUES.tolist()}
    sample = read_row(long, FORMATS["qa"], DataConfig(), open_image=lambda source, **more: open_series(source))

    def length(one) -> int:
        return sum(len(m.text) + 5 * len(m.media) for m in one.messages)

    shorter = POLICIES["truncate_text"](sample, length, 20)
    assert shorter is not None and shorter.media == sample.media and len(shorter.messages[0].text) == 15
    assert POLICIES["shrink"](sample, length, 20) is None


@pytest.mark.parametrize("column", ["series", "time_series", "time-series"])
def test_a_placeholder_says_where_a_series_stands(column: str) -> None:
    assert all(map(is_one, ([1, 2], [[1.0], [2.0]], [[]], [["1", "2"], ["3", "4"]])))
    assert not any(map(is_one, ([[[1]]], ["a.npy"], [{"path": "a"}], "a.npy")))
    one = VALUES.tolist()
    first, second = open_series(VALUES), open_series(VALUES[:, ::-1])
    assert row(text="a <series> b", **{column: one}) == ("a ", first, " b")
    assert row(text="a", **{column: one}) == (first, "a")
    assert row(text="a", **{column: json.dumps(one)}) == (first, "a")
    two = [one, VALUES[:, ::-1].tolist()]
    assert row(text="<series2>a<series1>", **{column: two}) == (second, "a", first)
    assert row(text="\\<series> <series>", **{column: one}) == ("<series> ", first)
    assert row(text="<series> of prose") == ("<series> of prose",)
    for empty in (None, [], ""):
        with pytest.raises(RowError, match=r"1 <series> placeholder\(s\) but 0 series"):
            row(text="<series>?", **{column: empty})
        with pytest.raises(RowError, match=r"1 <video> placeholder\(s\) but 0 videos"):
            row(text="<video>?", videos=empty)
        assert row(text="?", **{column: empty}) == ("?",)
    with pytest.raises(RowError, match=r"2 <series> placeholder\(s\) but 1 series"):
        row(text="<series><series>", **{column: one})


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES)
    rows = [
        {"id": "inside", "question": "<series>?", "answer": "1", "series": VALUES.tolist()},
        {"id": "file", "question": "\\<series> <series>?", "answer": "1", "series": "a.npy"},
        {"id": "bad", "question": "?", "answer": "1", "series": [[1, None]]},
    ]
    item = {"type": "series", "series": "a.npy"}
    content = [item, {"time_series": VALUES.tolist()}, {"type": "text", "text": "same?"}]
    chat = {"id": "chat", "messages": [{"role": "user", "content": content}], "answer": "1"}
    for name, some in (("rows", rows), ("chat", [chat])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    config = DataConfig(max_bad_fraction=0.5)
    sources = [DataSource(path=str(tmp_path / f"{name}.jsonl")) for name in ("rows", "chat")]
    data = load(sources, config)
    assert [(bad.id, "lead 0 is nan" in bad.reason) for bad in data.quarantined] == [("bad", True)]
    assert data.media_kinds["series"] == 5
    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(json.dumps(to_row(sample)) for sample in data.samples))
    assert load([DataSource(path=str(again))], config).samples == data.samples
