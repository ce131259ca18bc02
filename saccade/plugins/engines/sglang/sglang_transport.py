"""Two transports to SGLang: its engine in this process, or a server over HTTP. Both send a request under
an id (`name`) and return SGLang's answer, load weights, and free memory.
"""

import asyncio
import inspect
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
from torch import Tensor

from saccade.engines import Settings
from saccade.errors import EnvironmentProblem
from saccade.models.families import Family
from saccade.plugins.engines import INSTALL
from saccade.plugins.engines.weights import in_folder, pieces
from saccade.plugins.judges.http_client.sender import http_client

NEEDED = ("input_ids", "image_data", "mm_hashes", "return_logprob", "rid")  # of async_generate
CONNECTIONS, PATIENCE = 256, 3600.0  # parallel requests; seconds for an answer
ENVIRONMENT = {  # read when SGLang starts; the user's values take precedence
    "SGLANG_MM_AVOID_RETOKENIZE": "1",  # ids of a prompt with images stay as they are
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs include the temperature
}
Weights = Iterable[tuple[str, Tensor]]
Answers = list[tuple[str, dict[str, Any]]]


def problem() -> str:
    """Why SGLang cannot serve here, with the fix; empty when it can."""
    if find_spec("sglang") is None:
        return f"sglang is not installed; run: {INSTALL['sglang']}"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import sglang

        parameters = inspect.signature(sglang.Engine.async_generate).parameters
    except Exception as error:  # a library that does not fit the machine may raise anything
        return f"sglang cannot be imported ({error}); install it again: {INSTALL['sglang']}"
    lacks = [name for name in NEEDED if name not in parameters]
    return f"sglang has no {', '.join(lacks)}; install a newer one: {INSTALL['sglang']}" if lacks else ""


class InProcess:
    """SGLang's schedulers are child processes; the event loop that talks to them runs inside `wait`, in
    the caller's thread.
    """

    def __init__(self, settings: Settings, family: Family) -> None:
        if found := problem():
            raise EnvironmentProblem(f"rollout.engine=sglang: {found}")
        import sglang

        self.sleeps = find_spec("torch_memory_saver") is not None
        arguments: dict[str, Any] = {
            "model_path": settings.folder,
            "dtype": settings.dtype,
            "tp_size": settings.tensor_parallel,
            "mem_fraction_static": settings.memory_share,
            "context_length": min(settings.max_length, family.max_positions),
            "max_running_requests": settings.max_sequences,
            "random_seed": settings.seed,
            "trust_remote_code": settings.trust_remote_code,
            "enable_memory_saver": self.sleeps,
            "enable_deterministic_inference": True,  # otherwise the seeds of requests are ignored
            "log_level": "error",
        }
        if size := dict(family.untouched(settings.max_length, settings.max_pixels)):
            arguments["mm_process_config"] = {"image": {"size": size}}
        self._engine = sglang.Engine(**arguments | dict(settings.args))
        self._tasks: dict[asyncio.Task[Any], str] = {}

    def start(self, name: str, body: dict[str, Any]) -> None:
        answer = self._engine.async_generate(rid=name, **body)
        self._tasks[self._engine.loop.create_task(answer)] = name

    def wait(self) -> Answers:
        first = asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self._engine.loop.run_until_complete(first)
        return [(self._tasks.pop(task), task.result()) for task in done]

    def abort(self, name: str) -> None:
        self._engine.tokenizer_manager.abort_request(rid=name)

    def load(self, weights: Weights, version: int) -> None:
        engine = self._engine
        if hasattr(engine, "begin_weight_update"):  # newer releases require it
            _require(*engine.begin_weight_update())
        for piece in pieces(weights):
            _require(*engine.update_weights_from_tensor(list(piece.items()), flush_cache=False))
        if hasattr(engine, "end_weight_update"):
            _require(*engine.end_weight_update())
        _require(engine.flush_cache().success, "its cache was not flushed")

    def memory(self, what: str, tags: Sequence[str]) -> None:
        """`what`: release or resume."""
        getattr(self._engine, f"{what}_memory_occupation")(tags=list(tags))

    def close(self) -> None:
        self._engine.shutdown()


class OverHttp:
    """A server that sees this machine's shared memory, into which weights are written as a model folder."""

    def __init__(self, url: str, key_variable: str = "") -> None:
        self.url = url.rstrip("/")
        self._client = http_client(url, os.environ.get(key_variable, ""))
        self._ask("/health_generate", timeout=60)
        self.sleeps = bool(json.loads(self._ask("/server_info")).get("enable_memory_saver"))
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="sglang")
        self._answers: dict[Future[bytes], str] = {}

    def start(self, name: str, body: dict[str, Any]) -> None:
        whole = {"rid": name, "return_prompt_token_ids": True, **body}
        self._answers[self._threads.submit(self._ask, "/generate", whole)] = name

    def wait(self) -> Answers:
        done, _ = wait(self._answers, return_when=FIRST_COMPLETED)
        return [(self._answers.pop(one), json.loads(one.result())) for one in done]

    def abort(self, name: str) -> None:
        self._ask("/abort_request", {"rid": name})

    def load(self, weights: Weights, version: int) -> None:
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            in_folder(weights, Path(folder))
            request = {"model_path": folder, "flush_cache": True, "weight_version": str(version)}
            self._ask("/update_weights_from_disk", request)

    def memory(self, what: str, tags: Sequence[str]) -> None:
        self._ask(f"/{what}_memory_occupation", {"tags": list(tags)})

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, path: str, body: Any = None, timeout: float = PATIENCE) -> bytes:
        """GET without a body, else POST."""
        method = "GET" if body is None else "POST"
        try:
            answer = self._client.request(method, self.url + path, json=body, timeout=timeout)
        except (httpx2.HTTPError, OSError) as error:
            fix = "start it with python -m sglang.launch_server, or leave out rollout.engine_args.url to run it here"
            raise EnvironmentProblem(f"sglang: no answer from {self.url}{path}: {error}; {fix}") from error
        if answer.status_code != 200:
            raise EnvironmentProblem(f"sglang refused {path} ({answer.status_code}): {answer.text[:500]}")
        return answer.content


def _require(success: bool, message: str) -> None:
    if not success:
        raise EnvironmentProblem(f"sglang did not take the weights: {message}")
