"""Preferences on forests: loss and every gradient are those of transformers on padded pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.config import TrainConfig
from saccade.forest.batch import Batch
from saccade.forest.packing import halves, pack
from saccade.plugins.preferences.pairs import candidate_group
from saccade.plugins.preferences.preference_losses import (
    PREFERENCES,
    UNPAIRED,
    WITHOUT_REFERENCE,
    Labelled,
    Pairs,
    PreferenceLoss,
    of_step,
)
from saccade.trainer.local import LocalTrainer
from saccade.types import Group, Message, Sample

NLL, Z = 0.3, 0.05
FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(FAMILY)


@pytest.fixture(scope="module")
def groups(family, image) -> list[Group]:
    """Pictures in the prompt, on one side only, on both sides, an earlier reply, and none."""

    def said(role, *parts):
        return Message(role=role, parts=parts)

    look = said("user", image(84, 56, 1), "look closer")
    other = said("user", image(56, 56, 2), "look there")
    asked = (said("user", image(), "how many objects?"),)
    talk = (*asked, said("assistant", "three"), said("user", "sure?"))
    plain = (said("user", "two and two?"),)
    reply = lambda text: said("assistant", text)  # noqa: E731
    rows = [
        (asked, (reply("three of them"),), (reply("a dog"),)),
        (asked, (reply("zoom"), look, reply("four")), (reply("zoom in"),)),
        (talk, (reply("zoom"), look, reply("yes")), (reply("zoom"), other, reply("no, five"))),
        (plain, (reply("four"),), (reply("twenty two, I am sure"),)),
    ]
    return [
        candidate_group(Sample(id=f"s{n}", messages=q, candidates=(good, bad)), family)
        for n, (q, good, bad) in enumerate(rows)
    ]


def references(groups: list[Group]) -> dict[tuple[str, int], float]:
    rng = np.random.default_rng(0)
    members = [t for group in groups for t in group.trajectories]
    return {t.key: -5.5 * t.response_length + rng.normal() for t in members}


def packed(groups, family, budget) -> list[Batch]:
    known = references(groups)
    batches = pack(groups, micro_tokens=budget, whole=True)
    return [replace(b, ref_totals=np.array([known[key] for key in b.keys])) for b in batches]


def stock_loss(inputs, stock, groups: list[Group], name: str) -> tuple[float, dict]:
    members = [t for group in groups for t in group.trajectories]
    scores = stock(**inputs).logits.float().log_softmax(-1)
    totals = []
    for row, t in enumerate(members):
        policy = np.flatnonzero(t.policy_mask)
        totals.append(scores[row, policy - 1, torch.from_numpy(t.ids[policy])].double().sum())
    now = torch.stack(totals)
    known = references(groups)
    ref = torch.tensor([known[t.key] for t in members], dtype=torch.float64)
    lengths = torch.tensor([t.response_length for t in members])
    if name in UNPAIRED:
        good = torch.tensor([t.repeat == 0 for t in members])
        inputs = Labelled(logprobs=now, ref=ref, desirable=good, z=torch.tensor(Z))
    else:
        reference = None if name in WITHOUT_REFERENCE else (ref[::2], ref[1::2])
        inputs = Pairs(policy=(now[::2], now[1::2]), lengths=(lengths[::2], lengths[1::2]), reference=reference)
    losses, _ = PREFERENCES[name].function(inputs)
    loss = losses.mean() - NLL * now[::2].sum() / lengths[::2].sum()
    stock.zero_grad()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in stock.named_parameters()}


@pytest.mark.parametrize("name", PREFERENCES)
def test_any_partition_has_the_gradient_of_padded_pairs(name, groups, family, load, stock, measured, padded):
    inputs = padded(family, [t for group in groups for t in group.trajectories], torch.float32)
    wanted = stock_loss(inputs, stock(FAMILY), groups, name)
    whole = torch.stack([g.norm() for g in wanted[1].values()]).norm()
    backend = LocalTrainer(load(FAMILY), family, TrainConfig())
    sizes = []
    for budget in (10_000, 1):  # one forest, every pair by itself
        batches = packed(groups, family, budget)
        sizes.append(len(batches))
        row = of_step(PreferenceLoss(loss=name, options={}, nll_coef=NLL), batches, z=Z)
        means, seen = measured(backend, batches, row)
        assert means["policy/loss"] == pytest.approx(wanted[0], rel=1e-6)
        errors = [(seen[n] - gradient).norm() for n, gradient in wanted[1].items()]
        assert torch.stack(errors).norm() <= 1e-6 * whole
    assert sizes[0] == 1 and sizes[-1] == len(groups) and whole > 1e-4


def test_a_pair_shares_its_prompt_and_is_never_divided(groups, family):
    (batch,) = packed(groups, family, 10_000)
    apart = sum(len(t.ids) - 1 for group in groups for t in group.trajectories)
    assert batch.tokens < 0.75 * apart
    pictures = [span.media for span in batch.media]
    assert len(pictures) == 1 + 2 + 3  # that of a prompt once, those of the sides in their leaves
    for budget in (1, 30, 60):
        for part in packed(groups, family, budget):
            assert [key[1] for key in part.keys] == [0, 1] * (len(part.keys) // 2)
    first, second = halves(batch, whole=True)
    assert [len(half.keys) for half in (first, second)] == [4, 4]
    assert halves(halves(first, whole=True)[0], whole=True) is None
    assert second.ref_totals.tolist() == batch.ref_totals[4:].tolist()


def test_what_was_said_before_is_not_trained(groups, family):
    texts = [family.decode(groups[2].trajectories[side].response_ids) for side in (0, 1)]
    assert [text.replace(" ", "") for text in texts] == ["zoomyes", "zoomno,five"]


def test_running_out_of_memory_divides_a_forest_between_pairs(groups, family, load, monkeypatch):
    backend, batches, read = LocalTrainer(load(FAMILY), family, TrainConfig()), packed(groups, family, 10_000), []
    row = of_step(PreferenceLoss(loss="dpo", options={}), batches)
    whole = backend.train_step(batches, row, lr=0.0).metrics.means()
    plain = PreferenceLoss.forward

    def scarce(loss, trainer, batch):
        read.append(len(batch.keys))
        if len(batch.keys) > 4:
            raise torch.OutOfMemoryError
        return plain(loss, trainer, batch)

    monkeypatch.setattr(PreferenceLoss, "forward", scarce)
    split = backend.train_step(batches, row, lr=0.0).metrics.means()
    assert read == [8, 4, 4] and split["mem/oom_splits"] == 1
    for metric in ("policy/loss", "policy/grad_norm", "dpo/margin", "dpo/accuracy", "dpo/nll"):
        assert split[metric] == pytest.approx(whole[metric], rel=1e-5)
