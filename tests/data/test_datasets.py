import pytest

from saccade.config import DataConfig, DataSource
from saccade.data.datasets import leave_out, load
from saccade.data.formats import FORMATS
from saccade.errors import ConfigError, DataError
from saccade.media.images import decode
from saccade.plugins.check_data.unused_media import unread_media
from saccade.plugins.dry_run.plan import total_rows


def qa(count, **columns):
    return [{"question": f"{n}?", "answer": str(n), "id": n, **columns} for n in range(count)]


def source(path, **options):
    return DataSource(path=path, **options)


def test_sources_follow_each_other_in_file_order(jsonl):
    first, second = jsonl(qa(3), "a.jsonl"), jsonl([{"problem": "p", "answer": "9"}], "b.jsonl")
    data = load([source(first), source(second, name="bee", data_source="other")], DataConfig())
    assert [sample.answer for sample in data.samples] == ["0", "1", "2", "9"]
    assert [(p.name, p.format, p.start, p.stop) for p in data.parts] == [("a", "qa", 0, 3), ("bee", "easyr1", 3, 4)]
    assert [sample.data_source for sample in data.samples] == ["a", "a", "a", "other"]
    assert "a: 3 of 3 rows, format qa" in data.summary


def test_limits_per_source_and_overall(jsonl):
    paths = [jsonl(qa(10), "a.jsonl"), jsonl(qa(10), "b.jsonl")]
    data = load([source(paths[0], max_samples=4), source(paths[1])], DataConfig(max_samples=6))
    assert [part.stop - part.start for part in data.parts] == [4, 2]
    data = load([source(p, weight=w) for p, w in zip(paths, (3, 1), strict=True)], DataConfig(max_samples=8))
    assert [part.stop - part.start for part in data.parts] == [6, 2]
    with pytest.raises(ConfigError, match="has no weight but others have"):
        load([source(paths[0], weight=1), source(paths[1])], DataConfig())


def test_an_offset_leaves_out_the_first_rows_and_limits_count_from_there(jsonl):
    path = jsonl(qa(10))
    data = load([source(path, offset=4, max_samples=3)], DataConfig())
    assert [sample.answer for sample in data.samples] == ["4", "5", "6"]
    assert data.row_numbers == (5, 6, 7) and data.rows == 3  # numbers as in the file
    data = load([source(path, offset=8), source(path)], DataConfig(max_samples=5))
    assert [sample.answer for sample in data.samples] == ["8", "9", "0", "1", "2"]
    assert total_rows([source(path, offset=8), source(path, offset=2, max_samples=3)]) == 5
    for offset in (10, 11):
        with pytest.raises(DataError, match=f"it holds no rows behind offset={offset}, of 10 rows"):
            load([source(path, offset=offset)], DataConfig())
        assert total_rows([source(path, offset=offset)]) == 0


PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize(("columns", "role"), [
    ({"photo": "a/b.JPG"}, "images"),
    ({"photo": '["a.png", "b.png"]'}, "images"),  # in CSV files
    ({"photo": "data:image/png;base64,iVBO"}, "images"),
    ({"clip": "a film.mp4"}, "videos"),
    ({"mask": "a.png"}, None),  # for a reward
    ({"note": "It is a.png"}, "images"),
    ({"note": "see a.png!", "level": "a.png", "size": 3, "photo": None, "photos": []}, None),
])  # fmt: skip
def test_media_that_nobody_would_see_are_refused(jsonl, columns, role):
    """A model would be trained blind."""
    path = jsonl(qa(3, **columns))
    if role is None:
        assert len(load([source(path)], DataConfig()).samples) == 3
        return
    column = next(iter(columns))
    said = rf"column '{column}' holds {role}.* data.keys.{role}={column} shows .*data.keys.{role}= "
    with pytest.raises(DataError, match=said):
        load([source(path)], DataConfig())
    assert len(load([source(path)], DataConfig(keys={role: ""})).samples) == 3


