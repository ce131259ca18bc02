"""The commit of this code. A wheel and an sdist carry it in a file, which setup.py writes; a source tree asks git.

saccade --version
"""

import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
BAKED = PACKAGE / "commit.txt"


@cache  # of the code that this process runs
def revision() -> str | None:
    """The commit, with '-dirty' if files of the source tree differ from it; None if unknown."""
    if BAKED.is_file():
        return BAKED.read_text(encoding="utf-8").strip()
    if not (PACKAGE.parent / ".git").exists():  # the package may be installed inside another repository
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.check_output(describe, cwd=PACKAGE, text=True, timeout=5, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.SubprocessError):
        return None
