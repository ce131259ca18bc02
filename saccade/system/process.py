"""Child processes that can be asked, timed, killed and replaced: reward workers, environments of
the user, engine replicas.

A child is a module that is run with a socket as its standard input. Both sides send blocks of JSON
and arrays (`codec.pack`). A child leads its process group, so that what it starts ends with it, and
it ends itself when its parent is gone, however that happened. What it prints cannot disturb the
socket: it goes to the standard error of the parent, up to a limit, or to a log.

    child = Child("saccade.plugins.reward_workers.worker", who="a reward")     # in the parent
    reply = child.ask({"verifier": "count"}, seconds=10).row
    child.close()

    channel = connect(tied=True)                                # in the child
    channel.send({"id": listen(channel).get().row["id"]})
"""

import ctypes
import faulthandler
import logging
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
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

from saccade.system.codec import NO_ARRAYS, Arrays, pack, unpack

SIZE = struct.Struct("<Q")  # of a block, in front of it
LARGEST = 64 << 20  # bytes of a block from code of the user
SHOWN = 1 << 18  # bytes of what a process of the user's code prints
LOOK_EVERY = 1.0  # seconds between two looks at whether the other process still exists
DEATH_SIGNAL = 1  # of prctl
STACKS = "SACCADE_STACKS"  # names the file that a child writes its stacks to, when it gets SIGUSR1
LOST = -1  # the exit code of one elsewhere, whose own nobody knows
TIED = (
    "import runpy, sys; from saccade.system.process import end_with_parent; end_with_parent(); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


class Ended(ConnectionError):
    """The other process ended, or sent what cannot be read."""


class Block(NamedTuple):
    row: dict[str, Any]
    arrays: Arrays


class Channel:
    """Blocks over a socket. One thread may receive, any may send."""

    def __init__(self, link: socket.socket, *, largest: int | None = None) -> None:
        link.setblocking(False)
        self.link, self.largest = link, largest
        self._sending = threading.Lock()
        self._room, self._filled = bytearray(SIZE.size), 0  # of the size of the next block, then of the block
        self._sized, self.received = False, 0  # bytes in all

    def send(
        self, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = NO_ARRAYS, *, seconds: float | None = None
    ) -> None:
        """TimeoutError where the other side does not read; it cannot be used after that."""
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
        poll = select.poll()  # select.select knows no file number beyond 1023
        poll.register(self.link, event)
        return bool(poll.poll(left))


# -- in the parent ---------------------------------------------------------------------------------


class Process:
    """One at the end of a channel, which ends when that does."""

    asked = 0  # the id of the last request
    gone = False  # it has closed its side

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def ask(self, row: Mapping[str, Any], *, seconds: float) -> Block:
        """The first answer to a request. TimeoutError or `Ended` where there is none."""
        self.asked += 1
        self.channel.send({**row, "id": self.asked}, seconds=seconds)
        return self.answer(seconds)

    def answer(self, seconds: float) -> Block:
        """The next answer to the last request; answers to earlier ones are passed over."""
        end = time.monotonic() + seconds
        while (block := self.receive(max(0.0, end - time.monotonic()))) is not None:
            if block.row["id"] == self.asked:
                return block
        raise TimeoutError(f"no answer after {seconds:g} s")

    def receive(self, seconds: float) -> Block | None:
        """As that of a channel."""
        try:
            return self.channel.receive(seconds)
        except Ended:
            self.gone = True
            raise

    def exit_code(self) -> int | None:
        """None while it runs."""
        return LOST if self.gone else None

    def kill(self) -> None:
        """With all that it has started; also when it hangs."""
        with suppress(OSError):
            self.channel.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For the thread that receives from it."""
        self.kill()
        self.channel.link.close()


class Child(Process):
    """A process that runs a module of this package. One that ties itself to its parent ends with
    the thread that made it. `who` is named when it prints too much; a `log` takes everything.
    """

    def __init__(
        self,
        module: str,
        *,
        who: str = "a process",
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        largest: int | None = LARGEST,
        tied: bool = False,
    ) -> None:
        """`tied`: it ends with this one from its first moment, before it has imported what it runs."""
        root = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        link, theirs = socket.socketpair()
        with theirs, log.open("ab") if log else nullcontext(subprocess.PIPE) as errors:
            self.popen = subprocess.Popen(
                [sys.executable, *(("-c", TIED, module) if tied else ("-m", module))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches the parent only
                env={**os.environ, "PYTHONPATH": search, **(environment or {})},
            )
        super().__init__(Channel(link, largest=largest))
        self._shown = show_output(self.popen.stderr, who) if self.popen.stderr else None

    def receive(self, seconds: float) -> Block | None:
        """What the process has started may keep its socket open: so whether it still runs is looked at, too."""
        end = time.monotonic() + seconds
        while True:
            ended = self.popen.poll() is not None  # before: it may have answered and then ended
            left = end - time.monotonic()
            block = self.channel.receive(0 if ended else max(0.0, min(LOOK_EVERY, left)))
            if block is not None or (left <= 0 and not ended):
                return block
            if ended:
                raise Ended("its process ended")

    def exit_code(self) -> int | None:
        """One that has just closed its socket gets a moment to end."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=0.05)
        return self.popen.returncode

    def wait(self, seconds: float) -> None:
        """Until it has ended; subprocess.TimeoutExpired if it has not by then."""
        self.popen.wait(timeout=seconds)

    def kill(self) -> None:
        if self.popen.poll() is None:
            with suppress(ProcessLookupError):  # another thread has just seen its end
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        super().close()
        if self._shown is not None:
            self._shown.join(timeout=1)


def show_output(pipe: IO[bytes], who: str) -> threading.Thread:
    """Passes on what a process prints, up to SHOWN bytes; the rest is read all the same, for the
    process would wait otherwise. Ends with the last process that may print there.
    """

    def forward() -> None:
        left = SHOWN
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                with suppress(OSError):  # nobody may be there to read it
                    os.write(2, data[: max(0, left)])
                left -= len(data)
                if left < 0:
                    _say_enough(who)

    thread = threading.Thread(target=forward, name="output", daemon=True)
    thread.start()
    return thread


@cache
def _say_enough(who: str) -> None:
    logging.getLogger("saccade").warning(
        "%s printed more than %d kB; of each of its processes only that much is shown", who, SHOWN >> 10
    )


# -- in the child ----------------------------------------------------------------------------------


def connect(*, tied: bool) -> Channel:
    """To the parent. From here on standard input is empty, and prints go to standard error."""
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
    """The kernel ends this process with the thread that started it, even while it hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def listen(channel: Channel, *, tied: bool = True) -> queue.SimpleQueue[Block]:
    """What the parent sends. A thread reads it, and ends this process when the parent is gone,
    whatever the main thread is stuck in. Not `tied`: the other side is no parent.
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
    """This process, with what it has started or forked where it leads them."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
