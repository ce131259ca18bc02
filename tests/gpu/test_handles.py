"""A replica on the trainer's GPU reads the trainer's tensors where they are."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from saccade.config import LoraConfig  # noqa: E402
from saccade.engines import Settings, generate  # noqa: E402
from saccade.engines.embedded import EmbeddedEngine  # noqa: E402
from saccade.models import lora  # noqa: E402
from saccade.models.load import load_model  # noqa: E402
from saccade.plugins.engines import weights  # noqa: E402
from saccade.plugins.engines.replicas.replica_pool import start_replicas  # noqa: E402
from saccade.trainer.local import LocalTrainer  # noqa: E402
from saccade.types import Message, Sampling  # noqa: E402
from tests.engines.asked import requests  # noqa: E402


def test_weights_are_read_from_the_trainer_and_again_after_each_update(family_of, image, tmp_path, monkeypatch):
    """Those with adapters, which are merged for this, come as files."""
    family = family_of("qwen2_5_vl")
    shown = [family.render([Message(role="user", parts=(image(56, 56, n), f"What is {n}?"))]) for n in range(3)]
    asked = requests(shown, Sampling(temperature=1.0, max_tokens=16, ignore_eos=True), 2)
    models = [load_model(family, dtype=torch.float32, device=torch.device("cuda")) for _ in range(2)]
    lora.add(models[1], family, LoraConfig(rank=4), seed=0)
    settings = Settings(engine="embedded", folder=family.path, dtype="float32", device="cuda")
    pool = start_replicas(settings, 1, logs=tmp_path)
    [replica] = pool._places
    written, arranged = [], weights._arranged
    monkeypatch.setattr(weights, "_arranged", lambda tensors: (written.extend(tensors), arranged(tensors))[1])
    try:
        for version, model in enumerate((models[0], models[0], models[1]), 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.02)
            pool.update_weights(LocalTrainer(model, family), version)
            here, there = generate(EmbeddedEngine(model, family), asked), generate(pool, asked)
            assert [a.ids.tolist() for a in here] == [b.ids.tolist() for b in there]
            assert replica.direct and (version == 3) == bool(written)
    finally:
        pool.close()
    assert len(written) < len(list(models[0].parameters()))
