"""Models without a family of their own, against transformers: proved and served, or refused."""

import json
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from saccade.engines import Settings
from saccade.engines.builders import build as build_engine
from saccade.errors import ConfigError, DataError, EnvironmentProblem
from saccade.forest import attention
from saccade.forest.interface import decoder_of
from saccade.media.images import open_media
from saccade.models.families import load_family
from saccade.models.heads import attach_score
from saccade.models.load import load_model, trainable_table
from saccade.plugins.families import generic, proof, proof_rows, tiny, tiny_kinds
from saccade.plugins.media import videos
from saccade.plugins.ranks.by_rows import ByRows
from tests.models.against import (
    CPU,
    adapted_and_exported,
    ask,
    film,
    gradient_gap,
    greedy_prompts,
    ours,
    second_turn_gap,
)
from tests.models.against import noise as sound
from tests.ranks.processes import on_ranks

pytest.importorskip("torchvision")
FILLER = 256
ANY_AUTO = "AutoModelForImageTextToText"

# Chosen for what they differ in: (kind, what is special about it).
KINDS = {
    "smolvlm": "tiles with markers and breaks between runs",
    "idefics2": "text that depends on its neighbours",
    "llava_next": "newline vectors, unpadded",
    "mistral3": "rows with breaks",
    "ovis2": "indicator tokens, embedded too",
    "glm4v_moe": "positions on three axes, a shared expert beside experts",
    "ernie4_5_vl_moe": "kinds of tokens choose experts",
    "granite4_vision": "features by layer, divided logits, dropout",
    "qwen3_omni_moe_thinker": "features of the first layers",
    "gemma3": "pictures that see themselves both ways, windows",
    "gemma4": "the same in layers with windows, layers of two sizes, inputs of each layer",
    "kimi_k25": "keys and values of different size",
    "llama4": "chunks, a nested head",
    "minicpmv4_7": "recurrent layers, numbered pictures in slices, positions by what stands around them",
}


@pytest.fixture(scope="session")
def kind(tmp_path_factory):
    """(family, model) of a tiny random folder; not proved yet, and for all who do not want their own."""

    @cache
    def family_of(name):
        folder = (tiny_kinds if name in tiny_kinds.KINDS else tiny).build(name, tmp_path_factory.mktemp(name))
        family = load_family(folder, name="generic")
        return replace(family, spec=replace(family.spec, prove=lambda model, family: None))

    def loaded(name, dtype):
        return load_model(family_of(name), dtype=dtype, device=CPU)

    shared = cache(loaded)
    return lambda name, dtype=torch.float32, own=False: (family_of(name), (loaded if own else shared)(name, dtype))


def differing(family, model):
    """What is the first not to agree."""
    filler = FILLER if model.dtype == torch.float32 else 64  # CPUs without bfloat16 take their time
    return next((row for row in of_pictures(model, family, filler) if not row.agrees), None)


def of_pictures(model, family, filler):
    """Without videos and sounds, which come last."""
    for row in proof.comparisons(model, family, filler=filler):
        yield row
        if row.what == f"a row behind {filler} tokens of others":
            return


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_proved_trained_and_exported(kind, name, tmp_path):
    family, model = kind(name, own=True)
    found = {row.what: row for row in of_pictures(model, family, FILLER)}
    assert all(row.agrees for row in found.values()), found
    limit = 2e-5 if name == "minicpmv4_7" else 1e-5  # 1.2e-5: recurrent layers, whose sums are in another order
    assert len(found) == 10 and found["logits of answers"].gap < limit
    assert gradient_gap(family, model) < 2e-4
    assert second_turn_gap(family, model) < 1e-4
    assert {"vision", "llm"} <= set(trainable_table(model, family)) == set(family.spec.towers)
    learned, right, asked = adapted_and_exported(family, model, tmp_path)
    assert learned > 0.05 and right == asked == 3
    adapted = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted and {family.tower_of(name) for name in adapted} == {"llm"}
    assert not any(module.training for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p)


