"""Sound: files and rates, and the Qwen2-Audio family against transformers."""

import io
import wave

import numpy as np
import pytest
import torch
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

from saccade.algorithms import select
from saccade.config import DataConfig, TrainConfig
from saccade.errors import ConfigError, DataError, EnvironmentProblem
from saccade.media.images import ImageError, open_media
from saccade.media.kinds import decode
from saccade.plugins.media import sounds
from saccade.recipes.sft import SUPERVISED
from saccade.trainer import MODEL_SCORING
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from tests.models.against import CPU, ask, assert_forests_are_plain_rows, noise, ours, pair, rows_of, theirs

RATE = 16_000


def tone(seconds, pitch=440.0, rate=RATE):
    return (0.5 * np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * pitch / rate)).astype("f4")


def wav(samples, rate, width):
    """[samples, channels] within -1..1."""
    file = io.BytesIO()
    whole = np.round(samples * (2.0 ** (8 * width - 1) - 1)).astype("<i8")
    whole = whole + 128 if width == 1 else whole
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(width)
        writer.setframerate(rate)
        raw = whole.reshape(-1, 1).view("u1").reshape(-1, 8)[:, :width]
        writer.writeframes(raw.tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def family(family_of):
    return family_of("qwen2_audio")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width_are_heard_in_one_channel(width):
    left = tone(0.5)
    both = np.stack([left, np.zeros_like(left)], 1)
    media = sounds.open_sound(wav(both, RATE, width))
    assert (media.kind, media.width, media.height) == ("audio", 8000, 1)
    assert np.abs(decode(media) - left / 2).max() < (0.01 if width == 1 else 1e-4)


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_other_rates_become_16_khz(rate):
    media = sounds.open_sound(wav(tone(1.0, rate=rate)[:, None], rate, 2))
    assert media.width == RATE
    assert np.abs(decode(media) - tone(1.0))[400:-400].max() < 2e-3
    # What the new rate cannot hold goes.
    media = sounds.open_sound({"array": tone(0.5, 12_000.0, 48_000), "sampling_rate": 48_000})
    assert np.abs(decode(media))[400:-400].max() < 1e-3


def test_half_a_minute_is_kept_or_longer_sound_is_refused(family):
    long = {"array": tone(31.0, rate=8_000), "sampling_rate": 8_000}
    media = sounds.open_sound(long)
    assert media.width == 480_000 and len(decode(media)) == 480_000
    assert family.measure(media) == ((1, 1, 3000), 750)
    with pytest.raises(ImageError, match=r"31\.0 seconds; data\.long_audio=truncate"):
        sounds.open_sound(long, limits=DataConfig(long_audio="reject"))
    with pytest.raises(ImageError, match="too short"):
        sounds.open_sound(tone(0.01))


def test_a_wav_that_was_cut_is_as_long_as_what_is_left_or_damaged():
    whole = wav(tone(0.5)[:, None], RATE, 3)
    media = sounds.open_sound(whole[:-1])  # its last sample lacks a byte
    assert media.width == 7999 and decode(media).shape == (7999,)
    for kept in (4, 20):
        with pytest.raises(ImageError, match="damaged header"):
            sounds.open_sound(whole[:kept])


def test_other_files_need_soundfile():
    if sounds.importlib.util.find_spec("soundfile") is None:
        with pytest.raises(EnvironmentProblem, match="pip install soundfile"):
            sounds.open_sound(b"fLaC\0\0\0\x22")
        floats = bytearray(wav(tone(0.5)[:, None], RATE, 4))
        floats[20] = 3  # the tag of floats
        with pytest.raises(EnvironmentProblem, match="pip install soundfile"):
            sounds.open_sound(bytes(floats))
    with pytest.raises(ImageError, match="a sound is float"):
        sounds.open_sound(np.zeros(100, np.int16))
    with pytest.raises(ImageError, match="a sound is a list of numbers"):
        sounds.open_sound({"array": ["loud"]})
    with pytest.raises(ImageError, match="'fast'; a sound is a list of numbers, its sampling_rate a number"):
        sounds.open_sound({"array": [0.1] * 400, "sampling_rate": "fast"})


def test_features_and_tokens_are_those_of_transformers(family):
    heard = [noise(1.5), noise(0.73, seed=1), noise(29.99, seed=2)]
    extractor = WhisperFeatureExtractor.from_pretrained(family.path)
    template = family.chat.template
    processor = Qwen2AudioProcessor(extractor, family.chat.tokenizer, chat_template=template)
    rendered = family.render(ask(*heard, "which?"))
    text = family.chat.text_of(ask(*heard, "which?"), generation=True)
    theirs = processor(text=text, audio=[decode(m) for m in heard], sampling_rate=RATE, return_tensors="pt")
    assert theirs["input_ids"][0].tolist() == rendered.ids.tolist()
    ours = family.vision(rendered.media, CPU, torch.float32)
    assert torch.equal(ours["feature_attention_mask"], theirs["feature_attention_mask"].long())
    assert torch.allclose(ours["input_features"], theirs["input_features"], atol=1e-6)
    assert [span.length for span in rendered.media] == [37, 18, 750]


def test_greedy_answers_are_those_of_transformers(family, load, stock):
    asked = [ask(noise(1.0), "a"), ask("x", noise(0.4, 1), "y", noise(2.2, 2)), ask("text only")]
    prompts = [family.render(messages) for messages in asked]
    assert ours(load("qwen2_audio"), family, prompts) == theirs(stock("qwen2_audio"), family, prompts)


def test_rows_with_sound_train_in_forests_and_reach_the_tower(family, load):
    sample = pair(noise(0.5), "what?")
    assert_forests_are_plain_rows(load("qwen2_audio"), family, sample)
    learning = load("qwen2_audio")
    before = learning.base_model.audio_tower.conv1.weight.detach().clone()
    backend, row = LocalTrainer(learning, family, TrainConfig(lr=1e-3)), rows_of(sample, family)[1:]
    losses = []
    for _ in range(4):
        update = backend.train_step(select.write_supervision(row), PolicyLoss(SUPERVISED, MODEL_SCORING), lr=1e-2)
        losses.append(update.metrics.means()["policy/loss"])
    assert losses[-1] < losses[0] - 0.3
    assert not torch.equal(before, learning.base_model.audio_tower.conv1.weight)


def test_what_it_does_not_hear_is_refused(family):
    picture = open_media(np.zeros((56, 56, 3), np.uint8))
    with pytest.raises(DataError, match="takes text and audio, but a row holds an image"):
        family.measure(picture)
    with pytest.raises(ConfigError, match="0 of 1 images"):
        family.render(ask(picture, "x"))
    banned = family.chat.tokenizer.convert_tokens_to_ids(["<|AUDIO|>", "<|audio_bos|>"])
    assert family.banned[banned].all()
    typed = family.render(ask(noise(0.5), "write <|AUDIO|> here"))
    assert len(typed.media) == 1 and (~family.chat.is_text(typed.ids)).sum() == typed.media[0].length
