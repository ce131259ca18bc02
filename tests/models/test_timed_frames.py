"""Videos of Qwen3-VL and Qwen3.5, in which each pair of frames has its time in front: all is that of transformers."""

from functools import partial

import pytest
import torch
import transformers

pytest.importorskip("torchvision")

from saccade.config import LoraConfig
from saccade.models import lora
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.estimate import shapes
from saccade.plugins.estimate.flops import Meter
from saccade.plugins.families import proof_rows
from saccade.plugins.media import videos
from saccade.system.contents import write_files
from tests.models import against
from tests.models.against import CPU, ask, film
from tests.models.test_video import animation

NAMES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
LONG, SHORT = videos.open_video(film(6, 64, 96, seed=1), fps=1.5), videos.open_video(film(3, 96, 64, seed=2), fps=8.0)
PICTURE = proof_rows.noise(64, 64, 0)
ASKED = (("See ", LONG, " and ", PICTURE, "?"), (SHORT, PICTURE, LONG, "What?"))


@pytest.fixture
def processor_of(family_of):
    """The same folder through its own processor."""
    return lambda name: load_family(family_of(name).path, name="generic")


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_prompts_and_positions_are_those_of_transformers(name, family_of, processor_of, stock):
    family, generic = family_of(name), processor_of(name)
    clip = partial(videos.open_video, animation(film(12, 64, 96), duration=240))
    for parts in (*ASKED, (clip(), "Why?"), ("It jumps: ", clip(frames=[0, 1, 3, 11]), "!")):
        made, prompt = proof_rows.processed(generic, parts), family.render(ask(*parts))
        assert prompt.ids.tolist() == made["input_ids"][0].tolist() == generic.render(ask(*parts)).ids.tolist()
        given = {key: value for key, value in made.items() if key.endswith(("grid_thw", "type_ids"))}
        wanted, _ = stock(name).model.get_rope_index(made["input_ids"], **given)
        assert family.positions(prompt.ids, prompt.media).tolist() == wanted[:, 0].tolist()
        assert family.banned[family.chat.placeholders["video"]]
    text = family.chat.decode(prompt.ids, special=True)
    assert "<0.1 seconds><|vision_start|><|video_pad|>" in text and "<|vision_end|><1.7 seconds>" in text


@pytest.mark.parametrize("name", NAMES)
def test_logits_gradients_and_answers_are_those_of_transformers(name, family_of, processor_of, load, stock):
    family, generic, model = family_of(name), processor_of(name), load(name)
    rows = [row for parts in ASKED for row in proof_rows.answered(generic, parts, 2)]
    prompts = [family.render(ask(*parts)) for parts in ASKED for _ in range(2)]
    packed = [row._replace(prompt=prompt) for row, prompt in zip(rows, prompts, strict=True)]
    limit = 1 if "vl" in name else 10  # recurrent layers round more
    with torch.no_grad():
        for (_, found), row in zip(proof_rows.packed_rows(model, family, packed), rows, strict=True):
            wanted = proof_rows.theirs(model, row)[0][1]
            assert (found - wanted).abs().max() < limit * 2e-6 * wanted.abs().max()
    assert against.gradient_gap(generic, model, rows, packed_by=family, packed=packed) < limit * 1e-5
    asked = [*prompts[::2], family.render(ask("a"))]
    assert against.ours(model, family, asked) == against.theirs(stock(name), family, asked)
    assert against.second_turn_gap(family, model, SHORT, " and ", PICTURE) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_adapters_over_videos_are_exported(name, family_of, tmp_path):
    pytest.importorskip("peft")
    family = family_of(name)
    model = load_model(family, dtype=torch.float32, device=CPU)
    lora.add(model, family, LoraConfig(rank=2), seed=0)
    for parameter in lora.adapters(model).values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    against.assert_forests_are_plain_rows(model, family, against.pair(*ASKED[1]))
    write_files(tmp_path, lora.files(model))
    merged = getattr(transformers, family.spec.auto_class).from_pretrained(tmp_path, dtype=torch.float32).eval()
    asked = [family.render(ask(*parts)) for parts in ASKED]
    assert against.ours(model, family, asked) == against.theirs(merged, family, asked)


def test_a_video_is_kept_by_its_times_and_counted_by_its_frames(family_of, load):
    family, model = family_of("qwen3_vl"), load("qwen3_vl")
    fast, slow = (videos.open_video(film(4, 64, 96), fps=fps) for fps in (8.0, 0.01))
    assert fast.key != slow.key and fast.hash != slow.hash  # "<150.0 seconds>" has more tokens
    prompts = [family.render(ask(video, "a")) for video in (fast, slow, proof_rows.noise(96, 64, 1))]
    assert len(against.ours(model, family, prompts[:2])) == 2
    meter = Meter(shape=shapes.shape_of(model, family.tower_of))
    film_work, _, picture_work = (meter.encode(prompt.media) for prompt in prompts)
    for part in ("vision/inputs", "vision/layers", "vision/attention"):
        assert film_work[part] == 2 * picture_work[part] > 0
