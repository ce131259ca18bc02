"""A model that is split over two workers in processes of their own: run by test_rl.py.

python tests/vllm/two_workers.py FOLDER
"""

import sys

import numpy as np
import torch

from saccade.engines import Settings, generate
from saccade.engines.builders import build
from saccade.engines.embedded import EmbeddedEngine
from saccade.media.images import open_media
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.families.tiny import build as build_model
from saccade.trainer.local import LocalTrainer
from saccade.types import Message, Request, Sampling


def main(where):
    folder = build_model("qwen2_5_vl", where, text={"num_key_value_heads": 2})
    family = load_family(folder)
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    shown = open_media(np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8))
    prompt = family.render((Message(role="user", parts=(shown, "How many?")),))
    sampling = Sampling(temperature=0.0, max_tokens=8)
    request = Request(key="a", ids=prompt.ids, media=prompt.media, sampling=sampling)
    settings = Settings(
        engine="vllm", folder=folder, dtype="float32", tensor_parallel=2, max_length=256, max_sequences=8, max_images=1
    )
    split, whole = build(settings, family, model), EmbeddedEngine(model, family)
    seen = []
    for version in (1, 2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.05)
        split.update_weights(LocalTrainer(model, family), version)
        ours, theirs = generate(whole, [request])[0], generate(split, [request])[0]
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-4
        seen.append(float(theirs.logprobs[0]))
    assert seen[0] != seen[1]
    split.close()
    print("both agree")


if __name__ == "__main__":
    main(sys.argv[1])
