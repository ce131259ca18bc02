"""A report says what the run said, as data and as a page that a real browser draws from disk."""

import json
import re
from contextlib import closing

import pytest
from pytest import approx
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import TrackConfig
from saccade.plugins.reports.diagnosis import advise_ahead
from saccade.plugins.reports.eval_report import write_eval_report
from saccade.plugins.reports.report import before_after, charts_of, from_run
from saccade.plugins.reports.report_page import Chart, Curve, Report, Table, write_report
from saccade.run.loggers import Loggers
from tests.browser import needs_browser, page_data

EVIL = (
    "</script><script>document.title = 'owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">"
    "\0\x08\u2028\u202e \u05e9\u05dc\u05d5\u05dd \ud800 &amp; REPORT_JSON"
)
EPISODE = {
    **{"set": "train", "step": 1, "id": "one", "question": "How many?", "verdict": "right", "sample": 0, "gold": "3"},
    **{"reward": 1.0, "advantage": [0.5, -1.0, 0.0], "tokens": {"response": 3}, "extracted": "3", "outcome": 1.0},
    **{"status": "ok", "reason": "", "end": "answered", "parts": {}, "turn_rewards": [], "views": [], "asked": 0},
    "turns": [{"said": [{"source": "policy", "text": "<answer>3</answer>"}], "calls": []}],
}


def rows(steps=40):
    made = [
        {
            **{"step": step, "reward/mean": 0.1 * step, "reward/accuracy": min(1.0, 0.02 * step)},
            **{"reward/count": 0.5, "policy/grad_norm": None if step == 3 else 0.5},
            **{"turns/mean": 1.0, "time/step": 2.0, "time/rollout": 1.5},
            **{"length/response_mean": 9.0, "length/response_max": 90.0},
            "time/bottleneck": "rollout",
        }
        for step in range(1, steps + 1)
    ]
    for index, accuracy in ((0, 0.5), (-1, 0.75)):
        made[index] |= {"val/six/accuracy": accuracy, "val/six/parse_rate": 1.0}
        made[index] |= {"val/six/ci_low": accuracy - 0.04, "val/six/ci_high": accuracy + 0.04}
    return made


@pytest.fixture
def page(open_folder, build):
    given = ("advantage=rloo", "policy_loss=/x/mine.py:loss", "kl.coef=0.04", "entropy_coef=0")
    with open_folder(*(f"algorithm.{option}" for option in given)) as folder:
        with closing(Loggers(folder, TrackConfig(tensorboard=False))) as loggers:
            for row in rows():
                values = {name: value for name, value in row.items() if value is not None}
                loggers.log(values, values.pop("step"))
        for step, reward in ((1, 0.0), (40, 1.0)):
            parts = {"count": reward, "overlong": -0.5}
            said = {"response": (5, 19, 6, 7, 12, 8), "pictures": [build.media()]}
            member = build.trajectory(0, reward, parts=parts, **said)
            for kind in ("train", "val/six"):
                build.store(folder, build.group(member), steps=[step], kind=kind)
        return from_run(folder.path)


def test_a_run_as_data(page, caplog):
    assert page.name == "report.html"
    data = page_data(page)
    assert data["facts"]["accuracy on six"] == "50.0\u00a0% → 75.0\u00a0%"
    assert data["facts"]["best step"] == "40 (75.0\u00a0%)"
    assert data["facts"]["algorithm"] == "grpo, advantage=rloo, policy_loss=mine.py:loss"
    assert data["tables"][0]["note"].startswith("Brackets hold")
    (table,) = data["tables"]
    assert table["columns"][2:] == ["before (step 1)", "after (step 40)", "change"]
    name, measure, _, after, change = table["rows"][0]
    assert (name, measure, change["change"]) == ("six", "accuracy", True)
    assert [after["low"], after["high"]] == approx([0.71, 0.79])
    assert change["value"] == approx(0.25) and 0.19 < change["low"] < 0.25 < change["high"] < 0.31
    assert table["rows"][1][:2] == [None, "answer found"] and not table["rows"][1][4]["tone"]
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert charts["Validation accuracy"]["curves"][0]["band"][1] == approx([40, 0.71, 0.79])
    assert charts["Reward parts"]["curves"][0]["name"] == "count"
    assert "Turns" not in charts and charts["turns/mean"]["more"]  # never left 1
    assert len(charts["Gradient norm"]["curves"][0]["points"]) == 39  # null is no point
    assert data["phases"] == {"rollout": approx(60), "other": approx(20)}
    assert list(data["texts"]) == ["Configuration", "Manifest"]
    episodes = data["episodes"]
    assert [(e["set"], e["step"], e["verdict"]) for e in episodes["items"]] == [
        *(("val/six", 1, "wrong"), ("val/six", 40, "right")),
        *(("train", 1, "wrong"), ("train", 40, "right")),
    ]
    assert len(episodes["pictures"]) == 1  # each picture once
    caplog.set_level("INFO")
    runner = CliRunner()
    assert runner.invoke(app, ["report", str(page.parent)]).exit_code == 0
    assert data["notes"][-1].endswith("use rollout.ahead=1") and data["notes"][-1] in caplog.messages
    above = runner.invoke(app, ["report", str(page.parent.parent)], env={"COLUMNS": "500"})
    assert above.stderr.strip().endswith(f"give one such as {page.parent}")


