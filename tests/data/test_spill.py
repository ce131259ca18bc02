"""Files that came inside of rows: where they lie, who can read them, and when they go."""

import base64
import io
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.config import DataConfig, DataSource
from saccade.data.check import convert
from saccade.data.datasets import load
from saccade.data.records import to_row
from saccade.endpoint.pictures import encode
from saccade.images import ImageError, decode, open_media
from saccade.images.spill import PREFIX, Spill, encoded
from saccade.series import open_series
from saccade.sounds import open_sound
from saccade.types import Extent
from saccade.videos import open_video


def rows_of(jsonl, files, name="rows.jsonl"):
    """Questions about pictures that are in the rows themselves."""
    texts = [base64.b64encode(file).decode() for file in files]
    rows = [{"problem": "<image>?", "answer": "1", "images": [text]} for text in texts]
    return jsonl(rows, name)


def loaded(*paths):
    return load([DataSource(path=path) for path in paths], DataConfig())


def spill_files(folder):
    return list(Path(folder).glob(f"{PREFIX}*"))


def test_a_large_set_lies_on_disk_each_content_once(jsonl, on_disk, image):
    files = [image(seed=seed).data for seed in (0, 1, 0, 2)]
    first, second = rows_of(jsonl, files), rows_of(jsonl, files[:2], "more.jsonl")
    media = [sample.media[0] for sample in loaded(first, second).samples]
    assert all(isinstance(one.data, Extent) for one in media)
    assert [encoded(one) for one in media] == files + files[:2]
    assert len({one.data for one in media}) == 3
    (file,) = {one.data.file for one in media}
    assert str(Path(file).parent) == os.environ["TMPDIR"]
    assert Path(file).stat().st_size == sum(map(len, set(files)))
    assert Path(file).stat().st_mode & 0o077 == 0  # for nobody else's eyes


def test_a_small_set_stays_in_memory(jsonl, on_disk, image, monkeypatch):
    files = [image(seed=seed).data for seed in (0, 1, 0, 2)]
    monkeypatch.setattr("saccade.images.spill.IN_MEMORY", len(files[0]) + len(files[1]))
    few = loaded(rows_of(jsonl, files[:3]))
    assert [sample.media[0].data for sample in few.samples] == files[:3]
    assert not spill_files(os.environ["TMPDIR"])
    more = loaded(rows_of(jsonl, files))
    assert [type(sample.media[0].data) for sample in more.samples] == [bytes, bytes, bytes, Extent]


def test_nothing_else_of_a_set_depends_on_it(jsonl, on_disk, image, monkeypatch):
    path = rows_of(jsonl, [image(seed=seed).data for seed in range(3)])
    there = loaded(path)
    monkeypatch.setattr("saccade.images.spill.IN_MEMORY", 1 << 20)
    here = loaded(path)
    assert there == here and there.hash == here.hash
    assert [to_row(sample) for sample in there.samples] == [to_row(s) for s in here.samples]
    one, other = there.samples[0].media[0], here.samples[0].media[0]
    assert (hash(one), repr(one), encode(one)) == (hash(other), repr(other), encode(other))


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
    on_a_path = open_media(str(write(tmp_path / "a.png", image())))
    assert on_disk(on_a_path) is on_a_path and encoded(on_a_path) == image().data


def write(path, media):
    path.write_bytes(media.data)
    return path


# -- memory ----------------------------------------------------------------------------------------


def test_rows_are_let_go_of_when_they_are_read_and_when_they_are_written(
    jsonl, on_disk, noise, tmp_path
):
    file = noise().read_bytes()  # of 14 kB; 9 MB in all
    large = [file + number.to_bytes(4, "big") for number in range(600)]
    path = rows_of(jsonl, large)
    tracemalloc.start()
    data = loaded(path)
    convert(data.samples, tmp_path / "again.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data) == 600 and peak < sum(map(len, large)) / 2
    assert loaded(str(tmp_path / "again.jsonl")).samples == data.samples


# -- processes -------------------------------------------------------------------------------------


OWNER = """
import os, pickle, signal, sys
from saccade.images import open_media, spill
spill.IN_MEMORY = 0
media = spill.Spill()(open_media(sys.stdin.buffer.read(int(sys.argv[1]))))
"""
TELLS = """
sys.stdout.buffer.write(pickle.dumps(media))
sys.stdout.buffer.flush()
os.close(1)
sys.stdin.buffer.read()
"""


def owner(code, folder, file):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER + code, str(len(file))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    process.stdin.write(file)
    process.stdin.flush()
    return process


def test_another_process_reads_it_while_its_owner_lives(tmp_path, image):
    process = owner(TELLS, tmp_path, image().data)
    media = pickle.loads(process.stdout.read())
    assert isinstance(media.data, Extent) and encoded(media) == image().data
    process.stdin.close()
    assert process.wait(30) == 0
    assert not spill_files(tmp_path)
    with pytest.raises(ImageError, match="while the process that loaded them lives"):
        decode(media)


def test_what_a_killed_process_left_goes_with_the_next_file(on_disk, image):
    living, killed = (owner(TELLS, os.environ["TMPDIR"], image(seed=n).data) for n in (1, 2))
    media = [pickle.loads(process.stdout.read()) for process in (living, killed)]
    killed.kill()
    killed.wait(30)
    assert len(spill_files(os.environ["TMPDIR"])) == 2
    mine = on_disk(image())
    there = {str(path) for path in spill_files(os.environ["TMPDIR"])}
    assert there == {mine.data.file, media[0].data.file}
    assert encoded(media[0]) == image(seed=1).data
    living.stdin.close()
    assert living.wait(30) == 0


def test_a_fork_has_a_file_of_its_own(tmp_path, image):
    code = """
before = spill.encoded(media)
if os.fork() == 0:
    other = spill.Spill()(open_media(before + b"0"))
    assert other.data.file != media.data.file and spill.encoded(other) == before + b"0"
    sys.exit(0)  # which deletes its own
assert os.wait()[1] == 0
assert spill.encoded(media) == before and len(os.listdir(os.environ["TMPDIR"])) == 1
"""
    process = owner(code, tmp_path, image().data)
    assert process.wait(30) == 0 and not spill_files(tmp_path)


def test_a_full_disk_says_what_to_set(tmp_path, image):
    code = """
import resource
from saccade.errors import EnvironmentProblem
resource.setrlimit(resource.RLIMIT_FSIZE, (len(spill.encoded(media)) + 10,) * 2)
try:
    spill.Spill()(open_media(spill.encoded(media) + b"0"))
except EnvironmentProblem as error:
    print(error)
"""
    process = owner(code, tmp_path, image().data)
    said = process.communicate(timeout=30)[0].decode()
    assert said.startswith(f"{tmp_path}: File too large") and "TMPDIR=/data/tmp" in said


def test_a_file_that_was_cut_off_is_noticed(on_disk, image):
    media = on_disk(image())
    os.truncate(media.data.file, 10)
    with pytest.raises(ImageError, match="cut it off after 10"):
        encoded(media)


def test_a_spill_is_for_one_set(on_disk, image, monkeypatch):
    monkeypatch.setattr("saccade.images.spill.IN_MEMORY", len(image().data))
    for _ in range(2):
        assert Spill()(image()) is image()
