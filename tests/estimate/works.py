"""Models of real shapes, the two works that were measured, and estimates of them."""

from functools import cache

from saccade.config import load
from saccade.models.families import load_family
from saccade.plugins.estimate import estimate
from saccade.system import devices

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SIZES = {
    "0.5b": TEXT | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "3b": TEXT,
    "7b": TEXT
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
H200, A100_40, RTX_4090 = (devices.named(n) for n in ("H200", "A100 40GB", "RTX 4090"))
# 16 prompts x 8 rollouts: side of the picture, tokens of prompt and response.
W1, W2 = (448, 374, 512), (1000, 1366, 256)
LIMITED = (896, 1120, 1024)  # 8 prompts, in 24 GiB


def planned(folder, device, work, *overrides, text_only=False):
    side, prompt, new = work
    options = {
        "model.path": str(folder),
        "rollout.max_tokens": new,
        "algorithm.kl.coef": 0.0,
        "train.prompts_per_step": 16,
        "train.samples_per_prompt": 8,
    }
    config = load(options, list(overrides))
    image = None if text_only else (side, side)
    family = loaded(str(folder))
    return estimate(config, device, prompt_tokens=prompt, image=image, family=family)


loaded = cache(load_family)  # a tokenizer is read once for all estimates of a model


def sizes(found):
    return {item.name: item.gib for item in found.memory.items}
