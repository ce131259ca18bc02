"""Tracking works where torch is not even installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_here_imports_torch():
    modules = ["console", "folder", "loggers", "messages", "metrics", "progress"]
    modules += ["statistics", "trajectories"]
    code = "import sys; sys.modules['torch'] = None\n"
    code += "\n".join(f"import saccade.run.{name}" for name in modules)
    code += "\nassert 'tensorboard' not in sys.modules and 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
