"""Media to ask about, and the same answers and scores from us and from transformers."""

from dataclasses import replace

import numpy as np
import torch
import transformers

from saccade.algorithms import select
from saccade.config import LoraConfig, TrainConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.plugins.families import proof_rows
from saccade.plugins.families.door import cast
from saccade.plugins.media import sounds
from saccade.plugins.preferences.pairs import candidate_group
from saccade.recipes.sft import SUPERVISED
from saccade.recipes.to_trajectory import dialogue
from saccade.run.checkpoint import copy_processor
from saccade.system.contents import write_files
from saccade.trainer import MODEL_SCORING
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Message, Request, Sample, Sampling

CPU = torch.device("cpu")


def ask(*parts):
    return (Message(role="user", parts=parts),)


def noise(seconds, seed=0):
    samples = np.random.default_rng(seed).normal(size=round(seconds * 16_000)) * 0.1
    return sounds.open_sound(samples.astype("f4"))


def film(frames, height=84, width=112, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), np.uint8)


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
            vision["mm_token_type_ids"] = kinds_of(prompt, family)
        made = model.eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, eos_token_id=None, suppress_tokens=np.flatnonzero(family.banned).tolist(), **vision,
        )  # fmt: skip
        found.append(made[0, ids.shape[1] :].tolist())
    return found


def kinds_of(prompt, family):
    """[1, tokens]: 1 in an image, 2 in a video."""
    marks = (family.chat.placeholders.get(kind, -1) for kind in ("image", "video"))
    return torch.from_numpy(sum(n * (prompt.ids == mark) for n, mark in enumerate(marks, 1)))[None]


def pair(*parts):
    replies = [(Message(role="assistant", parts=(text,)),) for text in ("rain", "a bell")]
    return Sample(id="s", messages=ask(*parts), candidates=tuple(replies))


def forest_of(sample, family):
    (forest,) = pack([candidate_group(sample, family)], micro_tokens=4096)
    return forest


def rows_of(sample, family):
    rows = [
        dialogue(replace(sample, messages=(*sample.messages, *reply)), family, "assistant")
        for reply in sample.candidates
    ]
    return [batch for row in rows for batch in pack([row], micro_tokens=4096)]


def assert_forests_are_plain_rows(model, family, sample):
    """The media stand in the trunk once, the scores are those of single rows."""
    forest, backend = forest_of(sample, family), LocalTrainer(model, family)
    assert len(forest.media) == len(sample.messages[0].media) and len(forest.keys) == 2
    ((together, _),) = backend.logprobs([forest], MODEL_SCORING)
    apart = [backend.logprobs([row], MODEL_SCORING)[0][0] for row in rows_of(sample, family)]
    assert np.abs(together - np.concatenate(apart)).max() < 1e-5


def gradient_gap(family, model, rows=(), packed_by=None, packed=()):
    """Of all weights, from a forest and from separate rows through transformers: the worst, of the largest entry.
    `packed`: the same rows as the family `packed_by` packs them.
    """
    rows = rows or proof_rows.probes(family)
    model.eval().requires_grad_(True)

    def gradients(logits):
        total = torch.zeros(())
        for row, found in zip(rows, logits, strict=True):
            answer = torch.from_numpy(row.ids[len(row.prompt.ids) :])
            total = total + found[:-1].log_softmax(-1).gather(1, answer[:, None]).sum()
        total.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        model.zero_grad(set_to_none=True)
        return found

    wanted = gradients([proof_rows.theirs(model, row)[0][1] for row in rows])
    found = gradients([logits for _, logits in proof_rows.packed_rows(model, packed_by or family, packed or rows)])
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    gaps = []
    for name in wanted.keys() | found.keys():
        one, other = (each.get(name, torch.zeros(())) for each in (wanted, found))
        gaps.append(float((one - other).abs().max()) / max(float(one.abs().max()), 1e-3 * largest))
    return max(gaps)