@pytest.mark.parametrize(
    ("name", "options", "squares"),
    [
        ("idefics2", {"do_image_splitting": True}, (5, 5)),
        ("ovis2", {"crop_to_patches": True}, (3, 7)),
        ("internvl", {}, (1, 3)),
        ("deepseek_ocr2", {}, (1, 3)),
    ],
)
def test_pictures_in_pieces_are_proved(kind, name, options, squares, tmp_path):
    """A small picture beside one that is cut into tiles."""
    family, model = kind(name)
    family = told(family, tmp_path, options) if options else family
    assert tuple(sum(span.grid[::3]) for span in proof_rows.probes(family)[0].prompt.media) == squares
    assert differing(family, model) is None


@pytest.mark.parametrize(
    ("name", "medium", "why"),
    [
        ("llava_onevision", "video", ""),
        ("smolvlm", "video", "makes pixel_values, pixel_attention_mask of one of them alone"),  # one name for both
        ("glm4v", "video", "Image features and image tokens do not match"),  # one token stands for both
        ("gemma4", "video", ""),  # blocks of frames with the time between them
        ("muse_glimmer", "video", ""),  # told to tell the times; a factor and a cap on its logits
        ("gemma4", "audio", ""),
        ("qwen3_omni_moe_thinker", "audio", ""),  # nothing for the first layers
    ],
)
def test_videos_and_sounds_are_proved_and_trained(kind, name, medium, why):
    """Alone, and beside a picture where transformers does that, or refused there."""
    family, model = kind(name)
    alone, beside = proof.sense_comparisons(model.eval(), family, medium, 1e-4)
    assert alone.agrees and why in str(beside) and beside.agrees == (not why)
    one = videos.open_video(film(4, 50, 60), fps=2.0) if medium == "video" else sound(0.5)
    rows = proof_rows.answered(family, (one, "What is it?"), 2)
    assert family.banned[rows[0].ids[rows[0].prompt.media[0].start]]
    assert gradient_gap(family, model, rows) < 2e-4
    family.reader.refuse(beside.kind, str(beside))
    mixed = family.render(ask(one, " and ", proof_rows.noise(60, 50, 0), "?"))
    with pytest.raises(DataError, match=f"a row holds .* beside an image; {medium} beside an image: .*leave one"):
        family.positions(mixed.ids, mixed.media)
    del family.reader.refused[beside.kind]
    if (name, medium) == ("gemma4", "video"):  # at which its own `generate` fails: its logits instead
        prompt = family.render(ask(one, "Why?"))
        (drawn,) = ours(model, family, [prompt])
        whole = np.concatenate([prompt.ids, drawn])
        row = proof_rows.ProofRow(prompt, whole, proof_rows.processed(family, (one, "Why?")))
        logits = proof_rows.theirs(model, row)[0][1][:-1].masked_fill(torch.from_numpy(family.banned), -torch.inf)
        assert logits.argmax(-1).tolist() == drawn
        return
    stock = getattr(transformers, family.spec.auto_class).from_pretrained(family.path, dtype=torch.float32).eval()
    right, asked = greedy_prompts(family, model, stock, [(one, "Why?")])
    assert right == asked == 1


def test_where_tiles_are_large_a_large_picture_is_looked_at(kind, tmp_path):
    family = told(kind("llama4")[0], tmp_path, {"size": {"height": 336, "width": 336}})
    small, large = proof_rows.probes(family)[0].prompt.media
    assert (small.grid[0], large.grid[0]) == (1, 3) and (large.media.width, large.media.height) == (400, 200)


@pytest.mark.parametrize(("name", "options"), [("minicpmv4_6", {"max_slice_nums": 1}), ("llama4", {"max_patches": 1})])
def test_a_folder_says_what_a_picture_costs_at_most(kind, name, options, tmp_path):
    """Where the pixel budget does not to the token: its processor still cuts what was scaled down."""
    family = kind(name)[0]
    large, small = (replace(proof_rows.noise(400, 200, 0), max_pixels=pixels) for pixels in (1 << 20, 4_000))
    (_, usual), (_, limited), (_, budgeted) = (
        one.measure(media)
        for one, media in ((family, large), (told(family, tmp_path, options), large), (family, small))
    )
    assert limited < usual / 2 and limited < budgeted


