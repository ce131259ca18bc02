"""DPO on pictures: loss and gradient of TRL's own trainer on the same tiny vision model."""

import numpy as np
import pytest
import torch

from saccade.config import DataConfig, DataSource, TrainConfig
from saccade.data.datasets import load
from saccade.forest.packing import pack
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.preferences.dpo import logp_sums
from saccade.plugins.preferences.pairs import candidate_group
from saccade.plugins.preferences.preference_losses import PreferenceLoss, of_step
from saccade.trainer.local import LocalTrainer
from saccade.types import Message, replace

ROWS = {"prompt": ["how many ?"], "chosen": ["3"], "rejected": ["red"]}
# TRL's name, its further options, ours.
CASES = {
    "dpo": ("sigmoid", {}, {}),
    "robust": ("robust", {"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
    "ipo": ("ipo", {}, {}),
    "hinge": ("hinge", {}, {}),
    "dpo_norm": ("sigmoid_norm", {}, {}),
}


def bend(model):
    """Another model, so that policy and reference differ."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "language_model" in name and name.endswith("norm.weight"):
                parameter.mul_(1.3)


def theirs_of(family, groups):
    """Our pairs as their padded rows: all chosen, then all rejected."""
    members = [group.trajectories[side] for side in (0, 1) for group in groups]
    ids = torch.zeros(len(members), max(len(t.ids) for t in members), dtype=torch.long)
    mask, trained = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, t in enumerate(members):
        ids[row, : len(t.ids)], mask[row, : len(t.ids)] = torch.from_numpy(t.ids), 1
        trained[row, : len(t.ids)] = torch.from_numpy(t.policy_mask.astype(np.int64))
    spans = [span for t in members for span in t.media]
    return {
        "input_ids": ids, "attention_mask": mask, "completion_mask": trained,
        "mm_token_type_ids": (ids == family.chat.placeholder).long(),
        **family.vision(spans, torch.device("cpu"), torch.float32),
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, scenes, word_model, trl_trainer):
    family = load_family(word_model)
    samples = load([DataSource(path=str(scenes / "val.jsonl"))], DataConfig()).samples[:3]
    replies = [("3 objects", "red"), ("blue", "2 3 4"), ("4", "how many")]
    sides = [tuple((Message(role="assistant", parts=(r,)),) for r in pair) for pair in replies]
    pairs = [replace(s, candidates=c) for s, c in zip(samples, sides, strict=True)]
    groups = [candidate_group(sample, family) for sample in pairs]

    loss_type, options, own = CASES[name]
    trainer = trl_trainer("DPO", ROWS, {"loss_type": loss_type, "beta": 0.1, **options})
    bend(trainer.ref_model)
    wanted = trainer.compute_loss(trainer.model, theirs_of(family, groups))
    wanted.backward()

    models = [load_model(family, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    bend(models[1])
    backend, reference = (LocalTrainer(models[0], family, TrainConfig()), LocalTrainer(models[1], family))
    batches = pack(groups, micro_tokens=30, whole=True)
    assert len(batches) > 1
    totals = logp_sums(reference, batches)
    batches = [replace(b, ref_totals=t) for b, t in zip(batches, totals, strict=True)]
    row = of_step(PreferenceLoss(loss=name, options={"beta": 0.1, **own}), batches)
    seen = {}
    backend.optimizer.step = lambda lr, norm: seen.update(backend.optimizer.gradients)
    found = backend.train_step(batches, row, lr=0.0).metrics.means()

    assert abs(found["dpo/margin"]) > 1e-3  # the reference is another model
    assert found["policy/loss"] == pytest.approx(wanted.item(), rel=1e-5)
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert seen.keys() == gradients.keys()
    total = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    gap = torch.stack([(seen[n] - gradients[n]).norm() for n in gradients]).norm().item()
    assert total > 1e-3 and gap < 1e-5 * total
