import base64
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.config import DataConfig
from saccade.media import media_files
from saccade.media.images import ImageError, crop, decode, open_media, resized_size
from saccade.media.media_files import source_kind
from saccade.media.pixel_cache import ImageCache


@pytest.mark.parametrize(("width", "height", "unit", "low", "high", "expected", "tokens"), [
    (640, 480, 28, 3136, 1_003_520, (476, 644), 391),
    (1920, 1080, 28, 3136, 1_003_520, (728, 1316), 1222),
    (30, 20, 28, 3136, 1_003_520, (56, 84), 6),
    (640, 480, 32, 3136, 1_003_520, (480, 640), 300),
    (6000, 4000, 28, 40_000, 2_000_000, (1148, 1708), 2501),
])  # fmt: skip
def test_resized_size(width, height, unit, low, high, expected, tokens):
    assert resized_size(width, height, unit=unit, min_pixels=low, max_pixels=high) == expected
    assert expected[0] * expected[1] // unit**2 == tokens


def test_every_kind_of_source_gives_the_same_pixels(picture, tmp_path):
    path = picture("a b.png", colour=(10, 200, 30))
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    sources = {
        "path": "a b.png", "file_uri": path.as_uri(), "data_uri": f"data:image/png;base64,{text}", "base64": text,
        "bytes": data, "mapping": {"bytes": data, "path": "whatever.png"}, "pil": Image.open(path),
        "array": np.array(Image.open(path)),
    }  # fmt: skip
    for kind, source in sources.items():
        assert source_kind(source, tmp_path) == kind
        media = open_media(source, base=tmp_path)
        assert (media.width, media.height) == (40, 30)
        assert decode(media)[0, 0].tolist() == [10, 200, 30]
    same_file = {open_media(source, base=tmp_path).hash for source in list(sources.values())[:6]}
    assert len(same_file) == 1
    for source in (str(path), *({"bytes": nothing, "path": "a b.png"} for nothing in (None, b"", ""))):
        assert open_media(source, base=tmp_path).path == str(path)
    one = open_media(np.array([[[255, 0, 0]]], dtype=np.uint8))
    assert decode(one).tolist() == [[[255, 0, 0]]]


