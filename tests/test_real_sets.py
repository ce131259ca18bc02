"""Two steps on each of the real sets that lie beside the repository, where they do."""

from typing import Any

import pytest

from saccade.plugins.check_data import check_data
from saccade.recipes import rl
from saccade.run.loggers import read_metrics

# file, reward, prompt format, images per row
SETS: dict[str, tuple[str, Any, str, int]] = {
    "puzzlevqa": ("puzzlevqa/puzzlevqa.train.parquet", "exact", "think_answer", 1),
    "nlvr": ("nlvr/nlvr.train.json", "exact", "think_answer", 1),
    "mathv": ("mathv/mathv.train.jsonl", "math", "think_boxed", 1),
    "gsm8k": ("gsm8k/gsm8k.train.jsonl.gz", "gsm8k", "hash", 0),
}


def options(out, shared, name):
    path, reward, style, _ = SETS[name]
    data = {"train": str(shared / path), "max_samples": 6, "max_pixels": 56 * 56, "max_bad_fraction": 0}
    return {
        **{"run.out": str(out), "run.max_steps": 2, "model.path": "tiny:qwen2_5_vl", "track.tensorboard": False},
        **{f"data.{key}": value for key, value in data.items()},
        **{"prompt.format": style, "rollout.max_tokens": 8, "reward.terms": [reward], "reward.workers": 1},
        **{"train.prompts_per_step": 2, "train.samples_per_prompt": 2},
    }


@pytest.mark.parametrize("name", SETS)
def test_two_steps_with_rewards_that_know_right_from_wrong(tmp_path, shared, name):
    config = options(tmp_path, shared, name)
    row = rl.run(config | {"run.name": name})
    assert [r["step"] for r in read_metrics(tmp_path / name)] == [1, 2]
    assert row["guard/nonfinite"] == row["reward/error_rate"] == 0
    assert row["turns/images_per_sample"] == SETS[name][3]
    assert row["mismatch/logp_gap_max"] < 1e-5
    report = check_data.run(config, headers_only=True, workers=1)
    assert report.acceptable and report.self_test is not None
    assert report.self_test["passed"] and report.self_test["rows"] == 6
    assert report.good == 6 and report.lengths
