"""Files that came inside of rows: where they lie, who can read them, and when they go."""

import base64
import io
import os
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from saccade.config import DataConfig, DataSource
from saccade.data.datasets import load
from saccade.media.blob_file import Spill, encoded
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.plugins.check_data.canonical_rows import convert, to_row
from saccade.plugins.judges.http_client.chat_client import encode
from saccade.plugins.media.sounds import open_sound
from saccade.plugins.media.videos import open_video
from saccade.plugins.series.series_files import open_series
from saccade.types import Extent


def rows_of(jsonl, files, name="rows.jsonl"):
    """Questions about pictures that are in the rows themselves."""
    texts = [base64.b64encode(file).decode() for file in files]
    rows = [{"problem": "<image>?", "answer": "1", "images": [text]} for text in texts]
    return jsonl(rows, name)


def loaded(*paths):
    return load([DataSource(path=path) for path in paths], DataConfig())


def test_a_large_set_lies_on_disk_each_content_once(jsonl, on_disk, image):
    files = [image(seed=seed).data for seed in (0, 1, 0, 2)]
    first, second = rows_of(jsonl, files), rows_of(jsonl, files[:2], "more.jsonl")
    media = [sample.media[0] for sample in loaded(first, second).samples]
    assert all(isinstance(one.data, Extent) for one in media)
    assert [encoded(one) for one in media] == files + files[:2]
    assert len({one.data for one in media}) == 3
    (file,) = {one.data.file for one in media}
    found = os.fstat(file.fileno())
    assert found.st_size == sum(map(len, set(files))) and found.st_nlink == 0
    assert found.st_dev == os.stat(os.environ["TMPDIR"]).st_dev
    assert os.listdir(os.environ["TMPDIR"]) == []  # nothing that somebody could delete


def test_a_small_set_stays_in_memory(jsonl, on_disk, image, monkeypatch):
    files = [image(seed=seed).data for seed in (0, 1, 0, 2)]
    monkeypatch.setattr("saccade.media.blob_file.IN_MEMORY", len(files[0]) + len(files[1]))
    few = loaded(rows_of(jsonl, files[:3]))
    assert [sample.media[0].data for sample in few.samples] == files[:3]
    more = loaded(rows_of(jsonl, files))
    assert [type(sample.media[0].data) for sample in more.samples] == [bytes, bytes, bytes, Extent]
    monkeypatch.setattr("saccade.media.blob_file.IN_MEMORY", len(image().data))
    for _ in range(2):  # a spill is for one set
        assert Spill()(image()) is image()


def test_nothing_else_of_a_set_depends_on_it(jsonl, on_disk, image, monkeypatch):
    path = rows_of(jsonl, [image(seed=seed).data for seed in range(3)])
    there = loaded(path)
    monkeypatch.setattr("saccade.media.blob_file.IN_MEMORY", 1 << 20)
    here = loaded(path)
    assert there == here and there.hash == here.hash
    assert [to_row(sample) for sample in there.samples] == [to_row(s) for s in here.samples]
    one, other = there.samples[0].media[0], here.samples[0].media[0]
    assert (hash(one), repr(one), encode(one)) == (hash(other), repr(other), encode(other))
    with pytest.raises(TypeError, match="pickle"):  # another process would take it for a file of its own
        pickle.dumps(one)


def test_every_kind_of_medium_is_read_from_there(on_disk, image, tmp_path):
    frames = [Image.new("RGB", (56, 56), (50 * n, 9, 9)) for n in range(4)]
    film = io.BytesIO()
    frames[0].save(film, "GIF", save_all=True, append_images=frames[1:], duration=250)
    tone = np.sin(np.arange(4000) / 9).astype(np.float32)
    for media in (
        image(),
        open_video(film.getvalue()),
        open_video([image(seed=n).data for n in range(2)]),
        open_sound({"array": tone, "sampling_rate": 16000}),
        open_series([[0.0, 1.0, 0.5], [2.0, 2.0, 2.0]]),
    ):
        moved = on_disk(media)
        assert moved == media and np.array_equal(decode(moved), decode(media))
        held = [moved.data, *(picture.data for picture in moved.pictures)]
        assert not any(isinstance(data, bytes) for data in held)
    (tmp_path / "a.png").write_bytes(image().data)
    on_a_path = open_media(str(tmp_path / "a.png"))
    assert on_disk(on_a_path) is on_a_path and encoded(on_a_path) == image().data


def test_rows_are_let_go_of_when_they_are_read_and_when_they_are_written(jsonl, on_disk, noise, tmp_path):
    file = noise().read_bytes()  # of 14 kB; 6 MB in all, of which a hundred rows are looked at first
    large = [file + number.to_bytes(4, "big") for number in range(400)]
    path = rows_of(jsonl, large)
    tracemalloc.start()
    data = loaded(path)
    convert(data.samples, tmp_path / "again.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data) == 400 and peak < sum(map(len, large)) / 2
    assert loaded(str(tmp_path / "again.jsonl")).samples == data.samples


OWNER = """
import os, sys
from saccade.media import blob_file
from saccade.media.images import open_media
blob_file.IN_MEMORY = 0
media = blob_file.Spill()(open_media(sys.stdin.buffer.read()))
"""


def test_a_fork_has_a_file_of_its_own_and_a_full_disk_says_what_to_set(tmp_path, image):
    code = """
before = blob_file.encoded(media)
if os.fork() == 0:
    other = blob_file.Spill()(open_media(before + b"0"))
    assert other.data.file != media.data.file and blob_file.encoded(other) == before + b"0"
    assert blob_file.encoded(media) == before
    sys.exit(0)
assert os.wait()[1] == 0
assert blob_file.encoded(media) == before
import resource
from saccade.errors import EnvironmentProblem
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    blob_file.Spill()(open_media(before + b"0"))
except EnvironmentProblem as error:
    print(error)
"""
    command, env = [sys.executable, "-c", OWNER + code], os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, input=image().data, stdout=subprocess.PIPE, env=env, timeout=60, check=True)
    said = done.stdout.decode()
    assert said.startswith(f"{tmp_path}: File too large") and "TMPDIR=/data/tmp" in said
