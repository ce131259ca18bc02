"""Learning from what others wrote: a teacher, documents, answers with rewards, demonstrations; averaged weights."""

import json

import numpy as np
import pytest
import torch
import transformers

from saccade.algorithms import select
from saccade.config import DataConfig, DataSource, TrainConfig, load
from saccade.data.datasets import Stream
from saccade.data.datasets import load as read
from saccade.errors import ConfigError
from saccade.forest.packing import pack
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.families.tiny import build
from saccade.plugins.imitation import imitation_sources
from saccade.plugins.imitation.imitation_sources import asking_for_the_best, kd
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.recipes import questions, rl, sft
from saccade.recipes.to_trajectory import document
from saccade.trainer import MODEL_SCORING
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from saccade.types import Message, Sample, replace


def test_the_loss_beside_a_teacher(tmp_path, sft_config, word_model, monkeypatch):
    """Against stock transformers, row by row, where logits come in chunks of three."""
    family, teacher = load_family(word_model), build("qwen2_5_vl", tmp_path / "teacher", words=WORDS, seed=7)
    monkeypatch.setattr(imitation_sources, "CHUNK_ELEMENTS", 3 * family.vocabulary)
    config = sft_config(tmp_path, run__max_steps=1, sft__teacher=teacher, sft__kd_coef=0.3)
    row = sft.run(config)

    resolved = load(config)
    data = questions.load_dialogues(resolved, resolved.data.train, family)
    order = Stream(data, seed=resolved.run.seed, config=resolved.data).take(4)
    auto = getattr(transformers, family.spec.auto_class)
    models = [auto.from_pretrained(path, dtype=torch.float32) for path in (word_model, teacher)]
    total, hits, count = torch.zeros(()), 0, 0
    for sample in order:
        (member,) = sft.dialogue(sample, family, "assistant").trajectories
        ids = torch.from_numpy(member.ids)[None]
        vision = family.vision(member.media, torch.device("cpu"), torch.float32)
        kinds = torch.from_numpy((member.ids == family.chat.placeholder).astype(np.int64))[None]
        logits = [m(input_ids=ids, mm_token_type_ids=kinds, **vision).logits[0] for m in models]
        places = np.flatnonzero(member.policy_mask)
        losses, *_ = kd(logits[0][places - 1], logits[1][places - 1], ids[0][places], kd_coef=0.3)
        hits += int((logits[0][places - 1].argmax(-1) == ids[0][places]).sum())
        total, count = total + losses.sum(), count + len(places)
    loss = total / count
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in models[0].parameters()]).norm()
    assert row["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert (row["policy/grad_norm"], row["sft/token_accuracy"]) == pytest.approx((norm.item(), hits / count), rel=1e-4)
    assert row["sft/teacher"] > 0 and row["sft/ppl"] != pytest.approx(np.exp(row["sft/loss"]))


def test_a_teacher_with_other_tokens_is_refused(tmp_path, sft_config, family_of):
    with pytest.raises(ConfigError, match=r"sft.teacher=.*same family and tokenizer"):
        sft.run(sft_config(tmp_path, sft__teacher=family_of("qwen2_5_vl").path))


def test_every_token_of_a_document_is_trained_in_pieces(word_model):
    family = load_family(word_model)
    sample = Sample(id="d", messages=(Message(role="user", parts=("red blue 3 how many",)),))
    end = family.chat.tokenizer.eos_token_id
    (whole,) = document(sample, family, 100).trajectories
    assert whole.ids[-1] == end and whole.response_length == len(whole.ids) - 1 == 5
    pieces = document(sample, family, 4).trajectories
    assert [len(piece.ids) for piece in pieces] == [4, 2]
    assert np.concatenate([p.ids for p in pieces]).tolist() == whole.ids.tolist()


def test_pretraining_learns_a_text_by_heart(tmp_path, sft_config, numbers):
    path = tmp_path / "documents.jsonl"
    rows = [{"text": "red blue red blue 3 2 1"}, {"text": "how many objects ? 5 6"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"sft.mode": "pretrain", "train.prompts_per_step": 2, "train.lr": 1e-2}
    sft.run(sft_config(tmp_path, data__train=str(path), run__max_steps=12) | options)
    found = numbers(tmp_path / "run")
    assert found[0]["sft/tokens"] == 7 + 6
    assert found[-1]["sft/loss"] < 0.4 * found[0]["sft/loss"]


def test_the_reward_stands_after_the_question(tmp_path, sft_config, word_model):
    rows = [
        {"prompt": "how many ?", "chosen": "red", "rejected": "blue", "reward": 0.25},
        {"input": "how many ?", "output": "blue", "label": 0},
    ]
    family, found = load_family(word_model), []
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        changes = {"sft.reward_tag": " reward {reward:.1f}", "data.max_bad_fraction": 1}
        config = load(sft_config(tmp_path, data__train=str(path)) | changes)
        (sample,) = questions.load_dialogues(config, config.data.train, family).samples
        found.append([message.text for message in sample.messages])
    assert found == [["how many ? reward 0.2", "red"], ["how many ? reward 0.0", "blue"]]
    data = questions.load_dialogues(config, config.data.train, family)
    (asked,) = asking_for_the_best(config.sft.reward_tag, data, {"val": data})["val"].samples
    assert asked.messages[0].text.endswith("reward 0.0 reward 0.0")


def test_one_model_learns_good_and_bad_answers_apart(tmp_path, sft_config, numbers, scenes):
    """Asked for the best, it gives the answers that were called good."""
    rows = [
        {"prompt": "how many ?", "completion": "red" if good else "blue", "label": int(good)} for good in (True, False)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "how many ?", "reference": "red"}) + "\n")
    options = {
        "data.val": str(tmp_path / "val.jsonl"), "sft.reward_tag": " {reward:.0f}", "train.prompts_per_step": 2,
        "train.lr": 1e-2, "reward.terms": ["exact"], "reward.self_test": "off", "prompt.format": "direct",
        "rollout.max_tokens": 3, "val.every": 15,
    }  # fmt: skip
    config = sft_config(tmp_path, data__train=str(tmp_path / "rows.jsonl"), run__max_steps=15)
    row = sft.run(config | options)
    assert row["sft/loss"] < 0.2 and row["val/val/accuracy"] == 1


