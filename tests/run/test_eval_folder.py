"""The folder of an evaluation: which one it is, who writes to it, and what of an earlier start is kept."""

import json

import pytest

from saccade.config import load
from saccade.errors import ConfigError
from saccade.plugins.evaluation.eval_folder import begin_folder, finished, folders_of, locked_folder
from saccade.plugins.evaluation.results import add_rows, read_lines, read_summary, write_numbers

ASKED = {"command": "eval", "also": []}


def facts(**changes):
    sets = [{"name": name, "rows": 1, "hash": changes.pop(name, name)} for name in ("a", "b", "c")]
    return {**ASKED, "weights": "w", "sets": sets, **changes}


@pytest.fixture
def evaluation(tmp_path):
    """One that was broken off in its third set, in the middle of a line."""
    config = load({"run.out": str(tmp_path), "val.n": 2})
    folder, _ = folders_of(config, None, ASKED)
    with locked_folder(folder):
        assert begin_folder(folder, config, facts()) == {}
        for name in ("a", "b"):
            add_rows(folder, [{"set": name, "id": str(n)} for n in range(2)])
        write_numbers(folder, {"a": {"accuracy": 1.0}, "b": {"accuracy": 0.5}})
        add_rows(folder, [{"set": "c", "id": "0"}])
        with (folder / "samples.jsonl").open("a") as file:
            file.write('{"set": "c", "i')
    return config, folder


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, "ab"),
        ({"b": "other rows"}, "a"),
        ({"c": "other rows"}, "ab"),
        ({"weights": "x"}, ""),
        ({"also": ["x"]}, ""),
    ],
)
def test_what_is_kept_of_an_earlier_start(evaluation, changes, kept):
    config, folder = evaluation
    assert [*begin_folder(folder, config, facts(**changes))] == [*kept] == [*read_summary(folder)]
    assert [(row["set"], row["id"]) for row in read_lines(folder / "samples.jsonl")] == [
        (name, str(n)) for name in kept for n in range(2)
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["starts"]) == 2 and not finished(folder)


def test_the_same_evaluation_goes_on_where_it_was_broken_off(evaluation, tmp_path):
    config, folder = evaluation
    other = load(config, ["val.n=3"])
    assert folders_of(config, None, ASKED) == (folder, folder / "answers") and folder.name == "run-eval"
    for another, asked in ((other, ASKED), (config, ASKED | {"also": ["blind"]})):
        assert folders_of(another, None, asked)[0].name == "run-eval-2"
    assert folders_of(config, folder, ASKED)[0] == folder
    assert folders_of(load(config, ["run.name=x"]), folder, ASKED)[0] == folder  # that is where it lies
    with pytest.raises(ConfigError, match=r"other options; restore them.*\n  val\.n: 2 in the folder, 3 now"):
        folders_of(other, folder, ASKED)
    (folder / "answers").mkdir()
    assert folders_of(other, None, ASKED) == (tmp_path / "run-eval-2", folder / "answers")  # they are paid for
    write_numbers(folder, read_summary(folder) | {"c": {}})
    assert finished(folder) and folders_of(config, None, ASKED)[0].name == "run-eval-2"
    with pytest.raises(ConfigError, match=r"holds results\.json already"):
        folders_of(config, folder, ASKED)


def test_one_process_writes_to_a_folder_and_an_empty_one_is_removed(tmp_path):
    with locked_folder(tmp_path / "eval"):
        with pytest.raises(ConfigError, match="in use by process"), locked_folder(tmp_path / "eval"):
            pass
        assert (tmp_path / "eval").is_dir()
    assert not (tmp_path / "eval").exists()
