"""The two works that were measured, and estimates of them."""

from functools import cache

from saccade.config import load
from saccade.models.families import load_family
from saccade.plugins.estimate import estimate
from saccade.system import devices

H200, A100_40, RTX_4090 = (devices.lookup(n) for n in ("H200", "A100 40GB", "RTX 4090"))
# 16 prompts x 8 rollouts: side of the picture, tokens of prompt and response.
W1, W2 = (448, 368, 512), (1000, 1360, 256)
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
