"""The encoder of time series on top of families: places, numbers, gradients, files."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from saccade.algorithms import select
from saccade.config import LoraConfig, SeriesConfig, TrainConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.forest.packing import pack
from saccade.media.images import ImageError
from saccade.models import lora
from saccade.models.load import freeze, load_model, trainable_table
from saccade.plugins.engines import parity
from saccade.plugins.series import series_tower
from saccade.plugins.series.series_files import open_series
from saccade.recipes.sft import SUPERVISED
from saccade.system.contents import write_files
from saccade.trainer import MODEL_SCORING, Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Group, Request, Sample, Sampling
from tests.models.against import CPU, ask, assert_forests_are_plain_rows, pair, rows_of

SETTINGS = SeriesConfig(encoder="patches", channels=2, patch=10, width=16, layers=1)
OWN_MODULE = """
import torch
class Means(torch.nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.out = torch.nn.Linear(channels, hidden)
        self.register_buffer("seen", torch.zeros(1))
    def tokens(self, channels, samples):
        return samples // 5
    def forward(self, values):
        return self.out(values[:, : values.shape[1] // 5 * 5].unflatten(1, (-1, 5)).mean(2).T)
def make(channels, hidden):
    return Means(channels, hidden)
def wrong(channels, hidden):
    return torch.nn.Linear(channels, hidden)
"""


def wave(samples, seed=0):
    return open_series(np.random.default_rng(seed).normal(size=(2, samples)).astype("f4"))


@pytest.fixture
def plugged(family_of):
    return lambda name, settings=SETTINGS: series_tower.plugged(family_of(name), settings)


def loaded(family, seed=0):
    return load_model(family, dtype=torch.float32, device=CPU, seed=seed)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "internvl", "qwen2_5_omni"])
def test_any_family_shows_a_series_where_it_stands(plugged, family_of, name):
    family, plain = plugged(name), family_of(name)
    rendered = family.render(ask("a ", wave(95), "b"))
    (span,) = rendered.media
    assert span.length == 10  # the last patch is filled up
    token = family.chat.placeholders["series"]
    assert np.flatnonzero(rendered.ids == token).tolist() == list(range(span.start, span.end))
    around = np.delete(rendered.ids, np.arange(span.start, span.end)).tolist()
    before, after = plain.chat.text_of(ask("a \0b"), True).split("\0")
    assert around == [*plain.chat._encode(before), *plain.chat._encode(after)]
    assert token == plain.vocabulary - 1 and family.banned[token]
    assert token not in plain.chat.tokenizer.get_vocab().values()
    assert (family.positions(rendered.ids, rendered.media) == np.arange(len(rendered))).all()
    assert family.render(ask("text")).ids.tolist() == plain.render(ask("text")).ids.tolist()
    typed = family.render(ask(f"a {chr(0x10FFFF)} <series> b", wave(20)))  # nothing that is typed becomes a series
    assert (typed.ids == token).sum() == 2


@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm"])
def test_a_series_is_read_by_families_with_words_among_their_media(plugged, image, name):
    """In the engine, and in forests as in rows."""
    if name == "smolvlm":
        pytest.importorskip("torchvision")
    family = plugged(name)
    model = loaded(family)
    assert_forests_are_plain_rows(model, family, pair(wave(20), "x", image(), wave(35, 1), "y"))
    prompts = [family.render(ask(image(), wave(35, seed), "y")) for seed in (1, 2)]
    with torch.no_grad():
        options = [(torch.from_numpy(p.ids), family.features(model, family.media(p.media))) for p in prompts]
        (span,), places = prompts[0].media[1:], torch.cat([torch.arange(s.start, s.end) for s in prompts[0].media])
        one, other = (family.embed(model, ids, places, made)["inputs_embeds"][0] for ids, made in options)
    assert torch.equal(one[: span.start], other[: span.start]) and torch.equal(one[span.end :], other[span.end :])
    assert (one[span.start : span.end] != other[span.start : span.end]).any()


def test_a_picture_and_a_series_keep_their_order(plugged, image):
    family = plugged("qwen2_5_vl")
    model = loaded(family)
    shown = [wave(20), image(), wave(35, 1)]
    rendered = family.render(ask(shown[0], "x", shown[1], shown[2], "y"))
    assert [span.length for span in rendered.media] == [2, 4, 4]
    made = family.features(model, family.media(rendered.media))
    apart = [family.features(model, family.media([span])) for span in rendered.media]
    assert torch.allclose(made, torch.cat(apart), atol=1e-6)
    places = family.positions(rendered.ids, rendered.media)
    start = rendered.media[1].start
    assert places[:, start : start + 4].max(1).tolist() == [start, start + 1, start + 1]
    assert places[0, start + 4] == start + 2  # text goes on behind the picture, over the series


def test_rows_that_do_not_fit_are_refused(plugged, family_of):
    with pytest.raises(ConfigError, match=r"try model\.series\.encoder=patches model\.series\.channels=2"):
        family_of("qwen2").render(ask(wave(20)))
    with pytest.raises(ImageError, match=r"3 leads, model\.series\.channels is 2$"):
        plugged("qwen2").render(ask(open_series(np.ones((3, 20)))))
    with pytest.raises(ImageError, match=r"20 leads, .* is 2; is it transposed, \[samples, leads"):
        plugged("qwen2").render(ask(open_series(np.ones((20, 2)))))


def test_a_vocabulary_without_a_spare_row_lends_a_reserved_token(family_of):
    full = family_of("llama")
    size = len(full.chat.tokenizer)
    full = replace(full, vocabulary=size, banned=full.banned[:size])
    with pytest.raises(ConfigError, match=r"no id is spare.*\.series\.token=<\|vision_pad"):
        series_tower.plugged(full, SETTINGS)
    free = full.chat.tokenizer.convert_tokens_to_ids("<|vision_pad|>")
    chosen = SETTINGS.model_copy(update={"token": "<|vision_pad|>"})
    family = series_tower.plugged(full, chosen)
    assert family.chat.placeholders["series"] == free and family.banned[free]
    typed = family.render(ask("<|vision_pad|>", wave(20)))
    assert (typed.ids == free).sum() == 2
    with pytest.raises(ConfigError, match=r"<\|im_end\|> cannot stand"):
        series_tower.plugged(full, SETTINGS.model_copy(update={"token": "<|im_end|>"}))


def test_leads_are_compared_by_their_shape(plugged):
    wavy = torch.sin(torch.arange(40.0))[None]
    scaled = series_tower.normalised(torch.cat([wavy, 1000 * wavy + 5, torch.zeros(1, 40)]))
    assert torch.allclose(scaled[0], scaled[1], atol=1e-3) and not scaled[2].any()
    spike = torch.zeros(1, 40)
    spike[0, 7] = 1e-3
    assert 5 < series_tower.normalised(spike).max() < 7  # of its deviation: the quartiles are equal
    assert series_tower.normalised(torch.cat([wavy, torch.full((1, 1), 1e9)], 1)).max() == 10


def test_the_engine_answers_as_the_trainer_scores(plugged):
    family = plugged("qwen2_5_vl")
    model, sampling = loaded(family), Sampling(max_tokens=6, ignore_eos=True)
    prompts = [family.render(ask("a", wave(30 + n, n), "b")) for n in range(3)]
    asked = [Request(key=str(n), ids=p.ids, media=p.media, sampling=sampling, noise=n) for n, p in enumerate(prompts)]
    answers = generate(EmbeddedEngine(model, family), asked)
    groups = [
        Group(sample=Sample(id=request.key, messages=()), trajectories=(parity.trajectory(request, answer),))
        for request, answer in zip(asked, answers, strict=True)
    ]
    batches = pack(groups, micro_tokens=4096)
    ((scored, _),) = LocalTrainer(model, family).logprobs(batches, Scoring())
    sampled = np.concatenate([answer.logprobs for answer in answers])
    assert np.abs(scored - sampled).max() < 1e-4
    with torch.no_grad():
        model.series.inner.last.weight.neg_()
    ((moved, _),) = LocalTrainer(model, family).logprobs(batches, Scoring())
    assert np.abs(moved - sampled).max() > 1e-3


def test_a_group_shares_its_series_and_gradients_reach_the_encoder(plugged):
    family = plugged("qwen2")
    model = loaded(family)
    sample = pair(wave(50), "?")
    assert_forests_are_plain_rows(model, family, sample)
    apart = rows_of(sample, family)
    learning = loaded(family)
    assert trainable_table(learning, family)["series"][0] > 0
    before = {n: p.detach().clone() for n, p in learning.series.named_parameters()}
    freeze(learning, family, "freeze:llm")
    backend = LocalTrainer(learning, family, TrainConfig())
    words = learning.get_input_embeddings().weight.detach().clone()
    rows, loss = select.write_supervision(apart), PolicyLoss(SUPERVISED, MODEL_SCORING)
    losses = [backend.train_step(rows, loss, lr=1e-2).metrics.means()["policy/loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.01
    after = dict(learning.series.named_parameters())
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(words, learning.get_input_embeddings().weight)
    still = loaded(family)
    freeze(still, family, "freeze:series")
    assert not any(p.requires_grad for p in still.series.parameters())
    assert trainable_table(still, family)["llm"][1] == 0


def test_the_encoder_lies_beside_a_model_that_anybody_loads(plugged, family_of, tmp_path):
    family = plugged("qwen2")
    model = loaded(family, seed=3)
    assert not torch.equal(model.series.inner.first.weight, loaded(family).series.inner.first.weight)
    write_files(tmp_path, LocalTrainer(model, family).model_files())
    assert hasattr(model, "series")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(family.path) / name, tmp_path)
    plain = replace(family_of("qwen2"), path=str(tmp_path))
    again = series_tower.plugged(plain, SeriesConfig())
    assert again.series == SETTINGS
    mine, theirs = model.series.state_dict(), loaded(again).series.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)
    with pytest.raises(ConfigError, match=r"model\.series\.patch=25: the encoder in .* has 10"):
        series_tower.plugged(plain, SeriesConfig(encoder="patches", patch=25))
    adapted = loaded(again)
    lora.add(adapted, again, LoraConfig(rank=2), seed=0)
    assert not any(p.requires_grad for p in adapted.series.parameters())
    write_files(tmp_path / "merged", LocalTrainer(adapted, again, TrainConfig()).model_files())
    assert (tmp_path / "merged" / series_tower.SERIES_FILE).is_file()
    with pytest.raises(ConfigError, match="'series' matches no linear layer"):
        lora.add(loaded(again), again, LoraConfig(rank=2, targets="series"), seed=0)


def test_a_module_of_the_user_is_run_where_a_config_names_it(family_of, tmp_path):
    (tmp_path / "own.py").write_text(OWN_MODULE)
    named = SeriesConfig(encoder=f"{tmp_path}/own.py:make", channels=2)
    family = series_tower.plugged(family_of("qwen2"), named)
    model = loaded(family)
    rendered = family.render(ask(wave(23)))
    assert rendered.media[0].length == 4
    assert family.features(model, family.media(rendered.media)).shape == (4, 64)
    with pytest.raises(ImageError, match=r"4 samples are 0 tokens of .*own\.py:make; give more"):
        family.render(ask(wave(4)))
    with pytest.raises(ConfigError, match=r"forward gave \[4, 64\], and by its tokens\(\) it is"):
        model.series(torch.zeros(2, 23), [23], [5])
    write_files(tmp_path, LocalTrainer(model, family).model_files())
    plain = replace(family_of("qwen2"), path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"a user's module; say where it is, such as model"):
        series_tower.plugged(plain, SeriesConfig())
    shutil.copy(tmp_path / "own.py", tmp_path / "moved.py")
    moved = series_tower.plugged(plain, SeriesConfig(encoder=f"{tmp_path}/moved.py:make"))
    assert moved.series.channels == 2
    assert torch.equal(loaded(moved).series.inner.out.weight, model.series.inner.out.weight)
    wrong = named.model_copy(update={"encoder": f"{tmp_path}/own.py:wrong"})
    with pytest.raises(ConfigError, match="gives Linear; it needs"):
        series_tower.plugged(family_of("qwen2"), wrong)
    other = OWN_MODULE.replace("Linear(channels, hidden)\n        self.reg", "Linear(3, 4); self.reg")
    (tmp_path / "moved.py").write_text(other)
    with pytest.raises(EnvironmentProblem, match="not those of this model"):
        loaded(moved)


BROKEN = """
import torch
class Base(torch.nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.out = torch.nn.Linear(channels, hidden)
    def tokens(self, channels, samples):
        return 1
    def forward(self, values):
        return {forward}
def make(channels, hidden):
    {first}
    return Base(channels, hidden){end}
"""
READ = "self.out(values.mean(1))[None]"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"end": ")"}, r"own\.py:make: .*own\.py raised SyntaxError: .*\(own\.py:13\)"),
        ({"first": "raise ValueError('boom')"}, r"\(2, 64\) raises ValueError: boom \(own\.py:12"),
        ({"forward": f"{READ} / 0 * 0"}, "forward gives numbers that are not finite"),
        ({"forward": f"{READ} + torch.randn(1)"}, "remove dropout and noise"),
    ],
)
def test_a_broken_module_is_refused_by_the_first_row(family_of, tmp_path, changes, why):
    usual = {"forward": READ, "first": "", "end": ""}
    (tmp_path / "own.py").write_text(BROKEN.format(**usual | changes))
    named = SeriesConfig(encoder=f"{tmp_path}/own.py:make", channels=2)
    with pytest.raises(ConfigError, match=why):
        series_tower.plugged(family_of("qwen2"), named).render(ask(wave(20)))
