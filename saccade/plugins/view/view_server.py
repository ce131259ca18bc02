"""The viewer: a server of the data that its page requests, or a page with all of it in one file.

with running(view_app(Runs(Path("runs")), token="sesame"), "127.0.0.1", 8300): ...
"""

import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from saccade.checks import why_ignored
from saccade.errors import ConfigError
from saccade.plugins.reports.episodes import episode_of, inside, is_evaluation, question_of, steps_beside, thumbnail
from saccade.plugins.reports.eval_report import eval_report, read_facts, read_results, what_answered
from saccade.plugins.reports.report import read_numbers, read_options, run_facts, run_report
from saccade.plugins.reports.report_page import page_with, plain
from saccade.plugins.serving import http_server
from saccade.plugins.serving.http_server import BadRequest, Gate, JsonReply, json_app
from saccade.plugins.view.run_index import COLUMNS, Runs, stamp_of
from saccade.run.folder import CONFIG, METRICS, RESULTS, TRAJECTORIES, leaves
from saccade.system.disk import require_writable

log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("view_page.html")
THUMBNAIL = 96  # pixels of its longer side
BRIEF = 240  # characters of a question and an answer in the list
MOST = 200  # rollouts of one request
MOST_IN_FILE = 2000  # rollouts of a run in a page without a server
PATIENCE = 0.1  # seconds that a request may read rollouts; then it returns those read so far
GLANCE = 0.2  # seconds between checks for a stop signal
Json = dict[str, Any]
_small = lru_cache(maxsize=4096)(thumbnail)


# -- data of the page ------------------------------------------------------------------------------


def list_runs(runs: Runs) -> list[Json]:
    """All runs, the most recently written first."""
    listed = []
    for name, folder in runs.folders().items():
        stamp, unread = runs.state(folder)
        written = max((time for time, _ in stamp), default=0) / 1e9
        facts = _facts(folder, stamp_of(folder / METRICS), stamp_of(folder / RESULTS))
        state = {"written": written, "unread": unread, "stamp": str(hash((*stamp, unread)))}
        listed.append({"name": name, "facts": facts, **state})
    return sorted(listed, key=lambda run: -run["written"])


def show_run(runs: Runs, run: str) -> Json:
    """The report of a run, and its options by their dotted names."""
    folder = _folder(runs, run)
    found = leaves(read_options(folder, _said_elsewhere)) if (folder / CONFIG).exists() else ()
    options = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in found}
    judged = is_evaluation(folder)
    report = replace((eval_report if judged else run_report)(folder), title=run)
    read = {name: value for name, value in options.items() if not (judged and why_ignored(name, "eval"))}
    return {"report": plain(report), "options": read}


def list_rollouts(runs: Runs, run: str, seconds: float = inf) -> Json:
    """Columns of a run's rollouts, as many as can be read in `seconds`; a rollout is identified by its index."""
    folder = _folder(runs, run)
    rows = [one.row for one in runs.rollouts(folder, _after(seconds))]
    columns = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
    columns |= {name: [value] * len(rows) for name, value in steps_beside(folder).items()}
    return {**columns, "left_out": runs.left_out(folder)}


def find_words(runs: Runs, run: str, text: str, seconds: float = inf) -> list[int]:
    wanted, found = text.lower(), runs.rollouts(_folder(runs, run), _after(seconds))
    return [place for place, one in enumerate(found) if wanted in one.words]


def _after(seconds: float) -> Callable[[Any], bool]:
    end = monotonic() + seconds
    return lambda found: monotonic() > end


def brief_rollouts(runs: Runs, run: str, at: Sequence[int]) -> list[Json]:
    """The rollouts at these indices as the list shows them: start of question, end of answer, thumbnail."""
    folder = _folder(runs, run)
    return [_brief(record, folder / TRAJECTORIES) for record in _records(runs, folder, at)]


def show_rollouts(runs: Runs, run: str, at: Sequence[int], words: bool = False) -> Json:
    """The rollouts at these indices, whole with their pictures; with `words` their texts only."""
    album: dict[str, str] = {}
    folder = _folder(runs, run)
    records = ({**r, "images": ()} if words else r for r in _records(runs, folder, at))
    items = [episode_of(r, folder / TRAJECTORIES, album, tokens=not words) for r in records]
    return {"items": items, "pictures": album}


def _folder(runs: Runs, run: str) -> Path:
    """The folder of a run. Names are looked up, so none leads outside the root."""
    found = runs.folders()
    if run not in found:
        raise BadRequest("run", f"{run!r} is not in this folder; there is {', '.join(found) or 'none'}", status=404)
    return found[run]


def _records(runs: Runs, folder: Path, at: Sequence[int]) -> Any:
    stored = runs.rollouts(folder, lambda found: len(found) > max(at, default=-1))
    if max(at, default=-1) >= len(stored):
        raise BadRequest("at", f"{max(at)} is none of the {len(stored)} rollouts, which are counted from 0")
    return ({**record, **steps_beside(folder)} for record in runs.records([stored[place] for place in at]))


def _brief(record: Mapping[str, Any], folder: Path) -> Json:
    said = [part["text"] for part in record["segments"] if part["source"] == "policy"]
    files = [image["file"] for image in record["images"] if image.get("file")]
    path = inside(folder, files[0]) if files else None
    answer, picture = (said or [""])[-1][-BRIEF:], path and _small(path, THUMBNAIL)
    return {"question": question_of(record)[:BRIEF], "answer": answer, "picture": picture}


