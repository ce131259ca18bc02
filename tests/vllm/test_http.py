"""The HTTP engine against vLLM's own OpenAI server."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from saccade.config.schema import HttpConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.plugins.engines.http import HttpEngine
from saccade.plugins.engines.http_family import endpoint_family
from saccade.plugins.judges.http_client.chat_client import ChatClient
from saccade.types import Message, Request, Sampling

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
KEY = "sesame"
OPTIONS = "--dtype float32 --enforce-eager --max-model-len 2048 --max-num-seqs 8"


@pytest.fixture(scope="module")
def url(family, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("vllm")
    log = folder / "log.txt"
    # Mends a torchvision whose compiled part is missing, in all processes of the server.
    (folder / "sitecustomize.py").write_text("import saccade.models")
    paths = os.pathsep.join([str(folder), *sys.path])
    settings = {"PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", family.path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *OPTIONS.split()], stdout=file, stderr=file, env=os.environ | settings)
    address = f"http://127.0.0.1:{port}"
    while process.poll() is None and not _healthy(address):
        time.sleep(0.5)
    assert process.poll() is None, log.read_text()[-4000:]
    yield f"{address}/v1"
    process.terminate()
    process.wait()


def _healthy(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def legible(family):
    """Restricted to tokens that are text: vLLM samples placeholders too, and shows broken characters in its own way."""
    ids = range(family.vocabulary)
    text = np.array([family.chat.decode([i], special=True).isascii() for i in ids])
    return replace(family, banned=family.banned | ~text)


@pytest.fixture
def engine(url, legible, monkeypatch):
    monkeypatch.setenv("SACCADE_TEST_KEY", KEY)
    http = HttpConfig(url=url, key="SACCADE_TEST_KEY", retries=0)
    fields = {"logit_bias": {str(i): -100 for i in np.flatnonzero(legible.banned)}}
    made = HttpEngine(ChatClient(http, fields=fields), endpoint_family(url))
    yield made
    made.close()


@pytest.fixture(scope="module")
def requests(family, image):
    """About 0 to 3 images; ids for an engine of ours, messages for an endpoint."""

    def made(sampling):
        sizes = ((56, 56), (140, 84), (84, 56))
        shown = [image(*size, seed) for seed, size in enumerate(sizes)]
        talks = [(Message(role="user", parts=(*shown[:n], f"What are these {n}?")),) for n in range(4)]
        return [
            Request(
                key=str(n), ids=family.render(talk).ids, media=family.render(talk).media, messages=talk,
                sampling=sampling, noise=n,
            )
            for n, talk in enumerate(talks)
        ]  # fmt: skip

    return made


def test_greedy_answers_are_those_of_the_embedded_engine(engine, backend, legible, requests):
    asked = requests(Sampling(temperature=0, max_tokens=12))
    there, here = generate(engine, asked), generate(EmbeddedEngine(backend.model, legible), asked)
    texts = [engine._texts.decode(c.ids) for c in there]
    assert texts == [legible.decode(c.ids) for c in here]
    assert [(len(c.ids), c.finish) for c in there] == [(len(c.ids), c.finish) for c in here]
    assert engine.client.counters["prompt_tokens"] == sum(len(r.ids) for r in asked)


def test_seeds_and_stop_strings(engine, requests):
    hot = Sampling(temperature=1.0, max_tokens=40, ignore_eos=True)
    first, second = ([engine._texts.decode(c.ids) for c in generate(engine, requests(hot))] for _ in range(2))
    assert first == second and len(set(first)) == 4
    letter = next(c for c in first[1] if c.isascii())
    stopping = Sampling(temperature=1.0, max_tokens=40, ignore_eos=True, stop=(letter,))
    (_, stopped, *_) = (engine._texts.decode(c.ids) for c in generate(engine, requests(stopping)))
    assert stopped == first[1][: first[1].index(letter) + 1]


def test_a_refusal_in_vllms_words(engine, requests):
    with pytest.raises(ConfigError, match=r"0: rollout\.max_tokens: .*status 400.*max_tokens"):
        generate(engine, requests(Sampling(max_tokens=1 << 20))[:1])
