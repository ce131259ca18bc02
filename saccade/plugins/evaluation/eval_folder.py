"""The folder of an evaluation: its path, its lock, and which sets are already done in it.

folder, answers = places(config, None, asked={"command": "eval", "also": []})
with hold(folder):
    done = begin(folder, config, manifest)
"""

import itertools
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saccade.config import Config, load, to_yaml
from saccade.errors import ConfigError
from saccade.plugins.evaluation.results import SAMPLE_ROWS, read_summary, write_numbers
from saccade.run import folder as run_folder
from saccade.system.disk import require_writable

log = logging.getLogger(__name__)

ANSWERS = "answers"
PLACE = ("run.out", "run.name", "run.resume")  # where an evaluation is: not compared with an earlier one


def folders_of(config: Config, out: Path | None, asked: Mapping[str, Any]) -> tuple[Path, Path]:
    """Returns a folder for the results, and one for the cached answers of an endpoint. By default the first of
    NAME-eval, NAME-eval-2 … that is free: nothing is overwritten. An interrupted evaluation with the same options and
    the same values of `asked` in its manifest is continued in its folder. Answers that an endpoint gave to evaluations
    interrupted since the last finished one are reused.
    """
    if out is not None:
        out = Path(out)
        for name in (run_folder.RESULTS, run_folder.METRICS):
            if (out / name).exists() and (name == run_folder.METRICS or finished(out)):
                raise ConfigError(f"--out {out}: it holds {name} already; name a new folder")
        if (out / run_folder.RESULTS).exists() and (changes := changes_of(out, config, asked)):
            began = f"--out {out}: the evaluation that was broken off there had other options"
            raise ConfigError("\n  ".join([f"{began}; restore them, or name a new folder", *changes]))
        require_writable(out, "--out")
        return out, out / ANSWERS
    require_writable(config.run.out, "run.out")
    folders = numbered(Path(config.run.out) / f"{config.run.name}-eval")
    earlier: list[Path] = []
    while (folder := next(folders)).exists():
        earlier.insert(0, folder)
    broken_off = [*itertools.takewhile(lambda path: not finished(path), earlier)]
    folder = next((path for path in broken_off if not changes_of(path, config, asked)), folder)
    answers = next((path for path in broken_off if (path / ANSWERS).exists()), folder)
    return folder, answers / ANSWERS


def finished(folder: Path) -> bool:
    """Whether all sets in an evaluation's manifest have results. If it lists none, having a results file is enough."""
    planned = {one.get("name") for one in run_folder.read_manifest(folder).get("sets", ())}
    return (folder / run_folder.RESULTS).exists() and planned <= read_summary(folder).keys()


def changes_of(folder: Path, config: Config, asked: Mapping[str, Any]) -> list[str]:
    """Lines with the options, and values of `asked`, that differ from those of the evaluation begun in the folder."""
    try:
        before, facts = load(folder / run_folder.CONFIG).model_dump(mode="json"), run_folder.read_manifest(folder)
    except ConfigError as error:  # no config, or one of another version
        return [str(error)]
    changed = run_folder.differences(before, config.model_dump(mode="json"))
    changed |= {key: (facts.get(key), value) for key, value in asked.items() if facts.get(key) != value}
    return [f"{key}: {old!r} in the folder, {new!r} now" for key, (old, new) in changed.items() if key not in PLACE]


def numbered(path: Path) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3 …"""
    yield path
    yield from (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Context manager: creates and locks the folder; removes it if nothing was written, as by a command that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with run_folder.locked(folder):
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [run_folder.LOCK]:
                shutil.rmtree(folder)


def begin_folder(folder: Path, config: Config, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Write config and manifest, in the same files as a run. Returns the results of the sets that the interrupted
    evaluation had finished with the same weights, texts, functions and rows; all other results and answers are removed.
    """
    before, found, samples = run_folder.read_manifest(folder), read_summary(folder), folder / SAMPLE_ROWS
    about = run_folder.start_facts(config.model_dump(mode="json"), manifest, before)
    texts = {run_folder.CONFIG: to_yaml(config), run_folder.CHOSEN: to_yaml(config, full=False)}
    run_folder.write_start(folder, texts, about)
    facts = run_folder.read_manifest(folder)
    same = all(before.get(key) == facts[key] for key in {*manifest, "functions"} - {"sets"})
    kept = [one["name"] for one in facts["sets"] if same and one in before["sets"]]
    done = {name: found[name] for name in kept if name in found}
    if samples.exists():
        whole = samples.read_bytes().rpartition(b"\n")[0].split(b"\n")  # without a partial last line
        rows = [line for line in whole if line and json.loads(line)["set"] in done]
        run_folder.write_whole(samples, b"".join(line + b"\n" for line in rows).decode())
    if found:
        write_numbers(folder, done)
    return done


def missing(sets: Iterable[str], done: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The sets that are not done. Logs a line for each of the others."""
    for name in sets:
        if name in done:
            log.info(f"{name}: done before this evaluation was broken off; its results are in {folder}")
        else:
            yield name