@lru_cache(maxsize=1024)
def _facts(folder: Path, metrics: tuple[int, int], results: tuple[int, int]) -> Mapping[str, str]:
    """Facts of a run for the list. The stamps are cache keys: files are read again only when they change."""
    if is_evaluation(folder):
        found = read_results(folder, _said_elsewhere)
        shares = {n: one["accuracy"] for n, one in found.items() if isinstance(one.get("accuracy"), float | int)}
        facts = {f"accuracy on {name}": f"{100 * share:.1f}\u00a0%" for name, share in shares.items()}
        answered = what_answered(read_facts(folder, _said_elsewhere))
        return facts | ({"model": answered["model"]} if answered.get("model") else {})
    config, rows = read_options(folder, _said_elsewhere), read_numbers(folder, _said_elsewhere)
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    return run_facts(folder, rows, config) | ({"reward": f"{rewards[-1]:.3f}"} if rewards else {})


def _said_elsewhere(text: str) -> None:
    """Ignores messages about what is left out of a run: its report shows them."""


# -- a server --------------------------------------------------------------------------------------


def view_app(runs: Runs, *, token: str) -> FastAPI:
    """The app of the server; an empty `token` means that none is required. The page is public: it holds no secret."""
    app = json_app(Gate(token=token, public=("/",)), lambda problem: {"error": str(problem)})

    @app.get("/")
    def page() -> Response:
        return HTMLResponse(view_page({"live": True}))

    @app.get("/runs")
    def listed() -> Response:
        return JsonReply(list_runs(runs))

    @app.get("/run")
    def shown(run: str) -> Response:
        return JsonReply(show_run(runs, run))

    @app.get("/index")
    def index(run: str) -> Response:
        return JsonReply(list_rollouts(runs, run, PATIENCE))

    @app.get("/find")
    def find(run: str, text: str) -> Response:
        return JsonReply(find_words(runs, run, text, PATIENCE))

    @app.get("/brief")
    def brief(run: str, at: str) -> Response:
        return JsonReply(brief_rollouts(runs, run, _places(at)))

    @app.get("/rollouts")
    def rollouts(run: str, at: str, words: bool = False) -> Response:
        return JsonReply(show_rollouts(runs, run, _places(at), words))

    return app


def _places(at: str) -> list[int]:
    places = at.split(",")
    if len(places) > MOST or not all(place.isdecimal() for place in places):
        raise BadRequest("at", f"give at most {MOST} numbers, such as at=0,1, not {at[:40]!r}")
    return [int(place) for place in places]


def view_page(data: Any) -> str:
    """The page of reports with the views of several runs. If it is `live`, its policy allows requests to its server."""
    more = PAGE.read_text(encoding="utf-8")
    style, script = (more.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("style", "script"))
    return page_with(data, style=style, start=script, policy="; connect-src 'self'" if data["live"] else "")


def serve(folder: Path, *, host: str, port: int, token: bool) -> None:
    """`saccade view FOLDER`: serves until SIGTERM or Ctrl-C."""
    runs = _opened(folder)
    secret = http_server.make_token(host, wanted=token)
    stops: list[int] = []  # a list, because a handler must not wait for a lock
    with http_server.running(view_app(runs, token=secret), host, port) as address:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: stops.append(number))
        shown = http_server.shown_token(secret)
        print(f"{len(runs.folders())} runs at {address}/" + (f"#token={shown}" if secret else ""), flush=True)
        Thread(target=_read_all, args=(runs,), daemon=True).start()
        while not stops:
            sleep(GLANCE)


def _read_all(runs: Runs) -> None:
    """Read all rollouts ahead of requests, in a background thread."""
    for run in list_runs(runs):
        with suppress(BadRequest):  # deleted meanwhile
            runs.rollouts(_folder(runs, run["name"]))


# -- a file ----------------------------------------------------------------------------------------


def write_page(folder: Path, out: Path) -> None:
    """Write everything into one file that needs no server; of each run only the first rollouts."""
    require_writable(out, "--out", file=True)
    runs = _opened(folder)
    data = dict[str, Any](live=False, run={}, index={}, brief={}, rollouts={}, beyond={})
    for name, path in runs.folders().items():
        stored = len(runs.rollouts(path))
        places = range(min(stored, MOST_IN_FILE))
        data["beyond"][name] = stored - len(places)
        data["run"][name], index = show_run(runs, name), list_rollouts(runs, name)
        data["index"][name] = index | {column: index[column][: len(places)] for column in COLUMNS}
        for text in (*data["run"][name]["report"]["left_out"], *index["left_out"]):
            log.warning(text)
        data["brief"][name] = brief_rollouts(runs, name, places)
        data["rollouts"][name] = show_rollouts(runs, name, places)
    data["runs"] = list_runs(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(view_page(data), encoding="utf-8")


def _opened(folder: Path) -> Runs:
    runs = Runs(folder)
    if not folder.is_dir() or not runs.folders():
        raise ConfigError(f"{folder} holds no runs; name a folder such as runs, or runs/NAME")
    return runs
