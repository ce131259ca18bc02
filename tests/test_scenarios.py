"""Problems that users of other frameworks have reported, tried on a tiny model."""

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.errors import TrainingError
from saccade.plugins.check_data import check_data
from saccade.plugins.evaluation.results import read_lines
from saccade.recipes import model_setup, questions, rl, sft
from saccade.run import checkpoint


def rollouts(run, step):
    return [json.loads(line) for line in (run / "trajectories" / f"step-{step}.jsonl").open()]


def command(name, config, folder):
    """The result of a command with this config as its file."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(load(config).model_dump(mode="json", exclude_unset=True)))
    return CliRunner().invoke(app, [name, str(file)], env={"COLUMNS": "300"})


COUNTS = (1, 2, 4, 8, 16, 32, 64)
LIMIT = 260  # tokens: 16 pictures of 16 tokens do not fit, 64 pictures reduced to 1 token do


@pytest.fixture
def album_config(rl_config, tmp_path, image):
    """Rows with 1 to 64 pictures of 112 x 112."""
    (tmp_path / "a.png").write_bytes(image(112, 112).data)
    rows = [
        {"id": f"n{n}", "images": ["a.png"] * n, "problem": "<image>" * n + "how many ?", "answer": str(n % 9)}
        for n in COUNTS
    ]
    path = tmp_path / "albums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"data.max_prompt_tokens": LIMIT, "data.min_pixels": 28 * 28}
    return rl_config(tmp_path, data__train=str(path), run__max_steps=2, train__samples_per_prompt=2) | limits


def test_shrunk_rows_fit_and_train(album_config, tmp_path):
    config = load(album_config | {"data.overlong": "shrink", "train.prompts_per_step": 7})
    family = model_setup.family_of(config, model_setup.start_folder(config))
    data = questions.load_prompts(config, config.data.train, family)
    assert [sample.id for sample in data.samples] == [f"n{n}" for n in COUNTS] and data.shortened == 3
    for sample, count in zip(data.samples, COUNTS, strict=True):
        rendered = family.render(sample.messages)
        assert len(rendered) <= LIMIT and len(rendered.media) == count
        spans = sum(span.length for span in rendered.media)
        assert int((rendered.ids == family.chat.placeholder).sum()) == spans
        assert spans == sum(int(np.prod(span.grid)) // 4 for span in rendered.media)
    row = rl.run(config)
    assert row["turns/images_per_sample"] == pytest.approx(np.mean(COUNTS))
    assert row["mismatch/logp_gap_max"] < 1e-5 and not (tmp_path / "run" / "quarantine.jsonl").exists()


REWARD = '''
import time
import zlib

def right(sample):
    return float(sample.answer in sample.response.replace("<", " ").replace(">", " ").split())

def moody(sample):
    """Right or wrong in the self-test; on rollouts every other answer misbehaves."""
    luck = zlib.crc32((sample.id + sample.response).encode()) % 16
    if sample.step == 0 or luck >= 8:
        return right(sample)
    if luck == 0:
        time.sleep(60)
    if luck < 3:
        raise ValueError("no mood for this")
    return None if luck < 5 else float("nan")
'''


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(REWARD)
    return path


def test_rewards_that_misbehave_cost_their_sample_only(tmp_path, rl_config, reward_file):
    mine = {"reward.terms": [f"{reward_file}:moody"], "reward.deadline": 1, "reward.max_error_rate": 1}
    sizes = {"train.prompts_per_step": 6, "track.trajectories_groups": 6, "run.max_steps": 1}
    began = time.monotonic()
    row = rl.run(rl_config(tmp_path) | mine | sizes)
    assert time.monotonic() - began < 30
    members = rollouts(tmp_path / "run", 1)
    kinds = Counter(m["reason"].split(":")[0] for m in members if m["status"] == "error")
    assert len(members) == 24 and {"raised", "none", "nan"} <= kinds.keys()
    assert any("deadline" in kind or "timeout" in kind for kind in kinds), kinds
    assert row["reward/error_rate"] == pytest.approx(sum(kinds.values()) / 24)
    # A sample that is the only one left in its group has nothing to be compared with.
    assert row["policy/live_sequences"] == 24 - sum(kinds.values()) - row["group/singleton"]
    scored = [m["reward"] for m in members if m["status"] != "error"]
    assert None not in scored and row["reward/mean"] == pytest.approx(np.mean(scored))
    assert row["guard/nonfinite"] == 0


def test_too_many_failures_end_the_run_with_4(tmp_path, rl_config, reward_file):
    mine = {"reward.terms": [f"{reward_file}:moody"], "reward.deadline": 1, "train.prompts_per_step": 6}
    done = command("rl", rl_config(tmp_path) | mine, tmp_path)
    assert done.exit_code == 4
    assert "of 24 samples could not be scored" in done.stderr
    assert "raise reward.max_error_rate above 0.05" in done.stderr


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, word_model):
    """The model with one infinite weight."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(word_model, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("layers.1.mlp.down_proj.weight"))
    weights[name][0, 0] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft"])
