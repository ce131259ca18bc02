"""`saccade view`: runs, options and rollouts in a real browser, live and as a file; who may ask, and for what."""

import csv
import io
import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from saccade.config import TrackConfig, load
from saccade.errors import EnvironmentProblem
from saccade.media.images import decode
from saccade.plugins.evaluation.results import add_rows
from saccade.plugins.reports.report import from_run
from saccade.plugins.reports.rollout_record import token_sizes
from saccade.plugins.serving.http_server import running
from saccade.plugins.view.run_index import Runs
from saccade.plugins.view.view_server import list_rollouts, list_runs, show_rollouts, view_app, write_page
from saccade.run.loggers import Loggers
from saccade.run.training_run import open_folder
from tests.browser import needs_browser, page_data
from tests.endpoints import call
from tests.run.conftest import evaluation, group, media, store, trajectory
from tests.run.test_episodes import TURNS, episode

TOKEN = "sesame"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that answer the same questions; the second is better, and looks closer once."""
    root = tmp_path_factory.mktemp("runs")
    for name, lr, better in (("first", 1e-6, 0), ("second", 2e-6, 1)):
        config = load({"run": {"out": str(root), "name": name}, "train": {"lr": lr}})
        with open_folder(config, "rl", {}, config.algorithm) as folder:
            log(folder, *range(1, 4))
            for step in (1, 2):
                for kind, prefix, count in (("train", "q", 20), ("val/six", "v", 4)):
                    groups = (answers(f"{prefix}{n}", right=n < step + better) for n in range(count))
                    store(folder, *groups, steps=[step], kind=kind)
            if better:
                store(folder, episode("crops", TURNS), steps=[3], image=decode)
    return root


def log(folder, *steps):
    with closing(Loggers(folder, TrackConfig(tensorboard=False))) as loggers:
        for step in steps:
            loggers.log({"reward/mean": 0.1 * step, "reward/accuracy": 0.2 * step, "time/step": 1.0}, step)


def answers(name, *, right):
    """Two, the second of which is wrong and cut."""
    about = {"pictures": [media(name)], "parts": {"count": float(right)}, "reason": "" if right else "3 is not 4"}
    first = trajectory(0, float(right), advantages=None, **about)
    return group(first, trajectory(1, 0.0, response=(5, 9, 6), status="truncated", **about), uid=name)


@pytest.fixture(scope="module")
def server(runs):
    with running(view_app(Runs(runs), token=TOKEN), "127.0.0.1", 0) as url:
        yield url


def look(browser, server="", **state):
    """A view of the page, which is opened if its server is named."""
    if server:
        browser.visit(f"{server}/#token={TOKEN}")
        browser.until("!!document.querySelector('#runs')")
    browser.run(f"location.hash = new URLSearchParams({json.dumps(state)})")


def saved(browser, form):
    """What the browser stores of the rollouts that pass the filters."""
    with browser.page.expect_download() as file:
        browser.page.get_by_text(form, exact=True).click()
    return file.value.path().read_text(encoding="utf-8-sig")


def troubles(browser, server):
    """What the page asks of its own server is none."""
    return [one for one in browser.troubles if not str(one).startswith(server)]


def test_who_may_ask_and_for_what(server, runs):
    ask = lambda path, **head: call(server, "GET", path, **{"Authorization": f"Bearer {TOKEN}"} | head)  # noqa: E731
    assert ask("/runs", Authorization="Bearer x")[0] == 401
    assert ask("/", Authorization="")[0] == 200  # the page, which holds nothing
    assert [one["name"] for one in json.loads(ask("/runs")[2])] == ["second", "first"]
    for path, status, words in [
        ("/run?run=../first", 404, "is not in this folder; there is first, second"),
        ("/rollouts?run=first&at=96", 400, "96 is none of the 96 rollouts"),
        ("/brief?run=first&at=-1", 400, "such as at=0,1"),
        ("/index", 400, "run"),
    ]:
        found = ask(path)
        assert (found[0], words in found[2].decode()) == (status, True), found
    with running(view_app(Runs(runs), token=""), "127.0.0.1", 0) as free:
        assert call(free, "GET", "/runs")[0] == 200
        assert call(free, "GET", "/runs", Host="evil.example")[0] == 403


def test_a_picture_outside_of_its_folder_is_not_shown(tmp_path):
    store(tmp_path, answers("one", right=True))
    (file,) = (tmp_path / "trajectories").glob("step-1.jsonl")
    lines = file.read_text().replace("images/one.png", "../secret.png")
    (tmp_path / "secret.png").write_bytes((tmp_path / "trajectories/images/one.png").read_bytes())
    file.write_text(lines)
    (tmp_path / "results.json").write_text("{}")
    with running(view_app(Runs(tmp_path), token=""), "127.0.0.1", 0) as url:
        name = tmp_path.name
        assert json.loads(call(url, "GET", f"/brief?run={name}&at=0")[2])[0]["picture"] is None
        assert json.loads(call(url, "GET", f"/rollouts?run={name}&at=0")[2])["pictures"] == {}


@pytest.mark.parametrize("length", [16, 1000])
def test_advantages_by_token(length, tmp_path):
    values = np.linspace(-1, 1, length)
    store(tmp_path, group(trajectory(response=(5,) * length, advantages=values)))
    (tmp_path / "results.json").write_text("{}")
    assert not list_rollouts(Runs(tmp_path), tmp_path.name)["left_out"]
    (shown,) = show_rollouts(Runs(tmp_path), tmp_path.name, [0])["items"]
    (said,) = shown["turns"][0]["said"]
    assert len(said["advantage"]) == length and len(shown["advantage"]) == min(length, 200)


def test_sizes_of_tokens():
    letters = {1: "a", 2: "bc", 3: "\ufffd", 4: "\ufffd"}
    byte = lambda ids: "".join(letters[i] for i in ids).replace("\ufffd\ufffd", "é")  # noqa: E731
    spaced = lambda ids: " ".join(letters[i] for i in ids)  # noqa: E731
    assert token_sizes(np.array([1, 2]), "abc", byte) == [1, 2]
    assert token_sizes(np.array([1, 3, 4, 2]), "aébc", byte) == [1, 0, 1, 2]
    assert token_sizes(np.array([2, 1]), "bc a", spaced) == [2, 2]


@needs_browser
def test_runs_and_their_curves(browser, server, runs):
    look(browser, server)
    assert browser.run("document.querySelectorAll('#runs tbody tr').length") == 2
    browser.until("document.querySelectorAll('.chart').length > 2")
    assert "second" in browser.run("document.querySelector('.legend').textContent")
    with open(runs / "first" / "metrics.jsonl", "a") as file:  # a step more
        file.write(json.dumps({"step": 4, "reward/mean": 0.9}) + "\n")
    browser.until("[...document.querySelectorAll('#runs tr')].some(r => r.textContent.includes('0.900'))")
    browser.run('document.querySelector(`[aria-label="draw first"]`).click()')
    browser.until("!document.querySelector('.legend').textContent.includes('first')")
    assert troubles(browser, server) == []


@needs_browser
def test_the_options_of_a_run_and_how_another_differs(browser, server):
    look(browser, server, view="run", run="first", other="second")
    browser.until("document.querySelector('h1')?.textContent === 'first'")
    names = "[...document.querySelectorAll('td:first-child')].map(e => e.textContent).join()"
    assert browser.run(names) == "run.name,train.lr"
    look(browser, view="run", run="gone")
    browser.until("document.querySelector('.problem')?.textContent.startsWith('gone is not in this folder; this is ')")
    assert troubles(browser, server) == []


@needs_browser
def test_rollouts_are_filtered_opened_and_coloured(browser, server):
    look(browser, server, view="rollouts", run="first")
    count = "document.getElementById('count').textContent === '{} of 96 rollouts'"
    browser.until(count.format(96))
    browser.until("document.querySelectorAll('.row img').length > 5")
    for state, expected in [
        ({"step": "2"}, 48), ({"set": "val/six"}, 16), ({"verdict": "right"}, 6), ({"status": "truncated"}, 48),
        ({"low": "0.5"}, 6), ({"long": "3"}, 48), ({"text": "3 IS NOT"}, 84),
        ({"step": "1", "set": "train", "verdict": "right"}, 1),
    ]:  # fmt: skip
        look(browser, view="rollouts", run="first", **state)
        browser.until(count.format(expected))
    (one,) = map(json.loads, saved(browser, "JSON lines").splitlines())
    about = {"set": "train", "source": "count", "verdict": "right", "turns": ["<think> </think> <answer> 3 </answer>"]}
    assert one == one | about | {"parts": {"count": 1.0}}
    look(browser, view="rollouts", run="first", order="highest reward first", tint="logp", group="1")
    browser.until("document.querySelectorAll('.detail .answer').length === 2")
    assert browser.run("document.querySelector('.said span').title") == "logp -0.5"
    browser.press("g", "j")
    browser.until("document.querySelector('.row[aria-selected=true]').style.top === '64px'")
    browser.until("document.querySelectorAll('.detail .answer').length === 1")
    assert "because: 3 is not 4" not in browser.run("document.querySelector('.detail').textContent")
    look(browser, view="rollouts", run="second", step="3", tint="writer")  # boxes and crops, turn by turn
    browser.until("document.querySelectorAll('.detail .turn').length === 5")
    assert browser.run("document.querySelectorAll('.detail .box').length") == 5
    assert browser.run("document.querySelectorAll('.mark.c0').length") == 5  # what the policy wrote, turn by turn
    look(browser, view="rollouts", run="first", tint="writer", text="q7")
    browser.until("document.querySelector('.mark.c7')?.textContent === 'how many ?'")  # and what the prompt says
    browser.page.set_viewport_size({"width": 400, "height": 700})
    assert browser.run("document.documentElement.scrollWidth") == 400
    assert troubles(browser, server) == []


@needs_browser
def test_two_runs_side_by_side(browser, server):
    look(browser, server, view="sides", run="first", other="second", left="val/six \u00b7 step 1")
    count = (
        "document.getElementById('count')?.textContent.startsWith('4 questions in both: 2 became better, 0 worse; {} ')"
    )
    browser.until(count.format(4))  # after: the last step of the same set
    browser.until("document.querySelectorAll('.two .episode').length === 2")
    browser.run("document.querySelector('[aria-label=change]').value = 'changed'")
    browser.run("document.querySelector('[aria-label=change]').dispatchEvent(new Event('change'))")
    browser.until(count.format(2))
    browser.run("document.querySelectorAll('.row')[1].click()")
    verdicts = "[...document.querySelectorAll('.two .chip.right, .two .chip.wrong')].map(e => e.textContent).join()"
    browser.until(f"{verdicts} === 'wrong,wrong,truncated: 3 is not 4,right,wrong,truncated'")
    look(browser, view="sides", run="first", tint="entropy", left="train \u00b7 step 1", right="train \u00b7 step 2")
    browser.until("!!document.querySelector('.two')?.textContent.includes('stored with algorithm.old=recompute')")
    assert troubles(browser, server) == []


@needs_browser
def test_side_by_side_opens_two_things(browser, server, tmp_path):
    """Not a run against itself at the same step, but another step, or another run where it has one step."""
    chosen = "['left', 'other', 'right'].map(name => document.querySelector(`[aria-label=${name}]`)?.value).join()"
    look(browser, server, view="sides", run="first", left="val/six \u00b7 step 2")
    browser.until(f"{chosen} === 'val/six \u00b7 step 2,first,val/six \u00b7 step 1'")
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
        store(tmp_path / name, answers("one", right=True), steps=[0], kind="val/six")
        results = {"six": {"accuracy": 0.5}} if name == "base" else {"five": {"accuracy": 0.5}}
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    config = load({"run": {"out": str(tmp_path), "name": "trained"}})
    with open_folder(config, "rl", {}, config.algorithm) as folder:
        log(folder, 1)
    with running(view_app(Runs(tmp_path), token=TOKEN), "127.0.0.1", 0) as url:
        look(browser, url, view="sides", run="base")
        browser.until(f"{chosen} === 'val/six,tuned,val/six'")
        look(browser, view="runs")
        heads = "[...document.querySelectorAll('#runs th')].map(e => e.textContent)"
        browser.until(f"{heads}.slice(-2).every(name => name.startsWith('accuracy on')) && {heads}.includes('reward')")


def test_every_answer_of_an_evaluation(tmp_path):
    store(tmp_path, answers("one", right=True), steps=[0], kind="val/six")
    line = {"id": "two", "set": "six", "repeat": 0, "data_source": "count", "prompt": "How many?"}
    line |= {"status": "ok", "reason": "", "reward": 0.2, "score": 1.0, "tokens": 7, "turns": 2, "tool_calls": []}
    line |= {"gold": "3", "extracted": "3", "end_reason": "answered", "parts": {}, "said": ["look", "3"]}
    lines = [line | {"id": "one"}, line]  # the first is stored whole
    runs, name = Runs(evaluation(tmp_path, lines, {"six": {"accuracy": 0.5}})), tmp_path.name
    assert list_rollouts(runs, name)["id"] == ["one", "one", "two"]
    assert list_rollouts(runs, name)["step"] == [None] * 3  # of no run
    (last,) = show_rollouts(runs, name, [2])["items"]
    assert [turn["said"][0]["text"] for turn in last["turns"]] == ["look", "3"]
    assert (last["verdict"], last["question"], last["tokens"]) == ("right", "How many?", {"response": 7})
    assert list_runs(runs)[0]["facts"] == {"accuracy on six": "50.0\u00a0%"}

    def ends(kind):
        """A set: its whole rollouts are written, then its rows of samples.jsonl."""
        store(tmp_path, answers("zero", right=True), steps=[0], kind=f"val/{kind}")
        add_rows(tmp_path, [line | {"set": kind, "id": id} for id in ("zero", "three")])

    ends("five")
    found = ["one", "one", "two", "zero", "zero", "three"]  # the rows of the next set come behind
    assert list_rollouts(runs, name)["id"] == found
    (tmp_path / "samples.jsonl").touch()
    placed = runs.rollouts(tmp_path, lambda _: ends("four"))  # while files are read
    assert list_rollouts(runs, name)["id"] == [one.row[2] for one in placed] == [*found, "three", "zero", "zero"]
    assert [one["id"] for one in show_rollouts(runs, name, [2, 3, 5])["items"]] == ["two", "zero", "three"]


def test_the_first_rollouts_are_shown_before_all_are_read(runs):
    of, folder = Runs(runs), runs / "first"
    (before,) = [one for one in list_runs(of) if one["name"] == "first"]
    assert (before["unread"], list_rollouts(of, "first", 0)["id"]) == (4, [])
    found = of.rollouts(folder, lambda found: len(found) > 10)
    assert (len(found), of.state(folder)[1]) == (40, 3)  # whole files
    assert of.rollouts(folder)[:40] == found  # places stay
    (after,) = [one for one in list_runs(of) if one["name"] == "first"]
    assert after["unread"] == 0 and after["stamp"] != before["stamp"]


@pytest.mark.parametrize("config", ["model: {path: tiny\ntrain: [", "run: 3"])
def test_what_is_damaged_is_left_out_and_said(config, runs, tmp_path, caplog):
    folder = tmp_path / "first"
    shutil.copytree(runs / "first", folder)
    rollouts = folder / "trajectories/step-2.jsonl"
    for file, number, text in [
        (folder / "metrics.jsonl", 2, lambda line: '{"step": 2, "rew'),
        (folder / "metrics.jsonl", 3, lambda line: json.dumps(json.loads(line) | {"reward/mean": "high"})),
        (rollouts, 3, lambda line: "{}"),
        (rollouts, 5, lambda line: "\0"),
        (rollouts, 7, lambda line: line.replace('"segments": [', '"segments": [3, ')),
    ]:
        lines = file.read_text().splitlines()
        lines[number - 1] = text(lines[number - 1])
        file.write_text("\n".join(lines) + "\n")
    shutil.copy(rollouts, rollouts.with_stem("step-2 (copy)"))  # no step of ours
    picture = next((folder / "trajectories/images").glob("q0.*"))
    data = picture.read_bytes()
    picture.write_bytes(data[:33] + b"\0\0\0\1" + data[37:])  # its pixels end early, and no chunk follows
    (folder / "config.resolved.yaml").write_text(config)
    (folder / "manifest.json").unlink()
    with pytest.raises(EnvironmentProblem, match="--out /proc/x/page"):
        write_page(tmp_path, Path("/proc/x/page.html"))
    write_page(tmp_path, tmp_path / "page.html")
    said = page_data(tmp_path / "page.html")
    assert len(said["index"]["first"]["id"]) == 93 and said["brief"]["first"][0]["picture"] is None
    report = said["run"]["first"]["report"]
    assert [len(one["points"]) for one in report["charts"][0]["curves"]] == [2]
    told = [*report["left_out"], *said["index"]["first"]["left_out"]]
    lines = [f"step-2.jsonl, line {number}" for number in (3, 5, 7)]
    metrics = ["metrics.jsonl, line 2", "reward/mean is no number in step 3"]
    places = [*metrics, "config.resolved.yaml", "manifest.json", *lines]
    for place, words in zip(places, told, strict=True):
        assert place in words and "left out" in words and words in caplog.messages
    caplog.clear()
    page = page_data(from_run(folder))
    assert len(page["episodes"]["items"]) == 93 and page["left_out"] == caplog.messages
    assert sum("left out" in text for text in page["left_out"]) == 7
    found = Runs(tmp_path).rollouts(folder, lambda found: rollouts.unlink(missing_ok=True))
    assert found and rollouts not in {one.file for one in found}  # it went away meanwhile


@needs_browser
def test_the_same_as_one_file(runs, browser, tmp_path):
    write_page(runs, tmp_path / "page.html")
    browser.visit((tmp_path / "page.html").as_uri())
    browser.until("document.querySelectorAll('#runs tbody tr').length === 2")
    browser.press("3")
    look(browser, view="rollouts", run="second")
    browser.until("document.getElementById('count')?.textContent === '97 of 97 rollouts'")
    browser.press("/")
    browser.write("3 is not")
    browser.until("document.getElementById('count').textContent === '76 of 97 rollouts'")
    browser.until("document.querySelectorAll('.row img').length > 5 && !!document.querySelector('.detail .episode')")
    lines = [*csv.DictReader(io.StringIO(saved(browser, "CSV")))]
    assert len(lines) == 76 and {line["reason"] for line in lines} == {"3 is not 4"}
    assert browser.run("[quoted('=1+1'), quoted(-0.5)]") == ['"\'=1+1"', '"-0.5"']  # a spreadsheet runs nothing
    assert browser.troubles == []
