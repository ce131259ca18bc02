"""Time series on the GPU: a float32 encoder beside a bfloat16 model, sampled from and trained."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from saccade.config import load  # noqa: E402
from saccade.engines import generate  # noqa: E402
from saccade.engines.embedded import EmbeddedEngine  # noqa: E402
from saccade.models.files import SERIES_FILE  # noqa: E402
from saccade.plugins.series.series_files import open_series  # noqa: E402
from saccade.recipes import model_setup, rl  # noqa: E402
from saccade.run.loggers import read_metrics  # noqa: E402
from saccade.trainer.local import LocalTrainer  # noqa: E402
from saccade.types import Message, Request, Sampling  # noqa: E402

LEADS, STEPS, RATE = 4, 2, 1e-3
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


def series(number, samples=40):
    return np.random.default_rng(number).normal(size=(LEADS, samples)).round(2).tolist()


def options(folder, **changes):
    """Two steps; about half of all answers are right, whatever they say."""
    rows = [
        {"id": f"{n}", "question": "<series>lead?", "answer": "0", "series": series(n, 30 + 10 * n)} for n in range(8)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "own.py").write_text("def score(s): return float(sum(map(ord, s.response)) % 2)")
    always = {
        "run.out": str(folder), "run.device": "cuda", "run.max_steps": STEPS, "model.dtype": "bfloat16",
        "model.series.encoder": "patches", "model.series.channels": LEADS, "model.series.patch": 20,
        "model.series.width": 32, "model.series.layers": 1, "data.train": str(folder / "rows.jsonl"),
        "prompt.format": "direct", "prompt.instruction": "", "rollout.max_tokens": 8,
        "reward.terms": [f"{folder}/own.py:score"], "reward.self_test": "off", "algorithm.preset": "grpo",
        "train.prompts_per_step": 4, "train.samples_per_prompt": 8, "train.lr": RATE, "train.schedule": "constant",
        "train.warmup": 0, "save.every": STEPS, "track.tensorboard": False,
    }  # fmt: skip
    return always | {name.replace("__", "."): value for name, value in changes.items()}


def answers(model, family):
    """Greedy ones, over pages, to prompts of several lengths."""
    engine = EmbeddedEngine(model, family)
    assert engine.cache.kernels
    prompts = [
        family.render([Message(role="user", parts=(open_series(series(n, 20 * n + 7)), "lead?"))]) for n in range(5)
    ]
    asked = [
        Request(key=str(n), ids=prompt.ids, media=prompt.media, sampling=GREEDY) for n, prompt in enumerate(prompts)
    ]
    return [done.ids.tolist() for done in generate(engine, asked)]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_two_steps_train_the_encoder_and_its_folder_answers_alike(name, optimizer, tmp_path, monkeypatch):
    run = options(tmp_path, model__path=f"tiny:{name}", train__optimizer=optimizer)
    said, collect = [], LocalTrainer.model_files

    def noted(self, *, copy=False):
        said.append(answers(self.model, self.family))
        return collect(self, copy=copy)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainer, "model_files", noted)
        rl.run(run)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == STEPS and 0 < rows[-1]["reward/mean"] < 1
    assert max(row["mismatch/logp_gap_max"] for row in rows) < 0.1
    assert not any(row["guard/nonfinite"] or row["policy/update_skipped"] for row in rows)

    folder = tmp_path / "run" / "checkpoints" / f"step-{STEPS}"
    config = load(run)
    family = model_setup.family_of(config, model_setup.start_folder(config))
    drawn = model_setup.load_policy(config, family).series.state_dict()
    saved = load(run | {"model.path": str(folder)})
    family = model_setup.family_of(saved, str(folder))
    again = model_setup.load_policy(saved, family)
    trained = again.series.state_dict()
    assert (folder / SERIES_FILE).is_file() and trained.keys() == drawn.keys()
    for tensor, before in drawn.items():
        moved = (trained[tensor] - before).abs().max().item()
        assert before.dtype == torch.float32 and moved < 1.25 * STEPS * RATE, tensor
        assert moved > 0 or before.ndim == 1, tensor
    assert said == [answers(again, family)]