def second_turn_gap(family, model, *shown):
    """A second turn with a new picture, or what else is shown, on a live cache: how far its log-probs are from those of
    the trainer.
    """
    engine, sampling = EmbeddedEngine(model, family), Sampling(max_tokens=6, ignore_eos=True)
    first = family.render(ask(proof_rows.noise(60, 50, 0), "First?"))
    (one,) = generate(engine, [Request(key="a", ids=first.ids, media=first.media, sampling=sampling, episode="e")])
    messages = [Message(role="user", parts=("And ", *(shown or (proof_rows.noise(100, 60, 9),)), "?"))]
    more = family.render_continuation(messages, last_id=int(one.ids[-1]))
    ids = np.concatenate([first.ids, one.ids, more.ids])
    media = (*first.media, *(span.moved(len(first) + len(one.ids)) for span in more.media))
    asked = Request(key="b", ids=ids, media=media, sampling=sampling, episode="e", first_index=6)
    (two,) = generate(engine, [asked])
    whole = proof_rows.ProofRow(
        replace(first, ids=ids, sources=np.zeros(len(ids), np.int8), media=media), np.concatenate([ids, two.ids]), {}
    )
    with torch.no_grad():
        ((_, logits),) = proof_rows.packed_rows(model.eval(), family, [whole])
    scores = logits[:-1, : family.vocabulary].masked_fill(torch.from_numpy(family.banned), -torch.inf).log_softmax(-1)
    return float(np.abs(scores.numpy()[np.arange(6), two.ids] - two.logprobs).max())


def adapted_and_exported(family, model, folder):
    """By how much steps of adapters lower a loss; prompts that transformers answers alike from the folder that is
    written then, and all.
    """
    lora.add(model, family, LoraConfig(rank=2), seed=0)
    sample = Sample(
        id="s", messages=(*ask(proof_rows.noise(90, 64, 5), "What?"), Message(role="assistant", parts=("It.",)))
    )
    batches = select.write_supervision(pack([dialogue(sample, family, "assistant")], micro_tokens=4096))
    backend = LocalTrainer(model, family, TrainConfig())
    losses = [
        backend.train_step(batches, PolicyLoss(SUPERVISED, MODEL_SCORING), lr=1e-2).metrics.means()["policy/loss"]
        for _ in range(3)
    ]
    write_files(folder, lora.files(model))
    copy_processor(family, folder)
    auto = getattr(transformers, family.spec.auto_class)
    merged, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    return losses[0] - losses[-1], *greedy_prompts(family, model, merged.eval())


def greedy_prompts(family, model, stock, questions=()):
    """Prompts whose greedy tokens are those of `generate`, and all."""
    pictures = [proof_rows.noise(90, 64, 5), proof_rows.noise(50, 130, 6)]
    usual = [("Look ", pictures[0], " and ", pictures[1], " what?"), (pictures[1], "Why?"), ("Hello there.",)]
    sampling = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
    requests, wanted, stock.generation_config.eos_token_id = [], [], None
    for number, parts in enumerate(questions or usual):
        try:
            inputs = proof_rows.processed(family, parts)
        except ValueError:  # some processors cannot take pictures of different sizes together
            parts = tuple(pictures[0] if part is pictures[1] else part for part in parts)
            inputs = proof_rows.processed(family, parts)
        prompt = family.render(ask(*parts))
        requests.append(Request(key=str(number), ids=prompt.ids, media=prompt.media, sampling=sampling))
        how = {"do_sample": False, "max_new_tokens": 10, "suppress_tokens": np.flatnonzero(family.banned).tolist()}
        made = stock.generate(**cast(inputs, CPU, torch.float32), **how)
        wanted.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    found = {done.key: done.ids.tolist() for done in generate(EmbeddedEngine(model, family), requests)}
    return sum(found[str(number)] == ids for number, ids in enumerate(wanted)), len(wanted)