def test_updates_that_are_not_finite_are_skipped_then_stop_the_run(
    tmp_path, rl_config, sft_config, poisoned, kind, numbers, same_weights
):
    make, recipe = (sft_config, sft.run) if kind == "sft" else (rl_config, rl.run)
    config = make(tmp_path, model__path=poisoned, run__max_steps=9, save__every=1)
    if kind != "sft":
        config["algorithm.preset"] = kind
    with pytest.raises(TrainingError, match=r"3 (critic )?updates in a row were not finite.*lower train\.lr"):
        recipe(config)
    assert [row["guard/nonfinite"] for row in numbers(tmp_path / "run")] == [1, 1]
    assert [row["policy/update_skipped"] for row in numbers(tmp_path / "run")] == [1, 1]
    assert checkpoint.complete_steps(tmp_path / "run" / "checkpoints") == [1, 2]
    assert same_weights(poisoned, tmp_path / "run" / "checkpoints" / "step-2")
    saved = sorted((tmp_path / "run" / "bad-batches").glob("step-*"))
    steps = (1, 2) if kind == "ppo" else (1, 2, 3)  # the critic's third ends the run
    assert [path.name for path in saved] == [f"step-{n}-{n}.npz" for n in steps]
    batch = np.load(saved[0])
    assert {"0/ids", "0/advantages", "0/keys", "0/media"} <= set(batch.files) and len(batch["0/ids"]) > 20


LOSS = '''
calls = 0

def moody(new, inputs):
    """the policy gradient; infinite at the second call"""
    global calls
    calls += 1
    losses = -inputs.advantages * (new - inputs.old).exp()
    return losses * (float("inf") if calls == 2 else 1.0), {}
'''


def test_one_bad_update_leaves_no_trace(tmp_path, rl_config, numbers, same_weights):
    from safetensors.torch import load_file

    (tmp_path / "loss.py").write_text(LOSS)
    config = rl_config(tmp_path, run__max_steps=3, save__every=1, run__seed=5)
    rl.run(config | {"algorithm.policy_loss": f"{tmp_path}/loss.py:moody"})
    assert [row["guard/nonfinite"] for row in numbers(tmp_path / "run")] == [0, 1, 0]
    one, two, three = (tmp_path / "run" / "checkpoints" / f"step-{n}" for n in (1, 2, 3))
    assert same_weights(one, two) and not same_weights(two, three)
    before, after = (load_file(path / "state" / "optimizer.safetensors") for path in (one, two))
    assert all(bool((before[name] == after[name]).all()) for name in before)
    assert checkpoint.read_progress(three)["bad_updates"] == {"policy": 0}


def test_stop_means_at_once(tmp_path, sft_config, poisoned):
    config = sft_config(tmp_path, model__path=poisoned, train__on_nonfinite="stop")
    done = command("sft", config, tmp_path)
    assert done.exit_code == 5 and "1 updates in a row were not finite" in done.stderr


def test_awkward_rows_are_set_aside_and_the_rest_trains(tmp_path, shared):
    path = shared / "nasty" / "nasty.jsonl"
    expected = {row["id"]: row["expect"] for row in read_lines(path)}
    sizes = {"data.max_bad_fraction": 1, "data.max_megapixels": 100, "data.max_pixels": 56 * 56}
    sizes |= {"train.prompts_per_step": 16, "train.samples_per_prompt": 2, "track.trajectories_groups": 16}
    config = {"run.out": str(tmp_path), "run.max_steps": 1, "data.train": str(path)}
    config |= {"model.path": "tiny:qwen2_5_vl", "reward.terms": ["exact"], "track.tensorboard": False}
    row = rl.run(config | sizes | {"algorithm.kl.coef": 0.0, "rollout.max_tokens": 6})
    assert row["guard/nonfinite"] == 0 and row["mismatch/logp_gap_max"] < 1e-5
    set_aside = {r["id"]: r["reason"] for r in read_lines(tmp_path / "run" / "quarantine.jsonl")}
    trained = {member["id"] for member in rollouts(tmp_path / "run", 1)}
    assert {id for id, verdict in expected.items() if verdict == "ok"} <= trained
    assert {id for id, verdict in expected.items() if verdict == "reject"} <= set_aside.keys()
    assert trained.isdisjoint(set_aside) and trained | set_aside.keys() == expected.keys()
    assert all(len(reason) > 10 for reason in set_aside.values())


