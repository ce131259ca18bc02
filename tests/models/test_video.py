"""Video in the Qwen-VL families: tokens, positions, pixels, answers are those of transformers."""

import hashlib
import io
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.config import DataConfig
from saccade.errors import EnvironmentProblem
from saccade.media.blob_file import shown_hash
from saccade.media.images import ImageError, open_media
from saccade.media.kinds import decode
from saccade.plugins.media import videos
from saccade.types import Media
from tests.models.against import CPU, ask, assert_forests_are_plain_rows, film, kinds_of, ours, pair, theirs

NAMES = ("qwen2_vl", "qwen2_5_vl")


def animation(pixels, duration=250):
    file = io.BytesIO()
    first, *rest = (Image.fromarray(frame) for frame in pixels)
    first.save(file, "WEBP", save_all=True, append_images=rest, duration=duration, lossless=True, exact=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("total", "rate", "fps", "least", "most", "frames"),
    [(300, 30.0, 2.0, 4, 8, 8), (7, 30.0, 30.0, 4, 768, 6), (1, 10.0, 2.0, 4, 768, 2), (90, 30.0, 2.4, 4, 768, 6)],
)
def test_frames_are_an_even_number_within_the_limits(total, rate, fps, least, most, frames):
    chosen = videos.sampled(total, rate=rate, fps=fps, least=least, most=most)
    assert len(chosen) == frames and max(chosen) < total and list(chosen) == sorted(chosen)


def test_an_animation_is_opened_from_its_header_and_shows_the_frames_it_names():
    pixels = film(12)
    media = videos.open_video(animation(pixels), fps=2.0)  # three seconds at 4 per second
    assert (media.frames, media.fps) == ((0, 2, 4, 6, 8, 10), 2.0)
    assert (media.width, media.height, media.kind) == (112, 84, "video")
    assert np.array_equal(decode(media), pixels[::2])
    shown_hash = videos.open_video(animation(pixels), frames=[0, 11])
    assert np.array_equal(decode(shown_hash), pixels[[0, 11]]) and shown_hash.hash != media.hash


def test_pictures_are_a_video_too(tmp_path):
    pixels = film(5)
    for n, frame in enumerate(pixels):
        Image.fromarray(frame).save(tmp_path / f"{n}.png")
    listed = videos.open_video([f"{n}.png" for n in range(5)], base=tmp_path)
    folder = videos.open_video(tmp_path.name, base=tmp_path.parent)
    array = videos.open_video(pixels, fps=1.0)
    assert listed == folder and listed.fps == 2.0 and array.fps == 1.0
    for media in (listed, array):
        assert media.frames == (0, 1, 2, 3, 4, 4)  # the last one twice: an even number
        assert np.array_equal(decode(media), pixels[[0, 1, 2, 3, 4, 4]])
    few = videos.open_video(pixels, max_frames=2)
    assert np.array_equal(decode(few), pixels[[0, 2]]) and few.fps == pytest.approx(0.8)


def test_a_long_video_is_never_in_memory_at_full_size():
    large = film(24, 28, 28).repeat(10, axis=1).repeat(10, axis=2)
    video = videos.open_video(animation(large), min_frames=24)
    raw = 280 * 280 * 3
    tracemalloc.start()
    small = videos.decode(video, lambda frame: frame[::10, ::10].copy())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert small.shape == (24, 28, 28, 3) and peak < 4 * raw
    assert np.array_equal(small, videos.decode(video)[:, ::10, ::10])


def test_what_is_no_video_is_refused(tmp_path):
    with pytest.raises(ImageError, match="differ in size"):
        videos.open_video([film(1)[0], film(1, 56, 56)[0]])
    with pytest.raises(ImageError, match=r"\[frames, height, width, 3\]"):
        videos.open_video(film(1)[0])
    with pytest.raises(ImageError, match="even number of indices below 12"):
        videos.open_video(animation(film(12)), frames=[0, 12])
    with pytest.raises(ImageError, match="megapixels"):
        videos.open_video(animation(film(2)), limits=DataConfig(max_megapixels=0.001))


def test_a_film_file_needs_opencv_or_is_read(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"\0\0\0\x18ftypmp42")
    if videos.importlib.util.find_spec("cv2") is None:
        with pytest.raises(EnvironmentProblem, match="pip install opencv-python-headless"):
            videos.open_video(path)
        return
    import cv2

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 48))
    for n in range(30):
        writer.write(np.full((48, 64, 3), (n * 8, 0, 255 - n * 8), np.uint8))
    writer.release()
    media = videos.open_video(path)
    assert media.frames == (0, 5, 10, 15, 20, 25)
    assert np.abs(decode(media)[:, 20, 20, 2] - np.arange(0, 30, 5) * 8.0).max() < 8


