"""`saccade` for scripts and tasks of Ray, without its imports: the test forks the command, and both end together.

SACCADE_FORKS=127.0.0.1:28111 python -S tests/ranks/forked_command.py rank 127.0.0.1:28400
"""

import json
import os
import signal
import socket
import sys
from importlib import import_module

FORKS = "SACCADE_FORKS"  # the variable that says where the test listens


def run(*arguments: str, **environment: str) -> int:
    """The exit code of the command."""
    host, _, port = os.environ[FORKS].partition(":")
    with socket.create_connection((host, int(port))) as link:
        asked = {"arguments": arguments, "environment": {**os.environ, **environment}, "folder": os.getcwd()}
        link.sendall(json.dumps(asked).encode() + b"\n")
        return int(link.makefile().readline())


def rank(address: str, token: str) -> None:
    """As a task of Ray, and on the second machine of a script such a task itself."""
    if os.environ.get("SACCADE_HOST") != "machine-1":
        run("rank", address, SACCADE_TOKEN=token)
    else:
        import_module("saccade.plugins.ranks.launchers").run_rank(address, token)


def broken(address: str, token: str) -> None:
    raise OSError("no such disk")


def lost(address: str, token: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
