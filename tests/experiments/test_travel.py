"""To a machine without a network and back."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from experiments import travel


def test_pieces_are_joined_to_the_same_files_or_refused(tmp_path: Path) -> None:
    model, data = tmp_path / "model.gguf", tmp_path / "gsm8k"
    model.write_bytes(bytes(range(256)) * 20_000)
    (data / "deep").mkdir(parents=True)
    (data / "deep" / "train.jsonl").write_text("{}\n")
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("travelled/__init__.py", "WHERE = 'there'\n")
    out, there = tmp_path / "out", tmp_path / "there"
    pieces = travel.pack(out, [model, data], python="3.12", mib=1, wheels=False)
    assert len(pieces) == 1  # it repeats itself
    model.write_bytes(b"".join(str(n).encode() * 3 for n in range(400_000)))
    pieces = travel.pack(out, [model, data], python="3.12", mib=1, wheels=False)
    assert len(pieces) > 1 and all(piece.stat().st_size <= 1 << 20 for piece in pieces)
    travel.unpack(out, there)
    assert (there / "files" / "model.gguf").read_bytes() == model.read_bytes()
    assert (there / "files" / "gsm8k" / "deep" / "train.jsonl").read_text() == "{}\n"
    (there / "wheels").mkdir()
    (tmp_path / "some.whl").rename(there / "wheels" / "some.whl")
    packages = travel.unpack(out, there)
    code = "import travelled; print(travelled.WHERE)"
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(packages)}, capture_output=True)
    assert found.stdout == b"there\n" and importlib.util.find_spec("travelled") is None
    last = pieces[-1].read_bytes()
    for content in (last[:-1], b"\0" + last[1:]):
        pieces[-1].write_bytes(content)
        with pytest.raises(SystemExit, match="or one is damaged; send them again"):
            travel.unpack(out, there)
    pieces[-1].unlink()
    with pytest.raises(SystemExit, match=f"{len(pieces) - 1} of {len(pieces)} pieces"):
        travel.unpack(out, there)


def test_results_of_all_experiments_come_back_as_one_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    texts = {f"experiments/small/{name}": name for name in ("results/a-0.json", "results/dev/b-1.json", "RESULTS.md")}
    texts |= {"docs/images/small.svg": "<svg/>"}
    for name, text in ({"experiments/small/rows.jsonl": "{}"} | texts).items():
        (one / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_text(text)
    assert len(travel.results(tmp_path / "results.tar.gz", one)) == 3
    other.mkdir()
    travel.take(tmp_path / "results.tar.gz", other)
    assert {str(path.relative_to(other)): path.read_text() for path in other.rglob("*") if path.is_file()} == texts
