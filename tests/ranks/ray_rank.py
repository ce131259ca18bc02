"""What a task of Ray does in place of a rank, without the imports of one: it has the test fork the rank, and both end
together. So tasks, their places and machines are Ray's own.
"""

import os
import socket

FORKS = "SACCADE_FORKS"  # the variable that says where the test listens


def serve(address: str, token: str) -> None:
    host, _, port = os.environ[FORKS].partition(":")
    with socket.create_connection((host, int(port))) as link:
        link.sendall(f"{address} {token}\n".encode())
        link.recv(1)


def broken(address: str, token: str) -> None:
    raise OSError("no such disk")
