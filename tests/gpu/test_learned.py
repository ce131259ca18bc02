"""A reward model on a GPU: between scorings its weights are elsewhere, and nothing else changes."""

import gc

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda")
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from saccade.plugins.families.tiny import build

    return build("qwen2", tmp_path_factory.mktemp("wide"), text=WIDE)


def scorer(folder, *, offload):
    from saccade.plugins.reward_models.learned_reward import LearnedReward

    return LearnedReward.load(folder, device=DEVICE, dtype=torch.bfloat16, offload=offload, untrained=True)


def test_memory_is_given_back_between_scorings_and_scores_stay(folder):
    from saccade.rewards.reward_sample import RewardSample

    samples = [
        RewardSample(id=str(n), response=f"It is {n}.", messages=[{"role": "user", "content": "7 - 4?"}])
        for n in range(8)
    ]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = scorer(folder, offload=False)
    expected = kept.score(samples)
    size = sum(p.numel() * p.element_size() for p in kept.backend.model.parameters())
    assert torch.cuda.memory_allocated() - before >= size > 2**23
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()

    resting = scorer(folder, offload=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # a model that was woken once rests again
        assert torch.cuda.memory_allocated() - start < size / 4
        assert resting.score(samples) == expected
    assert torch.cuda.memory_allocated() - start < size / 4
    assert torch.cuda.max_memory_allocated() - start >= size  # it was there to score
    assert len(set(expected)) > 1