@contextmanager
def serving_files(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_picture_is_fetched_where_that_is_allowed(picture, tmp_path, monkeypatch):
    picture("a.png", colour=(10, 200, 30))
    allowed = DataConfig(allow_network=True)
    monkeypatch.setattr(media_files, "MAX_DOWNLOAD", (tmp_path / "a.png").stat().st_size)
    (tmp_path / "large.png").write_bytes(b"a" * 10_000)
    with serving_files(tmp_path) as address:
        assert decode(open_media(f"{address}/a.png", limits=allowed))[0, 0].tolist() == [10, 200, 30]
        for name, reason in {"gone.png": "cannot be fetched: status 404", "large.png": "larger than"}.items():
            with pytest.raises(ImageError, match=f"{address}/{name}: {reason}"):
                open_media(f"{address}/{name}", limits=allowed)
    with pytest.raises(ImageError, match="cannot be fetched: "):
        open_media(f"http://{'a' * 70}.com/a.png", limits=allowed)


@pytest.mark.parametrize(("source", "reason"), [
    ("gone.png", "gone.png: file does not exist"),
    ("../up.png", "../up.png: leaves the folder"),
    ("https://example.org/a.png", "data.allow_network=true"),
    (".", r"\.: is no regular file; give the path of one"),
    ("/dev/null", "/dev/null: is no regular file;"),
    (b"", "empty file"),
    (b"plain text", "not an image; expected one of PNG"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "not an image"),  # would start a program
    (b"RIFF\x24\x00\x00\x00WAVEfmt ", "not an image but audio, .* in audios"),
    (b"\x00\x00\x00\x20ftypisom", "not an image but video, .* in videos"),
    ("", "its path is empty"),
    ({"bytes": None, "path": None}, "needs a value"),
    (3.5, "cannot be made from float"),
    (np.zeros((4, 4, 3)), "give uint8"),
])  # fmt: skip
def test_refused_sources_say_why(source, reason, tmp_path):
    with pytest.raises(ImageError, match=reason.replace("(", r"\(")):
        open_media(source, base=tmp_path)


@pytest.mark.parametrize(
    ("allowed", "by_two_dots", "in_full"), [("absolute", False, True), (True, True, True), (False, False, False)]
)
def test_files_outside_of_the_folder(picture, tmp_path, allowed, by_two_dots, in_full):
    picture("up.png"), picture("inner/a.png")
    inner, limits = tmp_path / "inner", DataConfig(allow_outside=allowed)
    outside = {"../up.png": by_two_dots}
    outside |= dict.fromkeys((f"{tmp_path}/up.png", f"file://{tmp_path}/up.png"), in_full)
    for source, opens in outside.items():
        if opens:
            assert open_media(source, base=inner, limits=limits).width == 40
            continue
        accepts = "true" if source.startswith("..") else "absolute"
        with pytest.raises(ImageError, match=rf"inner; data\.allow_outside={accepts} accepts it"):
            open_media(source, base=inner, limits=limits)
    for source in ("a.png", "../inner/a.png", f"{inner}/a.png", f"file://{inner}/a.png"):
        assert open_media(source, base=inner, limits=limits).width == 40


def test_budgets_and_limits_are_held(picture):
    media = open_media(str(picture()), max_pixels=5000)
    assert (media.min_pixels, media.max_pixels) == (3136, 5000)
    with pytest.raises(ImageError, match="min_pixels 3136 is above max_pixels 10"):
        open_media(str(picture()), max_pixels=10)
    path = picture(size=(2000, 1000), mode="1", colour=1)
    with pytest.raises(ImageError, match=r"2000x1000 is 2 megapixels, data.max_megapixels is 1"):
        open_media(str(path), limits=DataConfig(max_megapixels=1))
    path = str(picture(size=(1, 1000), colour=(0, 0, 255)))
    media = open_media(path)
    assert (media.width, media.height) == (5, 1000)
    pixels = decode(media)
    assert pixels[500].tolist() == [[0, 0, 255]] + [[255, 255, 255]] * 4
    with pytest.raises(ImageError, match="200:1"):
        open_media(path, limits=DataConfig(aspect="reject"))


def test_exif_orientation_turns_size_and_pixels(tmp_path):
    image = Image.new("RGB", (60, 40), "blue")
    image.paste("red", (0, 0, 30, 40))  # the left half of the stored image is the top when upright
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("turned.jpg", "turned.png", "turned.tiff"):
        image.save(tmp_path / name, exif=exif)
        media = open_media(str(tmp_path / name))
        assert (media.width, media.height) == (40, 60), name
        pixels = decode(media)
        assert pixels[5, 20, 0] > 200 and pixels[55, 20, 2] > 200, name
    kept = open_media(Image.open(tmp_path / "turned.jpg"))
    assert (kept.width, kept.height) == (40, 60)


def test_pixels_of_every_mode_become_rgb(picture, tmp_path):
    for name, mode, colour in [("a.png", "RGBA", (0, 0, 0, 0)), ("b.png", "LA", (0, 0))]:
        assert decode(open_media(str(picture(name, colour, mode=mode)))).min() == 255
    half = decode(open_media(str(picture("c.png", (0, 0, 0, 128), mode="RGBA"))))
    assert abs(int(half[0, 0, 0]) - 127) <= 1
    image = Image.new("P", (8, 8), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((0, 0), 1)
    image.save(tmp_path / "p.png", transparency=0)
    pixels = decode(open_media(str(tmp_path / "p.png")))
    assert pixels[0, 0].tolist() == [255, 0, 0] and pixels[5, 5].tolist() == [255, 255, 255]
    for value, expected in [(0, 0), (257 * 100, 100), (65535, 255)]:
        Image.fromarray(np.full((4, 6), value, dtype=np.uint16)).save(tmp_path / "g.png")
        assert (decode(open_media(str(tmp_path / "g.png"))) == expected).all()
    assert decode(open_media(str(picture("b.png", 1, mode="1")))).min() == 255
    green = decode(open_media(str(picture("c.jpg", (255, 0, 255, 0), mode="CMYK"))))[0, 0]
    assert green[1] > green[0] and green[1] > green[2]
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "m.gif", save_all=True, append_images=frames[1:])
    assert decode(open_media(str(tmp_path / "m.gif")))[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("name", ["noise.png", "noise.jpg", "noise.webp"])
def test_half_a_file_is_refused_when_it_is_opened(noise, name):
    path = noise(name)
    data = path.read_bytes()
    assert open_media(str(path)).width == 80
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError, match=name):
        open_media(str(path))
    if name == "noise.webp":
        return
    path.write_bytes(data + b"\xff\xda" + bytes(500))  # behind the end there is no damage
    assert decode(open_media(str(path))).shape == (60, 80, 3)


def test_damage_is_not_hidden_by_a_thumbnail_or_a_wrong_checksum(noise):
    path = noise("noise.jpg")
    data = path.read_bytes()
    segment = b"\xff\xe1" + (8).to_bytes(2, "big") + b"\xff\xd8..\xff\xd9"
    whole = data[:2] + segment + data[2:]
    path.write_bytes(whole)
    assert open_media(str(path)).height == 60
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match="truncated"):
        open_media(str(path))
    path = noise("noise.png")
    data = bytearray(path.read_bytes())
    stored = data.index(b"IEND") - 8  # the last checksum of pixels
    data[stored] ^= 1
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"noise\.png: cannot be decoded: broken PNG file"):
        decode(open_media(str(path)))


