"""The page is whole, closed to scripts, and says what the run said."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest import approx

from saccade.config import TrackConfig
from saccade.errors import ConfigError
from saccade.tracking.cards import rollout_cards
from saccade.tracking.charts import (
    Series,
    interval_bar,
    legend,
    line_chart,
    nice_ticks,
    number,
    share_bar,
)
from saccade.tracking.folder import RunFolder
from saccade.tracking.loggers import Loggers
from saccade.tracking.report import before_after, from_run, write_report
from saccade.tracking.sections import Estimate, Table
from saccade.tracking.trajectories import TrajectoryWriter, read_trajectories

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\0\x08"
VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Collects tags and checks that they close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.events: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.events += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def rows(steps: int = 40) -> list[dict]:
    made = [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "reward/accuracy": min(1.0, 0.02 * step),
            "reward/count": 0.5,
            "policy/grad_norm": None if step == 3 else 0.5,
            "turns/mean": 1.0,
            "time/step": 2.0,
            "time/rollout": 1.5,
            "time/bottleneck": "rollout",
        }
        for step in range(1, steps + 1)
    ]
    for index, accuracy in ((0, 0.5), (-1, 0.75)):
        made[index] |= {"val/six/accuracy": accuracy, "val/six/parse_rate": 1.0}
        made[index] |= {"val/six/ci_low": accuracy - 0.04, "val/six/ci_high": accuracy + 0.04}
    return made


def test_from_run_tells_the_run(
    open_folder: Callable[..., RunFolder], build: SimpleNamespace
) -> None:
    with open_folder() as folder:
        with Loggers(folder, TrackConfig(tensorboard=False)) as loggers:
            for row in rows():
                values = {name: value for name, value in row.items() if value is not None}
                loggers.log(values, values.pop("step"))
        with TrajectoryWriter(folder) as writer:
            for step, reward in ((1, 0.0), (40, 1.0)):
                member = build.trajectory(
                    0,
                    reward,
                    response=(5, 19, 6, 7, 12, 8),
                    pictures=[build.media()],
                    parts={"count": reward, "overlong": -0.5},
                )
                for kind in ("train", "val/six"):
                    writer.write(
                        step,
                        [build.group(member)],
                        decode_text=build.decode,
                        image_bytes=build.pixels,
                        version=step,
                        kind=kind,
                    )
        path = from_run(folder.path)
    text = path.read_text()
    page = Page(text)
    assert path == folder.path / "report.html"
    for words in ("50.0 → 75.0\u00a0%", "[71.0, 79.0]", "+25.0 points", "before (step 1)"):
        assert words in text, words
    for title in ("Validation accuracy", "Reward parts", "Where the time went", "Sample rollouts"):
        assert title in text, title
    assert "How many objects?" in text and "overlong" in text and "other 25 %" in text
    assert page.tags.count("img") == 2  # one picture per sample, not per answer
    assert ">right<" in text and ">wrong<" in text
    assert ">Turns<" not in text  # never left 1
    assert "model:" in text  # the configuration, folded away


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        from_run(tmp_path)


def test_nothing_foreign_becomes_markup(tmp_path: Path, build: SimpleNamespace) -> None:
    record = {
        "kind": "train",
        "step": 1,
        "id": EVIL,
        "sample": 0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": EVIL}]}],
        "segments": [{"source": "policy", "text": EVIL, "ids": [1]}],
        "images": [],
        "gold": [EVIL],
        "extracted": EVIL,
        "reward": 1.0,
        "outcome": 0.5,
        "parts": {EVIL: 1.0},
        "advantage": None,
        "status": "error",
        "reason": EVIL + '" onmouseover="alert(3)',
    }
    path = write_report(
        tmp_path / "report.html",
        title=EVIL,
        subtitle=EVIL,
        facts={EVIL: EVIL},
        curves=[{"step": step, f"val/{EVIL}/accuracy": 0.5} for step in (0, 1)],
        tables=[Table(title=EVIL, columns=(EVIL,), rows=((EVIL,),), note=EVIL)],
        rollouts=[record],
        notes=[EVIL],
        appendix={EVIL: EVIL},
    )
    page = Page(path.read_text())
    assert not re.search(r"[\0-\x08\x0b-\x1f]", path.read_text()) and "␀␈" in path.read_text()
    assert "script" not in page.tags and "img" not in page.tags
    assert page.events == [] and page.links == []
    assert "default-src 'none'" in path.read_text()


@pytest.mark.parametrize(
    ("outcome", "is_score", "tone"),
    [(1.0, False, "right"), (0.0, False, "wrong"), (0.995, True, ""), (0.0, True, "")],
)
def test_a_score_is_neither_right_nor_wrong(
    tmp_path: Path, build: SimpleNamespace, outcome: float, is_score: bool, tone: str
) -> None:
    scores = ["count"] if is_score else []
    how = {"decode_text": build.decode, "image_bytes": build.pixels, "version": 1}
    with TrajectoryWriter(tmp_path) as writer:
        writer.write(1, [build.group(build.trajectory(0, outcome))], scores=scores, **how)
    page = rollout_cards(read_trajectories(tmp_path, "train", 1), None)
    assert ('class="chip right"' in page, 'class="chip wrong"' in page) == (
        tone == "right",
        tone == "wrong",
    )
    assert (f"outcome {outcome:.2f}" in page) == is_score


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = write_report(tmp_path / "r.html", title="t", curves=rows()).read_text()
    assert re.findall(r"https?://|@import|url\(", text) == []
    assert "prefers-color-scheme: dark" in text


def test_an_empty_report_is_still_a_page(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path / "r.html", title="nothing yet").read_text())
    assert "svg" not in page.tags and "section" not in page.tags


def test_dollars_and_braces_survive(tmp_path: Path) -> None:
    text = write_report(tmp_path / "r.html", title="$x {y}", notes=["$body {0}"]).read_text()
    assert "$x {y}" in text and "$body {0}" in text


def test_before_after_of_one_measurement_has_no_change() -> None:
    (table,) = before_after(rows()[:1])
    assert table.columns == ("set", "measure", "step 1")
    assert before_after([{"step": 1, "reward/mean": 1.0}]) == []


def test_a_change_is_coloured_only_when_it_is_sure(tmp_path: Path) -> None:
    def shown(low: float, high: float) -> str:
        cell = Estimate(value=0.05, low=low, high=high, change=True)
        table = Table(title="t", columns=("c",), rows=((cell,),))
        return write_report(tmp_path / "r.html", title="t", tables=[table]).read_text()

    assert '<b class="up">+5.0 points</b><span class="ci">[+1.0, +9.0]' in shown(0.01, 0.09)
    assert "<b>+5.0 points</b>" in shown(-0.01, 0.11)


def test_a_chart_spans_its_data_and_shows_values() -> None:
    svg = line_chart("loss", [Series(name="a", points=[(0, 1.0), (10, 3.0), (5, float("nan"))])])
    Page(svg)
    assert "step 10\na: 3" in svg and "nan" not in svg
    assert line_chart("none", [Series(name="a", points=[])]) == ""
    assert "<circle" in line_chart("one", [Series(name="a", points=[(1, 2.0)])])


def test_many_points_are_thinned_but_keep_their_mean() -> None:
    svg = line_chart("long", [Series(name="a", points=[(x, x % 2) for x in range(100_000)])])
    assert len(svg) < 80_000
    assert "a: 0.5" in svg


@pytest.mark.parametrize(
    "low, high, ticks",
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (5, 5, None)],
)
def test_ticks_are_round_and_cover(low: float, high: float, ticks: list | None) -> None:
    made = nice_ticks(low, high)
    assert made[0] <= low and made[-1] >= high
    assert ticks is None or made == approx(ticks)


def test_numbers_as_readers_want_them() -> None:
    shown = [number(0.5, True), number(0), number(1234.5), number(1e-6), number(0.123456)]
    assert shown == ["50.0\u00a0%", "0", "1,234", "1.00e-06", "0.1235"]


def test_bars_are_well_formed() -> None:
    Page(share_bar({"rollout": 3.0, "update": 1.0}))
    Page(interval_bar(0.5, 0.4, 0.6) + legend(["a"]))
    assert share_bar({}) == "" and "75 %" in share_bar({"rollout": 3.0, "update": 1.0})
