"""`saccade chat`: in a terminal, over a file, as a server that a browser can talk to."""

import contextlib
import json
import os
import re
import signal
import time

import pytest
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.plugins.serving import chat_command as chatting
from saccade.types import Sampling
from tests.browser import Browser, needs_browser
from tests.endpoints import Says, call, chat_answer, scripted
from tests.ranks.processes import LIMIT, forked, run_command


@pytest.fixture(scope="module")
def folder(family_of):
    return family_of("qwen2_5_vl").path


@pytest.fixture
def picture(tmp_path, image):
    media = image(84, 56, 5)
    (tmp_path / "a.png").write_bytes(media.data or b"")
    return tmp_path / "a.png"


def chat(*arguments, typed=()):
    lines = "".join(f"{line}\n" for line in typed)
    return CliRunner().invoke(app, ["chat", "rollout.max_tokens=12", *arguments], input=lines)


def test_a_conversation(folder, picture, tmp_path):
    saved = tmp_path / "talk.json"
    result = chat(
        folder,
        typed=[
            "/greedy", "/system be brief", f"/image {picture}", "how many?", "sure?", f"/save {saved}",
            f"/save {saved}", "/image nowhere.png", "/dance", "/clear", "exit", "never read",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()
    assert said[1:4] == ["greedy", "system message set", "84x56, goes with the next message"]
    (talk,) = json.loads(saved.read_text())
    roles = [message["role"] for message in talk["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    shown, text = talk["messages"][1]["content"]
    assert shown == {"type": "image", "image": str(picture)} and text["text"] == "how many?"
    assert talk["messages"][2]["content"] in result.stdout
    for problem in ("exists and is not overwritten; give another name", "file does not exist", "/dance is unknown"):
        assert problem in result.stdout
    assert "never" not in result.stdout


def test_a_file_of_conversations_gets_the_answers_of_the_terminal(folder, picture, tmp_path):
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "how many?"}]
    conversations = [[{"role": "user", "content": content}], "hello", {"messages": "hello"}]
    (tmp_path / "in.json").write_text(json.dumps(conversations))
    out = tmp_path / "out.json"
    options = ["--greedy", "--batch", str(tmp_path / "in.json"), "--out", str(out)]
    result = chat(folder, *options)
    assert result.exit_code == 0 and result.stdout == f"wrote 3 answers to {out}\n"
    answers = json.loads(out.read_text())
    assert [len(a["messages"]) for a in answers] == [2, 2, 2]
    assert answers[1]["messages"] == answers[2]["messages"] and answers[0]["tokens"] <= 12
    typed = chat(folder, "--greedy", typed=[f"/image {picture}", "how many?", "exit"])
    assert answers[0]["messages"][1]["content"] in typed.stdout
    assert "is not overwritten" in chat(folder, *options).output

    out.unlink()
    (tmp_path / "in.json").write_text(json.dumps(["hello", {"messages": []}, "hello", "hello " * 5000]))
    result = chat(folder, *options)
    assert result.exit_code == 2 and "2 of 4 conversations were not answered" in result.output
    again = json.loads(out.read_text())
    assert again[0]["messages"] == again[2]["messages"] == answers[1]["messages"]
    assert "in.json[1]: " in again[1]["error"] and "tokens where prompt and answer have" in again[3]["error"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ('["x", [{"role": "judge", "content": "x"}]]', "[1]: unknown role"),
        (
            '["x", [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}]]',
            "in.json[1]: gone.png: file does not exist",
        ),
    ],
)
def test_a_file_that_cannot_be_answered(folder, tmp_path, content, problem):
    (tmp_path / "in.json").write_text(content)
    result = chat(folder, "--batch", str(tmp_path / "in.json"))
    assert result.exit_code == 2 and problem in result.output.replace("\n", "")


def test_ctrl_c_ends_an_answer_between_two_steps(folder):
    """Never within one, which would leave an engine's caches half written."""
    config = load(None, [f"model.path={folder}", "rollout.max_tokens=12", "run.device=cpu"])
    before, steps, said = signal.getsignal(signal.SIGINT), [], []
    with chatting._opened(config, greedy=True) as state:
        engine, family, poll = state.engine, state.family, state.engine.poll

        def interrupted():
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            steps.append(poll())
            return steps[-1]

        engine.poll = interrupted  # type: ignore[method-assign]
        state.sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
        chatting._answer(state, "hello", said.append)
        (done,) = steps[-1]
        assert done.finish == "aborted" and len(done.ids) == 4 and len(steps) == 5
        assert f"{state.messages[-1].text}\n" == "".join(said) == f"{family.decode(done.ids)}\n"
        assert signal.getsignal(signal.SIGINT) is before and engine.pending == 0
        state.messages = []
        chatting._answer(state, "hello", said.append)
        (again,) = steps[-1]
        assert again.finish == "length" and again.ids[:4].tolist() == done.ids.tolist()


def test_a_refused_question_is_not_the_end_of_the_talk():
    script = [Says(status=400, body={"error": {"message": "too rude"}}), chat_answer("four")]
    with scripted(script) as endpoint:
        options = ["rollout.engine=http", f"rollout.http.url={endpoint.url}"]
        result = chat(*options, "rollout.http.model=m", typed=["bad", "2 + 2?", "exit"])
    assert "too rude" in result.stdout and "four" in result.stdout and result.exit_code == 0
    assert [len(seen["body"]["messages"]) for seen in endpoint.asked] == [1, 1]


def test_a_server_that_others_can_reach_has_a_token(folder):
    for command in (["chat", folder, "--serve"], ["serve-reward", "reward.terms=[count]"]):
        result = CliRunner().invoke(app, [*command, "--no-token", "--host", "0.0.0.0"])
        assert result.exit_code == 2 and "--no-token: 0.0.0.0 can be reached" in result.output
    result = chat(folder, "--serve", "--batch", "in.json")
    assert result.exit_code == 2 and "--batch: has no effect with --serve" in result.output


def serve(said, command):
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
    run_command({"environment": {}, "folder": ".", "arguments": command})


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Its address, and its page with the token in it."""
    said, end = tmp_path_factory.mktemp("server") / "said", time.monotonic() + LIMIT
    command = ["chat", folder, "rollout.max_tokens=64", "--greedy", "--serve", "--port", "0"]
    process = forked(serve, said, command)
    while not said.is_file() or said.read_text().count("\n") < 3:
        assert process.exitcode is None and time.monotonic() < end
        time.sleep(0.05)
    lines = said.read_text().splitlines()
    address = re.search(r"http://\S+/v1", lines[0])
    assert address is not None, lines
    yield address[0], lines[1].split()[1]
    process.terminate()
    process.join()


def test_terminal_and_endpoint_say_the_same(server, folder):
    url, page = server
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    bearer = f"Bearer {page.partition('#token=')[2]}"
    _, _, reply = call(url, "POST", "/v1/chat/completions", body, Authorization=bearer)
    text = json.loads(reply)["choices"][0]["message"]["content"]
    assert text and text in chat(folder, "--greedy", typed=["hello", "exit"]).stdout


@needs_browser
def test_the_page(server, folder, picture):
    """Type a message and see the answer; then one about an image."""
    _, page = server
    with contextlib.closing(Browser()) as browser:
        browser.visit(page)
        assert browser.until(f"document.getElementById('model').textContent === {folder!r}")
        browser.run("document.getElementById('text').focus()")
        browser.write("hello")
        browser.run("document.getElementById('send').click()")
        answer = browser.until("document.querySelector('.assistant.done')?.textContent")
        whole = chat(folder, "rollout.max_tokens=64", "--greedy", typed=["hello", "exit"]).stdout
        assert answer in whole
        browser.page.set_input_files("#files", picture)
        browser.until("document.querySelectorAll('#pictures img').length === 1")
        browser.write("and this?")
        browser.run("document.getElementById('send').click()")
        browser.until("document.querySelectorAll('.assistant.done').length === 2")
        assert browser.run("document.querySelectorAll('.user img').length") == 1
        assert browser.run("document.querySelectorAll('.error').length") == 0
        browser.visit(page.partition("#")[0])  # another tab, without the token
        browser.until("!document.getElementById('locked').hidden")