def test_a_file_that_changed_is_noticed(picture):
    media = open_media(str(picture()))
    part = crop(media, (0, 0, 30, 20))
    before = Path(media.path).stat()
    picture(colour=(1, 2, 3))  # as large as it was, and as old
    os.utime(media.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for one in (media, part):
        with pytest.raises(ImageError, match=r"a\.png: changed after it was read"):
            decode(one)
    Path(media.path).unlink()
    with pytest.raises(ImageError, match="No such file"):
        decode(media)


def test_a_crop_of_a_crop_is_exact(noise, picture):
    media = open_media(str(noise()))
    whole = decode(media)
    first = crop(media, (10, 5, 60, 45))
    second = crop(first, (4, 6, 24, 16))
    assert second.box == (14, 11, 34, 21) and second.parent == first.hash
    assert (decode(second) == whole[11:21, 14:34]).all()
    assert second.hash == crop(media, (14, 11, 34, 21)).hash != first.hash
    for box in [(0, 0, 81, 10), (5, 5, 5, 9), (-1, 0, 4, 4)]:
        with pytest.raises(ImageError, match="leaves the image"):
            crop(media, box)
    media = open_media(str(picture(size=(900, 30))))
    with pytest.raises(ImageError, match="aspect ratio"):
        crop(media, (0, 0, 900, 2))


def test_cache_makes_each_array_once_for_many_threads(noise):
    cache, media = ImageCache(10**6), open_media(str(noise()))
    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.get(media))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(pixels is found[0] for pixels in found)
    assert not found[0].flags.writeable
    cache = ImageCache(10**6, make=lambda item: decode(item)[..., 0])
    assert all(found is cache.get(media) for found in cache.get_all([media] * 3)) and cache.get(media).ndim == 2


def test_cache_stays_within_its_bytes_and_forgets_failures(picture):
    media = [open_media(str(picture(f"{i}.png", (i, 0, 0)))) for i in range(5)]
    one = 40 * 30 * 3
    cache = ImageCache(2 * one)
    for item in media:
        cache.get(item)
        assert cache.bytes <= 2 * one
    kept = cache.get(media[4])
    assert cache.get(media[4]) is kept
    assert ImageCache(10).get(media[0]).shape == (30, 40, 3)
    media = open_media(str(picture()))
    data = Path(media.path).read_bytes()
    Path(media.path).write_bytes(b"")
    cache = ImageCache(10**6)
    with pytest.raises(ImageError, match="changed after it was read"):
        cache.get(media)
    Path(media.path).write_bytes(data)
    assert cache.get(media).shape == (30, 40, 3)