def told(family, folder, options):
    """The family of a folder whose image processor has these options."""
    folder = shutil.copytree(family.path, folder / "told")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"] |= options
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return replace(load_family(str(folder), name=family.name), spec=family.spec)


# -- what the proof sees ---------------------------------------------------------------------------


def wrong_rope(family, model):
    """Other frequencies for packed rows."""
    own, rope = proof_rows.packed_rows, decoder_of(model).rotary_emb

    def packed(*given):
        rope.inv_freq *= 2
        try:
            return own(*given)
        finally:
            rope.inv_freq /= 2

    return family, ("saccade.plugins.families.proof_rows.packed_rows", packed)


def wider(family, model):
    """A window that is one token wider here."""
    own = attention.forest_plan

    def plan(*arguments, **options):
        attend = own(*arguments, **options)
        return lambda *given: attend(*given[:-1], given[-1] and given[-1] + 1)

    return family, ("saccade.trainer.forward_inputs.forest_plan", plan)


def with_dropout(family, model):
    return family, ("saccade.trainer.model_state.set_training", lambda model: model.train())


def changed(**functions):
    """Fields of the family, each made from the family."""
    return lambda family, model: (replace(family, **{name: make(family) for name, make in functions.items()}), None)


ROLLED = changed(features=lambda family: lambda model, media: family.features(model, media).roll(1, 0))
FLAT = changed(positions=lambda family: lambda ids, spans: np.tile(np.arange(len(ids)), (family.axes, 1)))
DOUBLED = changed(positions=lambda family: lambda ids, spans: 2 * family.positions(ids, spans))
BEGUN = changed(chat=lambda family: replace(family.chat, begin=(1,)))
NO_BLOCKS = changed(blocks=lambda family: "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "mistakes"),
    {
        "llava_next": {"prompts": BEGUN, "last states": DOUBLED},
        "granite4_vision": {"last states": wrong_rope, "training": with_dropout},
        "smolvlm": {"pictures": ROLLED},
        "gemma3": {"masks": NO_BLOCKS, "last states": wider},
        "glm4v": {"pictures": ROLLED, "positions": FLAT},
    }.items(),
)
def test_the_proof_sees_mistakes(kind, name, mistakes, dtype, monkeypatch):
    family, model = kind(name, getattr(torch, dtype))
    assert differing(family, model) is None
    for seen, mistake in mistakes.items():
        with monkeypatch.context() as patched:
            wrong, patch = mistake(family, model)
            if patch:
                patched.setattr(*patch)
            assert differing(wrong, model).what == seen


def test_rounding_is_told_from_a_mistake(kind, monkeypatch):
    """Experts are chosen by rounded numbers: half precision is far from itself where it is rounded in another way."""
    family, model = kind("kimi_k25", torch.bfloat16)
    packed, weights = proof_rows.packed_rows, {name: one.clone() for name, one in model.state_dict().items()}

    def without_rounding(*given):
        with proof._in_float32(model, family):
            return packed(*given)

    monkeypatch.setattr(proof_rows, "packed_rows", without_rounding)
    rows = [*proof.comparisons(model, family, filler=64)]
    assert all(row.agrees for row in rows) and rows[-1].limit == 1e-4
    assert all(one.dtype == weights[n].dtype and one.equal(weights[n]) for n, one in model.state_dict().items())
    refused = [row.what for row in proof.comparisons(model, DOUBLED(family, model)[0], filler=64) if not row.agrees]
    assert refused[0] == "last states"