@pytest.mark.parametrize("value", [PNG, [{"bytes": PNG}]])
@pytest.mark.parametrize("nothing", ["", "[]", {"bytes": None, "path": ""}])
def test_bytes_tell_what_they_are_also_between_rows_of_text(value, nothing):
    assert unread_media(qa(2, photo=value), FORMATS["qa"], {}) == ("photo", "images")
    assert unread_media(qa(2, photo=value), FORMATS["qa"], {"images": "photo"}) is None
    other = [*qa(2, photo=value), *qa(1, photo="a word")]
    assert unread_media(other, FORMATS["qa"], {}) is None
    mixed = [*qa(1, photo=nothing), *qa(1, photo=value)]
    assert unread_media(mixed, FORMATS["qa"], {}) == ("photo", "images")
    assert unread_media(qa(2, photo=nothing), FORMATS["qa"], {}) is None


def test_files_for_rewards_lie_beside_the_rows(jsonl, tmp_path):
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "0.png").touch()
    level = "#####\n#@$.#\n#####"
    rows = [
        {"segmentation_path": "masks/0.png", "level": level},
        {"segmentation_path": "elsewhere/0.png", "mask": [[0, 1]]},
        {"segmentation_path": "../0.png"},
    ]
    data = load([source(jsonl([{**qa(1)[0], **row} for row in rows]))], DataConfig(max_bad_fraction=1))
    found, missing = (sample.extra for sample in data.samples)
    assert found == {"segmentation_path": str(tmp_path / "masks" / "0.png"), "level": level}
    assert missing == rows[1]
    assert "leaves the folder" in data.quarantined[0].reason


def test_bad_rows_are_set_aside_with_id_row_and_reason(jsonl):
    rows = qa(150)
    rows[7] = {"id": 7, "question": "<image>?", "answer": "1"}
    data = load([source(jsonl(rows))], DataConfig())
    assert len(data) == 149 and data.rows == 150
    bad = data.quarantined[0]
    assert (bad.id, bad.source, bad.row) == ("7", "rows", 8)
    assert bad.reason == "1 <image> placeholder(s) but 0 images"
    assert data.row_numbers[7] == 9
    with pytest.raises(DataError, match=r"bad row 7 .row 8 of rows.: 1 <image> placeholder"):
        load([source(jsonl(rows))], DataConfig(on_bad_row="error"))
    with pytest.raises(DataError, match="it holds no rows"):
        load([source(jsonl([]))], DataConfig())


HALF = "\ud800"


@pytest.mark.parametrize("column", [
    *({"question": [{"role": "user", "content": HALF}]}, {"answer": HALF}, {"choices": ["1", HALF]}),
    *({"id": f"a{HALF}"}, {"images": [f"{HALF}.png"]}, {"note": [1, 2.5, None, [HALF]]}),
])  # fmt: skip
def test_half_a_surrogate_pair_is_a_bad_row_that_can_be_listed(jsonl, column):
    fine = {"id": "fine", "question": "A 😀, NUL \0 and \uffff?", "answer": "1"}
    rows = [fine, {"id": "lone", "question": "2+2?", "answer": "1"} | column]
    data = load([source(jsonl(rows))], DataConfig(max_bad_fraction=0.5))
    [bad] = data.quarantined
    assert [sample.id for sample in data.samples] == ["fine"]
    assert bad.row == 2 and bad.id == ("a\\ud800" if "id" in column else "lone")
    assert "surrogate" in bad.reason or "file does not exist" in bad.reason
    assert "\\ud800" in str(bad).encode().decode()


def test_a_row_that_a_template_refuses_is_bad_unless_it_refuses_all(jsonl):
    def length(sample):
        if sample.answer == "1":
            raise ConfigError("the chat template refuses the roles system, user")
        return 1

    rows = [{"id": n, "question": "q", "answer": str(n)} for n in (1, 2)]
    data = load([source(jsonl(rows))], DataConfig(max_bad_fraction=0.5), length=length)
    assert [(row.id, row.reason[:25]) for row in data.quarantined] == [("1", "the chat template refuses")]
    with pytest.raises(ConfigError, match=r"refuses the roles .* \(1, row 1 of rows\)"):
        load([source(jsonl(rows[:1]))], DataConfig(max_bad_fraction=0.5), length=length)


