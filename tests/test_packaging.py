"""What others install: the wheel has every file of the package, and knows its commit."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_wheel_has_every_file_and_the_commit(tmp_path: Path) -> None:
    """Built from a tree without git, as an sdist unpacks to."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "saccade", tmp_path / "saccade", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "saccade" / "commit.txt").write_text("c0ffee\n")
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl")))
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {str(path.relative_to(tmp_path)) for path in (tmp_path / "saccade").rglob("*") if path.is_file()}
    assert inside == there
    wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "saccade", "--version"]
    said = subprocess.check_output(command, cwd=tmp_path / "site", env={"PYTHONPATH": "."}, text=True)
    assert said.endswith(", commit c0ffee\n")