def on_rank(rank, folder, path):
    """Rows of which the first rank's are rounded more than is allowed, in half precision; then the weights."""
    family = load_family(path, name="generic")
    family = replace(family, spec=replace(family.spec, prove=lambda model, family: None))
    packed, part = proof_rows.packed_rows, ByRows(dist.group.WORLD)

    def rounded(model, *given):
        more = 0.04 * (rank == 0 and model.dtype == torch.bfloat16)
        return [(states + more * states.abs().max(), logits) for states, logits in packed(model, *given)]

    proof_rows.packed_rows, proof.GAPS[torch.bfloat16] = rounded, 0.03
    model = load_model(family, dtype=torch.bfloat16, device=CPU, by_rows=part)
    before = [getattr(one, "rows", one).clone() for one in model.parameters()]
    with part.running(model):
        rows = [*of_pictures(model, family, 64)]
        there = bool(model.get_input_embeddings().weight.isfinite().all())
    after = [getattr(one, "rows", one) for one in model.parameters()]
    return rows, there and hasattr(model.lm_head.weight, "rows") and all(map(torch.equal, before, after))


def test_ranks_that_hold_rows_look_again_together(kind, tmp_path):
    (found, kept), other = on_ranks(on_rank, tmp_path / "ranks", kind("kimi_k25")[0].path)[1]
    assert kept and len(found) == 15 and all(row.agrees for row in found) and found[-1].limit == 1e-4
    assert other == (found, kept)


def test_a_prompt_that_sees_itself_both_ways_is_refused(kind):
    family, model = kind("paligemma")
    found = differing(family, model)
    assert found.what == "masks" and found.gap > 100 and "layer" in found.where
    why = r"something else here.*masks: .* pairs of tokens, limit 0.*use another"
    with pytest.raises(EnvironmentProblem, match=why):
        proof.prove(model, family)


def test_float32_is_advised_only_where_half_precision_rounds():
    advised = {limit: proof.Compared("logits", 0.3, limit).advice for limit in (0, *proof.GAPS.values())}
    assert {limit for limit, advice in advised.items() if "model.dtype=float32" in advice} == {0.05, 0.02}


def test_a_verdict_is_remembered(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    family, model = kind("llava_next")
    calls = []
    own = proof.comparisons
    monkeypatch.setattr(proof, "comparisons", lambda *given: calls.append(1) or own(*given, filler=FILLER))
    for wanted in (1, 1):
        proof.prove(model, family)
        assert len(calls) == wanted
    (file,) = (tmp_path / "saccade" / "proofs").iterdir()
    verdict = json.loads(file.read_text())
    assert {row["what"] for row in verdict["rows"]} >= {"prompts", "masks", "logits of answers"}
    assert 0 < verdict["seconds"] < 600
    template = family.chat.template + "{# another #}"
    proof.prove(model, replace(family, chat=replace(family.chat, template=template)))
    assert len(calls) == 2


def test_blank_lines_around_a_picture_are_text(tmp_path):
    folder = tiny_kinds.build("gemma3", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens("\n\n")
    tokenizer.save_pretrained(folder)
    family = load_family(folder)
    assert not family.banned[tokenizer.convert_tokens_to_ids("\n\n")]
    assert family.banned[tokenizer.convert_tokens_to_ids("<start_of_image>")]


def test_a_critic_has_no_language_head(kind):
    _, model = kind("llama4", own=True)
    attach_score(model, seed=0)
    assert not [name for name, _ in model.named_parameters() if "lm_head" in name]


# -- what is refused before weights are read -------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mllama", "looks at pictures from inside its decoder"),
        ("florence2", "has an encoder for text"),
        ("glm5_next", "has layers of type indexed_attention, linear_attention"),
        ("blip", "computes its own attention"),
        ("instructblip", "reads no text without a picture"),
        ("mistral4", "names no token that stands for a picture"),
    ],
)
def test_the_gate(kind, why, tmp_path):
    transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(EnvironmentProblem, match=f"a model of type .*{why}.*; use one whose decoder"):
        generic.gate(str(tmp_path))


def test_a_processor_that_fails_in_a_chat_is_said(tmp_path):
    """Fuyu's puts its picture first by itself."""
    with pytest.raises(EnvironmentProblem, match=r"'fuyu' has a processor that fails at a picture in a chat \(Runtime"):
        load_family(tiny_kinds.build("fuyu", tmp_path))