def test_too_many_bad_rows_stop_with_the_first_five(jsonl):
    rows = qa(20)
    for index in range(7):
        rows[index]["question"] = None
    with pytest.raises(DataError) as caught:
        load([source(jsonl(rows))], DataConfig())
    message = str(caught.value)
    assert "7 of 20 rows are bad (35.0%)" in message and "data.max_bad_fraction=0.35" in message
    assert "4 (row 5 of rows): no prompt in column question" in message and "(row 6" not in message
    assert "check-data` (--for rl, sft, dpo or reward-model) lists all, its --fix" in message
    assert len(load([source(jsonl(rows))], DataConfig(max_bad_fraction=0.35))) == 13


def test_rows_left_out_are_counted_by_reason(jsonl):
    data = load([source(jsonl(qa(3))), source(jsonl(qa(2), "more.jsonl"))], DataConfig())
    kept = leave_out(data, lambda sample: "the first" if sample.id.startswith("0") else None)
    assert [(row.source, row.row) for row in kept.left_out] == [("rows", 1), ("more", 1)]
    assert [(part.start, part.stop) for part in kept.parts] == [(0, 2), (2, 3)]
    assert kept.summary.endswith("2 rows left out: the first")


def test_repeated_ids_are_made_unique_and_listed(jsonl):
    rows = [{"question": str(n), "id": id} for n, id in enumerate(["a", "a#2", "a", "b", "a"])]
    data = load([source(jsonl(rows))], DataConfig())
    assert [sample.id for sample in data.samples] == ["a", "a#2", "a#3", "b", "a#4"]
    assert data.duplicate_ids == ("a",) and data.renamed == 2
    assert "2 rows got a suffix, as another one has the same id" in data.summary


def test_the_hash_follows_the_content_and_files_are_opened_once(jsonl, picture):
    picture()
    row = {"id": 1, "problem": "?", "answer": "1", "images": ["a.png"], "level": 2}
    hashes = [load([source(jsonl([r]))], DataConfig()).hash for r in (row, row, row | {"level": 3})]
    assert hashes[0] == hashes[1] != hashes[2]
    picture(colour=(0, 0, 0))
    assert load([source(jsonl([row]))], DataConfig()).hash != hashes[0]
    path = picture()
    rows = [{"problem": "?", "answer": str(n), "images": ["a.png", str(path)]} for n in range(3)]
    data = load([source(jsonl(rows))], DataConfig())
    assert data.media_kinds == {"path": 6}
    assert data.samples[0].media[0] is data.samples[2].media[0]


@pytest.mark.parametrize(("path", "rows", "format", "name", "media"), [
    ("gsm8k/gsm8k.test.jsonl.gz", 1319, "qa", "gsm8k.test", 0),
    ("math500/math500.jsonl.gz", 500, "easyr1", "math500", 0),
    ("puzzlevqa/puzzlevqa.train.parquet", 400, "easyr1", "puzzlevqa", 1),
    ("nlvr/nlvr.train.json", 240, "minio3", "nlvr", 1),
    ("mathv/mathv.train.jsonl", 120, "messages", "mathv", 1),
    ("receipts/receipts.json", 24, "minio3", "receipts", 1),
])  # fmt: skip
def test_every_real_set_loads_whole(shared, path, rows, format, name, media):
    data = load([source(str(shared / path))], DataConfig(max_bad_fraction=0))
    assert len(data) == rows and list(data.formats.values()) == [format]
    assert all(sample.data_source == name and sample.answer for sample in data.samples)
    assert all(len(sample.media) == media for sample in data.samples)
    assert data.duplicate_ids == ()


def test_every_awkward_row_gets_its_verdict(shared):
    data = load([source(str(shared / "nasty/nasty.jsonl"))], DataConfig(max_bad_fraction=1))
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
