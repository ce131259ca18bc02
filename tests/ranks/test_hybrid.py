"""Four ranks on two machines, each with all weights in two parts, against one process.

Four processes run all cases.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from saccade.errors import EnvironmentProblem
from saccade.forest.batch import Batch
from saccade.models.families import load_family
from saccade.plugins.ranks.divided import DividedOptimizer
from saccade.plugins.ranks.machines import HOST, grid
from saccade.plugins.ranks.sharded import HybridBackend, ShardedBackend
from saccade.system.contents import write_files
from tests.ranks import test_divided as divided
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
    make = partial(made, family=family, optimizer=DividedOptimizer, backend=HybridBackend)
    for name, case in CASES.items():
        backend, parts = make(case), divided.dealt(name, forests, CASES)
        trained = divided.train(backend, case, parts[rank])
        optimizer: Any = backend.optimizer
        found[name] = *trained, optimizer.same_everywhere()
    write_files(folder / "lora", backend.model_files(copy=True))
    first = make(CASES["critic"])
    batches = divided.dealt("critic", forests, CASES)[rank]
    divided.train(first, CASES["critic"], batches, steps=2)
    write_files(folder / "hybrid", first.state_files())
    dist.barrier()
    sharded = make(CASES["critic"], backend=ShardedBackend)
    sharded.load_state(folder / "hybrid")
    write_files(folder / "sharded", sharded.state_files())
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
