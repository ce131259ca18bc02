"""Weights for engines on other machines: pieces in the memory of the trainer, which whoever knows their token may read
over the network, several at a time.

    with served(paths) as offer: ...                    # where the weights are
    with opened(offer, "node-1") as paths: ...          # where an engine is, of a run whose controller is on node-1
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

STREAMS = 4  # connections at a time: one alone fills no fast network
LIMIT = 60.0  # seconds in which nothing moves
TOKEN, NUMBER = 32, 8  # characters of a question: who asks, and for which piece


@contextmanager
def served(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield how to get these files from another machine, as long as the block."""
    token = secrets.token_hex(TOKEN // 2)
    with accepting(0, lambda link, address: _give(link, paths, token)) as port:
        sizes = [os.stat(path).st_size for path in paths]
        yield {"paths": [*paths], "sizes": sizes, "host": host_name(), "address": "", "port": port, "token": token}


def _give(link: socket.socket, paths: Sequence[str], token: str) -> None:
    with link, suppress(OSError, ValueError):  # strangers may send anything
        link.settimeout(LIMIT)
        asked = link.makefile("rb").read(TOKEN + NUMBER)
        if hmac.compare_digest(asked[:TOKEN], token.encode()):
            with open(paths[int(asked[TOKEN:])], "rb") as file:
                link.sendfile(file)


@contextmanager
def opened(offer: Mapping[str, Any], controller: str | None = None) -> Iterator[Sequence[str]]:
    """Yield paths of the pieces: those of the giver on its own machine, else those of a copy."""
    if _is_here(offer):
        yield offer["paths"]
        return
    address = offer["address"] or controller or "127.0.0.1"
    with ExitStack() as stack, ThreadPoolExecutor(STREAMS) as pool:
        paths, rooms = zip(*(stack.enter_context(room(size)) for size in offer["sizes"]), strict=True)
        list(pool.map(lambda piece: _take(address, offer, *piece), enumerate(rooms)))
        yield paths


def _is_here(offer: Mapping[str, Any]) -> bool:
    """The same name elsewhere, or in another container, may be another file."""
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