def test_demonstrations_are_part_of_the_same_update(tmp_path, rl_config, scenes, numbers, resumed):
    rl.run(rl_config(tmp_path, run__max_steps=1))
    more = {"train.sft_coef": 1.0, "data.demonstrations": str(scenes / "shown.jsonl")}
    last, _ = resumed(rl.run, rl_config(tmp_path) | more)
    without, both = numbers(tmp_path / "run"), numbers(last.parents[1])
    # The rollouts of the first step are the same, so its own loss is, too.
    assert both[0]["policy/loss"] == without[0]["policy/loss"]
    assert both[0]["policy/grad_norm"] != without[0]["policy/grad_norm"]
    assert both[-1]["policy/ptx_loss"] < 0.8 * both[0]["policy/ptx_loss"]
    assert "policy/ptx_loss" not in without[0]


def test_the_gradients_of_both_terms_add_up(word_model, scenes):
    family = load_family(word_model)
    samples = read([DataSource(path=str(scenes / "shown.jsonl"))], DataConfig()).samples[:4]
    groups = [sft.dialogue(sample, family, "assistant") for sample in samples]
    batches = pack(groups, micro_tokens=60)
    supervised = select.write_supervision(batches)
    imitated = [replace(batch, advantages=None) for batch in supervised]
    norms, metrics = [], []
    for step in (supervised, imitated, [*supervised, *imitated]):
        model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
        backend = LocalTrainer(model, family, TrainConfig())
        found = backend.train_step(step, PolicyLoss(sft.SUPERVISED, MODEL_SCORING), lr=0.0).metrics.means()
        norms.append(found["policy/grad_norm"])
        metrics.append(found)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[2] == pytest.approx(2 * norms[0], rel=1e-5)
    assert metrics[2]["policy/ptx_loss"] == pytest.approx(metrics[0]["policy/loss"], rel=1e-5)


def test_an_average_follows_the_weights_and_resumes(tmp_path, sft_config, word_model, tensors, resumed):
    config = sft_config(tmp_path, run__max_steps=3, train__ema=0.75)
    last, _ = resumed(sft.run, config)
    folders = [last.with_name(f"step-{n}") for n in (1, 2, 3)]
    average = tensors(word_model)
    for folder in folders:
        weights = tensors(folder)
        average = {name: 0.75 * old + 0.25 * weights[name] for name, old in average.items()}
    kept = tensors(folders[-1] / "state" / "ema")
    assert max(float((kept[name] - average[name]).abs().max()) for name in average) < 1e-6
    load_family(str(folders[-1] / "state" / "ema"))  # a model folder of its own
