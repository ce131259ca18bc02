"""Writes the commit into wheels and sdists, where `saccade --version` reads it, and the recipes of configs/ into
wheels; all else is in pyproject.toml."""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent


def bake(folder):
    if (ROOT / ".git").exists():  # else an sdist, which has the file already
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        Path(folder, "saccade", "commit.txt").write_bytes(subprocess.check_output(describe, cwd=ROOT))


class BuildPy(build_py):
    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # files that are gone since the last build
        super().run()
        if not self.editable_mode:
            bake(self.build_lib)
            shutil.copytree(ROOT / "configs", Path(self.build_lib, "saccade", "configs"))


class Sdist(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        bake(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