WITHIN, BESIDE = "use rollout.ahead=1", "use rollout.ahead={} rollout.replicas={} run.gpus={}".format


@pytest.mark.parametrize(("seconds", "mean", "options", "tips"), [
    (27.7, 960, {}, [WITHIN]),
    (27.7, 960, {"gpus": 8}, [WITHIN, BESIDE(2, 3, 5)]),
    (13.85, 960, {"gpus": 8, "ahead": 1}, [BESIDE(2, 3, 5)]),  # so long is a phase of the same answers
    (9.23, 960, {"gpus": 8, "ahead": 2}, [BESIDE(2, 3, 5)]),
    (9.23, 960, {"gpus": 8, "ahead": 4}, [BESIDE(4, 4, 4)]),
    (1e6, 960, {"gpus": 8}, [WITHIN, BESIDE(2, 7, 1)]),
    (27.7, 960, {"gpus": 8, "replicas": 2}, [WITHIN]),
    (27.7, 960, {"gpus": 8, "replicas": 2, "ahead": 1}, []),
    (27.7, 960, {"ahead": 1}, []),
    (27.7, 6000, {"gpus": 8}, []),  # answers of much the same length
    (5.0, 960, {"gpus": 8}, []),  # little to gain
    (27.7, 0, {"gpus": 8}, []),  # lengths are not known
    (27.7, 960, {"preset": ["gpg"]}, []),  # which refuses it
])  # fmt: skip
def test_what_a_report_advises_about_rollouts_ahead(seconds, mean, options, tips):
    phases = {"rollout": seconds, "update": 6.0, "logp_old": 0.4, "save": 500.0}
    sections = {"run": ("gpus",), "rollout": ("ahead", "replicas"), "algorithm": ("preset",)}
    config = {name: {key: options[key] for key in keys if key in options} for name, keys in sections.items()}
    rows = [{"step": 0}, {"step": 1, "length/response_mean": mean, "length/response_max": 8192}]
    lines = advise_ahead(rows, phases, config)
    assert [tip for line in lines for tip in re.findall(r"use [^;]+", line)] == tips and len(lines) <= 1


@needs_browser
def test_a_run_in_a_browser(page, browser):
    browser.visit(page.as_uri())
    assert browser.troubles == [] and browser.run("document.title") == "first"
    text = browser.run("document.body.innerText")
    for words in ("[71.0, 79.0]", "+25.0 points", "Where the time went", "other 25 %"):
        assert words in text, words
    assert "How many objects?" in text and "overlong" in text and "-0.50" in text
    assert browser.run("document.querySelector('td .up').textContent") == "+25.0 points"
    assert browser.run("document.querySelectorAll('.interval').length") == 2
    drawn = "[...document.querySelectorAll('path.line, path.raw')].filter(p => p.checkVisibility())"
    assert browser.run(f"{drawn}.length") >= 8
    assert browser.run(f"Math.min(...{drawn}.map(p => p.getTotalLength()))") > 100
    curve = "{ name: 'a', band: [], mean: [], points: [[1, 0], [2, 1]] }"
    drawn = browser.run(
        f"chart({{ title: 'a', curves: [{curve}] }}).querySelectorAll('text[text-anchor=middle]').length"
    )
    assert drawn == 2  # whole steps
    pictures = "[...document.querySelectorAll('.episode img')]"
    browser.until(f"{pictures}.length === 2 && {pictures}.every(i => i.naturalWidth === 56)")
    browser.run("document.querySelector('details').open = true")  # the other metrics
    browser.until("document.querySelector('details .chart') !== null")
    browser.run("document.querySelector('.chart').scrollIntoView()")
    frame = "document.querySelector('.chart').getBoundingClientRect()"
    x, y = (browser.run(f"{frame}.{side}") for side in ("right - 20", "top + 50"))
    browser.page.mouse.move(x, y)
    tip = "document.getElementById('tip')"
    browser.until(f"{tip}.innerText === 'step 40\\nsix 75.0\\u00a0%'")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    browser.page.emulate_media(color_scheme="dark")
    assert browser.run(ground) != light
    browser.page.set_viewport_size({"width": 400, "height": 800})  # a phone
    assert browser.run("document.documentElement.scrollWidth") == 400
    assert browser.troubles == []


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    picture = {"name": EVIL, "kind": EVIL, "size": (8, 8), "seen": None, "lineage": [EVIL], "picture": EVIL}
    said = [{"source": "policy", "text": EVIL + "x" * 100_000}, {"source": EVIL, "text": EVIL}]
    call = {"ok": False, "reason": EVIL, "name": EVIL, "source": EVIL}
    names = ("set", "id", "question", "gold", "extracted", "status", "reason", "end", "verdict")
    episode = EPISODE | dict.fromkeys(names, EVIL) | {"turns": [{"said": said, "calls": [call]}]}
    episode |= {"outcome": float("nan"), "parts": {EVIL: 1.0}, "views": [picture], "asked": 1}
    curve = Curve(name=EVIL, points=[(0, 1.0), (1, 2.0)])
    report = Report(
        **{"title": EVIL, "subtitle": EVIL, "facts": {EVIL: EVIL}, "notes": [EVIL]},
        **{"phases": {EVIL: 1.0}, "texts": {EVIL: EVIL}},
        tables=[Table(title=EVIL, columns=(EVIL,), rows=((EVIL,),), note=EVIL)],
        charts=[Chart(title=EVIL, curves=[curve]), Chart(title=EVIL, curves=[curve], more=True)],
        episodes={"items": [episode], "pictures": {EVIL: "javascript:alert(1)"}, "note": EVIL},
    )
    return write_report(tmp_path_factory.mktemp("hostile") / "report.html", report)


