"""Two ranks that each hold a part of the weights against one process, and a run that changes its layout.

One pair of processes runs all cases.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import saccade
from saccade.config import TrainConfig
from saccade.forest.batch import Batch
from saccade.models.families import Family, load_family
from saccade.plugins.offload import host_state
from saccade.plugins.ranks import team
from saccade.plugins.ranks.divided import DividedOptimizer
from saccade.plugins.ranks.sharded import ShardedTrainer
from saccade.plugins.reward_models.reward_card import REWARD_FILE, RewardCard
from saccade.plugins.reward_models.reward_head import RewardHead, attach_reward
from saccade.plugins.reward_models.reward_losses import judgements
from saccade.recipes import rl
from saccade.system.contents import write_files
from saccade.trainer import Scoring
from saccade.trainer import optimizer as optimizers
from saccade.trainer.local import LocalTrainer
from saccade.trainer.optimizer import Optimizer
from tests.ranks import full_rank
from tests.ranks import test_divided as divided
from tests.ranks.test_divided import VISION, Case, equal, made, require_same_training
from tests.ranks.test_ranks import STORED, require_alike, require_same_weights, sampled

forests = divided.forests
VERDICTS = (3, 5)  # tokens
PROBE = RewardCard(kind="scalar", heads=("taste",), probe_layer=0)
NAMES = (
    *("text on one rank", "two and none", "no image anywhere", "only a tower", "generic"),
    *("critic", "critic offloaded", "nan", "experts", "lora"),
)
CASES = {name: divided.CASES[name] for name in NAMES if name in divided.CASES}
CASES |= {
    "recomputed": Case(((0, 1, 4), (5,)), checkpointing=True),
    "bf16": replace(divided.CASES["bf16"], deal=((0, 4), (1,)), train=TrainConfig(grad_norm=1e9, eps=1e-3)),
}


def averaged(family: Family, backend: type[LocalTrainer]) -> LocalTrainer:
    """A reference in bf16 that followed another model twice."""
    case = Case(dtype=torch.bfloat16, change=divided.moved)
    policy = made(case, family, Optimizer if backend is LocalTrainer else DividedOptimizer, backend)
    average = backend(divided.fresh(family, torch.bfloat16), family)
    for _ in range(2):
        average.blend(policy.local_weights(), 0.25)
    return average


# -- a rank ------------------------------------------------------------------------------------------


def on_rank(rank: int, folder: Path, paths: dict[str, str], forests: dict[str, list[Batch]]) -> dict[str, Any]:
    families = {name: load_family(path) for name, path in paths.items()}
    make = partial(made, optimizer=DividedOptimizer, backend=ShardedTrainer)
    host_state.CHUNK, found = 4096, dict[str, Any]()  # of which a parameter may have many
    for name, case in CASES.items():
        optimizers.LARGE = 1 if name == "recomputed" else 8_000_000  # every gradient is added by a hook
        backend = make(case, families[case.family])
        parts = divided.dealt(name, forests, CASES)
        found[name] = *divided.train(backend, case, parts[rank]), True
        if name in ("critic", "text on one rank", "lora"):
            files = [*backend.model_files(copy=True), *(backend.state_files() if name == "critic" else ())]
            write_files(folder / name, files)
    family = families[VISION]
    found["resumed"] = divided.resumed(folder / "files", rank, CASES["critic"], make, family, forests)
    attach_reward(probe := divided.fresh(family, torch.float32), RewardHead(like=probe, card=PROBE, seed=0))
    write_files(folder / "probe", ShardedTrainer(probe, family).model_files(copy=True))
    average = averaged(family, ShardedTrainer)
    write_files(folder / f"average-{rank}", average.state_files())
    again = ShardedTrainer(divided.fresh(family, torch.bfloat16), family)
    dist.barrier()
    again.load_state(folder / "average-0")
    found["average"] = [
        equal(*(dict(one.local_weights()) for one in (average, again))),
        equal(average.averages, again.averages),
        average.saved_bytes(),
    ]
    backend = make(CASES["critic"], family)
    found["values"] = backend.values(forests[VISION][: 1 + rank])
    backend = make(Case(), family)
    found["verdicts"] = judgements(backend, forests[VISION][: 1 + rank], VERDICTS)
    found["logprobs"] = backend.logprobs(forests[VISION][:rank], Scoring())
    return found


# -- one process, and what both found ----------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any, family_of: Any, forests: dict[str, list[Batch]]) -> Any:
    """By case: what one process finds, and what each of two ranks finds; and their folder."""
    folder = tmp_path_factory.mktemp("sharded")
    return *divided.beside_ranks(on_rank, folder, family_of, forests, CASES), folder


@pytest.mark.parametrize("name", CASES)
def test_sharded_ranks_train_as_one_process_does(results: Any, name: str) -> None:
    near = 1e-3 if name == "bf16" else 1e-6  # sums over the ranks are rounded to the dtype of the weights
    alone = results[0][divided.plain(name)]
    require_same_training(name, alone, [found[name] for found in results[1]], near=near)


def test_what_is_gathered_is_written_once(results: Any, tensors: Any, family_of: Any) -> None:
    _, (found, other), folder = results
    written = tensors(folder / "text on one rank")
    weights = found["text on one rank"][3]
    assert written and len(written) == len(weights)
    assert sorted(float(t.sum()) for t in written.values()) == sorted(float(w.sum()) for w in weights.values())
    assert equal(load_file(folder / "critic" / "weights.safetensors"), found["critic"][3])
    assert [rank["resumed"] for rank in (found, other)] == [[True] * 3] * 2
    # Layers above the one that a reward model reads are written with the rest.
    assert equal(load_file(folder / "probe" / "model.safetensors"), tensors(Path(family_of(VISION).path)))
    assert (folder / "probe" / REWARD_FILE).is_file()


def test_a_sharded_average_is_that_of_one_process(results: Any, family_of: Any, tmp_path: Path) -> None:
    _, ranks, folder = results
    wanted = averaged(family_of(VISION), LocalTrainer)
    write_files(tmp_path, wanted.state_files())
    assert equal(*(load_file(place / "weights.safetensors") for place in (folder / "average-0", tmp_path)))
    assert [rank["average"] for rank in ranks] == [[True, True, wanted.saved_bytes()]] * 2
    assert not (folder / "average-1").is_dir()


def test_ranks_read_different_numbers_of_forests(results: Any, family_of: Any, forests: Any) -> None:
    _, ranks, _ = results
    values = made(CASES["critic"], family_of(VISION)).values(forests[VISION][:2])
    alone = made(Case(), family_of(VISION))
    logprobs = alone.logprobs(forests[VISION][:1], Scoring())
    verdicts = judgements(alone, forests[VISION][:2], VERDICTS)
    for number, rank in enumerate(ranks):
        for pair, other in zip(rank["values"], values[: 1 + number], strict=True):
            np.testing.assert_allclose(pair[0], other[0], atol=1e-6)
        for judged, expected in zip(rank["verdicts"], verdicts[: 1 + number], strict=True):
            np.testing.assert_allclose(judged, expected, atol=1e-6)
    assert ranks[0]["logprobs"] == [] and len(ranks[1]["logprobs"]) == 1
    np.testing.assert_allclose(ranks[1]["logprobs"][0][0], logprobs[0][0], atol=1e-6)


def test_micro_batches_are_halved_in_a_run_that_starts_again_because_one_did_not_fit(
    tmp_path: Path, rl_config: Any, tensors: Any, forked_ranks: None, monkeypatch: Any, capsys: Any
) -> None:
    """It goes on from its checkpoint, and has the tokens and weights of one process."""
    monkeypatch.setattr(team.Rank, "module", "tests.ranks.full_rank")
    more = {"save.every": 1, "train.micro_tokens": 2 * full_rank.ROOM} | STORED
    one, two = (rl_config(tmp_path, run__name=name, run__max_steps=2) | more for name in ("one", "two"))
    rl.run(one)
    saccade.rl(two, "run.gpus=2", "train.layout=sharded", "run.restarts=1")
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"rank 1 on \S+: CUDA .* 2 GiB; use a smaller train.micro_tokens and model.checkpointing=on", said)
    assert f"now with run.resume=auto train.micro_tokens={full_rank.ROOM} model.checkpointing=on" in said
    assert sampled(tmp_path / "two") == sampled(tmp_path / "one")
    require_same_weights(*(tensors(tmp_path / name / "checkpoints" / "step-2") for name in ("two", "one")))


def test_a_run_changes_its_layout(tmp_path: Path, rl_config: Any, tensors: Any, forked_ranks: None) -> None:
    """With a reference that moves and an average: whole, sharded, whole. The copy that generates is given
    back in each update, and its frozen tower comes back with the rest.
    """
    kl = {"algorithm.kl.coef": 0.05, "algorithm.kl.update": "ema", "algorithm.kl.update_every": 1}
    more = kl | {"train.updates_per_step": 2, "train.ema": 0.5, "model.train": "freeze:vision"}

    def start(name: str, **options: Any) -> None:
        rl.run(rl_config(tmp_path, run__name=name, run__resume="auto", save__every=1, **options) | more | STORED)

    start("one", run__max_steps=4)
    start("on", run__max_steps=1, run__gpus=2)
    start("on", run__max_steps=3, run__gpus=2, train__layout="sharded", train__offload=True)
    start("on", run__max_steps=4, run__gpus=2)
    one, on = tmp_path / "one", tmp_path / "on"
    log = (on / "log.txt").read_text()
    assert "train.layout=whole: this machine has no GPU" in log and "train.layout=sharded: as the config says" in log
    assert sampled(on) == sampled(one)
    require_alike(on, one)
    for step, place in ((3, ""), (3, "state/ema"), (4, ""), (4, "state/ema")):
        ours, theirs = (tensors(run / "checkpoints" / f"step-{step}" / place) for run in (on, one))
        require_same_weights(ours, theirs)


def test_beside_four_bit_weights_that_stay_whole_others_are_sharded(
    tmp_path: Path, rl_config: Any, tensors: Any, forked_ranks: None
) -> None:
    """A critic, which trains in full, and a learned reward; the policy generates with its own weights."""
    pytest.importorskip("bitsandbytes")
    learned = {"verifier": "model", "weight": 0.5, "args": {"path": "tiny:qwen2_vl"}}
    more = {"algorithm.preset": ["ppo"], "algorithm.kl.coef": 0.05, "model.train": "qlora", "model.lora.rank": 4}
    for name, several in {"one": {}, "two": {"run__gpus": 2, "train__layout": "sharded"}}.items():
        options = rl_config(tmp_path, run__name=name, run__max_steps=2, **several) | more | STORED
        rl.run(options | {"reward.terms": [*options["reward.terms"], learned]})
    one, two = tmp_path / "one", tmp_path / "two"
    assert sampled(two) == sampled(one)
    require_alike(two, one)
    ours, theirs = (run / "checkpoints" / "step-2" for run in (two, one))
    require_same_weights(tensors(ours / "adapter"), tensors(theirs / "adapter"))
    require_same_weights(*(load_file(step / "state" / "critic" / "weights.safetensors") for step in (ours, theirs)))
