"""A reward model on the GPU: a float32 head beside a bfloat16 model learns, is saved, and rests between scorings."""

import gc
import json
from functools import partial
from math import isfinite

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from safetensors.torch import load_file  # noqa: E402

from saccade.errors import EnvironmentProblem  # noqa: E402
from saccade.media.images import open_media  # noqa: E402
from saccade.plugins.families.tiny import build  # noqa: E402
from saccade.plugins.offload import host_state  # noqa: E402
from saccade.plugins.reward_models import reward_training  # noqa: E402
from saccade.plugins.reward_models.learned_reward import LearnedReward  # noqa: E402
from saccade.plugins.reward_models.reward_card import REWARD_FILE, read_card  # noqa: E402
from saccade.rewards.reward_sample import RewardSample  # noqa: E402
from saccade.trainer.local import LocalTrainer  # noqa: E402
from saccade.types import Message  # noqa: E402

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
STEPS, RATE = 2, 1e-3
DEEP = {
    "reward_model.loss": "hps", "reward_model.pooling": "attention", "reward_model.pooling_heads": 4,
    "reward_model.head": "mlp", "reward_model.bounded": True, "reward_model.probe_layer": 0,
}  # fmt: skip


def pictures(scenes):
    lines = (scenes / "train.jsonl").read_text().splitlines()
    return [str(scenes / json.loads(line)["images"][0]) for line in lines]


def asked(scenes):
    """Replies of several lengths, two to each picture."""
    return [
        RewardSample(
            id=f"{number}/{reply}",
            response=reply,
            asked=(Message(role="user", parts=(open_media(path), "how many objects ?")),),
            replied=(Message(role="assistant", parts=(reply,)),),
        )
        for number, path in enumerate(pictures(scenes)[:6])
        for reply in ("red", "blue " * (number + 1))
    ]


def scores(model, family, scenes):
    """Of a model that goes on training afterwards."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = LearnedReward(LocalTrainer(model, family), model.score.card).score(asked(scenes))
    for parameter in trained:
        parameter.requires_grad_(True)
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
def test_a_deep_head_learns_and_its_folder_scores_alike(optimizer, tmp_path, scenes, word_model, monkeypatch):
    rows = [
        {"id": f"{n}", "prompt": "<image>how many objects ?", "images": [path]} | {"chosen": "red", "rejected": "blue"}
        for n, path in enumerate(pictures(scenes))
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found, heads, collect = [], [], LocalTrainer.model_files

    def noted(self, *, copy=False):
        found.append(scores(self.model, self.family, scenes))
        return collect(self, copy=copy)

    def counted(self, *args, **options):
        heads.append({n: p.detach().cpu().clone() for n, p in self.model.score.named_parameters()})
        return update(self, *args, **options)

    update = LocalTrainer.take_step
    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "model_files", noted)
        patch.setattr(LocalTrainer, "take_step", counted)
        last = reward_training.run(
            {
                "run.out": str(tmp_path), "run.device": DEVICE.type, "run.max_steps": STEPS, "model.path": word_model,
                "model.dtype": "bfloat16", "data.train": str(tmp_path / "pairs.jsonl"), "prompt.format": "direct",
                "prompt.instruction": "", "train.optimizer": optimizer, "train.prompts_per_step": 8, "train.lr": RATE,
                "train.schedule": "constant", "train.warmup": 0, "track.tensorboard": False,
            }
            | DEEP
        )  # fmt: skip
    assert isfinite(last["rm/loss"]) and last["policy/grad_norm"] > 0
    assert last["guard/nonfinite"] == 0 and len(heads) == STEPS
    folder = tmp_path / "run" / "checkpoints" / f"step-{STEPS}"
    card = read_card(folder)
    assert card is not None and (card.head, card.pooling_heads, card.probe_layer) == ("mlp", 4, 0)
    stored = load_file(folder / REWARD_FILE)
    for name, before in heads[0].items():
        after = stored[f"score.{name}"]
        moved = (after - before).abs().max().item()
        assert after.dtype == torch.float32 and 0 < moved < 1.25 * STEPS * RATE, name
    for offload in (False, True):
        model = LearnedReward.load(folder, device=DEVICE, dtype=DTYPE, offload=offload)
        for _ in range(2):  # its weights come and go
            assert model.score(asked(scenes)) == pytest.approx(found[-1], abs=0.01)


def test_too_little_main_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host_state, "free_host_bytes", lambda: 1000)
    with pytest.raises(EnvironmentProblem, match=r"the frozen model .* and 1\.0 kB are free; .* reward\.offload=false"):
        LearnedReward.load(build("qwen2", tmp_path), device=DEVICE, dtype=DTYPE, offload=True, untrained=True)


def test_memory_is_given_back_between_scorings_and_scores_stay(tmp_path):
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 16}
    scorer = partial(LearnedReward.load, build("qwen2", tmp_path, text=wide), device=DEVICE, dtype=DTYPE)
    samples = [
        RewardSample(id=str(n), response=f"It is {n}.", messages=[{"role": "user", "content": "7 - 4?"}])
        for n in range(8)
    ]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = scorer(offload=False, untrained=True)
    expected = kept.score(samples)
    size = sum(p.numel() * p.element_size() for p in kept.trainer.model.parameters())
    assert torch.cuda.memory_allocated() - before >= size > 2**23
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()

    resting = scorer(offload=True, untrained=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # a model that was woken once rests again
        assert torch.cuda.memory_allocated() - start < size / 4
        assert resting.score(samples) == expected
    assert torch.cuda.memory_allocated() - start < size / 4
    assert torch.cuda.max_memory_allocated() - start >= size  # it was there to score
    assert len(set(expected)) > 1