def test_no_data_leaves_its_block(hostile):
    text = hostile.read_text()
    block = text.partition('id="report">')[2].partition("</script>")[0]
    assert block.isascii() and "<" not in block and text.count("</script>") == 2
    data = page_data(hostile)
    assert data["title"] == EVIL and data["version"] == 1
    assert data["episodes"]["items"][0]["outcome"] is None  # JSON has no NaN
    assert re.findall(r"(?:https?:)?//[\w.]+|@import|url\(", text) == ["http://www.w3.org"]
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text


@needs_browser
def test_foreign_text_is_shown_as_text(hostile, browser):
    browser.visit(hostile.as_uri())
    shown = EVIL.replace("\0", "␀").replace("\x08", "␈")
    titles = [browser.run(f"document.querySelector('{tag}').textContent") for tag in ("h1", "h2")]
    assert titles == [shown.replace("\ud800", "\ufffd")] * 2 or titles == [shown] * 2
    assert browser.run("document.querySelectorAll('script').length") == 2
    assert browser.run("document.querySelectorAll('main [onerror], main script').length") == 0
    assert browser.run("document.querySelector('.said').textContent.length") > 100_000
    assert browser.run("document.querySelector('.said').clientHeight") < 500
    assert browser.run("document.title").startswith("</script>")  # nothing foreign has run


@needs_browser
def test_a_big_run_can_be_searched(browser, tmp_path):
    numbers = [{"step": s, **{f"m/{n}": float(s % 7) for n in range(20)}} for s in range(5_000)]
    numbers[3333]["sft/loss"] = 1e3
    for row in numbers:
        row.setdefault("sft/loss", 1.0)
    turns = EPISODE["turns"] * 3
    items = [EPISODE | {"id": f"e{n}", "question": f"Question {n}?", "turns": turns} for n in range(2000)]
    items[1234] |= {"verdict": "wrong", "reward": -5.0}
    charts = charts_of(numbers)
    assert max(len(chart.curves[0].points) for chart in charts) < 400
    assert (3333, 1e3) in charts[0].curves[0].points  # a peak is not averaged away
    report = Report(title="big", charts=charts, episodes={"items": items, "pictures": {}, "note": ""})
    page = write_report(tmp_path / "big.html", report)
    browser.visit(page.as_uri())
    browser.until("document.getElementById('count')?.textContent === '2,000 of 2,000 episodes'")
    assert browser.run("document.querySelectorAll('.episode').length") < 100
    cards = "[...document.querySelectorAll('.episode')].map(e => e.innerText).join()"
    for change, count, first in (
        ("search.value = 'question 77?'", "1", "Question 77?"),
        ("search.value = 'nowhere'", "0", ""),
        ("search.value = ''; verdict.value = 'wrong'", "1", "Question 1234?"),
        ("verdict.selectedIndex = 0; order.value = 'lowest reward first'", "2,000", "Question 1234?"),
    ):
        names = "const [set, verdict, order] = document.querySelectorAll('.tools select')"
        search = "const search = document.getElementById('search')"
        fire = "search.dispatchEvent(new Event('input'))"
        browser.run(f"{{ {names}; {search}; {change}; {fire} }}")
        counted = browser.run("document.getElementById('count').textContent")
        assert counted == f"{count} of 2,000 episodes", change
        assert first in browser.run(cards)
    assert browser.troubles == []


