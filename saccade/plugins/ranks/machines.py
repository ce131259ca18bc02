"""Which ranks share a machine, and what all of them agree on.

>>> grid("cuda").shape
(2, 8)
"""

import os
import socket
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from saccade.errors import EnvironmentProblem

HOST = "SACCADE_HOST"  # how this machine is called instead, where several have one name


def host_name() -> str:
    return os.environ.get(HOST) or socket.gethostname()


def named(hosts: Sequence[str], ranks: Iterable[int]) -> str:
    """For messages: `hosts` has the machine of each rank."""
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


def agreed(numbers: Iterable[float], how: Any, group: Any = None) -> Tensor:
    """One answer from the numbers of all ranks, or of a group."""
    answer = torch.tensor([*numbers], dtype=torch.float64)
    dist.all_reduce(answer, op=how, group=group)
    return answer


def _everyone(number: float) -> list[float]:
    """That number of each rank."""
    mine = dist.get_rank()
    return agreed([number * (rank == mine) for rank in range(dist.get_world_size())], dist.ReduceOp.SUM).tolist()


def _hosts() -> list[float]:
    """The machine of each rank."""
    return _everyone(zlib.crc32(host_name().encode()))


def sum_of_machine(number: float) -> float:
    """Over the ranks of this machine; all ranks ask for it together."""
    hosts, numbers = _hosts(), _everyone(number)
    return sum(one for host, one in zip(hosts, numbers, strict=True) if host == hosts[dist.get_rank()])


@cache
def grid(device: str) -> DeviceMesh:
    """Ranks as `machines` x `gpus` of a machine; all ranks ask for it together."""
    hosts = _hosts()
    rows = [[rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    if len(sizes := set(map(len, rows))) > 1:
        seen = " and ".join(map(str, sorted(sizes)))
        raise EnvironmentProblem(
            f"train.layout=hybrid: machines have {seen} processes; use as many on each, or train.layout=sharded"
        )
    return DeviceMesh(device, torch.tensor(rows), mesh_dim_names=("machines", "gpus"))
