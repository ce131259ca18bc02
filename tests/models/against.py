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
from saccade.types import Batch, Media, Message, Rendered, Request, Sample, Sampling

CPU = torch.device("cpu")


def ask(*parts: str | Media) -> tuple[Message, ...]:
    return (Message(role="user", parts=parts),)


def noise(seconds: float, seed: int = 0) -> Media:
    samples = np.random.default_rng(seed).normal(size=round(seconds * 16_000)) * 0.1
    return sounds.open_sound(samples.astype("f4"))


def film(frames: int, height: int = 84, width: int = 112, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), np.uint8)


# -- greedy answers --------------------------------------------------------------------------------


def ours(model, family, prompts: list[Rendered], tokens: int = 8) -> list[list[int]]:
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asked = [Request(key=str(n), ids=p.ids, media=p.media, sampling=sampling) for n, p in enumerate(prompts)]
    return [done.ids.tolist() for done in generate(EmbeddedEngine(model, family), asked)]


def theirs(model, family, prompts: list[Rendered], tokens: int = 8) -> list[list[int]]:
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


def kinds_of(prompt: Rendered) -> torch.Tensor:
    """[1, tokens]: 1 in an image, 2 in a video."""
    kinds = torch.zeros(1, len(prompt), dtype=torch.long)
    for span in prompt.media:
        kinds[:, span.start : span.end] = 1 if span.media.kind == "image" else 2
    return kinds


# -- two replies to one question -------------------------------------------------------------------


def pair(*parts: str | Media) -> Sample:
    replies = [(Message(role="assistant", parts=(text,)),) for text in ("rain", "a bell")]
    return Sample(id="s", messages=ask(*parts), candidates=tuple(replies))


def forest_of(sample: Sample, family) -> Batch:
    (forest,) = pack([compared(sample, family)], positions=family.positions, micro_tokens=4096)
    return forest


def rows_of(sample: Sample, family) -> list[Batch]:
    rows = [
        dialogue(replace(sample, messages=(*sample.messages, *reply)), family, "assistant")
        for reply in sample.candidates
    ]
    return [batch for row in rows for batch in pack([row], positions=family.positions, micro_tokens=4096)]


def assert_forests_are_plain_rows(model, family, sample: Sample) -> None:
    """The media stand in the trunk once, the scores are those of single rows."""
    forest, backend = forest_of(sample, family), LocalBackend(model, family)
    assert len(forest.media) == len(sample.messages[0].media) and len(forest.keys) == 2
    ((together, _),) = backend.logprobs([forest], OWN)
    apart = [backend.logprobs([row], OWN)[0][0] for row in rows_of(sample, family)]
    assert np.abs(together - np.concatenate(apart)).max() < 1e-5