@pytest.fixture
def evaluated(tmp_path, build):
    whole = {"accuracy": 0.5, "ci_low": 0.4, "ci_high": 0.6, "pass@4": 0.75, "items": 8.0}
    rated = {"score": 3.5, "score_ci_low": 3.0, "score_ci_high": 4.0, "items": 2.0}
    tables = {"by_category": {"near": whole, "far": {"items": 1.0}}, "by_turns": {}}
    (tmp_path / "results.json").write_text(json.dumps({"a": whole | tables, "b": rated}))
    build.store(tmp_path, build.group(build.trajectory(pictures=[build.media()])), kind="val/a")
    return write_eval_report(tmp_path)


def test_an_evaluation_as_data(evaluated):
    summary, by_category = page_data(evaluated)["tables"]
    assert summary["columns"] == ["set", "accuracy", "pass@4", "score", "items"]
    assert summary["rows"][0][1] | {"low": 0.4, "high": 0.6, "percent": True} == summary["rows"][0][1]
    assert summary["rows"][1][1] is None and summary["rows"][1][3]["high"] == 4.0
    assert not summary["rows"][1][3]["percent"] and summary["rows"][0][2]["percent"]
    assert by_category["title"] == "a: accuracy by category"
    assert by_category["columns"] == ["category", "accuracy", "pass@4", "items"]
    assert by_category["rows"][1][:2] == ["far", None]
    assert [one["step"] for one in page_data(evaluated)["episodes"]["items"]] == [None]


def test_one_measurement_without_an_interval_is_no_gain():
    one = {"step": 4, "val/a/accuracy": 0.6, "val/a/parse_rate": 1.0}
    (table,) = before_after([{"step": 0, "val/a/accuracy": None}, one])
    assert table.columns[2:] == ("step 4",) and [row[2].value for row in table.rows] == [0.6, 1] and not table.note


def test_what_else_people_publish_of_an_evaluation(tmp_path):
    gain = {"sight_gain": 0.2, "sight_gain_ci_low": 0.1, "sight_gain_ci_high": 0.3}
    leaks = {"leaked_pictures": 3.0, "leaked_questions": 2.0, "accuracy_unseen": 0.4}
    sets = {"a": gain | leaks, "b": {"section_mean": 0.6}, "c": {"strict": 0.3, "loose": 0.5}, "a-blind": {}}
    plain = {"accuracy": 0.5, "items": 8.0}
    (tmp_path / "results.json").write_text(json.dumps({name: plain | more for name, more in sets.items()}))
    (table,) = page_data(write_eval_report(tmp_path))["tables"]
    rows = [[cell and cell["value"] for cell in row[1:]] for row in table["rows"]]
    columns = dict(zip(table["columns"][1:], map(list, zip(*rows, strict=True)), strict=True))
    assert columns == {
        "accuracy": [0.5] * 4, "mean of sections": [None, 0.6, None, None], "strict": [None, None, 0.3, None],
        "loose": [None, None, 0.5, None], "sight gain": [0.2, None, None, None],
        "accuracy, not trained on": [0.4, None, None, None], "leaked pictures": [3, None, None, None],
        "leaked questions": [2, None, None, None], "items": [8] * 4,
    }  # fmt: skip
    shown = table["rows"][0][table["columns"].index("sight gain")]
    assert (shown["low"], shown["high"], shown["percent"], shown["change"]) == (0.1, 0.3, True, True)
    assert not table["rows"][0][table["columns"].index("leaked pictures")]["percent"]


@needs_browser
def test_an_evaluation_in_a_browser(evaluated, browser):
    browser.visit(evaluated.as_uri())
    cells = browser.run("[...document.querySelectorAll('td')].map(e => e.innerText).join('|')").replace("\u00a0", " ")
    assert cells.startswith("a|50.0 %[40.0, 60.0]|75.0 %||8|b|||3.5[3, 4]|2|near|50.0 %") and cells.endswith("|far|||1")
    shown = browser.run("document.querySelector('.episode').innerText")
    assert "How many objects?" in shown and "step" not in shown
    browser.until("document.querySelector('.episode img')?.naturalWidth === 56")
    assert browser.troubles == []
    browser.run("console.log('fine'); console.error('wrong')")
    assert browser.troubles == ["wrong"]
