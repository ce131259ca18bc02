"""Media to ask about, and the same answers and scores from us and from transformers."""

from dataclasses import replace

import numpy as np
import torch

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.forest.packing import pack
from saccade.plugins.media import sounds
from saccade.plugins.preferences.pairs import compared
from saccade.recipes.to_trajectory import dialogue
from saccade.trainer import OWN
from saccade.trainer.local import LocalBackend
from saccade.types import Message, Request, Sample, Sampling

CPU = torch.device("cpu")


def ask(*parts):
    return (Message(role="user", parts=parts),)


def noise(seconds, seed=0):
    samples = np.random.default_rng(seed).normal(size=round(seconds * 16_000)) * 0.1
    return sounds.open_sound(samples.astype("f4"))


def film(frames, height=84, width=112, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), np.uint8)


# -- greedy answers --------------------------------------------------------------------------------


def ours(model, family, prompts, tokens=8):
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asked = [Request(key=str(n), ids=p.ids, media=p.media, sampling=sampling) for n, p in enumerate(prompts)]
    return [done.ids.tolist() for done in generate(EmbeddedEngine(model, family), asked)]


def theirs(model, family, prompts, tokens=8):
    found = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.ids)[None]
        vision = dict(family.vision(prompt.media, CPU, torch.float32))
        if vision and family.axes > 1 and "omni" not in family.name:
            vision["mm_token_type_ids"] = kinds_of(prompt)
        made = model.eval().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            suppress_tokens=np.flatnonzero(family.banned).tolist(),
            **vision,
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def kinds_of(prompt):
    """[1, tokens]: 1 in an image, 2 in a video."""
    kinds = torch.zeros(1, len(prompt), dtype=torch.long)
    for span in prompt.media:
        kinds[:, span.start : span.end] = 1 if span.media.kind == "image" else 2
    return kinds


# -- two replies to one question -------------------------------------------------------------------


def pair(*parts):
    replies = [(Message(role="assistant", parts=(text,)),) for text in ("rain", "a bell")]
    return Sample(id="s", messages=ask(*parts), candidates=tuple(replies))


def forest_of(sample, family):
    (forest,) = pack([compared(sample, family)], micro_tokens=4096)
    return forest


def rows_of(sample, family):
    rows = [
        dialogue(replace(sample, messages=(*sample.messages, *reply)), family, "assistant")
        for reply in sample.candidates
    ]
    return [batch for row in rows for batch in pack([row], micro_tokens=4096)]


def assert_forests_are_plain_rows(model, family, sample):
    """The media stand in the trunk once, the scores are those of single rows."""
    forest, backend = forest_of(sample, family), LocalBackend(model, family)
    assert len(forest.media) == len(sample.messages[0].media) and len(forest.keys) == 2
    ((together, _),) = backend.logprobs([forest], OWN)
    apart = [backend.logprobs([row], OWN)[0][0] for row in rows_of(sample, family)]
    assert np.abs(together - np.concatenate(apart)).max() < 1e-5