CODE = """
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
class MineConfig(SmolVLMConfig):
    model_type = "mine"
class Mine(SmolVLMForConditionalGeneration):
    config_class = MineConfig
"""


def test_code_of_a_folder_is_run_if_it_is_trusted(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(kind("smolvlm")[0].path, tmp_path / "mine")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig", ANY_AUTO: "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text(CODE)
    with pytest.raises(EnvironmentProblem, match=r"model_type 'mine'.*model.trust_remote_code=true runs"):
        load_family(str(folder))
    family = load_family(str(folder), trust_remote_code=True)
    assert family.spec.auto_class == ANY_AUTO and family.name == "mine"
    family = replace(family, spec=replace(family.spec, prove=lambda model, family: None))
    model = load_model(family, dtype=torch.float32, device=CPU, trust_remote_code=True)
    assert type(model).__name__ == "Mine" and differing(family, model) is None


def test_what_such_a_model_does_not_take_is_refused_by_name(kind):
    family, _ = kind("smolvlm")
    with pytest.raises(DataError, match="takes text and image and video, but a row holds a sound"):
        family.render(ask(sound(0.5), "x"))


# -- prompts and pictures --------------------------------------------------------------------------


def test_typed_markers_are_prose_and_breaks_are_no_picture(kind):
    family, _ = kind("mistral3")
    typed = family.render(ask(proof_rows.noise(60, 50, 0), "write [IMG] here"))
    assert len(typed.media) == 1
    inside = typed.ids[typed.media[0].start : typed.media[0].end]
    breaks = family.chat.tokenizer.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])
    assert breaks[0] in inside and family.banned[[*breaks, family.chat.placeholder]].all()
    assert family.chat.decode(typed.ids, special=True).count("[IMG]") == (inside == family.chat.placeholder).sum() + 1


def test_a_pixel_budget_scales_the_picture_down(kind):
    family, _ = kind("mistral3")
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    small, large = (family.measure(open_media(pixels, min_pixels=1, max_pixels=n))[1] for n in (2500, 10_000))
    assert small < large
    assert family.picture(open_media(pixels, min_pixels=1, max_pixels=2500)).shape == (50, 50, 3)


def test_of_a_folder_that_speaks_too_the_thinker_is_loaded(kind, tmp_path):
    """As Qwen3-Omni is published."""
    family, model = kind("qwen3_omni_moe_thinker")
    folder = shutil.copytree(family.path, tmp_path / "whole")
    thinker = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker}))
    stored = {f"thinker.{name}": p for name, p in load_file(folder / "model.safetensors").items()}
    spoken = {"talker.a.weight": torch.ones(2), "code2wav.b.weight": torch.ones(1)}
    save_file(stored | spoken, folder / "model.safetensors", metadata={"format": "pt"})
    whole = load_family(str(folder))
    assert whole.spec.towers == family.spec.towers and whole.spec.prove is proof.prove
    loaded = load_model(
        replace(whole, spec=replace(whole.spec, prove=family.spec.prove)), dtype=torch.float32, device=CPU
    )
    assert loaded.config.model_type == "qwen3_omni_moe_thinker"
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm: it needs all models of a qwen3_omni_moe folder"):
        build_engine(Settings(engine="vllm", folder=whole.path, dtype="float32"), whole)


@pytest.mark.parametrize(
    ("name", "bridge"),
    [
        ("lighton_ocr", "vision_projection"),
        ("ernie4_5_vl_moe", "resampler_model"),
        ("ovis2", "visual_embeddings_table"),
        ("janus", "aligner"),
    ],
)
def test_what_lies_between_a_tower_and_the_decoder_is_the_projector(kind, name, bridge):
    family, model = kind(name)
    towers = family.spec.towers
    assert towers["projector"] == (f"model.{bridge}.",)
    assert len(towers["vision"]) == 1 and towers["vision"][0].startswith("model.vision_")
    if name == "janus":  # what makes pictures is kept, and not trained
        assert towers["drawing"][0] == "model.vqmodel." and trainable_table(model, family)["drawing"][0] == 0
