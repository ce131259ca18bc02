"""The same rollouts and rewards give the GRPO loss and gradient of TRL's own trainer."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from saccade.algorithms import annotate, select
from saccade.algorithms.algorithm_state import restore
from saccade.algorithms.build import resolve
from saccade.algorithms.objective import to_metrics
from saccade.config import AlgorithmConfig, DataConfig, DataSource, KLConfig, TrainConfig
from saccade.data.datasets import load
from saccade.forest.packing import pack
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Group, Message, Sample
from tests.algorithms.by_member import sampled

SIZE, LIMIT, PROMPTS = 4, 6, 3


def groups_of(inputs, rewards, media):
    """Their padded rows as our groups."""
    groups = []
    for start in range(0, len(rewards), SIZE):
        members = []
        for row in range(start, start + SIZE):
            answer = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()].tolist()
            known = {"media": media[start // SIZE], "reward": rewards[row], "outcome": rewards[row]}
            members.append(sampled(str(start), row - start, inputs["prompt_ids"][row].tolist(), answer, **known))
        sample = Sample(id=str(start), messages=(Message(role="user", parts=("x",)),))
        groups.append(Group(sample=sample, uid=str(start), trajectories=tuple(members)))
    return groups


def ours(path, groups, old):
    """Loss, gradient by name and advantages, through the packed forests that training uses."""
    family = load_family(path)
    family = replace(family, banned=np.zeros_like(family.banned))  # TRL bans nothing
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    backend = LocalTrainer(model, family, TrainConfig())
    row = AlgorithmConfig(
        preset="grpo", args={"std_eps": 1e-4}, kl=KLConfig(coef=0.0), old="recompute" if old is not None else "detach"
    )
    algorithm = resolve(row, max_tokens=LIMIT, samples_per_prompt=SIZE)
    groups = select.mark_members(groups, algorithm)[0]
    updates = [pack(groups, micro_tokens=60)]
    if old is not None:
        starts = np.cumsum([0] + [batch.target_count for batch in updates[0]])
        scored = [(old[a:b], old[a:b]) for a, b in pairwise(starts)]
        updates = annotate.with_scores(updates, ("old_logprobs",), scored)
    (batches,) = annotate.add_advantages(updates, groups, algorithm, restore(algorithm, None))[0]
    assert len(batches) > 1  # several forests, as under a real budget
    stats = backend.sum_gradients(batches, PolicyLoss(algorithm, Scoring()))
    loss = to_metrics(stats).means()["policy/loss"]
    advantages = np.concatenate([b.per_target("advantages") for b in batches])
    return loss, dict(backend.optimizer.gradients), advantages


def compare(trainer, inputs, path, groups, spread):
    mask = inputs["completion_mask"].bool()
    old = None
    if spread:  # as if the policy had moved since: some ratios are clipped
        with torch.no_grad():
            together = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            seen = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
            vision = {name: inputs[name] for name in seen}
            now, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, together, attended, inputs["completion_ids"].shape[1], **vision
            )
        noise = torch.from_numpy(np.random.default_rng(0).normal(0, spread, tuple(now.shape))).float()
        inputs = inputs | {"old_per_token_logps": now.detach() + noise}
        old = inputs["old_per_token_logps"][mask].numpy()
    trainer.model.zero_grad()
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    loss, gradient, advantages = ours(path, groups, old)
    per_token = inputs["advantages"][:, None].expand_as(mask)[mask].numpy()
    np.testing.assert_allclose(advantages, per_token, rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(theirs.item(), rel=1e-5, abs=1e-6)
    wanted = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert gradient.keys() == wanted.keys()
    total = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    gap = torch.stack([(gradient[name] - wanted[name]).norm() for name in wanted]).norm().item()
    assert total > 0.05 and gap < 1e-5 * total


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_loss_and_gradient(scenes, word_model, trainer, spread):
    """On prompts with a picture each; the tensors are those of our processor."""
    family = load_family(word_model)
    samples = load([DataSource(path=str(scenes / "val.jsonl"))], DataConfig()).samples[:PROMPTS]
    prompts = [family.render(sample.messages) for sample in samples]
    random = np.random.default_rng(1)
    lengths = random.integers(2, LIMIT + 1, SIZE * len(prompts))
    rewards = random.integers(0, 3, len(lengths)).astype(float)
    owner = np.repeat(np.arange(len(prompts)), SIZE)
    completion_mask = torch.from_numpy((np.arange(LIMIT) < lengths[:, None]).astype(np.int64))
    prompt_ids = torch.stack([torch.from_numpy(prompts[i].ids) for i in owner])
    completion_ids = torch.from_numpy(random.integers(0, 30, (len(lengths), LIMIT)))
    spans = tuple(span for i in owner for span in prompts[i].media)
    ids = torch.cat([prompt_ids, completion_ids], 1)
    grouped = torch.from_numpy(rewards).view(-1, SIZE)
    advantages = (grouped - grouped.mean(1, True)) / (grouped.std(1, keepdim=True) + 1e-4)
    inputs = {
        "prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids), "completion_ids": completion_ids,
        "completion_mask": completion_mask, "advantages": advantages.flatten().float(),
        "num_items_in_batch": completion_mask.sum(), "num_images": [1] * len(lengths),
        "mm_token_type_ids": (ids == family.chat.placeholder).long(),
        **family.vision(spans, torch.device("cpu"), torch.float32),
    }  # fmt: skip
    groups = groups_of(inputs, rewards.tolist(), tuple(p.media for p in prompts))
    compare(trainer, inputs, word_model, groups, spread)
