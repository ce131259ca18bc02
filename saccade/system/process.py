"""Child processes with requests, timeouts, kill and restart: reward workers, the user's environments, engine replicas.

A child runs a module, with a socket as its standard input. Both sides send blocks of JSON and arrays (`codec.pack`). A
child leads its own process group, so the processes it starts are killed with it, and it exits when its parent is gone,
for whatever reason. What it prints cannot disturb the socket: it goes to the standard error of the parent, or to a log.

    child = Child("saccade.plugins.reward_workers.worker")      # in the parent
    reply = child.ask({"verifier": "count"}, seconds=10).row
    child.close()

    channel = connect(tied=True)                                # in the child
    channel.send({"id": listen(channel).get().row["id"]})
"""

import ctypes
import faulthandler
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from saccade.system.codec import NO_ARRAYS, Arrays, pack, unpack

SIZE = struct.Struct("<Q")  # prefix of a block: its size
LARGEST = 64 << 20  # bytes of a block from a process with the user's code
LOOK_EVERY = 1.0  # seconds between two checks that the other process is alive
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
STACKS = "SACCADE_STACKS"  # variable with the file to which a child dumps its stacks on SIGUSR1
LOST = -1  # exit code of a remote process, whose own is unknown
TIED = (
    "import runpy, sys; from saccade.system.process import end_with_parent; end_with_parent(); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


class Ended(ConnectionError):
    """The other process ended, or sent unreadable data."""


class Block(NamedTuple):
    row: dict[str, Any]
    arrays: Arrays


class Channel:
    """Blocks over a socket. One thread may receive, any may send."""

    def __init__(self, link: socket.socket, *, largest: int | None = None) -> None:
        link.setblocking(False)
        self.link, self.largest = link, largest
        self._sending = threading.Lock()
        self._room, self._filled = bytearray(SIZE.size), 0  # buffer: the size of the next block, then the block
        self._sized, self.received = False, 0  # `received`: bytes in total

    def send(
        self, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = NO_ARRAYS, *, seconds: float | None = None
    ) -> None:
        """Send a block. Raises TimeoutError if the other side does not read; the channel is unusable after that."""
        block = pack(row, arrays)
        end = None if seconds is None else time.monotonic() + seconds
        with self._sending:
            for data in (memoryview(SIZE.pack(sum(map(len, block)))), *block):
                while data:
                    try:
                        data = data[self.link.send(data) :]
                    except BlockingIOError:
                        if not self._wait(select.POLLOUT, end):
                            raise TimeoutError(f"it read nothing for {seconds:g} s") from None
                    except OSError:
                        raise Ended("its process ended") from None

    def receive(self, seconds: float | None = None) -> Block | None:
        """The next block; None when none has come in this time."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._filled < len(self._room) or not self._sized:
            if self._filled == len(self._room):
                [size] = SIZE.unpack(self._room)
                if self.largest is not None and size > self.largest:
                    raise Ended(f"it said more than {self.largest >> 20} MiB")
                self._room, self._filled, self._sized = bytearray(size), 0, True
                continue
            try:
                count = self.link.recv_into(memoryview(self._room)[self._filled :])
            except BlockingIOError:
                if not self._wait(select.POLLIN, end):
                    return None
                continue
            except OSError:
                count = 0
            if not count:
                raise Ended("its process ended")
            self._filled += count
            self.received += count
        block = self._room
        self._room, self._filled, self._sized = bytearray(SIZE.size), 0, False
        return Block(*unpack(block))

    def _wait(self, event: int, end: float | None) -> bool:
        left = None if end is None else max(0.0, end - time.monotonic()) * 1000
        poll = select.poll()  # select.select fails for file descriptors above 1023
        poll.register(self.link, event)
        return bool(poll.poll(left))


# -- in the parent ---------------------------------------------------------------------------------


class Process:
    """A process at the other end of a channel. It ends when the channel is closed."""

    asked = 0  # the id of the last request
    gone = False  # it has closed its side

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def ask(self, row: Mapping[str, Any], *, seconds: float) -> Block:
        """Send a request and return the first answer. Raises TimeoutError or `Ended`."""
        self.asked += 1
        self.channel.send({**row, "id": self.asked}, seconds=seconds)
        return self.answer(seconds)

    def answer(self, seconds: float) -> Block:
        """The next answer to the last request; answers to earlier ones are skipped."""
        end = time.monotonic() + seconds
        while (block := self.receive(max(0.0, end - time.monotonic()))) is not None:
            if block.row["id"] == self.asked:
                return block
        raise TimeoutError(f"no answer after {seconds:g} s")

    def receive(self, seconds: float) -> Block | None:
        """`Channel.receive`; remembers if the process has ended."""
        try:
            return self.channel.receive(seconds)
        except Ended:
            self.gone = True
            raise

    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return LOST if self.gone else None

    def kill(self) -> None:
        """End the process and its children, even if it hangs."""
        with suppress(OSError):
            self.channel.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the process and close the channel. Call it from the thread that receives."""
        self.kill()
        self.channel.link.close()


class Child(Process):
    """A process that runs a module of this package. A child that is tied to its parent ends with the thread that
    started it.
    """

    def __init__(
        self,
        module: str,
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        largest: int | None = LARGEST,
        tied: bool = False,
    ) -> None:
        """`tied`: the child is tied to its parent from the start, before it imports its module."""
        root = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        link, theirs = socket.socketpair()
        with theirs, log.open("ab") if log else nullcontext() as errors:
            self.popen = subprocess.Popen(
                [sys.executable, *(("-c", TIED, module) if tied else ("-m", module))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches the parent only
                env={**os.environ, "PYTHONPATH": search, **(environment or {})},
            )
        super().__init__(Channel(link, largest=largest))

    def receive(self, seconds: float) -> Block | None:
        """`Channel.receive`; also polls the process, as its children may keep the socket open after it has ended."""
        end = time.monotonic() + seconds
        while True:
            ended = self.popen.poll() is not None  # polled first: it may answer and then end
            left = end - time.monotonic()
            block = self.channel.receive(0 if ended else max(0.0, min(LOOK_EVERY, left)))
            if block is not None or (left <= 0 and not ended):
                return block
            if ended:
                raise Ended("its process ended")

    def exit_code(self) -> int | None:
        """The exit code or None; waits 50 ms, in case the process has just closed its socket."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=0.05)
        return self.popen.returncode

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended; raises subprocess.TimeoutExpired."""
        self.popen.wait(timeout=seconds)

    def kill(self) -> None:
        if self.popen.poll() is None:
            with suppress(ProcessLookupError):  # another thread has just reaped it
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


# -- in the child ----------------------------------------------------------------------------------


def connect(*, tied: bool) -> Channel:
    """Connect to the parent. Afterwards standard input is empty, and prints go to standard error."""
    if tied:
        end_with_parent()
    if file := os.environ.get(STACKS):
        faulthandler.register(signal.SIGUSR1, open(file, "ab"))  # noqa: SIM115 (it stays open)
    link = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return Channel(link)


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends, even if it hangs (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def listen(channel: Channel, *, tied: bool = True) -> queue.SimpleQueue[Block]:
    """A queue of the parent's blocks, filled by a thread. The thread ends this process when the parent is gone, even if
    the main thread hangs. Not `tied`: the other side is not the parent, so only the connection counts.
    """
    inbox: queue.SimpleQueue[Block] = queue.SimpleQueue()

    def read() -> None:
        parent = os.getppid()
        try:
            while (block := channel.receive(LOOK_EVERY)) or not tied or os.getppid() == parent:
                if block is not None:
                    inbox.put(block)
        finally:
            if not tied:
                print("the connection to the run has ended, and so does this process", file=sys.stderr, flush=True)
            end()

    threading.Thread(target=read, name="listen", daemon=True).start()
    return inbox


def end() -> NoReturn:
    """Kill this process, and its whole process group if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
