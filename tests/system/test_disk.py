"""Places to write to are looked at before there is anything to write."""

import errno
import os

import pytest
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load, to_yaml
from saccade.errors import EnvironmentProblem
from saccade.system import disk


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("kept")
    disk.require_writable(tmp_path / "new" / "folder", "run.out")
    disk.require_writable(tmp_path / "new" / "file", "--out", file=True)
    disk.require_writable(tmp_path / "file", "--out", file=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(EnvironmentProblem, match=r"run.out=.*/file/x cannot be written: Not a dir"):
        disk.require_writable(tmp_path / "file" / "x", "run.out")
    with pytest.raises(EnvironmentProblem, match="use --out FILE where this user may write"):
        disk.require_writable(tmp_path, "--out", file=True)
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        disk.require_writable("/proc/no/such", "run.out")


def test_what_a_file_system_refuses_is_said_and_nothing_else():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert disk.refusal(full) == f"No space left on device; {disk.FULL}"
    barred = OSError(errno.EROFS, os.strerror(errno.EROFS), "runs/a")
    assert str(disk.refusal(barred)).startswith("runs/a: Read-only file system; ")
    secret = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "train.jsonl")  # to read
    assert disk.refusal(secret) == ("train.jsonl: Permission denied; change its permissions, or give another path")
    folder = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "train")
    assert disk.refusal(folder) == "train: Is a directory; give a file"
    assert disk.refusal(BrokenPipeError(errno.EPIPE, "")) is None
    rust = RuntimeError("Error while serializing: I/O error: something (os error 28)")
    assert disk.refusal(rust) == disk.refusal(full)
    assert disk.refusal(ValueError("28")) is None


def run(*arguments):
    return CliRunner().invoke(app, [str(item) for item in arguments], env={"NO_COLOR": "1"})


@pytest.mark.parametrize(
    "command",
    [
        "rl C run.out=P", "sft S run.out=P", "reward-model S run.out=P", "eval C data.val=D --out P/x",
        "generate C run.out=P", "export M --out P", "init M D --out P/run.yaml", "check-data D --fix P/fixed.jsonl",
        "quickstart --out P/x", "data visual-search P --rows 2", "data coldstart D P",
    ],
)  # fmt: skip
def test_every_command_looks_at_its_place_first(command, rl_config, sft_config, word_model, tmp_path):
    place = tmp_path / "file"
    place.write_text("no folder")
    (tmp_path / "rl.yaml").write_text(to_yaml(load(rl_config(tmp_path)), full=False))
    (tmp_path / "sft.yaml").write_text(to_yaml(load(sft_config(tmp_path)), full=False))
    data = rl_config(tmp_path)["data.train"]
    known = {"C": tmp_path / "rl.yaml", "S": tmp_path / "sft.yaml", "M": word_model, "D": data}
    words = [str(known.get(word, word)) for word in command.split()]
    words = [w.replace("=D", f"={data}").replace("P/", f"{place}/") for w in words]
    result = run(*(str(place) if w == "P" else w.replace("=P", f"={place}") for w in words))
    assert result.exit_code == 3, result.output
    assert "cannot be written: Not a directory; use " in " ".join(result.output.split())
    assert place.read_text() == "no folder"


def test_a_chat_looks_before_it_answers(word_model, tmp_path):
    (tmp_path / "in.json").write_text('["x"]')
    batch = ("--batch", tmp_path / "in.json")
    result = run("chat", word_model, *batch, "--out", "/proc/answers.json")
    assert result.exit_code == 3
    assert "--out /proc/answers.json cannot be written" in " ".join(result.output.split())


def test_a_set_of_scenes_stays_inside_of_its_folder(tmp_path):
    result = run("data", "visual-search", tmp_path / "scenes", "--rows", "2", "--name", "../train")
    assert "--name ../train: wants one file name" in result.output
    assert (result.exit_code, [*tmp_path.iterdir()]) == (2, [])
    assert run("data", "visual-search", tmp_path / "scenes", "--rows", "2").exit_code == 0
    again = run("data", "visual-search", tmp_path / "scenes", "--rows", "3")
    scenes, said = str(tmp_path / "scenes" / "train.jsonl"), " ".join(again.output.split())
    assert again.exit_code == 2 and f"OUT {scenes} exists and is not overwritten; give another folder or --name" in said
    assert "OUT FOLDER where" in " ".join(run("data", "coldstart", scenes, scenes).output.split())
    said = run("data", "coldstart", scenes, tmp_path / "scenes").output
    assert f"OUT {scenes} exists and is not overwritten; give another folder" in " ".join(said.split())
    card = (tmp_path / "scenes" / "train.md").read_text()
    assert "2 scenes" in card and "visual-search scenes --rows 2 --level medium" in card and "inputs: none" in card


def test_what_a_command_meets_later_is_no_traceback(word_model, tmp_path):
    """A report goes into the folder that it is about."""
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "report.html").mkdir()
    result = run("report", tmp_path)
    assert result.exit_code == 3 and "report.html: Is a directory; give a file" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
