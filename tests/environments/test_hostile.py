"""Nothing that a hostile policy writes is executed, and what it costs is bounded by what it may write."""

import sys

import pytest

from saccade.config import EnvConfig
from saccade.environments import EnvContext, build
from saccade.environments.texts import render_text
from saccade.plugins.tools.calls import LONGEST
from saccade.plugins.verifiers.extract import extract
from saccade.types import Message, Sample

CONTEXT = EnvContext(answer=lambda text: extract(text, ["answer_tag"]) or None)
FORBIDDEN = ("exec", "compile", "open", "os.system", "os.exec", "os.fork", "os.posix_spawn")
FORBIDDEN += ("subprocess.Popen", "socket.connect", "ctypes.dlopen", "pickle.find_class")
CODE = "__import__('os').system('touch owned')"
watching: list[list[str]] = []


def _audit(event, arguments):
    if watching and event in FORBIDDEN:
        watching[-1].append(f"{event} {arguments!r:.80}")


@pytest.fixture(scope="module")
def audited():
    """A hook stays for good, so it looks only while something is watched."""
    sys.addaudithook(_audit)


@pytest.fixture
def seen(audited):
    events: list[str] = []
    yield events
    assert not watching


def played(text, seen, image, **options):
    environment = build(EnvConfig(**{"name": "crop"} | options), CONTEXT)
    picture = image(200, 100, 3)
    sample = Sample(id="s", messages=(Message(role="user", parts=(picture, "?")),), extra={"level": "@$."})
    environment.reset(sample, 0)
    render_text("json")  # reads the texts
    watching.append(seen)
    step = environment.step(Message(role="assistant", parts=(text,)))
    watching.pop()
    assert seen == []
    return step


def grounding(body):
    return f"<grounding>{body}</grounding>"


ORIGINAL = '"source": "original_image"'
HOSTILE = {
    "code in the box": (grounding(f'{{"bbox_2d": {CODE}, {ORIGINAL}}}'), "json"),
    "ten million digits": (grounding(f'{{"bbox_2d": [{"9" * 10**7}], {ORIGINAL}}}'), "too_long"),
    "an exponent of 10^9": (grounding(f'{{"bbox_2d": [1e999999999, 0, 1, 1], {ORIGINAL}}}'), "number"),
    "a million openings": ("<grounding>" * 10**6 + "</grounding>", "json"),
    "nothing closed": ("<grounding>" + "{" * 10**6, "unclosed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_call_is_refused_and_answered_in_a_line(name, seen, image):
    text, reason = HOSTILE[name]
    step = played(text, seen, image)
    (noted,) = step.info["tool_calls"]
    assert (noted["ok"], noted["reason"], noted["observation"]) == (False, reason, None)
    assert len(noted["text"]) <= LONGEST and not step.done
    (message,) = step.messages
    assert message.media == () and len(message.text) < 250


def test_ten_thousand_calls_in_one_turn(seen, image):
    """As many are answered as are allowed; the others are not even read."""
    call = '<tool_call>{"name": "zoom", "arguments": {"bbox_2d": [0, 0, 0.5, 1], %s}}</tool_call>'
    options = {"call": "tool_call", "parallel_calls": 8}
    step = played(call % ORIGINAL * 10_000, seen, image, **options)
    assert len(step.info["tool_calls"]) == len(step.messages[0].media) == 8
    broken = played("<tool_call>{}</tool_call>" * 10_000, seen, image, **options)
    assert len(broken.info["tool_calls"]) == 8 and len(broken.messages[0].text) < 1000


@pytest.mark.parametrize("arguments", [f'{{"expression": "{CODE}"}}', '{"expression": "9^9^9^9^9"}'])
def test_a_calculator_calculates_and_nothing_else(arguments, seen, image):
    text = f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call>'
    step = played(text, seen, image, name="calculator")
    assert not step.info["tool_calls"][0]["ok"] and len(step.messages[0].text) < 250


@pytest.mark.parametrize("answer", ["up, " * 10**5, f"up, {CODE}"])
def test_a_game_reads_moves_and_nothing_else(answer, seen, image):
    step = played(f"<answer>{answer}</answer>", seen, image, name="sokoban_step")
    noted = step.info["tool_calls"][-1]
    assert not noted["ok"] and len(str(noted)) < 1000 and len(step.messages[0].text) < 250
