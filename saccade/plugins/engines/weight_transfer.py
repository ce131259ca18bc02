"""Weights for engines on other machines: pieces in the trainer's memory, which clients with the token can read over
the network, several at a time.

    with served(paths) as offer: ...                    # in the trainer
    with opened(offer, "node-1") as paths: ...          # in an engine; the run's controller is on node-1
"""

import hmac
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from saccade.plugins.engines.kept_memory import room
from saccade.plugins.ranks.connections import accepting
from saccade.plugins.ranks.machines import host_name

STREAMS = 4  # parallel connections: one alone does not saturate a fast network
LIMIT = 60.0  # seconds without any data
TOKEN, NUMBER = 32, 8  # characters of a request: the token, and the number of the piece


@contextmanager
def served(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Serve these files while the block runs. Yields what another machine needs to get them (see `opened`)."""
    token = secrets.token_hex(TOKEN // 2)
    with accepting(0, lambda link, address: _give(link, paths, token)) as port:
        sizes = [os.stat(path).st_size for path in paths]
        yield {"paths": [*paths], "sizes": sizes, "host": host_name(), "address": "", "port": port, "token": token}


def _give(link: socket.socket, paths: Sequence[str], token: str) -> None:
    with link, suppress(OSError, ValueError):  # other clients may send anything
        link.settimeout(LIMIT)
        asked = link.makefile("rb").read(TOKEN + NUMBER)
        if hmac.compare_digest(asked[:TOKEN], token.encode()):
            with open(paths[int(asked[TOKEN:])], "rb") as file:
                link.sendfile(file)


@contextmanager
def opened(offer: Mapping[str, Any], controller: str | None = None) -> Iterator[Sequence[str]]:
    """Yield paths of the pieces: the trainer's own files on its machine, else those of a copy."""
    if _is_here(offer):
        yield offer["paths"]
        return
    address = offer["address"] or controller or "127.0.0.1"
    with ExitStack() as stack, ThreadPoolExecutor(STREAMS) as pool:
        paths, rooms = zip(*(stack.enter_context(room(size)) for size in offer["sizes"]), strict=True)
        list(pool.map(lambda piece: _take(address, offer, *piece), enumerate(rooms)))
        yield paths


def _is_here(offer: Mapping[str, Any]) -> bool:
    """Whether the files are on this machine: compares host and sizes, because a container may have others there."""
    if "port" not in offer:
        return True
    if offer["host"] != host_name():
        return False
    with suppress(OSError):
        return [os.stat(path).st_size for path in offer["paths"]] == offer["sizes"]
    return False


def _take(address: str, offer: Mapping[str, Any], number: int, held: Any) -> None:
    with socket.create_connection((address, offer["port"]), timeout=LIMIT) as link:
        link.sendall(f"{offer['token']}{number:0{NUMBER}}".encode())
        left, done = memoryview(held.numpy()), 0
        while done < len(left):
            if not (count := link.recv_into(left[done:])):
                raise ConnectionError(f"{address}: weights ended after {done} of {len(left)} bytes")
            done += count
