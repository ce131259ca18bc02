"""Which prompts a step is planned with."""

import json
import re

import torch
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.plugins.estimate import estimate
from saccade.system import devices
from tests.estimate.works import H200, W1, planned


def test_prompts_are_those_of_the_data(scenes, word_model):
    config = load({"model.path": word_model, "data.train": str(scenes / "train.jsonl")})
    found = estimate(config, devices.current_device("cpu"))
    about = r"\d+ tokens \(mean of 24 rows of data.train, the longest \d+\)"
    assert re.fullmatch(about, found.prompts)
    assert found.pace.seconds == {} and found.pace.tflop["update"] > 0


def test_prompts_do_not_depend_on_the_order_of_rows(large, tmp_path):
    rows = [{"problem": "a" * (3_000 if n == 40 else 10), "answer": "1"} for n in range(64)]
    found = []
    for name in ("late", "early"):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = load({"model.path": large, "data.train": str(data)}, ["train.prompts_per_step=8"])
        found.append(estimate(config, H200))
        rows.reverse()
    assert found[0].memory == found[1].memory and found[0].pace == found[1].pace
    assert "the longest 3133" in found[0].prompts
    pictured = estimate(config, H200, image=(448, 448))
    assert "image of 448x448 (the text is that of 64 rows of data.train)" in pictured.prompts
    assert pictured.prompts.startswith("446 tokens")  # 256 of them are the image


def test_prompts_that_a_run_would_leave_out_are_told(large):
    (note,) = planned(large, H200, (224, 5000, 64)).notes
    assert note == "a run leaves prompts of 5000 tokens out: data.max_prompt_tokens=4096"
    (note,) = planned(large, H200, (224, 5000, 64), "data.overlong=shrink").notes
    assert note == "a run shortens prompts of 5000 tokens: data.max_prompt_tokens=4096"
    config = load({"model.path": large, "data.max_prompt_tokens": 200})
    (note,) = estimate(config, H200, image=(448, 448)).notes
    assert note == "a run leaves prompts of 257 tokens out: data.max_prompt_tokens=200"


def test_a_gpu_that_is_not_there_is_not_taken_for_a_cpu(large, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["estimate", f"model.path={large}", "run.device=cuda"])
    assert result.exit_code == 3 and "name one: saccade estimate --device H100" in result.stderr


def test_without_data_prompts_are_as_long_as_allowed_and_pictures_shrunk(word_model, large):
    config = load({"model.path": word_model, "data.max_prompt_tokens": 2000})
    found = estimate(config, devices.current_device("cpu"))
    assert found.prompts == "2000 tokens, an image of 1001x1001 (data.max_prompt_tokens)"
    config = load({"model.path": large, "data.max_pixels": 2048**2, "data.max_prompt_tokens": 2048})
    found = estimate(config, H200)
    assert found.prompts == "2048 tokens, an image of 1172x1172 (data.max_prompt_tokens)"
    assert found.notes == ()  # nothing was said of data
    few = load(config, ["data.max_prompt_tokens=50", "data.min_pixels=262144"])
    assert estimate(few, H200).prompts == "50 tokens (data.max_prompt_tokens)"


def test_data_that_is_not_there_is_named(word_model):
    config = load({"model.path": word_model, "data.train": "trian.parquet@train", "data.max_prompt_tokens": 500})
    gone = "data.train: trian.parquet not found, so"
    said = f"{gone} prompts are as long as data.max_prompt_tokens=500 allows"
    for options, wanted in (({}, (said,)), ({"prompt_tokens": 40}, ()), ({"image": (28, 28)}, (said,))):
        assert estimate(config, devices.current_device("cpu"), **options).notes == wanted, options
    over, missing = estimate(config, devices.current_device("cpu"), image=(1400, 1400)).notes
    assert over.startswith("a run leaves prompts of") and missing == f"{gone} of prompts only the image is counted"


def test_full_precision_has_no_seconds(large):
    found = planned(large, H200, W1, "model.dtype=float32")
    assert found.memory.fits and found.pace.seconds == {} and found.pace.tflop["update"] > 0
    assert found.notes == ("no seconds with model.dtype=float32: peaks are known in bfloat16 only",)
    unknown = devices.Device(name="other", memory=139.8)  # it has none anyway
    assert planned(large, unknown, W1, "model.dtype=float32").notes == ()
