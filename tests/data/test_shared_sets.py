"""The real sets that lie beside the repository, where they do."""

from pathlib import Path

import pytest

from saccade.config import DataConfig, DataSource
from saccade.config import load as load_config
from saccade.data.datasets import load
from saccade.errors import DataError
from saccade.media.images import decode
from saccade.plugins.check_data.check_data import check_data

SETS = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SETS.is_dir(), reason="the shared data sets are not here")


def read(path, **options):
    return load([DataSource(path=str(SETS / path))], DataConfig(**options))


@pytest.mark.parametrize(
    ("path", "rows", "format", "source", "media"),
    [
        ("gsm8k/gsm8k.test.jsonl.gz", 1319, "qa", "gsm8k.test", 0),
        ("math500/math500.jsonl.gz", 500, "easyr1", "math500", 0),
        ("puzzlevqa/puzzlevqa.train.parquet", 400, "easyr1", "puzzlevqa", 1),
        ("nlvr/nlvr.train.json", 240, "minio3", "nlvr", 1),
        ("mathv/mathv.train.jsonl", 120, "messages", "mathv", 1),
        ("receipts/receipts.json", 24, "minio3", "receipts", 1),
    ],
)
def test_every_set_loads_whole(path, rows, format, source, media):
    data = read(path, max_bad_fraction=0)
    assert len(data) == rows and list(data.formats.values()) == [format]
    assert all(sample.data_source == source and sample.answer for sample in data.samples)
    assert all(len(sample.media) == media for sample in data.samples)
    assert data.duplicate_ids == ()


# -- awkward rows -----------------------------------------------------------------------------


def test_every_awkward_row_gets_its_verdict():
    data = read("nasty/nasty.jsonl", max_bad_fraction=1)
    rejected = {row.id: row.reason for row in data.quarantined}
    kept = {sample.id: sample for sample in data.samples}
    assert len(kept) == 17 and len(rejected) == 9
    for sample in kept.values():
        assert sample.extra["expect"] in ("ok", "either")
        if sample.extra["expect"] == "ok" and sample.extra["size"]:
            sizes = sample.extra["size"]
            wanted = sizes if isinstance(sizes[0], list) else [sizes]
            assert [[media.width, media.height] for media in sample.media] == wanted
            for media in sample.media:
                assert decode(media).shape == (media.height, media.width, 3)
    for name, words in {
        "truncated_jpg": "truncated.jpg: cannot be decoded",
        "truncated_png": "truncated.png: cannot be decoded",
        "zero_byte_png": "zero_byte.png: empty file",
        "not_an_image_png": "not_an_image.png: not an image",
        "bomb_20000x20000_png": "400 megapixels",
        "missing_file": "no_such_file.png: file does not exist",
        "outside_folder": "leaves the folder",
        "too_many_placeholders": "2 <image> placeholder(s) but 1 image",
        "too_few_placeholders": "1 <image> placeholder(s) but 2 images",
    }.items():
        assert words in rejected[f"nasty/{name}"]


def test_awkward_rows_stop_a_run_by_default_and_check_data_agrees():
    with pytest.raises(DataError, match="9 of 26 rows are bad"):
        read("nasty/nasty.jsonl")
    path = SETS / "nasty" / "nasty.jsonl"
    config = load_config({"data.train": str(path), "data.max_megapixels": 100})
    report = check_data(config)
    assert (report.rows, report.good, len(report.bad)) == (26, 16, 10)  # a limit of 100 hits both bombs
    assert not report.acceptable