def biased_model(folder):
    """Ids that must never be sampled have the highest logits: their rows of the head read one fixed dimension."""
    from safetensors.torch import load_file, save_file

    from saccade.models.families import load_family
    from saccade.plugins.families.tiny import build
    from saccade.plugins.quickstart.quickstart import WORDS

    path = build("qwen2_5_vl", folder, words=WORDS, text={"tie_word_embeddings": False})
    banned = np.flatnonzero(load_family(path).banned).tolist()
    weights = load_file(Path(path) / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, 0] = 3.0
        elif name.endswith(("merger.mlp.2.weight", "o_proj.weight", "down_proj.weight")) and "blocks" not in name:
            tensor[0] = 0.0
        elif name.endswith("merger.mlp.2.bias"):
            tensor[0] = 3.0
        elif name.endswith("lm_head.weight"):
            tensor[:, 0] = 0.0
            tensor[banned, 0] = 50.0
    save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_policy_that_loves_placeholders_never_writes_one(tmp_path, rl_config, numbers):
    import torch
    import transformers

    from saccade.models.families import load_family

    path = biased_model(tmp_path / "model")
    family = load_family(path)
    banned = np.flatnonzero(family.banned)
    assert family.chat.placeholder in banned and family.vocabulary - 1 in banned
    stock = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    with torch.no_grad():
        logits = stock(input_ids=torch.arange(20)[None]).logits[0].numpy()
    allowed = np.setdiff1d(np.arange(logits.shape[1]), banned)
    assert (logits[:, banned].min(1) - logits[:, allowed].max(1)).min() > 50

    config = rl_config(tmp_path, model__path=path, run__max_steps=2, track__trajectories_every=1)
    rl.run(config)
    rows = numbers(tmp_path / "run")
    assert len(rows) == 2 and max(row["mismatch/logp_gap_max"] for row in rows) < 1e-5
    assert all(row["mismatch/unscored_frac"] == 0 for row in rows)
    members = [member for step in (1, 2) for member in rollouts(tmp_path / "run", step)]
    own = [part["ids"] for member in members for part in member["segments"] if part["source"] == "policy"]
    written = {id for ids in own for id in ids}
    assert len(written) > 10 and written.isdisjoint(banned.tolist())


# file, reward, prompt format, images per row
SETS = {
    "puzzlevqa": ("puzzlevqa/puzzlevqa.train.parquet", "exact", "think_answer", 1),
    "nlvr": ("nlvr/nlvr.train.json", "exact", "think_answer", 1),
    "mathv": ("mathv/mathv.train.jsonl", "math", "think_boxed", 1),
    "gsm8k": ("gsm8k/gsm8k.train.jsonl.gz", "gsm8k", "hash", 0),
}


@pytest.mark.parametrize("name", SETS)
def test_two_steps_on_a_real_set_with_rewards_that_know_right_from_wrong(tmp_path, shared, name, numbers, rewards_here):
    path, reward, style, images = SETS[name]
    config = {
        **{"run.out": str(tmp_path), "run.max_steps": 2, "model.path": "tiny:qwen2_5_vl", "track.tensorboard": False},
        **{"data.train": str(shared / path), "data.max_samples": 6, "data.max_pixels": 56 * 56},
        **{"data.max_bad_fraction": 0, "prompt.format": style, "rollout.max_tokens": 8, "reward.terms": [reward]},
        **{"reward.workers": 1, "train.prompts_per_step": 2, "train.samples_per_prompt": 2},
    }
    row = rl.run(config)
    assert [r["step"] for r in numbers(tmp_path / "run")] == [1, 2]
    assert row["guard/nonfinite"] == row["reward/error_rate"] == 0
    assert row["turns/images_per_sample"] == images
    assert row["mismatch/logp_gap_max"] < 1e-5
    report = check_data.run(config, headers_only=True, workers=1)
    assert report.acceptable and report.self_test is not None
    assert report.self_test["passed"] and report.self_test["rows"] == 6
    assert report.good == 6 and report.lengths
