"""Which ranks share a machine, and small collectives on the CPU.

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

HOST = "SACCADE_HOST"  # environment variable that replaces the host name, for machines with equal ones


def host_name() -> str:
    return os.environ.get(HOST) or socket.gethostname()


def named(hosts: Sequence[str], ranks: Iterable[int]) -> str:
    """Ranks with their machines, for messages. `hosts`: the machine of each rank."""
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


def agreed(numbers: Iterable[float], how: Any, group: Any = None) -> Tensor:
    """All-reduce a few numbers over all ranks or a group, in float64 on the CPU."""
    answer = torch.tensor([*numbers], dtype=torch.float64)
    dist.all_reduce(answer, op=how, group=group)
    return answer


def _everyone(number: float) -> list[float]:
    """All-gather one number: the numbers of all ranks, in rank order."""
    mine = dist.get_rank()
    return agreed([number * (rank == mine) for rank in range(dist.get_world_size())], dist.ReduceOp.SUM).tolist()


def _hosts() -> list[float]:
    """A checksum of the host name of each rank."""
    return _everyone(zlib.crc32(host_name().encode()))


def sum_of_machine(number: float) -> float:
    """Sum a number over the ranks of this machine. Collective: all ranks must call it."""
    hosts, numbers = _hosts(), _everyone(number)
    return sum(one for host, one in zip(hosts, numbers, strict=True) if host == hosts[dist.get_rank()])


@cache
def grid(device: str) -> DeviceMesh:
    """The device mesh of all ranks: `machines` x `gpus` of a machine. Collective: all ranks must call it."""
    hosts = _hosts()
    rows = [[rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]
    if len(sizes := set(map(len, rows))) > 1:
        seen = " and ".join(map(str, sorted(sizes)))
        raise EnvironmentProblem(
            f"train.layout=hybrid: machines have {seen} processes; use as many on each, or train.layout=sharded"
        )
    return DeviceMesh(device, torch.tensor(rows), mesh_dim_names=("machines", "gpus"))
