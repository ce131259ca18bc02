"""Rows with videos and sounds run through every training command, and are checked and counted."""

import json
import math
import wave

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from saccade.config import DataConfig, DataSource, load
from saccade.data.datasets import load as load_data
from saccade.media import pixel_cache
from saccade.models.families import qwen_vl
from saccade.plugins.check_data.canonical_rows import to_row
from saccade.plugins.check_data.check_data import check_data
from saccade.plugins.export.export import export
from saccade.plugins.preferences import dpo
from saccade.plugins.reward_models import reward_training
from saccade.recipes import rl, sft

TINY = {"video": "tiny:qwen2_5_vl", "audio": "tiny:qwen2_audio", "every": "tiny:qwen2_5_omni"}
SHOWN = {"sft": "sft/loss", "dpo": "dpo/loss", "rl": "reward/mean", "rm": "rm/loss"}
RECIPES = {"sft": sft.run, "dpo": dpo.run, "rl": rl.run, "rm": reward_training.run}
MEDIA = {
    "video": ("<image>Like <video>", ("videos", "images")),
    "audio": ("<audio>", ("audios",)),
    "every": ("<audio><image>Like <video>", ("audios", "videos", "images")),
}
FILES = {"videos": "gif", "images": "png", "audios": "wav"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("media")
    for n in range(4):
        frames = [Image.new("RGB", (56, 56), (60 * n, 50 * m, 9)) for m in range(4)]
        frames[0].save(home / f"{n}.gif", save_all=True, append_images=frames[1:], duration=250)
        frames[0].save(home / f"{n}.png")
        with wave.open(str(home / f"{n}.wav"), "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            values = np.sin(np.arange(4000) * (n + 1) / 9) * 9000
            sound.writeframes(values.astype("<i2").tobytes())
    return home


def rows(folder, kind, command):
    """A picture beside every video."""
    mark, columns = MEDIA[kind]
    listed = []
    for n in range(4):
        media = {column: [f"{n}.{FILES[column]}"] for column in columns}
        row = {"id": str(n), "problem": f"{mark}What is {n}?", **media}
        if command in ("dpo", "rm"):
            row |= {"chosen": "red", "rejected": "green"}
        elif command == "sft":
            text = row.pop("problem")
            said = [{"from": "human", "value": text}, {"from": "gpt", "value": "red"}]
            row["conversations"] = said
        else:
            row["answer"] = "red"
        listed.append(row)
    path = folder / f"{kind}-{command}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    return str(path)


def trained(folder, kind, command, **changes):
    name, out = f"{kind}-{command}", str(folder / "runs")
    options = {
        "run": {"name": name, "out": out, "max_steps": 1, "device": "cpu"}, "model": {"path": TINY[kind]},
        "data": {"train": rows(folder, kind, command), "max_frame_pixels": 3136},
        "train": {"prompts_per_step": 2, "lr": 1e-3}, "save": {"every": 0}, **changes, "track": {"tensorboard": False},
    }  # fmt: skip
    if command == "rl":
        options = {"rollout": {"max_tokens": 6}, "reward": {"terms": ["exact"]}, **options}
        options["train"]["samples_per_prompt"] = 2
    return RECIPES[command](load(options))[SHOWN[command]]


@pytest.mark.parametrize(("kind", "command"), [("video", "sft"), ("video", "dpo"), ("video", "rl"), ("audio", "sft")])
def test_a_command_trains_on_it(folder, kind, command):
    assert math.isfinite(trained(folder, kind, command))


def test_a_reward_model_of_sounds_pictures_and_videos_scores_answers_about_them(folder):
    assert math.isfinite(trained(folder, "every", "rm"))
    (judge,) = (folder / "runs" / "every-rm" / "checkpoints").glob("step-*")
    term = {"verifier": "model", "args": {"path": str(judge)}}
    reward = trained(folder, "every", "rl", reward={"terms": [term]})
    assert math.isfinite(reward) and reward != 0
    out = export(folder / "runs" / "every-rl", folder / "exported", dtype="bfloat16")
    _, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))


def test_data_is_checked_and_rewritten(folder):
    for kind, other in (("video", "image"), ("audio", "audio")):
        config = load({"data": {"train": rows(folder, kind, "rl")}})
        report = check_data(config)
        assert report.good == 4 and report.media_kinds[kind] == 4
        data = load_data(config.data.train, config.data)
        path = folder / f"{kind}-again.jsonl"
        path.write_text("".join(json.dumps(to_row(sample)) + "\n" for sample in data.samples))
        again = load_data([DataSource(path=str(path))], DataConfig())
        assert [s.messages for s in again.samples] == [s.messages for s in data.samples]
        assert {m.kind for s in data.samples for m in s.media} == {kind, other}


def test_a_broken_medium_is_a_bad_row(folder):
    for name, column in (("broken.gif", "videos"), ("broken.wav", "audios"), ("no.gif", "videos")):
        if name != "no.gif":
            (folder / name).write_bytes((folder / name.replace("broken", "0")).read_bytes()[:60])
        path = folder / "broken.jsonl"
        path.write_text(json.dumps({"problem": "?", "answer": "1", column: [name]}) + "\n")
        report = check_data(load({"data": {"train": str(path)}}))
        assert report.good == 0 and len(report.bad) == 1 and name in report.bad[0].reason


def test_a_picture_is_decoded_once_however_often_its_row_comes(rl_config, tmp_path, monkeypatch):
    decoded, decode = [], pixel_cache.decode
    monkeypatch.setattr(pixel_cache, "decode", lambda media: decoded.append(media.hash) or decode(media))
    monkeypatch.setattr(pixel_cache.DECODED, "max_bytes", 0)  # as if all of them were large
    options = {"data.train": pictures(tmp_path, 4), "track.trajectories_every": 0}
    result = rl.run(rl_config(tmp_path) | options | {"run.max_steps": 3})
    assert result["data/epoch"] == 3 and len(decoded) == len(set(decoded)) == 4


def test_a_row_is_set_aside_when_its_picture_was_replaced(rl_config, tmp_path, monkeypatch):
    monkeypatch.setattr(pixel_cache.DECODED, "max_bytes", 0)
    monkeypatch.setattr(qwen_vl, "CACHE_BYTES", 0)  # every step reads the files again
    reward = tmp_path / "reward.py"  # in the first step it replaces a picture of the second
    copied = f"shutil.copy('{tmp_path}/7.png', '{tmp_path}/6.png')"
    reward.write_text(f"import shutil\n\ndef score(sample):\n    return 1.0 if sample.step > 1 or {copied} else 0.0\n")
    options = {"data.train": pictures(tmp_path, 8), "reward.terms": [f"{reward}:score"], "reward.self_test": "off"}
    options |= {"run.max_steps": 2, "data.max_bad_fraction": 0.5, "data.order": "sequential"}
    rl.run(rl_config(tmp_path) | options)
    (row,) = map(json.loads, (tmp_path / "run" / "quarantine.jsonl").open())
    assert row["id"] == "6" and row["reason"].endswith("6.png: changed after it was read")


def pictures(folder, count):
    """A step of `rl_config` takes four rows."""
    lines = []
    for n in range(count):
        Image.new("RGB", (60, 60), (30 * n, 0, 9)).save(folder / f"{n}.png")
        lines.append(json.dumps({"id": str(n), "problem": "?", "answer": "1", "images": f"{n}.png"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder / "rows.jsonl")
