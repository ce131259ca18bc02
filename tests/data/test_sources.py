import csv
import gzip
import json

import pytest

from saccade.config import DataConfig, DataSource
from saccade.data.chats import RowError
from saccade.data.datasets import load
from saccade.data.sources import Address, open_source, parse_address, set_names, stem_of
from saccade.errors import DataError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]


def rows(path, **options):
    return list(open_source(DataSource(path=str(path), **options)).rows)


def test_json_jsonl_and_their_gzip(tmp_path):
    lines = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    for name, text in [("a.json", json.dumps(ROWS)), ("a.jsonl", "\ufeff" + lines)]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
        assert rows(tmp_path / name) == rows(tmp_path / f"{name}.gz") == ROWS
        assert open_source(DataSource(path=str(tmp_path / f"{name}.gz"))).stem == "a"
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "1"}\n{"quest\n[1]\n"\xff"\n{"question": "2"}\n')
    found = rows(tmp_path / "a.jsonl")  # a broken line is one bad row
    assert [isinstance(row, RowError) for row in found] == [False, True, True, True, False]


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_csv_with_the_separator_of_any_country(tmp_path, sign):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=sign)
        writer.writerows([["question", "answer"], ["a,\n b?", "0,5"], [f"c{sign}d", ""], ["e"]])
    first, second, third = rows(tmp_path / "a.csv")
    assert first == {"question": "a,\n b?", "answer": "0,5"}
    assert second == {"question": f"c{sign}d", "answer": None}
    assert isinstance(third, RowError)
    # A comma stays the separator where it cuts the header.
    (tmp_path / "a.csv").write_text("question,answer;unit\n?,1;m\n")
    (tmp_path / "b.csv").write_text('"this;that"\n1;2\n')
    assert rows(tmp_path / "a.csv") == [{"question": "?", "answer;unit": "1;m"}]
    assert rows(tmp_path / "b.csv") == [{"this;that": "1;2"}]


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_tables_keep_image_bytes_and_are_read_in_parts(tmp_path, monkeypatch, name):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    large = [bytes(7_000) + number.to_bytes(4, "big") for number in range(300)]
    monkeypatch.setattr("saccade.plugins.containers.table_files.BATCH_BYTES", 1 << 16)
    table = pyarrow.table({"images": [[{"bytes": file, "path": None}] for file in large]})
    path = str(tmp_path / name)
    if name == "a.parquet":
        parquet.write_table(table, path, row_group_size=20, compression="none")
    elif name == "file.arrow":
        feather.write_feather(table, path, compression="lz4", chunksize=20)
    else:
        packed = pyarrow.ipc.IpcWriteOptions(compression="lz4")
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema, options=packed) as writer:
            writer.write_table(table, max_chunksize=20)
    del table
    before, held = pyarrow.total_allocated_bytes(), []
    for row, file in zip(open_source(DataSource(path=path)).rows, large, strict=True):
        assert row == {"images": [{"bytes": file, "path": None}]}
        held.append(pyarrow.total_allocated_bytes() - before)
    assert max(held) < sum(map(len, large)) / 4


def test_a_python_file_gets_the_split(tmp_path):
    (tmp_path / "a.py").write_text("def load(split):\n    return [{'question': split}]\n")
    assert rows(f"{tmp_path}/a.py@test") == [{"question": "test"}]
    assert rows(tmp_path / "a.py") == [{"question": "train"}] and stem_of(tmp_path / "a.py") == "a"
    (tmp_path / "b.py").write_text("")
    with pytest.raises(DataError, match="needs a function load"):
        rows(tmp_path / "b.py")
    for text, line in {"def load(split):\n    yield {}\n    1 / 0": 3, "\n1 / 0": 2}.items():
        (tmp_path / "b.py").write_text(text)
        with pytest.raises(DataError, match=rf"b.py: raised ZeroDivisionError: .* \(b.py:{line}\)$"):
            rows(tmp_path / "b.py")


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("a.json", b'{"a": 1}', "a list of rows"),
    ("a.json", b"[1,", "not a JSON file"),
    ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "cannot be read"),
    ("a.parquet", b"text", "not a parquet file"),
    ("a.arrow", b"text", "not an arrow file"),
    ("a.csv", "question,answer\nhöher?,1\n".encode("latin-1"), "not UTF-8.*0xf6.*save it as"),
    ("a.txt", b"text", "unknown kind of file '.txt'; readable are .json"),
])  # fmt: skip
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*{reason}"):
        rows(tmp_path / name)


def test_addresses_and_names_of_sets(tmp_path, monkeypatch):
    assert parse_address("org/set:clean@train#en/x") == Address("org/set", "clean", "train", "en/x")
    assert parse_address("set@test") == Address("set", None, "test", None)
    assert parse_address("a/b.jsonl") == Address("a/b.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd@2x#1.jsonl").write_text("{}")
    assert parse_address("odd@2x#1.jsonl") == Address("odd@2x#1.jsonl")
    paths = ["a/val.jsonl", "b/val.jsonl.gz", "org/val:clean@test", "val-2", "val"]
    sources = [DataSource(path=path) for path in paths] + [DataSource(path="x.csv", name="mine")]
    assert set_names(sources) == ["val", "val-1", "val-2", "val-2-3", "val-4", "mine"]


def test_what_is_not_there_is_named(tmp_path, jsonl):
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        rows(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"no/such does not exist.*allow_network"):
        rows("no/such")
    (tmp_path / "classes" / "3").mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds no data file.* pictures need a metadata\.jsonl .*file_name"):
        rows(tmp_path / "classes")
    with pytest.raises(DataError, match="single file and has no split 'train'"):
        rows(jsonl(ROWS), split="train")


def test_a_folder_with_one_file_per_split(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"question": name}))
    assert [row["question"][:7] for row in rows(f"{tmp_path}@train")] == ["train-0", "train-0"]
    assert len(rows(f"{tmp_path}@test")) == 1
    assert len(rows(f"{tmp_path}#data", split="test")) == 1
    with pytest.raises(DataError, match=r"a split .write PATH@SPLIT.*: test, train"):
        rows(tmp_path)


def test_where_pictures_of_rows_lie(tmp_path, picture, jsonl):
    picture("train/x.png")
    line = {"file_name": "x.png", "question": "?", "answer": "1"}
    (tmp_path / "train" / "metadata.jsonl").write_text(json.dumps(line))
    for path in (tmp_path / "train", f"{tmp_path}@train"):
        sample = load([DataSource(path=str(path))], DataConfig()).samples[0]
        assert sample.media[0].path == str(tmp_path / "train" / "x.png")
    picture("pics/x.png")
    path = jsonl([{"problem": "<image>", "answer": "1", "images": ["x.png"]}])
    source = DataSource(path=path, image_dir=str(tmp_path / "pics"))
    assert load([source], DataConfig()).samples[0].media[0].width == 40
    with pytest.raises(DataError, match=r"image_dir .*none does not exist"):
        open_source(DataSource(path=path, image_dir=str(tmp_path / "none")))


def test_a_folder_written_by_datasets(tmp_path, picture):
    datasets = pytest.importorskip("datasets")
    columns = {"problem": ["<image>?"], "answer": ["1"], "images": [[str(picture())]]}
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    )
    table = datasets.Dataset.from_dict(columns, features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "two"))
    for path in ("a.parquet", "one", "two@test"):
        sample = load([DataSource(path=f"{tmp_path}/{path}")], DataConfig()).samples[0]
        assert (sample.media[0].width, sample.answer) == (40, "1")
    with pytest.raises(DataError, match="several splits; write PATH@SPLIT with one of train, test"):
        rows(tmp_path / "two")