def test_a_film_is_compared_with_its_hash_and_not_taken_into_memory(tmp_path, monkeypatch):
    path, data = tmp_path / "a.mp4", b"\0\0\0\x18ftypmp42" + bytes(100)
    path.write_bytes(data)
    media = Media(kind="video", hash="x", width=4, height=4, path=str(path), frames=(0, 1), fps=1.0)
    media = replace(media, hash=shown_hash(media, hashlib.sha256(data).hexdigest()))
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("the whole film was read"))
    with pytest.raises((EnvironmentProblem, ImageError), match=r"OpenCV|cannot be decoded"):
        decode(media)
    path.write_bytes(data[:-1] + b"1")
    with pytest.raises(ImageError, match="changed after it was read"):
        decode(media)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_positions_are_those_of_transformers(name, family_of, load):
    family = family_of(name)
    media = videos.open_video(animation(film(8, 84, 140)), fps=4.0)
    picture = open_media(film(1, 56, 84)[0])
    rendered = family.render(ask(picture, "see", media, "what?"))
    spans = rendered.media
    assert [span.grid for span in spans] == [(1, 4, 6), (4, 6, 10)]
    assert [span.length for span in spans] == [6, 60]
    video_id = family.chat.placeholders["video"]
    assert (rendered.ids[spans[1].start : spans[1].end] == video_id).all()
    vision = dict(family.vision(spans, CPU, torch.float32))
    grids = {key: value for key, value in vision.items() if "pixel" not in key}
    rope_index = load(name).model.get_rope_index
    wanted, _ = rope_index(torch.from_numpy(rendered.ids)[None], kinds_of(rendered, family), **grids)
    # transformers goes on behind the rows and columns of a video, Qwen's own code behind its time
    # as well: the two agree up to there.
    ours = family.positions(rendered.ids, spans)
    end = spans[1].end
    assert np.array_equal(ours[:, :end], wanted[:, 0].numpy()[:, :end])
    assert ours[0, end] == ours[:, spans[1].start : end].max() + 1


def test_patches_hold_two_frames_in_the_order_of_the_tower(family_of):
    family, pixels = family_of("qwen2_5_vl"), film(4, 56, 84)
    shown = videos.open_video(pixels), open_media(pixels[0]), videos.open_video(np.stack([pixels[0]] * 2))
    video, picture, still = (family.vision(family.render(ask(m)).media, CPU, torch.float32) for m in shown)
    flat = video["pixel_values_videos"].reshape(2, 24, 3, 2, 14, 14)
    centre = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    spread = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    for frame in (0, 1):  # of the second layer, top left
        wanted = (torch.from_numpy(pixels[2 + frame, :14, :14]) / 255 - centre) / spread
        assert torch.allclose(flat[1, 0, :, frame].permute(1, 2, 0), wanted, atol=1e-5)
    # An image is a video of one frame twice.
    assert torch.equal(picture["pixel_values"], still["pixel_values_videos"])


def test_a_frame_has_a_budget_of_its_own(family_of):
    media = videos.open_video(film(4, 224, 224), limits=DataConfig(max_frame_pixels=56 * 56))
    assert family_of("qwen2_vl").measure(media) == ((2, 4, 4), 8)
    assert family_of("qwen2_vl").measure(replace(media, max_pixels=112 * 112)) == ((2, 8, 8), 32)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(name, family_of, load, stock):
    family = family_of(name)
    # As many layers as rows, at a step of one: there transformers and Qwen count alike.
    video = videos.open_video(film(6, 84, 112, seed=1), fps=8.0 if name == "qwen2_5_vl" else 2.0)
    other = videos.open_video(animation(film(4, 56, 84, seed=2), 125), fps=8.0)
    picture = open_media(film(1, 56, 56)[0])
    asked = [ask(video, "a"), ask("x", picture, other, "why"), ask(other, video, picture), ask("a")]
    prompts = [family.render(messages) for messages in asked]
    assert ours(load(name), family, prompts) == theirs(stock(name), family, prompts)


def test_rows_with_videos_train_in_forests(family_of, load):
    sample = pair(videos.open_video(film(4, 56, 84)), "what?")
    assert_forests_are_plain_rows(load("qwen2_5_vl"), family_of("qwen2_5_vl"), sample)
