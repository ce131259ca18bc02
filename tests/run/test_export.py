"""Every save is a folder that stock transformers loads, with the outputs that the engine had."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.media.images import open_media
from saccade.models.families import load_family
from saccade.plugins.evaluation import evaluate
from saccade.plugins.export.export import _compare, export
from saccade.plugins.families.tiny import build
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.recipes import questions, rl
from saccade.recipes.model_setup import family_of
from saccade.run.checkpoint import copy_processor
from tests.models.against import theirs

FAMILIES = {"qwen2_5_vl": {}, "internvl": {}, "llava": {}, "mixtral": {}, "untied": {"tie_word_embeddings": False}}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory, rl_config):
    """(config, checkpoint after one step) of a family; text models count without a picture."""
    out = tmp_path_factory.mktemp(request.param)
    family = "qwen2_5_vl" if request.param == "untied" else request.param
    model = build(family, out / "model", words=WORDS, text=FAMILIES[request.param])
    config = rl_config(out, model__path=model, run__max_steps=1, train__lr=1e-3)
    config["data.val"] = config["data.train"].replace("train.jsonl", "val.jsonl")
    if not family.endswith(("vl", "llava")):
        text = out / "text.jsonl"
        rows = [f'{{"question": "how many {"red " * n}?", "answer": "{n}"}}\n' for n in range(1, 7)]
        text.write_text("".join(rows))
        config |= {"data.train": str(text), "data.val": str(text)}
    rl.run(config | {"val.every": 0})
    return config, out / "run" / "checkpoints" / "step-1"


def loaded(folder, **options):
    multimodal = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = "AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)


def test_transformers_finds_every_tensor_once(saved, tensors):
    config, folder = saved
    assert {p.name for p in Path(config["model.path"]).iterdir()} <= {p.name for p in folder.iterdir()}
    model, info = loaded(folder)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    stored = tensors(folder)
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    tied = model.config.get_text_config().tie_word_embeddings
    assert any("lm_head" in name for name in stored) is not tied
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied


def test_greedy_outputs_are_those_of_the_engine(saved, tmp_path):
    config, folder = saved
    config = config | {"model.path": str(folder), "rollout.max_tokens": 8}
    evaluate.run(config, out=tmp_path / "eval")
    rows = [json.loads(x) for x in (tmp_path / "eval" / "samples.jsonl").read_bytes().split(b"\n") if x]
    family = load_family(str(folder))
    model, _ = loaded(folder, dtype=torch.float32)
    (data,) = questions.validation_sets(load(config), family).values()
    made = theirs(model, family, [family.render(sample.messages) for sample in data.samples])
    ends = [next((n for n, token in enumerate(ids) if token in family.chat.eos_ids), 8) for ids in made]
    assert [family.decode(ids[:end]) for ids, end in zip(made, ends, strict=True)] == [row["response"] for row in rows]


@pytest.mark.parametrize("saved", ["qwen2_5_vl"], indirect=True)
def test_export_copies_and_verifies(saved, tmp_path, same_weights):
    _, folder = saved
    out = export(folder.parent.parent, tmp_path / "out")  # a run folder means its last checkpoint
    assert same_weights(folder, out) and not (out / "state").exists()
    assert loaded(out)[1]["missing_keys"] in (set(), [])
    with pytest.raises(ConfigError, match="exists and is not empty; give another folder"):
        export(folder, out)


@pytest.mark.parametrize("saved", ["qwen2_5_vl", "mixtral"], indirect=True)
def test_export_casts(saved, tmp_path, tensors):
    _, folder = saved
    out = tmp_path / "half"
    done = CliRunner().invoke(app, ["export", str(folder), "--out", str(out), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    exact, cast = tensors(folder), tensors(out)
    assert exact.keys() == cast.keys()
    for name, tensor in cast.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[name].to(torch.bfloat16)), name
    assert not any(loaded(out)[1][f"{kind}_keys"] for kind in ("missing", "unexpected"))


def test_a_folder_that_differs_is_seen(tmp_path, word_model):
    out = export(Path(word_model), tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    name = next(n for n in weights if n.endswith("o_proj.weight"))
    weights[name] = weights[name] * 1.01
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match="log-probs differ from the checkpoint's by"):
        _compare(Path(word_model), out, exact=True)


@pytest.mark.parametrize(
    ("source", "dtype", "words"),
    [("nothing", None, "holds no checkpoint"), ("model", "float8", "dtype 'float8' is not known")],
)
def test_what_cannot_be_exported(tmp_path, word_model, source, dtype, words):
    path = Path(word_model) if source == "model" else tmp_path / source
    with pytest.raises(ConfigError, match=words):
        export(path, tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_whoever_serves_a_folder_shows_pictures_as_the_run_did(name, tmp_path):
    folder, again = Path(build(name, tmp_path / "model")), tmp_path / "saved"
    again.mkdir()
    (again / "config.json").write_bytes((folder / "config.json").read_bytes())
    budget = {"data.min_pixels": 6272, "data.max_pixels": 12544}
    copy_processor(family_of(load(budget), str(folder)), again)
    picture = Image.effect_noise((400, 300), 50).convert("RGB")
    small, whole = (open_media(picture, max_pixels=n) for n in (12544, 1_003_520))
    theirs = AutoImageProcessor.from_pretrained(again, backend="pil")
    cut = {"crop_to_patches": True} if name == "internvl" else {}
    found = theirs(images=[picture], return_tensors="pt", **cut)
    grid, _ = load_family(str(folder)).measure(small)
    seen = [*found["pixel_values"].shape[:1]] if cut else found["image_grid_thw"][0].tolist()
    assert seen == list(grid[: len(seen)])
    # A run that begins there shows what its own budget says.
    assert load_family(str(again)).measure(whole) == load_family(str(folder)).measure(whole)
    settings = json.loads((again / "preprocessor_config.json").read_text())
    assert settings["max_patches"] == 4 if cut else settings["max_pixels"] == 12544
