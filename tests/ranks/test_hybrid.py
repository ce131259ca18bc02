"""Four ranks on two machines, each with all weights in two parts, against one process.

Four processes run all cases.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from saccade.errors import EnvironmentProblem
from saccade.forest.batch import Batch
from saccade.models.families import load_family
from saccade.plugins.ranks.divided import DividedOptimizer
from saccade.plugins.ranks.machines import HOST, grid
from saccade.plugins.ranks.sharded import HybridTrainer, ShardedTrainer
from saccade.plugins.reward_models.reward_losses import judgements
from saccade.system.contents import write_files
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer
from tests.ranks import test_divided as divided
from tests.ranks import test_sharded as sharded
from tests.ranks.test_divided import VISION, Case, equal, made, require_same_training

forests = divided.forests
DEAL = ((0,), (1, 4), (5,), ())
CASES = {
    "all": Case(DEAL),
    "text on one machine": Case(((0, 1), (4,), (), ())),
    "no image anywhere": Case(((4,), (), (5,), ())),
    "bf16": replace(divided.CASES["bf16"], deal=((0,), (4,), (), (1,))),
    "critic": replace(divided.CASES["critic"], deal=DEAL),
    "critic offloaded": replace(divided.CASES["critic offloaded"], deal=DEAL),
    "nan": Case(DEAL),
    "teacher": Case(DEAL, taught=True),
} | ({"lora": replace(divided.CASES["lora"], deal=DEAL)} if "lora" in divided.CASES else {})


def on_rank(rank: int, folder: Path, paths: dict[str, str], forests: dict[str, list[Batch]]) -> dict[str, Any]:
    family, found = load_family(paths[VISION]), dict[str, Any]()
    os.environ[HOST] = f"machine-{rank // 3}"
    try:
        grid("cpu")
    except EnvironmentProblem as error:
        found["uneven"] = str(error)
    os.environ[HOST] = f"machine-{rank % 2}"  # ranks of a machine need not be neighbours
    make = partial(made, family=family, optimizer=DividedOptimizer, backend=HybridTrainer)
    for name, case in CASES.items():
        backend, parts = make(case), divided.dealt(name, forests, CASES)
        trained = divided.train(backend, case, parts[rank])
        optimizer: Any = backend.optimizer
        found[name] = *trained, optimizer.same_everywhere()
    write_files(folder / "lora", backend.model_files(copy=True))
    write_files(folder / f"average-{rank}", sharded.averaged(family, HybridTrainer).state_files())
    mine, reference = forests[VISION][:rank], HybridTrainer(divided.fresh(family, torch.float32), family)
    found["read"] = reference.logprobs(mine, Scoring()), judgements(reference, mine, sharded.VERDICTS)
    first = make(CASES["critic"])
    batches = divided.dealt("critic", forests, CASES)[rank]
    divided.train(first, CASES["critic"], batches, steps=2)
    write_files(folder / "hybrid", first.state_files())
    dist.barrier()
    other = make(CASES["critic"], backend=ShardedTrainer)
    other.load_state(folder / "hybrid")
    write_files(folder / "sharded", other.state_files())
    dist.barrier()
    if rank == 0:
        alone = made(CASES["critic"], family)
        alone.load_state(folder / "sharded")
        write_files(folder / "one", alone.state_files())
    dist.barrier()
    second = make(CASES["critic"])
    second.load_state(folder / "one")
    optimizers: Any = first.optimizer, second.optimizer
    after = [divided.train(one, CASES["critic"], batches, steps=1)[-1] for one in (first, second)]
    found["resumed"] = equal(*(one.state() for one in optimizers)) and equal(*after)
    for name, weight in second.local_weights():
        if rank == 3 and "layers.0" in name:
            weight += 1
    found["differ"] = optimizers[1].same_everywhere()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any, family_of: Any, forests: dict[str, list[Batch]]) -> Any:
    """By case: what one process finds, and what each of four ranks finds; and their folder."""
    folder = tmp_path_factory.mktemp("hybrid")
    return *divided.beside_ranks(on_rank, folder, family_of, forests, CASES, ranks=4), folder


@pytest.mark.parametrize("name", CASES)
def test_two_machines_train_as_one_process_does(results: Any, name: str) -> None:
    near = 1e-3 if name == "bf16" else 1e-6  # sums inside a machine are rounded to the dtype of the weights
    alone = results[0][divided.plain(name)]
    require_same_training(name, alone, [found[name] for found in results[1]], near=near)


def test_an_average_a_reference_and_verdicts_of_a_reward_are_those_of_one_process(
    results: Any, family_of: Any, forests: Any, tmp_path: Path
) -> None:
    """Ranks read none to three forests."""
    write_files(tmp_path, sharded.averaged(family_of(VISION), LocalTrainer).state_files())
    assert equal(*(load_file(place / "weights.safetensors") for place in (results[2] / "average-0", tmp_path)))
    alone, mine = LocalTrainer(divided.fresh(family_of(VISION), torch.float32), family_of(VISION)), forests[VISION][:3]
    wanted = alone.logprobs(mine, Scoring()), judgements(alone, mine, sharded.VERDICTS)
    for rank, found in enumerate(results[1]):
        for read, expected in zip(found["read"], wanted, strict=True):
            assert len(read) == rank
            for one, other in zip(read, expected, strict=False):
                np.testing.assert_allclose(one[0], other[0], atol=1e-6)


def test_state_goes_from_hybrid_to_sharded_to_one_process_and_back(results: Any) -> None:
    _, ranks, folder = results
    assert [found["resumed"] for found in ranks] == [True] * 4
    for place in ("hybrid", "sharded"):
        assert len(list((folder / place).glob("optimizer-*-of-004.safetensors"))) == 4
    assert equal(*(load_file(folder / place / "weights.safetensors") for place in ("hybrid", "one")))


def test_every_number_is_stepped_once_and_a_quarter_by_each(results: Any) -> None:
    sizes = [sum(end - first for (first, end), _ in found["all"][0].values()) for found in results[1]]
    assert sum(sizes) == sum(gradient.numel() for _, gradient in results[0]["all"][0].values())
    assert max(sizes) <= 1.1 * sum(sizes) / 4


def test_a_machine_whose_weights_differ_is_noticed(results: Any) -> None:
    assert [found["differ"] for found in results[1]] == [True, True, False, False]  # by those with the same part


def test_machines_with_unequal_numbers_of_ranks_are_refused(results: Any) -> None:
    wanted = "train.layout=hybrid: machines have 1 and 3 processes; use as many on each, or train.layout=sharded"
    assert [found["uneven"] for found in results[1]] == [wanted] * 4
